"""The cost of several devices of one CPU: with the same total of rows, and with the same rows per device.

Forced CPU devices share the cores of the machine, so this shows the cost of splitting, and not the gain of a
second machine. It runs in a separate process, because JAX counts its devices once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _ratio
from phijax_rng import (
    LossModule,
    LossTrainStep,
    NamedBatchSource,
    TrainLoop,
    UniformDomainSampler,
    keys,
)
from phijax_rng.devices.placement import resolve
from phijax_rng.state import initialize_train_state

ROWS = 2**13
COUNTS = (2, 4, 8)
_STEPS = 50
_FLAG = "--xla_force_host_platform_device_count=8"


def figures(pairs: int) -> Iterator[_ratio.Figure | str]:
    """Each number of devices compared with one, with the same rows in total and per device."""
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.devices", str(pairs)],
        env={**os.environ, "XLA_FLAGS": _FLAG},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for label, ours, other in json.loads(child.stdout.splitlines()[-1]):
        yield _ratio.Figure(label, np.array(ours) / _STEPS, np.array(other) / _STEPS)
    yield f"{os.cpu_count()} cores run all devices, so at best n times the rows take n / cores the time"


def _init(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {"in": jax.random.normal(first, (2, 32)), "out": jax.random.normal(second, (32, 1))}


def _losses(params: Any, batches: Any) -> dict[str, jax.Array]:
    points = batches["box"]["inputs"]
    return {"fit": jnp.mean((jnp.tanh(points @ params["in"]) @ params["out"] - points[:, :1]) ** 2)}


def _chunk(count: int, rows: int) -> Callable[[], Any]:
    """A chunk of a loop with these numbers of devices and rows."""
    module = LossModule(_init, _losses, batch_keys=("box",))
    streams = keys.split_root(0)
    optimizer = optax.adam(1e-3)
    state = initialize_train_state(module.init(streams.model), optimizer, {}, streams)
    sampler = UniformDomainSampler([(0.0, 1.0), (0.0, 1.0)])
    source = NamedBatchSource({"box": sampler}, {"box": rows}, streams.sampling)
    loop = TrainLoop(LossTrainStep(module, optimizer), state, source, placement=resolve(count))
    placed = loop.place(state)
    return lambda: loop.run(placed, _STEPS)


def _measured(pairs: int) -> list[tuple[str, Any, Any]]:
    one = _chunk(1, ROWS)
    found = []
    for count in COUNTS:
        for rows, what in ((ROWS, "the same rows in all"), (ROWS * count, "the same rows for each")):
            several = _chunk(count, rows)
            times = _ratio.interleaved(
                lambda several=several: _ratio.timed(several), lambda: _ratio.timed(one), pairs
            )
            found.append((f"step on {count} devices, {what}", *(np.array(t).tolist() for t in times)))
    return found


if __name__ == "__main__":
    print(json.dumps(_measured(int(sys.argv[1]))))
