"""Settings by which JAX refuses or checks more: every draw and fit runs under them, with the same bits."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    DatasetSampler,
    GradNormBalancer,
    LatinHypercubeSampler,
    LossModule,
    NamedBatchSource,
    NTKBalancer,
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    ShuffledRowSampler,
    SobolSampler,
    SpaceTimeSampler,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
    WeightedRowSampler,
    keys,
)
from phijax_rng.sampling import HostedRowSampler
from phijax_rng.sampling.geometry import Ball, Box, BoxEdges, BoxFaces, InitialSlab, SpaceTimeCylinder, Sphere
from phijax_rng.sampling.geometry import Union as UnionOf
from phijax_rng.training.balancing import ReLoBRaLoBalancer, UncertaintyBalancer
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import Samplers
from tests._selection import mostly_full

SETTINGS = {
    "rank promotion raises": {"jax_numpy_rank_promotion": "raise"},
    "dtype promotion strict": {"jax_numpy_dtype_promotion": "strict"},
    "both": {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"},
    "NaNs debugged": {"jax_debug_nans": True},
    "infinities debugged": {"jax_debug_infs": True},
    "key reuse": {"jax_debug_key_reuse": True},
    "tracer leaks": {"jax_check_tracer_leaks": True},
    "x64": {"jax_enable_x64": True},
}
NO_JIT = {"jax_disable_jit": True}
STEP = 3


@contextlib.contextmanager
def configured(options):
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# Draws

POOL = {"inputs": np.arange(12, dtype=np.float32).reshape(6, 2), "targets": np.arange(6, dtype=np.float32)}
PLACES = {"inputs": POOL["inputs"]}
BOUNDS = np.float32([(0.1, 0.7), (-1.7, 1.6)])
DISK = Ball(np.float32([0.3, -1.0]), 0.7)
SAMPLERS = {
    "uniform": UniformDomainSampler(BOUNDS, {"label": np.float32([1, 2])}, sort_axis=0),
    "space-time": SpaceTimeSampler(PLACES, (0, 1)),
    "rows": RandomRowSampler(POOL),
    "sorted": RandomRowSampler(POOL, False, "sort", sort_axis=0),
    "distinct": RandomRowSampler(POOL, False),
    "shuffled": ShuffledRowSampler(POOL),
    "weighted": WeightedRowSampler(POOL, [1, 2, 3, 4, 0, 1]),
    "weighted and distinct": WeightedRowSampler(POOL, [1, 2, 3, 4, 0, 1], False),
    "faces": BoxFaces(BOUNDS),
    "edges": BoxEdges(BOUNDS),
    "ball": Ball(np.float32([0.3, -1.0, 2.0]), 0.7),
    "deep": Sphere(np.float32([0.3, -1.0, 2.0, 0.0]), 0.7),
    "slab": InitialSlab(DISK, 0.3),
    "wall": SpaceTimeCylinder(Sphere(np.float32([0.3, -1.0]), 0.7), (0, 0.3)),
    "union": UnionOf((DISK, Box(BOUNDS))),
    "Sobol": SobolSampler(Box(BOUNDS)),
    "Latin hypercube": LatinHypercubeSampler(Box(BOUNDS)),
}


EVERYDAY = ("uniform", "space-time", "shuffled", "weighted and distinct", "wall", "union", "Sobol")
"""One of each mechanism: a program of all of them takes long to compile."""


def drawn(samplers):
    """The batch of a step, as NumPy arrays."""
    source = NamedBatchSource(samplers, dict.fromkeys(samplers, 4), keys.root_key(0))
    return jax.tree.map(np.asarray, source(STEP))


@functools.cache
def plainly_drawn(names):
    return drawn({name: SAMPLERS[name] for name in names})


@pytest.mark.parametrize("names", [EVERYDAY, pytest.param(tuple(SAMPLERS), marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("setting", mostly_full(list(SETTINGS), everyday=["both"]))
def test_every_sampler_draws_the_same_bits(setting, names):
    expected = plainly_drawn(names)
    with configured(SETTINGS[setting]):
        assert_trees_bitwise_equal(drawn({name: SAMPLERS[name] for name in names}), expected)


@pytest.mark.full
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_rows_of_the_host_are_the_same(setting):
    hosted = {"pool": HostedRowSampler(ShuffledRowSampler(POOL)), "data": DatasetSampler([PLACES] * 6)}
    expected = drawn(hosted)
    with configured(SETTINGS[setting]):
        assert_trees_bitwise_equal(drawn(hosted), expected)


@pytest.mark.full
def test_every_sampler_draws_the_same_bits_op_by_op():
    exact = {name: sampler for name, sampler in SAMPLERS.items() if name != "deep"}  # equal to within 4 ulp
    expected = plainly_drawn(tuple(exact))
    with configured(NO_JIT):
        assert_trees_bitwise_equal(drawn(exact), expected)


# Fits


def _init(key):
    return {"w": jax.random.normal(key, (2,), jnp.float32)}


def _residuals(model, batches):
    data = batches["b"]
    return {
        "a": jnp.tanh(batches["a"]["inputs"] @ model["w"]) - jnp.float32(0.5),
        "b": data["inputs"] @ model["w"] - data["targets"],
    }


def _losses(model, batches):
    return {name: jnp.mean(rows * rows) for name, rows in _residuals(model, batches).items()}


NAMES = ("a", "b")
MODULE = LossModule(_init, _losses, batch_keys=NAMES, loss_names=NAMES, residuals=_residuals)
SMALL = {name: field / 10 for name, field in POOL.items()}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A balancer and the sampler of the batch that residuals are taken of."""

    balancer: Any = None
    sampler: Any = dataclasses.field(default_factory=lambda: Box(BOUNDS))


def _adaptive(balancer):
    return Kind(balancer(NAMES, update_every_n_steps=2, diagnostic_batch_sizes=dict.fromkeys(NAMES, 4)))


KINDS = {
    "static": Kind(StaticLossBalancer(NAMES, weights={"a": 2.0})),
    "GradNorm": _adaptive(GradNormBalancer),
    "NTK": _adaptive(NTKBalancer),
    "ReLoBRaLo": Kind(ReLoBRaLoBalancer(NAMES)),
    "uncertainty": Kind(UncertaintyBalancer(NAMES)),
    "distribution": Kind(None, ResidualDistributionSampler(Box(BOUNDS), 2, num_candidates=16)),
    "refinement": Kind(
        None,
        ResidualRefinementSampler(Box(BOUNDS), 2, capacity=12, num_initial=8, num_added=2, num_candidates=16),
    ),
}


def fitted(kind, optimizer=None):
    data = Samplers({"a": kind.sampler, "b": ShuffledRowSampler(SMALL)}, dict.fromkeys(NAMES, 4))
    result = Trainer(5, progress=False).fit(
        MODULE, datamodule=data, optimizer=optimizer or optax.adam(1e-2), seed=0, balancer=kind.balancer
    )
    return jax.tree.map(np.asarray, result.state.model_state)


@pytest.mark.full
@pytest.mark.parametrize("setting", mostly_full(list(SETTINGS), everyday=["both"]))
@pytest.mark.parametrize("kind", mostly_full(list(KINDS), everyday=["GradNorm"]))
def test_a_fit_ends_in_the_same_bits(kind, setting):
    plain = fitted(KINDS[kind])
    assert first_difference(plain, fitted(KINDS[kind], optax.adam(2e-2))) is not None
    with configured(SETTINGS[setting]):
        found = fitted(KINDS[kind])
    if setting == "x64":  # Adam and the losses compute some numbers in float64 then
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), found, plain)
    else:
        assert_trees_bitwise_equal(found, plain)


def test_a_fit_without_jit_is_refused_before_it_is_traced():
    with configured(NO_JIT), pytest.raises(ValueError) as caught:
        fitted(KINDS["static"])
    assert str(caught.value) == (
        "jax_disable_jit is on, and training runs in a compiled loop. "
        "Turn it off; jax.debug.print and Trainer.audit show values and draws of a run."
    )


# In float64


def _init_wide(key):
    return {"w": jax.random.normal(key, (2,), jnp.float64)}


def _wide_residuals(model, batches):
    data = batches["b"]
    return {
        "a": jnp.tanh(batches["a"]["inputs"] @ model["w"]) - 0.5,
        "b": data["inputs"] @ model["w"] - data["targets"],
    }


def _wide_losses(model, batches):
    rows = _wide_residuals(model, batches)
    a = rows["a"] ** 2 * batches["a"].get("weights", 1.0)
    return {"a": jnp.mean(a), "b": jnp.mean(rows["b"] ** 2)}


@pytest.mark.parametrize("kind", mostly_full(list(KINDS), everyday=["static"]))
def test_a_fit_is_float64_under_strict_promotion(kind):
    with configured({**SETTINGS["both"], "jax_enable_x64": True}):
        domain = Box(BOUNDS.astype(float))
        sampler = KINDS[kind].sampler
        wide = domain if isinstance(sampler, Box) else dataclasses.replace(sampler, domain=domain)
        pool = ShuffledRowSampler({name: field.astype(float) for name, field in SMALL.items()})
        data = Samplers({"a": wide, "b": pool}, dict.fromkeys(NAMES, 4))
        module = LossModule(
            _init_wide, _wide_losses, batch_keys=NAMES, loss_names=NAMES, residuals=_wide_residuals
        )
        result = Trainer(5, progress=False).fit(
            module, datamodule=data, optimizer=optax.adam(1e-2), seed=0, balancer=KINDS[kind].balancer
        )
        assert result.state.model_state["w"].dtype == np.float64
