"""The cost of a training step with rows on the host, compared with the same rows on the device.

Both runs train the same network on the same batches, whose rows have 32 numbers, and end in the same bits. A
step's time is the difference of a long and a short run, divided by the steps between them.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed
from phijax_rng import HostPool, LossModule, PoolDataModule, Trainer

ROWS, WIDTH, BATCH = 200_000, 32, 1024
HIDDEN = 320  # wide enough for a step of more than 2 ms
SHORT, LONG = 64, 320


def figures(pairs: int) -> Iterator[Figure | str]:
    inputs = np.random.default_rng(0).random((ROWS, WIDTH), dtype=np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    resident = PoolDataModule({"data": HostPool(inputs, targets)}, {"data": BATCH}, resident=True)
    on_host = PoolDataModule({"data": HostPool(inputs, targets)}, {"data": BATCH}, resident=False)
    with tempfile.TemporaryDirectory() as directory:
        mapped = _mapped(Path(directory), inputs)
        on_disk = PoolDataModule({"data": HostPool(mapped, targets)}, {"data": BATCH}, resident=False)
        _check_same_bits(resident, on_host, on_disk)
        for label, other in (("NumPy rows on the host", on_host), ("memory-mapped rows", on_disk)):
            ours, base = interleaved(_step(other), _step(resident), pairs)
            yield Figure(
                f"{label}, steps/s as a part of the resident loop's", ours, base, Bar(0.8, True), True
            )


def _mapped(directory: Path, inputs: np.ndarray[Any, Any]) -> Any:
    np.save(directory / "inputs.npy", inputs)
    return np.load(directory / "inputs.npy", mmap_mode="r")


def _init(key: jax.Array) -> Any:
    shapes = ((WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1))
    return [
        jax.random.normal(k, shape, jnp.float32) / np.sqrt(shape[0])
        for k, shape in zip(jax.random.split(key, 3), shapes, strict=True)
    ]


def _losses(model: Any, batches: Any) -> dict[str, jax.Array]:
    hidden = batches["data"]["inputs"]
    for weights in model[:-1]:
        hidden = jnp.tanh(hidden @ weights)
    return {"fit": jnp.mean((hidden @ model[-1] - batches["data"]["targets"]) ** 2)}


MODULE = LossModule(_init, _losses, batch_keys=("data",))


@functools.cache
def _optimizer() -> Any:
    return optax.adam(1e-3)


def _fit(datamodule: PoolDataModule, count: int) -> Any:
    trainer = Trainer(count, progress=False)
    return trainer.fit(MODULE, datamodule=datamodule, optimizer=_optimizer(), seed=0)


def _step(datamodule: PoolDataModule) -> Callable[[], Seconds]:
    def measure() -> Seconds:
        short = timed(lambda: _fit(datamodule, SHORT))
        return (timed(lambda: _fit(datamodule, SHORT + LONG)) - short) / LONG

    return measure


def _check_same_bits(first: PoolDataModule, *others: PoolDataModule) -> None:
    expected = jax.tree.leaves(_fit(first, 70).state.model_state)
    for other in others:
        for leaf, same in zip(expected, jax.tree.leaves(_fit(other, 70).state.model_state), strict=True):
            np.testing.assert_array_equal(leaf, same)
