"""The cost of rows without replacement and of complete epochs, compared with JAX and Grain.

Every draw is timed inside one compiled loop of many draws, so the time of Python calls does not count, here
and for JAX. Grain shuffles on the host, one index at a time.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed
from phijax_rng import RandomRowSampler, ShuffledRowSampler

SIZE = 1024
LARGE = 10**7
EPOCH_SIZE = 4096
DRAWS = 2_000
GRAIN_INDICES = 20_000


def figures(pairs: int) -> Iterator[Figure | str]:
    _check_distinct()
    for n in (LARGE, 2**23 + 1):
        ours, other = interleaved(_draws(_distinct, n), _draws(_with_replacement, n), pairs)
        yield Figure(f"{SIZE} distinct rows of {n} / with replacement", ours, other, Bar(2))
    ours, other = interleaved(_draws(_distinct, LARGE), _draws(_choice, LARGE, 1), min(pairs, 3))
    label = f"{SIZE} distinct rows of {LARGE}, jax.random.choice / ours"
    yield Figure(label, ours, other, Bar(1e4, at_least=True), faster=True)
    ours, other = interleaved(_draws(_distinct, 10**9), _draws(_distinct, 10**3), pairs)
    yield Figure(f"{SIZE} of 10**9 distinct rows / of 10**3", ours, other, Bar(1.5))
    ours, other = interleaved(_draws(_shuffled, 10**9), _draws(_shuffled, 10**3), pairs)
    yield Figure(f"{SIZE} shuffled rows of 10**9 / of 10**3", ours, other, Bar(1.5))
    yield from _epochs(pairs)


def _epochs(pairs: int) -> Iterator[Figure | str]:
    try:
        import grain  # noqa: PLC0415 - an extra
    except ImportError:
        yield "Grain is not installed, so its index shuffle was not measured"
        return
    order = grain.MapDataset.range(LARGE).shuffle(seed=0)

    def theirs() -> Seconds:
        """A complete epoch, extrapolated from its first indices."""
        return timed(lambda: [order[i] for i in range(GRAIN_INDICES)]) * (LARGE / GRAIN_INDICES)

    ours, other = interleaved(_epoch(), theirs, pairs)
    label = f"an epoch of {LARGE} row numbers by {EPOCH_SIZE}, Grain's MapDataset.shuffle / ours"
    yield Figure(label, ours, other, Bar(20, at_least=True), faster=True)
    shuffle = _index_shuffle()
    if shuffle is None:
        yield "Grain's index_shuffle has moved, so it was not measured alone"
        return

    def bare() -> Seconds:
        def work() -> None:
            for i in range(GRAIN_INDICES):
                shuffle(i, max_index=LARGE - 1, seed=0, rounds=4)

        return timed(work) * (LARGE / GRAIN_INDICES)

    ours, other = interleaved(_epoch(), bare, pairs)
    label = "the same, Grain's index_shuffle called alone / ours"
    yield Figure(label, ours, other, Bar(20, at_least=True), faster=True)


def _index_shuffle() -> Any:
    try:
        from grain._src.python.experimental.index_shuffle.python import (  # noqa: PLC0415
            index_shuffle_module,
        )
    except ImportError:
        return None
    return index_shuffle_module.index_shuffle


# What is drawn: row numbers from a key, at a step


def _pool(n: int) -> Any:
    return {"inputs": np.zeros((n, 0), np.float32)}


def _distinct(key: jax.Array, step: Any, n: int) -> jax.Array:
    return RandomRowSampler(_pool(n), replace=False).choose(jax.random.fold_in(key, step), SIZE)


def _with_replacement(key: jax.Array, step: Any, n: int) -> jax.Array:
    return RandomRowSampler(_pool(n)).choose(jax.random.fold_in(key, step), SIZE)


def _choice(key: jax.Array, step: Any, n: int) -> jax.Array:
    return jax.random.choice(jax.random.fold_in(key, step), n, (SIZE,), replace=False)


def _shuffled(key: jax.Array, step: Any, n: int, size: int = SIZE) -> jax.Array:
    return ShuffledRowSampler(_pool(n)).choose_at(key, step, size)


def _draws(draw: Callable[..., jax.Array], n: int, count: int = DRAWS) -> Callable[[], Seconds]:
    """Seconds of one draw: the mean over `count` draws in one program."""
    program, key = _program(draw, n, SIZE), jax.random.key(0)
    return lambda: timed(lambda: program(key, count).block_until_ready()) / count


def _epoch() -> Callable[[], Seconds]:
    draw = functools.partial(_shuffled, size=EPOCH_SIZE)
    program, key = _program(draw, LARGE, EPOCH_SIZE), jax.random.key(0)
    count = -(-LARGE // EPOCH_SIZE)
    return lambda: timed(lambda: program(key, count).block_until_ready())


def _program(draw: Callable[..., jax.Array], n: int, size: int) -> Any:
    def run(key: jax.Array, count: Any) -> jax.Array:
        def turn(step: Any, seen: jax.Array) -> jax.Array:
            return seen ^ draw(key, step, n)  # so that no draw is left out

        return jax.lax.fori_loop(0, count, turn, jnp.zeros(size, jnp.int32))

    return jax.jit(run)


def _check_distinct() -> None:
    rows = np.asarray(_distinct(jax.random.key(0), 7, LARGE))
    assert len(set(rows.tolist())) == SIZE
