"""The cost of `Trainer.fit` per step, compared with a hand-written loop with the same draws.

A step's time is the difference of a long and a short run, divided by the steps between them: tracing,
compilation and setup cancel on both sides. The first runs compile and are dropped.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import _heat, _ours
from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed

SHORT = 100


def figures(pairs: int) -> Iterator[Figure]:
    yield from _figure("a step of the heat problem, 32+32+64 rows", _heat.SIZES, 10_000, 1.05, pairs)
    yield from _figure("the same with 4096 PDE rows", _heat.MANY_ROWS, 1_000, 1.03, pairs)


def _figure(label: str, sizes: Any, long: int, limit: float, pairs: int) -> Iterator[Figure]:
    hand = _heat.HandLoop(sizes)
    _check_same_training(hand, sizes)
    ours, other = interleaved(
        functools.partial(_step, lambda count: _ours.fit(count, sizes), long),
        functools.partial(_step, hand.run, long),
        pairs,
    )
    yield Figure(f"{label}, fit / hand-written loop", ours, other, Bar(limit))


def _step(run: Callable[[int], Any], long: int) -> Seconds:
    short = timed(lambda: run(SHORT))
    return (timed(lambda: run(SHORT + long)) - short) / long


def _check_same_training(hand: _heat.HandLoop, sizes: Any) -> None:
    """Both end in the same parameters, up to rounding; otherwise the ratio would be meaningless."""
    params, totals = hand.run(SHORT)
    result = _ours.fit(SHORT, sizes)
    np.testing.assert_allclose(totals[-1], result.metrics["total_loss"], rtol=1e-3)
    for theirs, ours in zip(jax.tree.leaves(params), jax.tree.leaves(result.state.model_state), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-3)
