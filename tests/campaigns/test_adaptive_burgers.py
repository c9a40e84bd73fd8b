"""Points that follow the residuals beside uniform ones, on Burgers' equation: five seeds, equal steps.

PHIJAX_RNG_BURGERS_STEPS sets how many; the table is printed. Everything but the points of the equation
is the same: the network, its first weights, the optimizer, the points of the initial and boundary values.
"""

import importlib.util
import os

import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import (
    LossModule,
    NamedBatchSource,
    ResidualDistributionSampler,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
)
from phijax_rng.sampling.geometry import Box
from tests._subprocess import ROOT

STEPS = int(os.environ.get("PHIJAX_RNG_BURGERS_STEPS", "20000"))
SEEDS = range(5)
NAMES = ("pde", "initial", "boundary")

_spec = importlib.util.spec_from_file_location("burgers", ROOT / "examples" / "burgers.py")
burgers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(burgers)


def adaptive(exponent, offset):
    return ResidualDistributionSampler(
        Box(burgers.BOXES["pde"]),
        100,
        num_candidates=16_384,
        exponent=exponent,
        offset=offset,
        refresh_start_step=0,
    )


def weighted_losses(params, batches):
    points = batches["pde"]
    squares = burgers.residual(params, points["inputs"]) ** 2
    return {**burgers.losses(params, batches), "pde": jnp.mean(points["weights"] * squares)}


def residuals(params, batches):
    return {"pde": burgers.residual(params, batches["pde"]["inputs"])}


METHODS = {  # sampler of the equation's points, losses
    "uniform": (UniformDomainSampler(burgers.BOXES["pde"]), burgers.losses),
    "k = 1, c = 1, weighted mean": (adaptive(1.0, 1.0), weighted_losses),
    "k = 2, c = 0.3, weighted mean": (adaptive(2.0, 0.3), weighted_losses),
    "k = 1, c = 1, plain mean": (adaptive(1.0, 1.0), burgers.losses),
}


class Points:
    def __init__(self, sampler):
        self.sampler = sampler

    def train_batch_source(self, batch_keys, key):
        fixed = {name: UniformDomainSampler(burgers.BOXES[name]) for name in batch_keys[1:]}
        return NamedBatchSource({"pde": self.sampler, **fixed}, burgers.SIZES, key)


def error(method, seed):
    sampler, losses = METHODS[method]
    module = LossModule(burgers.init, losses, batch_keys=NAMES, residuals=residuals)
    result = Trainer(STEPS, progress=False).fit(
        module,
        datamodule=Points(sampler),
        optimizer=burgers.optimizer(STEPS),
        balancer=StaticLossBalancer(NAMES, weights=burgers.WEIGHTS),
        seed=seed,
    )
    return float(burgers.relative_error(*burgers.solution(result.state.model_state)))


@pytest.mark.slow
def test_points_that_follow_the_residuals_give_a_smaller_error_than_uniform_ones(capsys):
    errors = {}
    for method in METHODS:
        errors[method] = [error(method, seed) for seed in SEEDS]
        with capsys.disabled():
            print("\n" + row(method, errors[method]), end="", flush=True)
    uniform, weighted = errors["uniform"], errors["k = 1, c = 1, weighted mean"]
    assert np.median(weighted) < np.median(uniform)
    assert sum(w < u for w, u in zip(weighted, uniform, strict=True)) >= 4


def row(method, values):
    """One row of the table: relative L2 errors against Cole and Hopf, by seed, and their median."""
    return f"| {method} | " + " | ".join(f"{v:.2e}" for v in values) + f" | {np.median(values):.2e} |"
