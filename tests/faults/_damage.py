"""A directory with three good checkpoints, and single-bit damage to it."""

import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import optax

from phijax_rng import Checkpoints, TrainState, initialize_train_state, keys
from phijax_rng.errors import DamagedCheckpointError

STEPS = (10, 20, 30)


def state_at(step: int) -> TrainState:
    """A state with leaves of several dtypes whose bits depend on the step."""
    rng = np.random.Generator(np.random.PCG64(step))
    model = {
        "w": jax.numpy.asarray(rng.standard_normal((64, 33)), "float32"),
        "half": jax.numpy.asarray(rng.standard_normal(17), "bfloat16"),
        "count": np.int8(step),
        "none": np.zeros((0, 3), np.float32),
    }
    state = initialize_train_state(model, optax.adam(1e-3), {}, keys.split_root(step))
    return state.replace(step=jax.numpy.int32(step))


def save_all(folder: Path) -> None:
    """Steps 10, 20 and 30 of one run."""
    with Checkpoints(folder, asynchronous=False) as checkpoints:
        for before, step in zip((None, *STEPS), STEPS, strict=False):
            checkpoints.save(state_at(step), {"run": {"id": "one", "parent_step": before}})


def flip_one_bit(folder: Path, rng: np.random.Generator) -> str:
    """Flips a random bit of a random non-empty file of the newest step; says which."""
    files = sorted(p for p in (folder / str(STEPS[-1])).rglob("*") if p.is_file() and p.stat().st_size)
    path = files[int(rng.integers(len(files)))]
    data = bytearray(path.read_bytes())
    place, bit = int(rng.integers(len(data))), int(rng.integers(8))
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.relative_to(folder)} byte {place} bit {bit}"


def restore_after(folder: Path) -> tuple[TrainState | None, int | None, list[str]]:
    """What a resume gets: the state and its step, or nothing; and what it was told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            state, step = Checkpoints(folder).restore_intact(state_at(0))
        except DamagedCheckpointError as error:
            return None, None, [str(error)]
    return state, step, [str(warning.message) for warning in told]


def fresh_copy(good: Path, folder: Path) -> Path:
    """A copy of the good directory to damage."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(good, folder))
