"""The heat problem whose balancing is compared with PhiJAX's: losses, residuals, pools.

Everything is a function of arrays, so that both packages can be given the same.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import LossModule, PoolDataModule

SEED = 42
LOSSES = ("initial", "boundary", "pde")
SIZES = {"initial": 16, "boundary": 16, "pde": 32}
KERNEL_SIZE = 8
UPDATES = (3, 6, 9, 12, 15)
"""Steps before whose update the weights are renewed: every third, five times in 16 steps."""
NUM_STEPS = 16


def make_fields() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(0)
    x, t = rng.random((2, 64, 1), dtype=np.float32)
    zero = np.zeros_like(x)
    return {
        "initial": {"inputs": np.hstack([x, zero]), "targets": np.sin(np.pi * x).astype(np.float32)},
        "boundary": {"inputs": np.hstack([np.round(x), t]), "targets": zero},
        "pde": {"inputs": rng.random((256, 2), dtype=np.float32)},
    }


def init(key: jax.Array) -> Any:
    shapes = list(itertools.pairwise((2, 8, 8, 1)))
    return [
        {"b": jnp.zeros(shape[1]), "w": jax.random.normal(k, shape) * math.sqrt(2 / sum(shape))}
        for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    ]


def network(params: Any, point: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        point = jnp.tanh(point @ layer["w"] + layer["b"])
    return point @ params[-1]["w"] + params[-1]["b"]


def residuals(params: Any, batches: Any) -> dict[str, jax.Array]:
    """One row for each point, of each loss."""

    def u(point: jax.Array) -> jax.Array:
        return network(params, point)[0]

    def heat(point: jax.Array) -> jax.Array:
        slope, curvature = jax.jvp(jax.grad(u), (point,), (jnp.array([1.0, 0.0]),))
        return slope[1] - 0.1 * curvature[0]

    rows = {
        name: jax.vmap(u)(batches[name]["inputs"]) - batches[name]["targets"][:, 0]
        for name in ("initial", "boundary")
    }
    return {**rows, "pde": jax.vmap(heat)(batches["pde"]["inputs"])}


def losses(params: Any, batches: Any) -> dict[str, jax.Array]:
    return {name: jnp.mean(rows**2) for name, rows in residuals(params, batches).items()}


def make_module() -> LossModule:
    return LossModule(init, losses, batch_keys=LOSSES, loss_names=LOSSES, residuals=residuals)


def make_data() -> PoolDataModule:
    return PoolDataModule(make_fields(), SIZES)
