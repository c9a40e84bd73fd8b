"""Rows in proportion to weights: exact sums, no zeros, what is refused, and what jit does instead."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import WeightedRowSampler
from phijax_rng.sampling import weighted, weighted_rows
from tests._bitwise import assert_trees_bitwise_equal

KEY = jax.random.key(3)
traced_rows = jax.jit(
    lambda key, weights, size, replace: weighted_rows(key, weights, size, replace=replace),
    static_argnums=(2, 3),
)


@functools.partial(jax.jit, static_argnums=2)
def sample(sampler, key, size):
    return sampler.sample(key, size)["index"]


def pool(n):
    return {"inputs": np.arange(n, dtype=np.float32)[:, None], "index": np.arange(n, dtype=np.int32)}


def some_weights(n, kind, seed=0):
    rng = np.random.default_rng(seed)
    weights = {
        "alike": lambda: np.ones(n),
        "uniform": lambda: rng.random(n),
        "far apart": lambda: np.exp(rng.normal(size=n) * 10),
        "half zeros": lambda: rng.random(n) * (rng.random(n) < 0.5) + (np.arange(n) == n // 2),
        "tiny": lambda: rng.random(n) * 1e-35,
        "huge": lambda: rng.random(n) * 3e38,
    }[kind]()
    return np.where(weights < 2.0**-126, 0, weights).astype(np.float32)


KINDS = ("alike", "uniform", "far apart", "half zeros", "tiny", "huge")


@pytest.mark.parametrize("n", [1, 2, 100])
def test_sums_and_clocks_are_the_same_on_the_host_and_traced(n):
    sums = jax.jit(lambda weights: weighted.traced_sums(weighted.safe(weights)))
    clocks = jax.jit(lambda weights: weighted.traced_clocks(weighted.safe(weights)))
    for kind in KINDS:
        weights = some_weights(n, kind)
        known = weights.astype(np.float64)
        assert_trees_bitwise_equal(sums(weights), weighted.sums_of(known))
        assert_trees_bitwise_equal(clocks(weights), weighted.clocks_of(known))


def test_sums_are_in_proportion_to_one_part_in_a_billion():
    weights = np.random.default_rng(1).random(1000) + 0.01
    high, low = weighted.sums_of(weights)
    sums = np.array([int(h) << 32 | int(w) for h, w in zip(high, low, strict=True)], object)
    np.testing.assert_allclose((sums / sums[-1]).astype(float), np.cumsum(weights) / weights.sum(), rtol=1e-9)


def test_a_positive_weight_never_vanishes_and_a_zero_never_counts():
    high, low = weighted.sums_of(np.array([0.0, 1.0, 1e-300, 0.0, 1e-30]))
    steps = np.diff([int(h) << 32 | int(w) for h, w in zip(high, low, strict=True)], prepend=0)
    assert (steps > 0).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("place", ["first", "last", "every second", "all but one"])
def test_rows_of_weight_zero_are_never_drawn(place, replace):
    zero = {
        "first": np.arange(64) < 20,
        "last": np.arange(64) >= 44,
        "every second": np.arange(64) % 2 == 0,
        "all but one": np.arange(64) != 37,
    }[place]
    weights = np.where(zero, 0, 1e-3)
    size = 2000 if replace else int((~zero).sum())
    rows = sample(WeightedRowSampler(pool(64), weights, replace), KEY, size)
    assert not zero[np.asarray(rows)].any()
    assert len(set(rows.tolist())) == (~zero).sum()


def test_without_replacement_rows_are_distinct_and_a_smaller_draw_is_the_beginning():
    sampler = WeightedRowSampler(pool(200), np.arange(200) % 5, replace=False)
    rows = sample(sampler, KEY, 160)
    assert len(set(rows.tolist())) == 160
    assert_trees_bitwise_equal(sample(sampler, KEY, 20), rows[:20])


def test_the_exponential_variates_are_those_of_the_logarithm():
    bits = jax.random.bits(KEY, (100_000, 2), jnp.uint32)
    high, low = (np.array(column) for column in bits.T)
    high[:64] = [*(2**k for k in range(32)), *(2**32 - 1 - 2**k for k in range(32))]
    low[:64] = 12345
    drawn = np.asarray(jax.jit(weighted.exponential)(high, low))
    fraction = (high.astype(np.longdouble) * 2**32 + (low | 1)) / np.longdouble(2) ** 64
    np.testing.assert_allclose(drawn, (-np.log1p(-fraction)).astype(float), rtol=3e-7)
    with jax.disable_jit():
        assert_trees_bitwise_equal(weighted.exponential(jnp.asarray(high), jnp.asarray(low)), drawn)


@pytest.mark.parametrize("replace", [True, pytest.param(False, marks=pytest.mark.full)])
def test_known_and_traced_weights_give_the_same_rows(replace):
    weights = some_weights(40, "half zeros")
    known = weighted_rows(KEY, weights, 12, replace=replace)
    assert_trees_bitwise_equal(traced_rows(KEY, weights, 12, replace), known)
    assert_trees_bitwise_equal(sample(WeightedRowSampler(pool(40), weights, replace), KEY, 12), known)
    with jax.enable_x64(True):
        assert_trees_bitwise_equal(np.asarray(traced_rows(KEY, weights, 12, replace)), known)

    def in_a_program(weights):
        return WeightedRowSampler(pool(40), weights, replace).sample(KEY, 12)["index"]

    assert_trees_bitwise_equal(jax.jit(in_a_program)(weights), known)


# What jit does where the host would refuse


BAD = np.float32([np.nan, -1, np.inf, 0, -np.inf, 1e-45])


@pytest.mark.parametrize("replace", [True, False])
def test_traced_weights_that_are_no_weights_count_as_zero(replace):
    rows = traced_rows(KEY, np.append(BAD, np.float32([2, 3, 5])), 3 if not replace else 300, replace)
    assert set(rows.tolist()) == {6, 7, 8}


@pytest.mark.parametrize("weights", [BAD, np.zeros(6, np.float32)], ids=["none usable", "all zero"])
def test_where_no_traced_weight_is_left_all_rows_are_alike(weights):
    assert set(traced_rows(KEY, weights, 300, True).tolist()) == set(range(6))
    assert sorted(traced_rows(KEY, weights, 6, False).tolist()) == list(range(6))


def test_where_too_few_traced_weights_are_positive_their_rows_come_again():
    weights = np.float32([0, 1, 0, 2, 0, 0])
    rows = traced_rows(KEY, weights, 5, False).tolist()
    assert set(rows) == {1, 3}
    assert rows == [*rows[:2], *rows[:2], rows[0]]


# What the host refuses


REFUSED = {
    "NaN": (
        [1.0, np.nan],
        "weights[1] must be finite and not negative. Use 0 for a row that must not be drawn.",
    ),
    "infinity": (
        np.float32([np.inf]),
        "weights[0] must be finite and not negative. Use 0 for a row that must not be drawn.",
    ),
    "negative": (
        [0, -2],
        "weights[1] must be finite and not negative. Use 0 for a row that must not be drawn.",
    ),
    "zeros": ([0, 0], "weights must have a positive entry, got 2 zeros. Nothing could be drawn."),
    "none": ([], "weights must have one weight for each row, got shape (0,). Give every row a weight."),
    "a table": (
        [[1.0]],
        "weights must have one weight for each row, got shape (1, 1). Give every row a weight.",
    ),
}


@pytest.mark.parametrize(("weights", "message"), REFUSED.values(), ids=REFUSED)
def test_weights_that_are_none_are_rejected(weights, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        weighted_rows(KEY, weights, 1)


CALLS = {
    "text": (
        lambda: weighted_rows(KEY, ["a"], 1),
        TypeError,
        "weights must hold real numbers, got dtype <U1. Pass one weight for each row.",
    ),
    "another number": (
        lambda: WeightedRowSampler(pool(3), [1.0, 2.0]),
        ValueError,
        "weights must have one weight for each of 3 rows, got shape (2,). Give every row a weight.",
    ),
    "too few": (
        lambda: weighted_rows(KEY, [1, 0, 1], 3, replace=False),
        ValueError,
        "size must be at most the 2 rows of positive weight when replace=False, got 3. "
        "Use a smaller size, more positive weights, or replace=True.",
    ),
    "size 0": (
        lambda: weighted_rows(KEY, [1.0], 0),
        ValueError,
        "size must be in [1, 2**31), got 0. Pick a number inside the range.",
    ),
    "a word for replace": (
        lambda: WeightedRowSampler(pool(1), [1.0], "no"),
        TypeError,
        "replace must be True or False, got 'no'. Pass a bool.",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
def test_what_cannot_be_drawn_is_rejected(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
