"""The peak memory of a large run, each in a new process, compared with a hand-written loop that donates.

The state is 768 MB: 64 million parameters in sixteen layers, and the two moments of Adam. The hand-written
loop is a jitted `fori_loop` without checks; it saves with Orbax alone. The peak is the largest resident set
of the process, with the interpreter and its libraries.
"""

import functools
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._ratio import Bar, Figure, interleaved, shown_bytes

LAYERS, WIDTH = 16, 2048
ROWS, BATCH = 64, 16
CHUNK, CHUNKS = 2, 3

# The numbers of a kind differ by a few percent.
_FEWEST = 3


def figures(pairs: int) -> Iterator[Figure]:
    for label, suffix, limit in (
        ("peak memory of 64 million parameters with Adam", "", 1.15),
        ("the same while saves are in flight", " and save", 1.3),
    ):
        ours, hand = interleaved(
            functools.partial(_peak, f"fit{suffix}"),
            functools.partial(_peak, f"hand{suffix}"),
            max(_FEWEST, pairs // 5),
            warm_up=0,
        )
        yield Figure(
            f"{label}, fit / hand-written loop",
            ours,
            hand,
            Bar(limit),
            cpu=False,
            shown=shown_bytes,
            fewest=_FEWEST,
        )


def _peak(whose: str) -> Any:
    """The peak of a process, twice: a figure has two columns."""
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", whose],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return np.full(2, json.loads(child.stdout.splitlines()[-1]))


def init(key: jax.Array) -> Any:
    layers = enumerate(jax.random.split(key, LAYERS))
    return {f"layer{i:02d}": jax.random.normal(own, (WIDTH, WIDTH)) / WIDTH**0.5 for i, own in layers}


def losses(params: Any, batches: Any) -> dict[str, jax.Array]:
    hidden = batches["data"]["inputs"]
    for weights in params.values():
        hidden = jnp.tanh(hidden @ weights)
    return {"fit": jnp.mean((hidden - 1) ** 2)}


def rows() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)


def _fit(folder: str | None) -> None:
    import phijax_rng as pr  # noqa: PLC0415 - the other side does without

    checkpoints = None if folder is None else pr.Checkpoints(folder, every_n_steps=CHUNK, max_to_keep=1)
    trainer = pr.Trainer(CHUNK * CHUNKS, checkpoints=checkpoints, chunk_size=CHUNK, progress=False)
    datamodule = pr.PoolDataModule({"data": {"inputs": rows()}}, {"data": BATCH})
    module = pr.LossModule(init, losses, batch_keys=("data",))
    trainer.fit(module, datamodule=datamodule, optimizer=optax.adam(1e-3), seed=0)


def _by_hand(folder: str | None) -> None:
    optimizer, pool, sampling = optax.adam(1e-3), jax.device_put(rows()), jax.random.key(2)

    def update(carry: Any) -> Any:
        step, params, optimizer_state = carry
        index = jax.random.randint(jax.random.fold_in(sampling, step), (BATCH,), 0, ROWS)
        grads = jax.grad(lambda params: losses(params, {"data": {"inputs": pool[index]}})["fit"])(params)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return step + 1, optax.apply_updates(params, updates), optimizer_state

    chunk = jax.jit(
        lambda carry: jax.lax.fori_loop(0, CHUNK, lambda _, c: update(c), carry), donate_argnums=0
    )
    params = init(jax.random.key(0))
    carry = (jnp.int32(0), params, optimizer.init(params))
    del params
    if folder is None:
        for _ in range(CHUNKS):
            carry = jax.block_until_ready(chunk(carry))
        return
    import orbax.checkpoint as ocp  # noqa: PLC0415 - only the loop that saves needs it

    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        for number in range(CHUNKS):
            carry = jax.block_until_ready(chunk(carry))
            manager.save(number, args=ocp.args.StandardSave(list(carry)))


def _measure(whose: str) -> int:
    """In the new process: the peak in bytes."""
    run = {"fit": _fit, "hand": _by_hand}[whose.removesuffix(" and save")]
    with tempfile.TemporaryDirectory(prefix="phijax_rng-bench-") as folder:
        run(folder if whose.endswith("save") else None)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
