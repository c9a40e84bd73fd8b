"""`Trainer.fit` compared with PhiJAX's, on the heat problem.

PhiJAX compiles its step again in every fit and draws every batch outside it. The steady step of PhiJAX is
the mean over all steps after the tenth; ours is the difference quotient of two runs. The time of a complete
call is that of a second fit in one process.
"""

from collections.abc import Iterator

import numpy as np

from benchmarks import _heat, _ours, _theirs
from benchmarks._ratio import Bar, Figure, interleaved, timed

STEPS = 400
SHORT, LONG = 500, 5_000
TYPICAL = 20_000


def figures(pairs: int) -> Iterator[Figure | str]:
    if not _theirs.present:
        yield _theirs.ABSENT
        return
    _check_same_training()
    ours, theirs = interleaved(_measure_ours, _measure_theirs, pairs)
    steady = [[sample[0] for sample in samples] for samples in (ours, theirs)]
    yield Figure(
        "a step of the heat problem, PhiJAX's fit / ours", *steady, Bar(25, at_least=True), faster=True
    )
    whole = [[sample[1] for sample in samples] for samples in (ours, theirs)]
    yield Figure(f"the whole call, {STEPS} steps, PhiJAX / ours", *whole, faster=True)
    typical = [[call + (TYPICAL - STEPS) * step for step, call in samples] for samples in (ours, theirs)]
    yield Figure(
        f"the whole call, {TYPICAL} steps (from the two above)",
        *typical,
        Bar(25, at_least=True),
        faster=True,
    )


def _measure_ours() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Seconds of a step and of the complete call."""
    whole = timed(lambda: _ours.fit(STEPS, _heat.SIZES))
    short = timed(lambda: _ours.fit(SHORT, _heat.SIZES))
    return (timed(lambda: _ours.fit(SHORT + LONG, _heat.SIZES)) - short) / LONG, whole


def _measure_theirs() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    stamps = []
    whole = timed(lambda: stamps.append(_theirs.fit(STEPS, _heat.SIZES)[1]))
    gaps = np.diff(stamps[0], axis=0)[10:]
    return gaps.mean(axis=0), whole


def _check_same_training() -> None:
    """Both report the same losses, up to rounding."""
    ours = _ours.fit(50, _heat.SIZES).metrics
    theirs = _theirs.fit(50, _heat.SIZES)[0].metrics
    for name in _heat.LOSSES:
        np.testing.assert_allclose(ours[name], theirs[f"train/loss/{name}"], rtol=1e-3)
