import functools
import gc
import re
import shutil
import tempfile

import jax
import numpy as np
import pytest

from phijax_rng import Checkpoints, Trainer
from phijax_rng.errors import DirectoryInUseError, SaveError
from tests import _fit, _problems
from tests._bitwise import assert_trees_bitwise_equal
from tests._subprocess import run_python
from tests.faults import _damage

HEAT = _problems.heat()

# A limit on the size of a file stands in for a full disk: writing on raises the same kind of error.
FULL_DISK = """
import resource, signal, sys
import numpy as np, jax
from phijax_rng import Checkpoints
from phijax_rng.errors import SaveError
from tests.faults._damage import state_at
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(state_at(10))
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
    checkpoints.save(state_at(20))
    checkpoints.wait()
except SaveError as error:
    print("SaveError", error.step, error)
print("steps", checkpoints.steps)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(state_at(20))
checkpoints.close()
print("steps", checkpoints.steps)
"""


def test_a_full_disk_is_named_and_leaves_the_earlier_steps(tmp_path):
    done = run_python(FULL_DISK, tmp_path / "run")
    assert f"SaveError 20 step 20 could not be saved in {tmp_path / 'run'}: " in done.stdout
    assert re.findall(r"^steps (.*)$", done.stdout, re.M) == ["(10,)", "(10, 20)"]
    restored = Checkpoints(tmp_path / "run").restore(_damage.state_at(0), 10)
    assert_trees_bitwise_equal(restored, jax.tree.map(jax.numpy.asarray, _damage.state_at(10)))


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = Trainer(2, checkpoints=Checkpoints(tmp_path / "file" / "run"), progress=False)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))):
        trainer.fit(HEAT.module, seed=0, **HEAT.arguments)


# Root may write anywhere, so it first becomes someone who may not.
NO_PERMISSION = """
import os, sys
from phijax_rng import Checkpoints
from phijax_rng.errors import SaveError
from tests.faults._damage import state_at
folder = sys.argv[1]
if os.getuid() == 0:
    os.chown(folder, 65534, 65534)
    os.setgid(65534)
    os.setuid(65534)
checkpoints = Checkpoints(folder + "/run")
checkpoints.save(state_at(10))
checkpoints.wait()
os.chmod(checkpoints.directory, 0o555)
try:
    checkpoints.save(state_at(20))
    checkpoints.wait()
except SaveError as error:
    print("SaveError", error.step, error)
print("steps", checkpoints.steps)
os.chmod(checkpoints.directory, 0o755)
checkpoints.save(state_at(20))
checkpoints.close()
print("steps", checkpoints.steps)
"""


def test_a_directory_that_may_not_be_written_is_named_and_keeps_its_steps():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lies below one that only we may enter
        done = run_python(NO_PERMISSION, folder)
        assert f"SaveError 20 step 20 could not be saved in {folder}/run: " in done.stdout
        assert "Permission denied" in done.stdout
        assert re.findall(r"^steps (.*)$", done.stdout, re.M) == ["(10,)", "(10, 20)"]


# Orbax leaves coroutines unawaited when a write fails half-way.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("when", ["between two saves", "while a save is in flight"])
def test_a_directory_that_is_gone_loses_no_training(tmp_path, when):
    """Whatever stood there is gone; what is saved later, and the result, are there."""
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder, every_n_steps=2)

    def remove(event):
        if when == "between two saves":
            checkpoints.wait()
        shutil.rmtree(folder, ignore_errors=True)

    remove.every_n_steps = 5
    trainer = Trainer(8, checkpoints=checkpoints, callbacks=[remove], progress=False)
    try:
        result = trainer.fit(HEAT.module, seed=0, **HEAT.arguments)
    except SaveError as error:
        assert str(folder) in str(error)
        reached = error.state
    else:
        reached = result.state
        assert_trees_bitwise_equal(Checkpoints(folder).restore(HEAT.state()), reached)
    assert_trees_bitwise_equal(reached, HEAT.run(int(reached.step)))
    gc.collect()  # while the warnings are let pass


def test_a_save_that_fails_in_a_fit_hands_over_the_state(tmp_path, monkeypatch):
    whole = Trainer(4, progress=False).fit(HEAT.module, seed=0, **HEAT.arguments)

    def full(self, step, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", full)
    with pytest.raises(SaveError, match=r"^step 4 could not be saved in .*No space left on device") as error:
        Trainer(4, checkpoints=Checkpoints(tmp_path), progress=False).fit(
            HEAT.module, seed=0, **HEAT.arguments
        )
    assert error.value.step == 4
    assert_trees_bitwise_equal(error.value.state, whole.state)


def test_two_jobs_cannot_write_one_directory(tmp_path):
    with Checkpoints(tmp_path) as first:
        first.lock()
        with pytest.raises(DirectoryInUseError, match=re.escape(f"{tmp_path} is in use by process ")):
            Trainer(2, checkpoints=Checkpoints(tmp_path), progress=False).fit(
                HEAT.module, seed=0, **HEAT.arguments
            )
    Trainer(2, checkpoints=Checkpoints(tmp_path), progress=False).fit(HEAT.module, seed=0, **HEAT.arguments)


def test_a_dead_owner_does_not_keep_the_lock(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from phijax_rng import Checkpoints\n"
        "Checkpoints(sys.argv[1]).lock()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run_python(script, tmp_path, exit_code=-9)
    assert (tmp_path / ".phijax_rng.lock").exists()
    Checkpoints(tmp_path).lock()


def test_a_rewind_moves_later_steps_aside_and_ends_in_the_same_bits(tmp_path):
    fit = functools.partial(_fit.fit, HEAT, folder=tmp_path, saves={"every_n_steps": 2})
    whole = fit(8)
    assert Checkpoints(tmp_path).steps == (2, 4, 6, 8)
    again = fit(8, resume=True, ckpt_step=4)
    assert_trees_bitwise_equal(again.state, whole.state)
    assert Checkpoints(tmp_path).steps == (2, 4, 6, 8)
    assert sorted(entry.name for entry in (tmp_path / "superseded").iterdir()) == ["6-0", "8-0"]
    assert Checkpoints(tmp_path).contract(6)["run"]["parent_step"] == 4


def test_a_fit_falls_back_and_ends_in_the_same_bits(tmp_path):
    fit = functools.partial(_fit.fit, HEAT, folder=tmp_path, saves={"every_n_steps": 2})
    whole = fit(8)
    for path in (tmp_path / "8" / "state").rglob("*"):
        if path.is_file():
            data = np.frombuffer(path.read_bytes(), np.uint8) ^ 1
            path.write_bytes(data.tobytes())
    with pytest.warns(UserWarning, match="checkpoint at step 8 is damaged, going back to step 6"):
        again = fit(8, resume="auto")
    assert again.iterations == 2
    assert_trees_bitwise_equal(again.state, whole.state)
    assert (tmp_path / "superseded" / "8-0").is_dir()
