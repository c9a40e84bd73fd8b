"""Whether shuffles look like uniform permutations: over keys, within one key, between neighbors.

Every statistic takes a base key and gives one p-value; its test uses a fixed key and fails below
`FALSE_ALARM`, which is therefore the probability that a perfect shuffle would have failed here.
The keys of a statistic are `fold_in(base, 0)`, `fold_in(base, 1)`, ..., as those of steps are.

Judged over `key(1000)` to `key(1099)` (the base key above is the first one tried): of 2900 p-values 153
were below 0.05, 29 below 0.01, 2 below 0.001 and none below `FALSE_ALARM`, as chance would have it.
For five indices 33 of 300 bases fell below 0.05, so 359 fresh ones were drawn (72 million keys): 21
did, the mean statistic was 119.2 ± 0.8 for 119 degrees of freedom, and pooled they gave p = 0.95.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from phijax_rng import shuffle
from tests._selection import mostly_full

FALSE_ALARM = 1e-4
BASE = jax.random.key(31)


def images(base, indices, n, num_keys):
    """Row t: where the permutation of `fold_in(base, t)` takes the indices."""
    return np.asarray(_images(base, np.array(indices, np.int32), n, num_keys)).astype(np.int64)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _images(base, indices, n, num_keys):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(base, jnp.arange(num_keys))
    return jax.vmap(lambda key: shuffle.permute_index(key, indices, n))(keys)


def chi_square(counts, expected):
    statistic = ((counts - expected) ** 2 / expected).sum()
    return stats.chi2.sf(statistic, np.size(counts) - 1)


def chi_square_uniform(values, n, num_bins=1000):
    """Values in [0, n), in bins as equal as whole numbers allow."""
    num_bins = min(n, num_bins)
    edges = -(-np.arange(num_bins + 1) * n // num_bins)
    counts = np.bincount(np.ravel(values) * num_bins // n, minlength=num_bins)
    return chi_square(counts, np.size(values) * np.diff(edges) / n)


def all_tuples(base, indices, n, num_keys):
    """The joint law of the images of a few indices, against all ordered tuples."""
    code = functools.reduce(lambda code, column: code * n + column, images(base, indices, n, num_keys).T)
    tuples = np.array(list(itertools.permutations(range(n), len(indices))))
    cells = functools.reduce(lambda code, column: code * n + column, tuples.T)
    counts = np.bincount(code, minlength=cells.max() + 1)[cells]
    assert counts.sum() == num_keys
    return chi_square(counts, num_keys / len(cells))


def position(base, index, n):
    return chi_square_uniform(images(base, [index], n, 100_000), n)


def difference(base, pair, n):
    left, right = images(base, pair, n, 100_000).T
    return chi_square_uniform((right - left) % n - 1, n - 1)


def parity(base, n):
    permutations = images(base, range(n), n, 20_000)
    pairs = itertools.combinations(range(n), 2)
    inversions = sum(permutations[:, i] > permutations[:, j] for i, j in pairs)
    odd = int((inversions % 2).sum())
    return stats.binomtest(odd, len(permutations)).pvalue


def cycles(base, n):
    """The number of cycles, whose law is given by the Stirling numbers of the first kind."""
    permutations = images(base, range(n), n, 20_000)
    least = np.broadcast_to(np.arange(n), permutations.shape)  # of what was met on the way
    place = least
    for _ in range(n):
        place = np.take_along_axis(permutations, place, axis=1)
        least = np.minimum(least, place)
    counts = np.bincount((least == np.arange(n)).sum(axis=1), minlength=n + 1)
    stirling = functools.reduce(np.polymul, ([1, k] for k in range(n)))[::-1]
    expected = len(permutations) * np.array(stirling, float) / math.factorial(n)
    common = expected >= 5
    rest = counts[~common].sum(), expected[~common].sum()
    return chi_square(np.append(counts[common], rest[0]), np.append(expected[common], rest[1]))


def fixed_points(base, n):
    """Their number is Poisson(1) but for a correction of order 1/n!."""
    counts = np.bincount((images(base, range(n), n, 5_000) == np.arange(n)).sum(axis=1), minlength=6)
    law = stats.poisson(1)
    expected = 5_000 * np.append(law.pmf(range(5)), law.sf(4))
    return chi_square(np.append(counts[:5], counts[5:].sum()), expected)


def one_draw(base, n):
    """The first 2**17 places of one permutation, drawn without replacement."""
    drawn, num_bins = images(base, range(2**17), n, 1)[0], 1000
    edges = -(-np.arange(num_bins + 1) * n // num_bins)
    expected = len(drawn) * np.diff(edges) / n
    counts = np.bincount(drawn * num_bins // n, minlength=num_bins)
    without_replacement = (n - 1) / (n - len(drawn))
    statistic = ((counts - expected) ** 2 / expected).sum() * without_replacement
    return stats.chi2.sf(statistic, num_bins - 1)


def successive_differences(base, n):
    drawn = images(base, range(2**17), n, 1)[0]
    return chi_square_uniform((np.diff(drawn)[::2]) % n - 1, n - 1)


def neighboring_keys(base, n):
    """Images of the same 64 indices under `fold_in(base, t)` and under `fold_in(base, t + 1)`."""
    drawn = images(base, range(64), n, 2_000)
    return chi_square_uniform(drawn[1::2] - drawn[::2] + (drawn[1::2] < drawn[::2]) * n, n)


def common_rows(base, n):
    """How many of their first 1000 rows two neighboring keys share: a hypergeometric number."""
    drawn = images(base, range(1000), n, 400)
    shared = sum(np.isin(left, right).sum() for left, right in zip(drawn[::2], drawn[1::2], strict=True))
    mean, variance = (float(x) * 200 for x in stats.hypergeom(n, 1000, 1000).stats())
    return 2 * stats.norm.sf(abs(shared - mean) / math.sqrt(variance))


def avalanche(base, n):
    """Every single bit of the key flipped in turn: each bit of each image flips with probability 1/2."""
    words = np.asarray(jax.random.key_data(base))
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    flips = np.concatenate([words ^ np.stack([bits, 0 * bits], 1), words ^ np.stack([0 * bits, bits], 1)])
    index = jnp.arange(1000, dtype=jnp.int32) * 7919 % n
    before = np.asarray(shuffle.permute_index(base, index, n))
    after = np.asarray(
        jax.vmap(lambda key: shuffle.permute_index(key, index, n))(jax.random.wrap_key_data(flips))
    )
    each = [
        ((before ^ after) >> bit & 1).sum(axis=1) for bit in range(n.bit_length() - 1)
    ]  # 64 numbers of 1000
    deviations = (np.array(each) - 500) / math.sqrt(250)
    return stats.chi2.sf((deviations**2).sum(), deviations.size)


LARGE = 10_000_000
COLUMNS = math.isqrt(LARGE - 1) + 1  # of the grid the indices lie on

STATISTICS = {
    **{
        f"all permutations of {n}": functools.partial(all_tuples, indices=range(n), n=n, num_keys=num_keys)
        for n, num_keys in ((2, 100_000), (3, 100_000), (4, 200_000), (5, 200_000))
    },
    # 9 cells mix slowest of all: a grid of four columns whose last row holds one cell.
    "triples of 9": functools.partial(all_tuples, indices=(0, 4, 8), n=9, num_keys=200_000),
    "pairs of 30": functools.partial(all_tuples, indices=(0, 1), n=30, num_keys=200_000),
    **{
        f"position of {index} in {n}": functools.partial(position, index=index, n=n)
        for n in (7, 111, 1000, LARGE, 2**31 - 1)
        for index in (0, n - 1)
    },
    "difference of neighbors in a row": functools.partial(difference, pair=(5, 6), n=LARGE),
    "difference of neighbors in a column": functools.partial(difference, pair=(5, 5 + COLUMNS), n=LARGE),
    "difference of the ends": functools.partial(difference, pair=(0, LARGE - 1), n=LARGE),
    **{f"parity of {n}": functools.partial(parity, n=n) for n in (8, 9, 25)},
    "cycles of 16": functools.partial(cycles, n=16),
    "fixed points of 1000": functools.partial(fixed_points, n=1000),
    "one draw": functools.partial(one_draw, n=LARGE),
    "successive differences": functools.partial(successive_differences, n=LARGE),
    "neighboring keys of 1000": functools.partial(neighboring_keys, n=1000),
    "neighboring keys of a large pool": functools.partial(neighboring_keys, n=LARGE),
    "avalanche between keys that differ in one bit": functools.partial(avalanche, n=2**20),
    "common rows of neighboring keys": functools.partial(common_rows, n=100_000),
}


EVERYDAY = (
    *("all permutations of 4", "triples of 9", "position of 0 in 111", "difference of neighbors in a row"),
    *("parity of 9", "one draw", "neighboring keys of a large pool", "common rows of neighboring keys"),
    "avalanche between keys that differ in one bit",
)


@pytest.mark.parametrize("statistic", mostly_full(STATISTICS, everyday=EVERYDAY))
def test_shuffles_look_like_uniform_permutations(statistic):
    assert statistic(BASE) > FALSE_ALARM


def test_four_rounds_on_five_indices_are_seen(monkeypatch):
    monkeypatch.setattr(shuffle, "_num_rounds", lambda rows: 4)
    jax.clear_caches()  # the programs hold the number of rounds
    try:
        assert all_tuples(BASE, range(5), 5, 100_000) < FALSE_ALARM
    finally:
        jax.clear_caches()
