"""The cost of adaptive balancing, compared with PhiJAX's, and of a static run, which must not pay for it.

The overhead of GradNorm with an update every 100 steps is a step with it beside a step without it: for us the
difference quotient of two runs each, for PhiJAX the mean over all steps after the first update. An overhead
of 1 is none. A static run is compared with a loop whose update has no balancer, and with one whose program
has an update that is never due.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

import phijax_rng as pr
from benchmarks import _heat, _ours, _theirs
from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed

EVERY = 100
SHORT, LONG = 100, 10_000
THEIR_STEPS = 420
NEVER = 2**31 - 1


def figures(pairs: int) -> Iterator[Figure | str]:
    _check_same_weights()
    _check_same_training()
    static, without = interleaved(
        functools.partial(_step, pr.StaticLossBalancer(_heat.LOSSES)), _step_without_balancer, pairs
    )
    yield Figure("a step with StaticLossBalancer / with no balancer in it", static, without, Bar(1.02))
    balanced, plain = interleaved(
        functools.partial(_step, _gradnorm(EVERY)), functools.partial(_step, None), pairs
    )
    yield Figure(f"a step with GradNorm every {EVERY} steps / without", balanced, plain)
    waiting, plain = interleaved(
        functools.partial(_step, _gradnorm(NEVER)), functools.partial(_step, None), pairs
    )
    yield Figure("a step with GradNorm that is never due / without", waiting, plain)
    if not _theirs.present:
        yield _theirs.ABSENT
        return
    theirs, unbalanced = interleaved(
        functools.partial(_their_step, balanced=True), functools.partial(_their_step, balanced=False), pairs
    )
    yield Figure("the same of PhiJAX: GradNorm every 100 steps / without", theirs, unbalanced)
    ours, theirs = interleaved(
        functools.partial(_step, _gradnorm(EVERY)), functools.partial(_their_step, balanced=True), pairs
    )
    yield Figure(f"a step with GradNorm every {EVERY} steps, PhiJAX / ours", ours, theirs, faster=True)


def _gradnorm(every: int) -> pr.GradNormBalancer:
    return pr.GradNormBalancer(_heat.LOSSES, update_every_n_steps=every)


def _step(balancer: Any) -> Seconds:
    short = timed(lambda: _ours.fit(SHORT, _heat.SIZES, balancer))
    return (timed(lambda: _ours.fit(SHORT + LONG, _heat.SIZES, balancer)) - short) / LONG


def _step_without_balancer() -> Seconds:
    short = timed(lambda: _ours.fit_without_balancer(SHORT, _heat.SIZES))
    return (timed(lambda: _ours.fit_without_balancer(SHORT + LONG, _heat.SIZES)) - short) / LONG


def _their_step(balanced: bool) -> Seconds:
    balancer = _theirs.gradnorm(EVERY) if balanced else None
    stamps = _theirs.fit(THEIR_STEPS, _heat.SIZES, balancer)[1]
    # The first update compiles; three complete periods follow.
    return (stamps[EVERY + 10 + 3 * EVERY] - stamps[EVERY + 10]) / (3 * EVERY)


def _check_same_training() -> None:
    """With the static balancer and without one, both end in the same losses, up to rounding."""
    static = _ours.fit(SHORT, _heat.SIZES, pr.StaticLossBalancer(_heat.LOSSES))
    without = _ours.fit_without_balancer(SHORT, _heat.SIZES)
    for name in ("total_loss", *_heat.LOSSES):
        np.testing.assert_allclose(static.metrics[name], without.metrics[name], rtol=1e-3)


def _check_same_weights() -> None:
    """Both end with the same weights, up to rounding."""
    if not _theirs.present:
        return
    ours = _ours.fit(20, _heat.SIZES, _gradnorm(5)).state.balancer_state["weights"]
    theirs = _theirs.fit(20, _heat.SIZES, _theirs.gradnorm(5))[0].state.balancer_state.weights
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
