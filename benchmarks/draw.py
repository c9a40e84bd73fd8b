"""The cost of a batch drawn from Python: `source(step)`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phijax_rng as pr
from benchmarks import _heat, _ours, _theirs
from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed
from phijax_rng.training import cpu_threefry

CALLS = 500
CALLS_OF_PHIJAX = 50
LARGE = 1_000_000


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
    yield _large_draw(pairs)

    if not _theirs.present:
        yield _theirs.ABSENT
        return
    theirs = _theirs.source(_heat.SIZES, key)
    _check_same_rows(source, theirs)
    ours, other = interleaved(_calls(source, CALLS), _calls(theirs, CALLS_OF_PHIJAX), pairs)
    yield Figure("source(step), PhiJAX's / ours", ours, other, Bar(20, at_least=True), faster=True)


def _large_draw(pairs: int) -> Figure:
    """A million numbers under the key of a step, as the compiled loop draws them and as JAX compiles it."""
    jitted = jax.jit(lambda key, step: jax.random.uniform(jax.random.fold_in(key, step), (LARGE,)))
    arguments = (pr.keys.root_key(_heat.SEED), jnp.int32(7))
    ours = cpu_threefry.lower(jitted, arguments, jax.default_backend()).compile()
    np.testing.assert_array_equal(ours(*arguments), jitted(*arguments))
    works = [
        lambda draw=draw: timed(lambda: [jax.block_until_ready(draw(*arguments)) for _ in range(20)]) / 20
        for draw in (ours, jitted)
    ]
    return Figure(
        f"{LARGE} numbers inside the loop, JAX's hash / ours", *interleaved(*works, pairs), faster=True
    )


def _calls(source: Callable[[int], Any], count: int) -> Callable[[], Seconds]:
    """Seconds of one call: the mean over `count` calls, waiting for each."""

    def work() -> None:
        for step in range(count):
            jax.block_until_ready(source(step))

    return lambda: timed(work) / count


def _check_same_rows(ours: Any, other: Any) -> None:
    for name, batch in ours(7).items():
        np.testing.assert_array_equal(batch["inputs"], other(7)[name]["inputs"])
