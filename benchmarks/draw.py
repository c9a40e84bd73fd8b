"""What a batch costs that is asked for from Python: `source(step)`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import _heat, _ours, _theirs
from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed

CALLS = 500
CALLS_OF_PHIJAX = 50


def figures(pairs: int) -> Iterator[Figure | str]:
    source = _ours.source(_heat.SIZES)
    key = source.key
    pools = jax.device_put(_heat.make_arrays())
    jitted = jax.jit(lambda key, pools, step: _heat.draw(pools, _heat.SIZES, key, step))

    def by_hand(step: int) -> Any:
        return jitted(key, pools, step)

    _check_same_rows(source, by_hand)
    ours, other = interleaved(_calls(source, CALLS), _calls(by_hand, CALLS), pairs)
    yield Figure("source(step) / hand-jitted draw", ours, other, Bar(1.2))

    if not _theirs.present:
        yield _theirs.ABSENT
        return
    theirs = _theirs.source(_heat.SIZES, key)
    _check_same_rows(source, theirs)
    ours, other = interleaved(_calls(source, CALLS), _calls(theirs, CALLS_OF_PHIJAX), pairs)
    yield Figure("source(step), PhiJAX's / ours", ours, other, Bar(20, at_least=True), faster=True)


def _calls(source: Callable[[int], Any], count: int) -> Callable[[], Seconds]:
    """Seconds of one call, the mean over `count` of them, each waited for."""

    def work() -> None:
        for step in range(count):
            jax.block_until_ready(source(step))

    return lambda: timed(work) / count


def _check_same_rows(ours: Any, other: Any) -> None:
    for name, batch in ours(7).items():
        np.testing.assert_array_equal(batch["inputs"], other(7)[name]["inputs"])
