"""The cost of points that follow the residuals: a refresh, compared with the steps between two refreshes.

A refresh draws candidates and evaluates the residuals of all of them, without a gradient. Its cost in
steps is ten times the difference between a step of a run with a refresh every 10 steps and of one without.
The problem is the heat problem, with 64 points of the equation a step.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import phijax_rng as pr
from benchmarks import _heat
from benchmarks._ratio import Figure, Seconds, interleaved, timed

CANDIDATES = 8192
USUAL, OFTEN, NEVER = 100, 10, 2**31 - 1
SHORT = 100
# Steps between the ends of a short and a long run; those with many refreshes take longer each.
LONG = {USUAL: 5000, OFTEN: 1000, NEVER: 5000, None: 5000}


def figures(pairs: int) -> Iterator[Figure | str]:
    _check_refreshes()
    refreshed, between = _pairs(USUAL, pairs)
    label = f"{CANDIDATES} candidates"
    yield Figure(f"a step, {label} refreshed every {USUAL} steps / never", refreshed, between)
    refreshed, between = _pairs(OFTEN, pairs)
    whole = [OFTEN * (one - other) for one, other in zip(refreshed, between, strict=True)]
    yield Figure(f"one refresh of {label} / a step without", whole, between)
    followed, uniform = interleaved(functools.partial(_step, NEVER), functools.partial(_step, None), pairs)
    yield Figure("a step, points from a density that is never refreshed / uniform points", followed, uniform)


def _pairs(every: int, pairs: int) -> tuple[list[Any], list[Any]]:
    return interleaved(functools.partial(_step, every), functools.partial(_step, NEVER), pairs)


class _Points:
    """The pools of the heat problem, with points of the square in place of the pool of the equation."""

    def __init__(self, every: int | None):
        square = pr.sampling.geometry.Box([(0.0, 1.0), (0.0, 1.0)])
        self._points: Any = square
        if every is not None:
            self._points = pr.ResidualDistributionSampler(square, every, num_candidates=CANDIDATES)

    def train_batch_source(self, batch_keys: tuple[str, ...], key: Any) -> pr.NamedBatchSource:
        pools = _heat.make_arrays()
        samplers = {name: pr.RandomRowSampler(pools[name]) for name in ("initial", "boundary")}
        return pr.NamedBatchSource({**samplers, "pde": self._points}, _heat.SIZES, key)


def _fit(every: int | None, num_steps: int) -> Any:
    module = pr.LossModule(
        _heat.init,
        _heat.losses,
        batch_keys=_heat.LOSSES,
        loss_names=_heat.LOSSES,
        residuals=_heat.residuals,
    )
    result = pr.Trainer(num_steps, progress=False).fit(
        module, datamodule=_Points(every), optimizer=_heat.optimizer(), seed=_heat.SEED
    )
    return jax.block_until_ready(result)


def _step(every: int | None) -> Seconds:
    short = timed(lambda: _fit(every, SHORT))
    return (timed(lambda: _fit(every, SHORT + LONG[every])) - short) / LONG[every]


def _check_refreshes() -> None:
    """A run with refreshes ends with other weights; a run without, with its initial weights."""
    weights = {every: _fit(every, 15).state.sampler_state["pde"]["weights"] for every in (OFTEN, NEVER)}
    assert np.ptp(weights[NEVER]) == 0 < np.ptp(weights[OFTEN])
