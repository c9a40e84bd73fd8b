"""The cost of saving and restoring 100 MB, compared with Orbax alone.

An asynchronous save is timed until it returns and training can continue, and until it is on disk.
Orbax alone is its `CheckpointManager` with `StandardSave` and `StandardRestore` of the same arrays: no
digests, no contract, keys as their words.
"""

import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import phijax_rng as pr
from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed

# Parameters and the two moments of Adam together are 100 MB.
LAYERS, WIDTH = 10, 914


def make_state(step: int) -> pr.TrainState:
    rng = np.random.default_rng(0)
    params = {
        f"layer{i}": {"w": rng.standard_normal((WIDTH, WIDTH), dtype=np.float32)} for i in range(LAYERS)
    }
    params = jax.device_put(params)
    state = pr.initialize_train_state(params, optax.adam(1e-3), {}, pr.keys.split_root(0))
    return state.replace(step=jax.numpy.int32(step))


def as_arrays(state: pr.TrainState) -> dict[str, Any]:
    """The state in the form that Orbax alone takes."""
    named = {name: getattr(state, name) for name in ("model_state", "optimizer_state", "step")}
    words = {name: jax.random.key_data(getattr(state, name)) for name in ("rng_key", "sampling_key")}
    return {**named, **words}


def figures(pairs: int) -> Iterator[Figure]:
    folder = Path(tempfile.mkdtemp(prefix="phijax_rng-bench-"))
    try:
        state = jax.block_until_ready(make_state(1))
        yield from _saves(folder, state, pairs)
        yield from _restores(folder, state, pairs)
    finally:
        shutil.rmtree(folder)


def _saves(folder: Path, state: pr.TrainState, pairs: int) -> Iterator[Figure]:
    fresh = (folder / str(number) for number in itertools.count())
    arrays, later = as_arrays(state), state.replace(step=jax.numpy.int32(2))

    # The second save of a run is timed; the first sets things up.
    def ours() -> tuple[Seconds, Seconds]:
        with pr.Checkpoints(next(fresh)) as checkpoints:
            checkpoints.save(state)
            checkpoints.wait()
            return _then(lambda: checkpoints.save(later), checkpoints.wait)

    def orbax() -> tuple[Seconds, Seconds]:
        with ocp.CheckpointManager(next(fresh)) as manager:
            for step in (1, 2):
                saving = functools.partial(manager.save, step, args=ocp.args.StandardSave(arrays))
                seconds = _then(saving, manager.wait_until_finished)
            return seconds

    samples = interleaved(_cleaning(folder, ours), _cleaning(folder, orbax), pairs)
    labels = (("an asynchronous save of 100 MB returns", Bar(1.25)), ("... and is on disk", None))
    for index, (label, bar) in enumerate(labels):
        sides = ([sample[index] for sample in side] for side in samples)
        yield Figure(f"{label}, ours / Orbax", *sides, bar)


def _then(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Seconds, Seconds]:
    """Seconds of the first, and of both."""
    returned = timed(first)
    return returned, returned + timed(second)


def _cleaning(folder: Path, measure: Callable[[], Any]) -> Callable[[], Any]:
    def cleaned() -> Any:
        try:
            return measure()
        finally:
            for entry in folder.iterdir():
                shutil.rmtree(entry)

    return cleaned


def _restores(folder: Path, state: pr.TrainState, pairs: int) -> Iterator[Figure]:
    arrays = as_arrays(state)
    with pr.Checkpoints(folder / "ours") as checkpoints, ocp.CheckpointManager(folder / "orbax") as manager:
        checkpoints.save(state)
        manager.save(1, args=ocp.args.StandardSave(arrays))
        manager.wait_until_finished()
        checkpoints.wait()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)

        def ours() -> Any:
            return jax.block_until_ready(checkpoints.restore(state))

        def orbax() -> Any:
            return jax.block_until_ready(manager.restore(1, args=ocp.args.StandardRestore(abstract)))

        samples = interleaved(lambda: timed(ours), lambda: timed(orbax), pairs)
    yield Figure("a restore of 100 MB, ours / Orbax", *samples, Bar(2.0))
