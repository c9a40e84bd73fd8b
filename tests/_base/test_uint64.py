"""Two words for whole numbers below 2**64, against Python's unbounded integers."""

import jax
import numpy as np
import pytest

from phijax_rng._base import uint64

EDGES = np.array([0, 1, 2, 0xFFFF, 0x10000, 0x10001, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)


def pairs(seed):
    """Every pair of the edges, and random ones."""
    random = np.random.default_rng(seed).integers(0, 2**32, (2, 5000), dtype=np.uint32)
    edges = np.stack([np.repeat(EDGES, len(EDGES)), np.tile(EDGES, len(EDGES))])
    return np.concatenate([edges, random], axis=1)


def integers(words):
    return [int(high) << 32 | int(low) for high, low in zip(*map(np.asarray, words), strict=True)]


HIGH, LOW = pairs(0)
VALUES = integers((HIGH, LOW))


def test_products_have_all_their_64_bits():
    assert integers(jax.jit(uint64.product)(HIGH, LOW)) == [
        int(a) * int(b) for a, b in zip(HIGH, LOW, strict=True)
    ]


@pytest.mark.parametrize(
    "n", [1, 2, 3, 65535, 65536, 65537, 100_003, 10**7, 2**30 + 1, 0x7FFF0001, 0x7FFF8000, 2**31 - 1]
)
def test_division_gives_quotient_and_remainder(n):
    quotient, remainder = jax.jit(uint64.divide, static_argnums=2)(HIGH, LOW, n)
    assert integers(quotient) == [value // n for value in VALUES]
    assert remainder.tolist() == [value % n for value in VALUES]


def test_sums_and_orders_are_those_of_64_bits():
    other = pairs(1)[:, ::-1]
    others = integers(other)
    together = list(zip(VALUES, others, strict=True))
    assert integers(jax.jit(uint64.plus)((HIGH, LOW), tuple(other))) == [(a + b) % 2**64 for a, b in together]
    added = jax.jit(uint64.add)(HIGH, LOW, other[1])
    assert integers(added) == [(a + int(b)) % 2**64 for a, b in zip(VALUES, other[1], strict=True)]
    assert jax.jit(uint64.less)((HIGH, LOW), tuple(other)).tolist() == [a < b for a, b in together]


def test_a_fraction_is_the_upper_half_of_the_product():
    other = pairs(2)[:, ::-1]
    fraction = jax.jit(uint64.fraction_of)((HIGH, LOW), tuple(other))
    assert integers(fraction) == [a * b >> 64 for a, b in zip(VALUES, integers(other), strict=True)]


def test_x64_changes_no_bit():
    plain = jax.tree.map(np.asarray, jax.jit(uint64.divide, static_argnums=2)(HIGH, LOW, 100_003))
    with jax.enable_x64(True):
        wide = jax.tree.map(np.asarray, jax.jit(uint64.divide, static_argnums=2)(HIGH, LOW, 100_003))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(wide), strict=True):
        assert one.dtype == other.dtype == np.uint32
        np.testing.assert_array_equal(one, other)
