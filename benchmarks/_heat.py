"""The problem that is timed, u_t = u_xx / 10 on the unit square, and a hand-written training loop.

The hand-written loop is what someone who knows JAX would write for this one problem: a jitted
`fori_loop` that draws the batch, updates with Adam, advances a runtime key and keeps the total loss of every
step; the host calls it a thousand steps at a time. It has no checks, no names and no saves.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SEED = 42
LOSSES = ("initial", "boundary", "pde")
SIZES = {"initial": 32, "boundary": 32, "pde": 64}
MANY_ROWS = {"initial": 32, "boundary": 32, "pde": 4096}
WIDTHS = (2, 32, 32, 1)
CHUNK = 1000


def make_arrays() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Rows of (x, t): the sine at t = 0, zero at both ends, and points inside."""
    rng = np.random.default_rng(0)
    x, t = rng.random((2, 256, 1), dtype=np.float32)
    zero = np.zeros_like(x)
    return {
        "initial": {"inputs": np.hstack([x, zero]), "targets": np.sin(np.pi * x)},
        "boundary": {"inputs": np.hstack([np.round(x), t]), "targets": zero},
        "pde": {"inputs": rng.random((16384, 2), dtype=np.float32)},
    }


def init(key: jax.Array) -> Any:
    shapes = list(itertools.pairwise(WIDTHS))
    return [
        {
            "w": jax.random.normal(k, shape, jnp.float32) * math.sqrt(2 / sum(shape)),
            "b": jnp.zeros(shape[1]),
        }
        for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    ]


def network(params: Any, point: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        point = jnp.tanh(point @ layer["w"] + layer["b"])
    return point @ params[-1]["w"] + params[-1]["b"]


def losses(model_state: Any, batches: Mapping[str, Any]) -> dict[str, jax.Array]:
    def u(point: jax.Array) -> jax.Array:
        return network(model_state, point)[0]

    named = {
        name: jnp.mean((jax.vmap(u)(batches[name]["inputs"]) - batches[name]["targets"][:, 0]) ** 2)
        for name in ("initial", "boundary")
    }
    return {**named, "pde": jnp.mean(residuals(model_state, batches)["pde"] ** 2)}


def residuals(model_state: Any, batches: Mapping[str, Any]) -> dict[str, jax.Array]:
    def u(point: jax.Array) -> jax.Array:
        return network(model_state, point)[0]

    def residual(point: jax.Array) -> jax.Array:
        du, du_dx = jax.jvp(jax.grad(u), (point,), (jnp.array([1.0, 0.0]),))
        return du[1] - 0.1 * du_dx[0]

    return {"pde": jax.vmap(residual)(batches["pde"]["inputs"])}


def optimizer() -> Any:
    return optax.adam(1e-3)


# By hand


def draw(pools: Any, sizes: Mapping[str, int], key: jax.Array, step: Any) -> dict[str, Any]:
    """The rows that PhiJAX and phijax_rng draw."""
    step_key = jax.random.fold_in(key, step)
    batches = {}
    for name, own in zip(LOSSES, jax.random.split(step_key, len(LOSSES)), strict=True):
        count = pools[name]["inputs"].shape[0]
        rows = jax.random.randint(own, (sizes[name],), 0, count, dtype=jnp.int32)
        batches[name] = {field: array[rows] for field, array in pools[name].items()}
    return batches


@dataclasses.dataclass
class HandLoop:
    """Hand-written training; runs reuse the compiled program."""

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        self._pools = jax.device_put(make_arrays())
        self._program = jax.jit(self._chunk, donate_argnums=0)

    def _chunk(self, carry: Any, pools: Any, key: jax.Array, num_steps: Any) -> Any:
        return jax.lax.fori_loop(0, num_steps, functools.partial(self._update, pools, key), carry)

    def _update(self, pools: Any, key: jax.Array, index: Any, carry: Any) -> Any:
        step, params, optimizer_state, rng_key, record = carry
        batches = draw(pools, self.sizes, key, step)
        rng_key, _ = jax.random.split(rng_key)
        total, grads = jax.value_and_grad(lambda params: sum(losses(params, batches).values()))(params)
        updates, optimizer_state = optimizer().update(grads, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        return step + 1, params, optimizer_state, rng_key, record.at[index].set(total)

    def run(self, num_steps: int) -> Any:
        """Trained parameters and the total loss of every step, from a seed."""
        model, runtime, sampling, _ = jax.random.split(jax.random.key(SEED), 4)
        params = init(model)
        carry = (jnp.int32(0), params, optimizer().init(params), runtime, jnp.zeros(CHUNK))
        totals = []
        for start in range(0, num_steps, CHUNK):
            count = min(CHUNK, num_steps - start)
            carry = self._program(carry, self._pools, sampling, jnp.int32(count))
            totals.append(np.array(carry[-1])[:count])
        return carry[1], np.concatenate(totals)
