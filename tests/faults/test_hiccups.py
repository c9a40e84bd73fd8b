"""An error of the file system is no damage: it is retried, then raised; nothing is moved or deleted."""

import errno
import logging
import os
import random
import re
import shutil

import jax
import pytest

from phijax_rng import Checkpoints, Trainer
from phijax_rng.checkpoints import faults
from phijax_rng.errors import DamagedCheckpointError, DirectoryInUseError, SaveError
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal
from tests.faults import _damage
from tests.faults._hiccups import CODES, READS, WRITES, Hiccups

HEAT = _problems.heat()
LIKE = _damage.state_at(0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("phijax_rng.checkpoints.directory._PAUSES", (0.0,) * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    _damage.save_all(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of eight steps, with saves at 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, fit(folder, 8)


def fit(checkpoints, max_steps, callbacks=(), **options):
    if not isinstance(checkpoints, Checkpoints):
        checkpoints = Checkpoints(checkpoints, every_n_steps=2)
    trainer = Trainer(max_steps, checkpoints=checkpoints, callbacks=list(callbacks), progress=False)
    return trainer.fit(HEAT.module, seed=0, **HEAT.arguments, **options)


def entries(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def restored(step):
    return jax.tree.map(jax.numpy.asarray, _damage.state_at(step))


def calls_of_a_restore(folder):
    with Hiccups(folder, 0, 0, errno.EIO).at(READS) as counted:
        Checkpoints(folder).restore_intact(LIKE)
    return counted.calls


def check_read(folder, first, count, code):
    """Returns whether the step was read."""
    before = entries(folder)
    with Hiccups(folder, first, count, code).at(READS):
        try:
            state, step = Checkpoints(folder).restore_intact(LIKE)
        except OSError as error:
            assert error.errno == code
            assert str(folder) in str(error)
            assert "tried 4 times" in str(error)
            state = None
        else:
            assert step == 30
            assert_trees_bitwise_equal(state, restored(30))
    assert entries(folder) == before
    return state is not None


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_hiccup_is_read_over_and_a_failure_is_raised_by_name(folder, code):
    calls = calls_of_a_restore(folder)
    numbers = random.Random(code).sample(range(1, calls + 1), 6)
    assert all(check_read(folder, first, 1, code) for first in numbers)
    assert not any(check_read(folder, first, float("inf"), code) for first in numbers[:3])


def test_the_step_and_the_path_are_named(folder):
    with Hiccups(folder, 1, float("inf"), errno.EIO).at(("arrays",)), pytest.raises(OSError) as caught:
        Checkpoints(folder).restore(LIKE, 30)
    assert str(caught.value) == (
        f"[Errno {errno.EIO}] the arrays of step 30 in {folder} cannot be read, tried 4 times: "
        f"{os.strerror(errno.EIO)}. Nothing was changed; start again: '{folder / '30'}'"
    )


def test_a_resume_after_a_failure_moves_and_deletes_nothing(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    before = entries(run)
    with (
        Hiccups(run, 1, float("inf"), errno.ESTALE).at(("arrays",)),
        pytest.raises(OSError, match="step 8 in"),
    ):
        fit(run, 10, resume="auto")
    assert entries(run) == before
    with Hiccups(run, 1, 2, errno.ESTALE).at(("arrays",)):
        result = fit(run, 8, resume="auto")
    assert_trees_bitwise_equal(result.state, whole[1].state)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, ""), errno.EIO),
        (PermissionError(errno.EACCES, ""), errno.EACCES),
        (TimeoutError(), errno.EIO),
        (ValueError("UNKNOWN: Error [os_error_code='116']"), 116),
        (ValueError("NOT_FOUND: Error [os_error_code='2']"), None),
        (ValueError("UNAVAILABLE: the bucket does not answer"), errno.EIO),
        (ValueError("DATA_LOSS: Error decoding"), None),
        (FileNotFoundError("no metadata"), None),
        (IsADirectoryError(errno.EISDIR, ""), None),
        (TypeError("Cannot change data-type for array of references"), None),
    ],
)
def test_errors_of_the_file_system_are_told_from_damage(error, code):
    assert faults.system_error(error) == code
    wrapped = Exception("Encountered error while reading array index")
    wrapped.__cause__ = error
    assert faults.system_error(wrapped) == code


def test_an_unexpected_error_is_damage_by_name(folder, monkeypatch):
    def broken(path, parts):
        raise TypeError("Cannot change data-type for array of references")

    monkeypatch.setattr("phijax_rng.checkpoints.stored_leaves.read_arrays", broken)
    message = (
        f"^the arrays of step 30 in {re.escape(str(folder))} cannot be read: Cannot change data-type for"
    )
    with pytest.raises(DamagedCheckpointError, match=message):
        Checkpoints(folder).restore(LIKE, 30)


def test_no_best_step_is_dropped_because_its_number_cannot_be_read(tmp_path, caplog):
    options = {"every_n_steps": 1, "max_to_keep": 1, "keep_best": ("loss", 1), "asynchronous": False}
    for step, value in ((1, 0.5), (2, 2.0)):
        with Checkpoints(tmp_path, **options) as checkpoints:
            checkpoints.save(restored(step), memory={"metrics": {"loss": value}})
    with (
        Checkpoints(tmp_path, **options) as checkpoints,
        Hiccups(tmp_path / "1" / "document" / "document.json", 1, float("inf"), errno.EIO).at(("io.open",)),
        caplog.at_level(logging.WARNING, "phijax_rng"),
    ):
        checkpoints.save(restored(3), memory={"metrics": {"loss": 1.0}})
        assert checkpoints.steps == (1, 3)
    assert "step 1 stays, since its number cannot be read" in caplog.text
    (tmp_path / "1" / "document" / "document.json").write_text("{")
    with Checkpoints(tmp_path, **options) as checkpoints:
        checkpoints.save(restored(4), memory={"metrics": {"loss": 3.0}})
        assert (checkpoints.steps, checkpoints.best_step) == ((1, 3, 4), 3)


# Housekeeping


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["busy", "unlisted", "a file"])
def test_no_failure_of_housekeeping_costs_the_training(whole, tmp_path, monkeypatch, caplog, what):
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder, every_n_steps=2, max_to_keep=1)
    real_rename, real_list = os.rename, os.listdir

    def busy(source, target):
        if "-deleted-" in str(target):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source))
        return real_rename(source, target)

    def unlisted(path="."):
        if str(path) == str(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real_list(path)

    def breaks(event):
        checkpoints.wait()
        if what == "busy":
            monkeypatch.setattr(os, "rename", busy)
        elif what == "unlisted":
            monkeypatch.setattr(os, "listdir", unlisted)
        else:
            shutil.rmtree(folder)
            folder.write_text("")

    breaks.every_n_steps = 3
    if what == "busy":
        with caplog.at_level(logging.WARNING, "phijax_rng"):
            result = fit(checkpoints, 8, [breaks])
        monkeypatch.undo()
        assert_trees_bitwise_equal(result.state, whole[1].state)
        assert Checkpoints(folder).steps == (2, 4, 6, 8)
        assert "step 2 in " in caplog.text
        assert "cannot be deleted, and stays" in caplog.text
        return
    with pytest.raises(SaveError, match=re.escape(str(folder))) as caught:
        fit(checkpoints, 8, [breaks])
    monkeypatch.undo()
    assert int(caught.value.state.step) == 4
    assert_trees_bitwise_equal(caught.value.state, HEAT.run(4))
    assert what == "a file" or Checkpoints(folder).latest_step == 2


def check_write(whole, run, first, count, code):
    """Returns whether the run ended."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole[0], run)
    # A run to step 12 that goes on from 8, whose steps must survive whatever happens.
    with Hiccups(run, first, count, code).at(WRITES):
        try:
            state = fit(Checkpoints(run, every_n_steps=2, max_to_keep=None), 12, resume="auto").state
        except SaveError as error:
            state = error.state
            assert_trees_bitwise_equal(state, HEAT.run(int(state.step)))
            state = None
        except OSError as error:  # before the first update
            assert (error.errno, str(run) in str(error)) == (code, True)
            state = None
    for step in (4, 6, 8):
        assert_trees_bitwise_equal(Checkpoints(run).restore(HEAT.state(), step), HEAT.run(step))
    again = fit(Checkpoints(run, every_n_steps=2, max_to_keep=None), 12, resume="auto")
    assert_trees_bitwise_equal(again.state, HEAT.run(12))
    return state is not None


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_write_that_fails_loses_no_earlier_step(whole, tmp_path, code):
    for first in random.Random(code).sample(range(1, 40), 2):
        check_write(whole, tmp_path / "run", first, 1, code)


# One object, one fit


def test_a_caller_keeps_the_lock_that_it_holds(tmp_path):
    def is_free():
        try:
            with Checkpoints(tmp_path) as other:
                other.lock()
        except DirectoryInUseError:
            return False
        return True

    with Checkpoints(tmp_path, every_n_steps=2) as checkpoints:
        fit(checkpoints, 2)
        assert not is_free()
        fit(checkpoints, 4, resume="auto")
        assert not is_free()
    assert is_free()
    checkpoints.lock()
    fit(checkpoints, 6, resume="auto")
    assert not is_free()
    checkpoints.close()
    assert is_free()
    fit(checkpoints, 8, resume="auto")
    assert is_free()


def test_one_object_serves_one_fit_at_a_time(whole, tmp_path):
    checkpoints, told = Checkpoints(tmp_path, every_n_steps=2), []

    def inner(event):
        with pytest.raises(DirectoryInUseError) as caught:
            fit(checkpoints, 4, resume="auto")
        told.append(str(caught.value))

    inner.every_n_steps = 3
    result = fit(checkpoints, 8, [inner])
    assert set(told) == {
        f"another fit of this process uses this Checkpoints of {tmp_path}. "
        "Wait for it to end, or give each fit a directory of its own."
    }
    assert_trees_bitwise_equal(result.state, whole[1].state)


def test_a_state_saved_by_hand_among_the_steps_of_a_run_is_of_that_run(tmp_path):
    options = {"every_n_steps": 2, "max_to_keep": None}
    first = fit(Checkpoints(tmp_path, **options), 4)
    with Checkpoints(tmp_path, **options) as checkpoints:
        checkpoints.save(first.state.replace(step=first.state.step + 1))
    for max_steps in (6, 8):
        fit(Checkpoints(tmp_path, **options), max_steps, resume="auto")
    named = {Checkpoints(tmp_path).contract(step).get("run", {}).get("id") for step in (2, 4, 6, 8)}
    assert len(named) == 1
