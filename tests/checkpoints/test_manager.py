import collections
import gc
import os
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import Checkpoints, CSVHistory, TrainState, keys
from phijax_rng.callbacks import TensorBoardLogger
from phijax_rng.checkpoints.writer import StepWriter
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError, DirectoryInUseError, SaveError
from tests._bitwise import assert_trees_bitwise_equal, first_difference

Point = collections.namedtuple("Point", ["x", "y"])


def state_with(model_state, *, step=0, implementation="threefry2x32", **others):
    words = [jax.random.key(number, impl=implementation) for number in (1, 2, 3)]
    fields = {
        "optimizer_state": (),
        "balancer_state": {},
        "rng_key": words[0],
        "sampling_key": words[1],
        "balancer_key": words[2],
    }
    return TrainState(model_state=model_state, step=jnp.int32(step), **fields | others)


def saved(path, state, **options):
    """Checkpoints with this state on disk."""
    checkpoints = Checkpoints(path, **{"asynchronous": False} | options)
    checkpoints.save(state)
    checkpoints.close()
    return checkpoints


def tree_of(path):
    """Every file and folder below a path, with size and time of change."""
    return {
        found: (found.stat().st_size, found.stat().st_mtime_ns) for found in [path, *sorted(path.rglob("*"))]
    }


# What comes back


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("implementation", keys.TESTED_IMPLEMENTATIONS)
def test_typed_keys_come_back_with_their_implementation(tmp_path, implementation, asynchronous):
    stack = jax.random.split(jax.random.key(9, impl=implementation), (2, 3))
    state = state_with({"own": stack}, implementation=implementation)
    restored = saved(tmp_path / "run", state, asynchronous=asynchronous).restore(state)
    assert_trees_bitwise_equal(restored, state)
    assert {str(jax.random.key_impl(key)) for key in (restored.rng_key, restored.model_state["own"])} == {
        implementation
    }
    other = state.replace(sampling_key=state.balancer_key)
    assert first_difference(restored, other) is not None


LEAVES = {
    "float32": jnp.array([0.1, -0.0, jnp.nan, jnp.inf], jnp.float32),
    "float16": jnp.array([0.1, 2.0], jnp.float16),
    "bfloat16": jnp.array([0.1, 3.0e38], jnp.bfloat16),
    "complex64": jnp.array([1 + 2j, -3j], jnp.complex64),
    "int8": jnp.array([-128, 127], jnp.int8),
    "int32": jnp.array([[-1, 2**31 - 1]], jnp.int32),
    "uint32": jnp.array([2**32 - 1], jnp.uint32),
    "bool": jnp.array([[True], [False]]),
    "scalar": jnp.float32(0.1),
    "bool scalar": jnp.bool_(True),
    "zero-size": jnp.zeros((0, 3), jnp.bfloat16),
    "denormal": jnp.array([1e-45], jnp.float32),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_leaf_comes_back_bit_for_bit(tmp_path, leaf):
    state = state_with({"leaf": leaf}, optimizer_state={"copy": leaf})
    restored = saved(tmp_path / "run", state).restore(state)
    assert_trees_bitwise_equal(restored, state)
    assert isinstance(restored.model_state["leaf"], jax.Array)


def test_a_key_array_without_entries_comes_back(tmp_path):
    state = state_with({"none": jax.random.split(jax.random.key(0), 0)})
    assert_trees_bitwise_equal(saved(tmp_path / "run", state).restore(state), state)


def test_numpy_leaves_come_back_as_arrays_of_their_bits_and_python_numbers_as_they_are(tmp_path):
    state = state_with({"array": np.float32([0.1, 0.2]), "number": 3, "scalar": np.float32(0.1)})
    restored = saved(tmp_path / "run", state).restore(state)
    expected = {"array": jnp.float32([0.1, 0.2]), "number": 3, "scalar": jnp.float32(0.1)}
    assert_trees_bitwise_equal(restored.model_state, expected)


STRUCTURES = {
    "tuple": (jnp.ones(2), (jnp.zeros(1), jnp.int32(3))),
    "list": [jnp.ones(2), [jnp.zeros(1)], []],
    "namedtuple": Point(jnp.ones(2), {"y": Point(jnp.zeros(1), None)}),
    "None": {"a": None, "b": jnp.ones(2)},
    "slashes and dots": {
        "a/b": jnp.ones(2),
        "a": {"b": jnp.zeros(2)},
        "a.b": jnp.full(2, 2.0),
        "..": jnp.ones(1),
    },
    "quotes and spaces": {
        "it's": jnp.ones(2),
        'so "called"': jnp.zeros(2),
        " ": jnp.ones(1),
        "ü": jnp.zeros(1),
    },
    "int keys": {10: jnp.ones(2), 9: jnp.zeros(2)},
    "many": [jnp.float32(number) for number in range(120)],
    "a single array": jnp.arange(3.0),
    "nothing": {},
}


@pytest.mark.parametrize("tree", STRUCTURES.values(), ids=STRUCTURES)
def test_a_structure_comes_back_as_it_was(tmp_path, tree):
    state = state_with(tree, optimizer_state=(tree, {"again": tree}))
    restored = saved(tmp_path / "run", state).restore(state)
    assert_trees_bitwise_equal(restored, state, dict_order=False)  # JAX sorts the keys of a dict


def test_abstract_values_say_what_to_restore_as_well_as_arrays_do(tmp_path):
    state = state_with({"w": jnp.arange(3.0)})
    abstract = jax.eval_shape(lambda: state)
    assert_trees_bitwise_equal(saved(tmp_path / "run", state).restore(abstract), state)


def test_the_contract_comes_back_as_it_was_given(tmp_path):
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(
            state_with({"w": jnp.ones(1)}, step=4), {"keys": {"root": "a:1"}, "n": [1, None, 0.5]}
        )
        checkpoints.wait()
        assert (
            checkpoints.contract(4)
            == checkpoints.contract()
            == {
                "keys": {"root": "a:1"},
                "n": [1, None, 0.5],
            }
        )


# Weights only


def test_weights_only_keeps_everything_else_of_the_fresh_state(tmp_path):
    old = state_with({"w": jnp.arange(3.0)}, step=7, optimizer_state={"adam": jnp.ones(3)})
    fresh = state_with({"w": jnp.zeros(3)}, optimizer_state=("sgd",), implementation="rbg")
    fresh = fresh.replace(optimizer_state=(jnp.zeros(1),))
    restored = saved(tmp_path / "run", old).restore(fresh, weights_only=True)
    assert_trees_bitwise_equal(restored, fresh.replace(model_state=old.model_state))


# Mismatches


def mismatch(tmp_path, was, now, **options):
    checkpoints = saved(tmp_path / "run", was)
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoints.restore(now, **options)
    return str(caught.value)


def test_another_shape_raises_with_its_path_and_both_sides(tmp_path):
    was = state_with({"dense": {"kernel": jnp.zeros((64, 32))}}, step=400)
    now = state_with({"dense": {"kernel": jnp.zeros((64, 48))}})
    assert mismatch(tmp_path, was, now) == (
        "checkpoint at step 400 does not fit this run:\n"
        "  model_state['dense']['kernel']\n"
        "    in the checkpoint: float32[64, 32]\n"
        "    in this run:       float32[64, 48]\n"
        "Build the run with the model it was saved from."
    )


def test_another_dtype_raises_and_is_not_cast(tmp_path):
    was = state_with({"w": jnp.zeros(2, jnp.float32)})
    now = state_with({"w": jnp.zeros(2, jnp.bfloat16)})
    assert mismatch(tmp_path, was, now, weights_only=True) == (
        "checkpoint at step 0 does not fit this run:\n"
        "  model_state['w']\n"
        "    in the checkpoint: float32[2]\n"
        "    in this run:       bfloat16[2]\n"
        "Build the run with the model it was saved from."
    )


def test_another_key_implementation_raises(tmp_path):
    was, now = state_with({}), state_with({}, implementation="rbg")
    message = mismatch(tmp_path, was, now)
    for name in ("rng_key", "sampling_key", "balancer_key"):
        assert (
            f"  {name}\n    in the checkpoint: key<threefry2x32>[]\n    in this run:       key<rbg>[]\n"
        ) in message


@pytest.mark.parametrize(
    ("field", "value", "mend"),
    [
        (
            "balancer_state",
            {"weights": jnp.ones(3)},
            "Build the run with the balancer it was saved from, or restore the weights only.",
        ),
        (
            "optimizer_state",
            [jnp.zeros(3)],
            "Build the run with the optimizer it was saved from, or restore the weights only.",
        ),
        (
            "sampler_state",
            {"pde": jnp.zeros(3)},
            "Build the run with the samplers it was saved from, or restore the weights only.",
        ),
        ("model_state", {"v": jnp.zeros(3)}, "Build the run with the model it was saved from."),
    ],
)
def test_the_message_names_what_to_build_as_it_was(tmp_path, field, value, mend):
    was = state_with({"w": jnp.zeros(2)})
    assert mismatch(tmp_path, was, was.replace(**{field: value})).split("\n")[-1] == mend


def test_everything_that_differs_is_named(tmp_path):
    was = state_with({"w": jnp.zeros(2)})
    now = was.replace(
        optimizer_state=[jnp.zeros(1)], balancer_state={"a": jnp.zeros(1)}, sampler_state={"b": jnp.zeros(1)}
    )
    assert mismatch(tmp_path, was, now).split("\n")[-1] == (
        "Build the run with the optimizer, balancer and samplers it was saved from, "
        "or restore the weights only."
    )


def test_a_leaf_that_one_side_lacks_is_absent(tmp_path):
    was, now = state_with({"a": jnp.zeros(1)}), state_with({"b": jnp.zeros(1)})
    assert mismatch(tmp_path, was, now) == (
        "checkpoint at step 0 does not fit this run:\n"
        "  model_state['a']\n"
        "    in the checkpoint: float32[1]\n"
        "    in this run:       absent\n"
        "  model_state['b']\n"
        "    in the checkpoint: absent\n"
        "    in this run:       float32[1]\n"
        "Build the run with the model it was saved from."
    )


def test_a_long_list_of_mismatches_is_cut(tmp_path):
    was, now = (state_with([jnp.zeros(size)] * 11) for size in (1, 2))
    lines = mismatch(tmp_path, was, now).split("\n")
    assert len(lines) == 1 + 8 * 3 + 1 + 1
    assert lines[-2] == "  and 3 more"


# Steps


def test_a_missing_step_lists_the_steps_there_are(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=False)
    for step in (3, 20, 100):
        checkpoints.save(state_with({"w": jnp.ones(1)}, step=step))
    message = f"no checkpoint at step 5 in {tmp_path / 'run'}; there are steps 3, 20, 100. Pick one of them."
    for ask in (
        lambda: checkpoints.restore(state_with({"w": jnp.ones(1)}), 5),
        lambda: checkpoints.contract(5),
    ):
        with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
            ask()
    assert checkpoints.latest_step == 100


@pytest.mark.parametrize("made", [False, True], ids=["no directory", "empty directory"])
def test_reading_a_directory_without_a_run_creates_nothing(tmp_path, made):
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    before = tree_of(tmp_path)
    checkpoints = Checkpoints(folder)
    message = f"no checkpoint in {folder}. Check the path, or start a fresh run."
    for ask in (
        lambda: checkpoints.restore(state_with({})),
        lambda: checkpoints.restore(state_with({}), 3),
        checkpoints.contract,
    ):
        with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
            ask()
    assert (checkpoints.steps, checkpoints.latest_step) == ((), None)
    checkpoints.wait()
    checkpoints.close()
    assert repr(checkpoints) == f"Checkpoints({str(folder)!r}, steps=[])"
    assert tree_of(tmp_path) == before


def test_restoring_changes_nothing_on_disk(tmp_path):
    state = state_with({"w": jnp.ones(3)}, step=2)
    saved(tmp_path / "run", state)
    before = tree_of(tmp_path)
    reader = Checkpoints(tmp_path / "run")
    reader.restore(state)
    reader.restore(state, 2, weights_only=True)
    reader.contract()
    reader.close()
    assert tree_of(tmp_path) == before


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (
            True,
            TypeError,
            "step must be a whole number, got True. A step counts completed optimizer updates.",
        ),
        (1.0, TypeError, "step must be a whole number, got 1.0. A step counts completed optimizer updates."),
        (-1, ValueError, "step must be in [0, 2**31), got -1. A step counts completed optimizer updates."),
    ],
    ids=["bool", "float", "negative"],
)
def test_a_step_is_a_whole_number(tmp_path, step, error, message):
    state = state_with({"w": jnp.ones(1)}, step=1)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        saved(tmp_path / "run", state).restore(state, step)


def test_a_numpy_integer_names_a_step(tmp_path):
    state = state_with({"w": jnp.ones(1)}, step=1)
    assert_trees_bitwise_equal(saved(tmp_path / "run", state).restore(state, np.int64(1)), state)


def test_what_is_no_step_is_not_counted(tmp_path):
    checkpoints = saved(tmp_path / "run", state_with({"w": jnp.ones(1)}, step=7))
    for name in ("9.orbax-checkpoint-tmp-0", "superseded", "-3", "08", "1e3", "٣"):
        (tmp_path / "run" / name).mkdir()
    (tmp_path / "run" / "11").write_text("a file")
    assert checkpoints.steps == (7,)


# Paths


def test_a_relative_path_is_resolved_at_construction(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpoints = Checkpoints("runs/../runs/one", asynchronous=False)
    monkeypatch.chdir(tmp_path / "there")
    checkpoints.save(state_with({"w": jnp.ones(1)}))
    assert checkpoints.directory == tmp_path / "here" / "runs" / "one"
    assert (tmp_path / "here" / "runs" / "one" / "0").is_dir()
    assert list((tmp_path / "there").iterdir()) == []


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert saved("~/run", state_with({"w": jnp.ones(1)})).directory == tmp_path / "run"
    assert (tmp_path / "run" / "0").is_dir()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"directory": 5}, TypeError, "directory must be a path, got 5. Pass the directory of the run."),
        ({"directory": ""}, TypeError, "directory must be a path, got ''. Pass the directory of the run."),
        (
            {"every_n_steps": 0},
            ValueError,
            "every_n_steps must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        (
            {"every_n_steps": 1.0},
            TypeError,
            "every_n_steps must be a whole number, got 1.0. Pass an int or a NumPy integer.",
        ),
        (
            {"max_to_keep": 0},
            ValueError,
            "max_to_keep must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        ({"every_minutes": 0}, ValueError, "every_minutes must be positive, got 0. Pass minutes, or None."),
        (
            {"every_minutes": float("nan")},
            ValueError,
            "every_minutes must be positive, got nan. Pass minutes, or None.",
        ),
        (
            {"every_minutes": "5"},
            TypeError,
            "every_minutes must be a number, got '5'. Pass minutes, or None.",
        ),
        ({"asynchronous": 1}, TypeError, "asynchronous must be True or False, got 1. Pass a bool."),
    ],
)
def test_options_are_checked_at_construction(tmp_path, options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Checkpoints(**{"directory": tmp_path / "run"} | options)
    assert not (tmp_path / "run").exists()


# Saving


def test_an_asynchronous_save_survives_donation_of_what_it_saves(tmp_path):
    state = state_with({"w": jnp.arange(2_000_000.0)})
    kept = jax.tree.map(np.array, state.model_state)
    overwrite = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
        for _ in range(3):
            state = state.replace(model_state={"w": overwrite(state.model_state["w"])})
        checkpoints.wait()
        assert_trees_bitwise_equal(checkpoints.restore(state).model_state, kept)
    assert float(state.model_state["w"][0]) == -1


def test_saving_a_step_twice_raises(tmp_path):
    state = state_with({"w": jnp.ones(1)}, step=3)
    message = f"step 3 is already saved in {tmp_path / 'run'}. Continue from it, or use another directory."
    with saved(tmp_path / "run", state) as checkpoints:
        with pytest.raises(FileExistsError, match=f"^{re.escape(message)}$"):
            checkpoints.save(state.replace(model_state={"w": jnp.zeros(1)}))
        assert_trees_bitwise_equal(checkpoints.restore(state), state)


def test_an_earlier_step_can_be_saved_after_a_later_one(tmp_path):
    states = {step: state_with({"w": jnp.full(1, float(step))}, step=step) for step in (10, 20, 5)}
    with Checkpoints(tmp_path / "run") as checkpoints:
        for state in states.values():
            checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.steps == (5, 10, 20)
        for step, state in states.items():
            assert_trees_bitwise_equal(checkpoints.restore(state, step), state)


@pytest.mark.parametrize(
    ("max_to_keep", "kept"), [(1, (50,)), (3, (30, 40, 50)), (None, (10, 20, 30, 40, 50))]
)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_the_newest_steps_are_kept(tmp_path, max_to_keep, kept, asynchronous):
    options = {"max_to_keep": max_to_keep, "asynchronous": asynchronous}
    with Checkpoints(tmp_path / "run", **options) as checkpoints:
        for step in (10, 20, 30, 40, 50):
            checkpoints.save(state_with({"w": jnp.full(1, float(step))}, step=step))
    assert checkpoints.steps == kept
    state = state_with({"w": jnp.full(1, 50.0)}, step=50)
    assert_trees_bitwise_equal(checkpoints.restore(state), state)


def test_retention_counts_what_an_earlier_process_left(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path / "run", state_with({"w": jnp.ones(1)}, step=step), max_to_keep=2)
    assert Checkpoints(tmp_path / "run").steps == (2, 3)


def test_steps_after_a_rewind_are_moved_and_can_be_saved_again(tmp_path):
    with Checkpoints(tmp_path / "run", max_to_keep=None) as checkpoints:
        for value in (0.0, 1.0, 2.0):
            for step in (10, 20, 30):
                if step not in checkpoints.steps:
                    checkpoints.save(state_with({"w": jnp.full(1, value)}, step=step))
            assert checkpoints.supersede_after(10) == [20, 30]
            assert checkpoints.steps == (10,)
    assert checkpoints.supersede_after(10) == []
    folders = sorted(entry.name for entry in (tmp_path / "run" / "superseded").iterdir())
    assert folders == ["20-0", "20-1", "20-2", "30-0", "30-1", "30-2"]


def test_what_is_no_state_is_not_saved(tmp_path):
    message = "state must be a TrainState, got {'w': 1}. Use initialize_train_state."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        Checkpoints(tmp_path / "run").save({"w": 1})
    assert not (tmp_path / "run").exists()


def _refuse_renames(patch, refusal):
    """A save becomes visible by a rename, the last thing that happens to it."""
    for name in ("os.rename", "os.replace", "pathlib.Path.rename", "pathlib.Path.replace"):
        patch.setattr(name, refusal)


@pytest.mark.parametrize("ask", ["wait", "close", "save"])
def test_a_failure_in_the_background_is_raised(tmp_path, monkeypatch, ask):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(state_with({"w": jnp.ones(1)}, step=1))
    checkpoints.wait()
    may_fail, failed_in = threading.Event(), []

    def full(*arguments, **options):
        may_fail.wait(60)
        failed_in.append(threading.current_thread())
        raise OSError(28, "No space left on device")

    _refuse_renames(monkeypatch, full)
    checkpoints.save(state_with({"w": jnp.ones(1)}, step=2))
    may_fail.set()
    following = state_with({"w": jnp.ones(1)}, step=3)
    message = f"^step 2 could not be saved in {re.escape(str(tmp_path / 'run'))}: .*No space left on device"
    with pytest.raises(SaveError, match=message) as caught:
        {"wait": checkpoints.wait, "close": checkpoints.close, "save": lambda: checkpoints.save(following)}[
            ask
        ]()
    assert failed_in and threading.main_thread() not in failed_in
    assert (caught.value.step, caught.value.state) == (2, None)
    monkeypatch.undo()
    # The save that failed does not count, and the one before it is intact.
    assert checkpoints.steps == (1,)
    assert int(checkpoints.restore(following).step) == 1


def test_a_save_that_failed_can_be_made_again(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=False)
    state = state_with({"w": jnp.ones(1)}, step=2)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        _refuse_renames(patch, full)
        with pytest.raises(SaveError, match="No space left on device"):
            checkpoints.save(state)
    assert checkpoints.steps == ()
    checkpoints.save(state)
    checkpoints.close()
    assert_trees_bitwise_equal(checkpoints.restore(state), state)


# Times to save


@pytest.mark.parametrize(
    ("every_n_steps", "step", "following", "due"),
    [(None, 5, None, False), (5, 0, 5, True), (5, 4, 5, False), (5, 5, 10, True), (1, 7, 8, True)],
)
def test_saves_by_number_are_due_at_multiples(tmp_path, every_n_steps, step, following, due):
    checkpoints = Checkpoints(tmp_path / "run", every_n_steps=every_n_steps, every_minutes=None)
    assert checkpoints.next_save(step) == following
    assert checkpoints.is_due(step) is due


def test_a_save_by_the_clock_is_due_when_the_minutes_have_passed(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("phijax_rng.checkpoints.writer.time.monotonic", lambda: now)
    checkpoints = Checkpoints(tmp_path / "run", every_minutes=2, asynchronous=False)
    now += 119
    assert not checkpoints.is_due(7)
    now += 1
    assert checkpoints.is_due(7)
    checkpoints.save(state_with({"w": jnp.ones(1)}, step=7))
    assert not checkpoints.is_due(8)
    now += 120
    assert checkpoints.is_due(8)
    checkpoints.start_clock()
    assert not checkpoints.is_due(8)


# One writer


def test_a_second_object_may_read_and_not_write(tmp_path):
    state = state_with({"w": jnp.ones(1)}, step=1)
    other = Checkpoints(tmp_path / "run")
    with Checkpoints(tmp_path / "run") as first:
        first.save(state)
        first.wait()
        message = f"^{re.escape(str(tmp_path / 'run'))} is in use by process {os.getpid()} on "
        for write in (other.lock, lambda: other.save(state.replace(step=jnp.int32(2)))):
            with pytest.raises(DirectoryInUseError, match=message):
                write()
        assert other.steps == (1,)
        assert_trees_bitwise_equal(other.restore(state), state)
        other.close()  # lets go of nothing that it does not hold
        with pytest.raises(DirectoryInUseError, match=message):
            other.lock()
    with other:
        other.save(state.replace(step=jnp.int32(2)))
    assert first.steps == (1, 2)


def test_a_lock_is_taken_once_and_makes_the_directory(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "run")
    checkpoints.lock()
    checkpoints.lock()
    assert [entry.name for entry in (tmp_path / "a" / "run").iterdir()] == [".phijax_rng.lock"]
    assert checkpoints.steps == ()
    checkpoints.close()
    with Checkpoints(tmp_path / "a" / "run") as other:
        other.lock()


# Damage; `faults/test_damage.py` has the complete list


# Orbax leaves coroutines unawaited when a read fails half-way.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["arrays removed", "item removed"])
def test_missing_arrays_are_damage_and_named(tmp_path, damage):
    state = state_with({"w": jnp.arange(3.0)})
    checkpoints = saved(tmp_path / "run", state)
    folder = tmp_path / "run" / "0" / "state"
    shutil.rmtree(folder if damage == "item removed" else folder / "d")
    message = f"^the arrays of step 0 in {re.escape(str(tmp_path / 'run'))} cannot be read"
    with pytest.raises(DamagedCheckpointError, match=message):
        checkpoints.restore(state)
    gc.collect()  # while the warnings are let pass


def test_bits_of_another_checkpoint_are_damage(tmp_path):
    state = state_with({"w": jnp.arange(3.0)})
    checkpoints = saved(tmp_path / "run", state)
    saved(tmp_path / "other", state.replace(model_state={"w": -jnp.arange(3.0)}))
    shutil.rmtree(tmp_path / "run" / "0" / "state")
    shutil.copytree(tmp_path / "other" / "0" / "state", tmp_path / "run" / "0" / "state")
    message = (
        f"model_state of step 0 in {tmp_path / 'run'} does not match its SHA-256: "
        "it was damaged or edited. Restore another step."
    )
    for weights_only in (False, True):
        with pytest.raises(DamagedCheckpointError, match=f"^{re.escape(message)}$"):
            checkpoints.restore(state, weights_only=weights_only)


def test_the_newest_readable_contract_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=False)
    assert checkpoints.readable_contract() == {}
    for step in (1, 2):
        checkpoints.save(state_with({"w": jnp.ones(1)}, step=step), {"n": step})
    checkpoints.close()
    assert checkpoints.readable_contract() == {"n": 2}
    (tmp_path / "run" / "2" / "document" / "document.json").write_text("{")
    assert checkpoints.readable_contract() == checkpoints.readable_contract(1) == {"n": 1}
    with pytest.raises(DamagedCheckpointError, match=r"^the document of step 2 in .* cannot be read: "):
        checkpoints.readable_contract(2)
    (tmp_path / "run" / "1" / "document" / "document.json").unlink()
    assert checkpoints.readable_contract() == {}


def test_a_mismatch_is_raised_and_not_passed_over_as_damage(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=False)
    for step in (1, 2):
        checkpoints.save(state_with({"w": jnp.ones(step)}, step=step))
    checkpoints.close()
    with pytest.raises(CheckpointMismatchError, match=r"^checkpoint at step 2 does not fit this run"):
        checkpoints.restore_intact(state_with({"w": jnp.ones(1)}))


def test_a_save_that_is_interrupted_leaves_no_thread_waiting(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(state_with({"w": jnp.ones(3)}))
    checkpoints.wait()
    manager = type(checkpoints._writer.manager)
    real = manager.save

    def interrupted(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(manager, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state_with({"w": jnp.ones(3)}, step=1))
    checkpoints.close()
    assert checkpoints.steps == (0, 1)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket/run", "file:///run", "HDFS://host/run"])
def test_an_address_never_becomes_a_folder(address, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (Checkpoints, CSVHistory, TensorBoardLogger):
        with pytest.raises(ValueError, match="must be in a file system of this machine, got the address"):
            make(kind(address))
    for joined in (f"runs/{address}", f"./{address}", f" {address}"):
        with pytest.raises(ValueError, match="got the address"):
            Checkpoints(joined)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", ["gs", "s3", "az", "hf"])
def test_a_folder_that_orbax_takes_for_a_bucket_is_refused(root):
    with pytest.raises(
        ValueError, match=f"directory must not be below /{root}, which Orbax takes for {root}://"
    ):
        Checkpoints(f"/tmp/../{root}/bucket/run")
    assert Checkpoints(f"/data/{root}/run").directory == Path(f"/data/{root}/run")


@pytest.mark.parametrize("name", ["s3:", "a:b", "run:x", "./s3:/x"])
def test_a_colon_alone_makes_no_address(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Checkpoints(name).directory == tmp_path / name


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_that_another_job_publishes_meanwhile_stays(tmp_path, monkeypatch, asynchronous):
    theirs = state_with({"w": jnp.arange(3.0)}, step=2)
    with Checkpoints(tmp_path / "other", asynchronous=False) as other:
        other.save(theirs)
    opened = StepWriter._open

    def late(writer):
        manager = opened(writer)
        if not (tmp_path / "run" / "2").exists():
            shutil.copytree(tmp_path / "other" / "2", tmp_path / "run" / "2")
        return manager

    monkeypatch.setattr(StepWriter, "_open", late)
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=asynchronous)
    with pytest.raises(SaveError, match="step 2 could not be saved"):
        checkpoints.save(state_with({"w": -jnp.arange(3.0)}, step=2))
        checkpoints.wait()
    assert_trees_bitwise_equal(Checkpoints(tmp_path / "run").restore(theirs, 2), theirs)
