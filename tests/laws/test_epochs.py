"""Shuffled rows: every row exactly once per epoch, wherever one begins to look."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phijax_rng import NamedBatchSource, RandomRowSampler, ShuffledRowSampler, keys, shuffle
from phijax_rng.sampling.rows import num_epochs
from tests._bitwise import first_difference
from tests._selection import mostly_full

KEY = keys.stream(keys.split_root(0).sampling, "sampler", "data")
LAST = 2**31 - 1


def sampler(n):
    return ShuffledRowSampler({"inputs": np.zeros((n, 0), np.float32)})


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def chosen(key, n, size, count, first):
    """Row numbers of `count` steps from `first` on, end to end."""
    steps = first + jnp.arange(count, dtype=jnp.int32)
    return jax.lax.map(lambda step: sampler(n).choose_at(key, step, size), steps).ravel()


def reference(position, n):
    """The row at a position, by unbounded integers and one index alone."""
    epoch, offset = divmod(position, n)
    key = keys.fold_in(KEY, epoch >> 32, epoch & 0xFFFF_FFFF)
    return int(shuffle.permute_index(key, offset, n))


def assert_epochs(rows, first, n):
    """Every epoch that lies whole in rows from position `first` on is a permutation; how many there are."""
    begin = -first % n
    whole = (len(rows) - begin) // n
    for epoch in range(whole):
        seen = np.bincount(rows[begin + epoch * n : begin + (epoch + 1) * n], minlength=n)
        assert seen.size == n
        assert (seen == 1).all()
    return whole


@pytest.mark.parametrize(
    ("n", "size"),
    [
        *((1, 1), (2, 3), (3, 2), (5, 12), (97, 96), (1000, 250)),
        *(
            pytest.param(*sizes, marks=pytest.mark.full)
            for sizes in (
                *((1, 5), (2, 1), (3, 7), (5, 2), (5, 5), (97, 10), (97, 98), (1000, 64), (1000, 3000)),
                *((100_003, 1000), (2**23 + 1, 4096), (10**7, 4096)),
            )
        ),
    ],
)
def test_three_epochs_hold_every_row_exactly_once_from_any_step(n, size):
    count = -(-4 * n // size) + 1  # three whole epochs, wherever the first begins
    for first in (1_234_567, LAST + 1 - count) if n > 10**6 else (0, 1_234_567, LAST + 1 - count):
        rows = np.asarray(chosen(KEY, n, size, count, np.int32(first)))
        assert assert_epochs(rows, first * size, n) >= 3


def test_a_row_that_comes_twice_is_seen():
    rows = np.arange(30) % 10
    assert assert_epochs(rows, 0, 10) == 3
    rows[13] = 4
    with pytest.raises(AssertionError):
        assert_epochs(rows, 0, 10)


@pytest.mark.parametrize(
    ("n", "size"), mostly_full([(5, 3), (97, 1024), (10**7, 65536), (2**31 - 1, 4096)], everyday=[(97, 1024)])
)
def test_positions_beyond_32_bits_are_those_of_unbounded_integers(n, size):
    steps = {0, 1, LAST, LAST - 1}
    for position in (2**31, 2**32, 2**31 * n):
        steps |= {step for step in (position // size - 1, position // size) if 0 <= step <= LAST}
    for step in sorted(steps):
        rows = np.asarray(chosen(KEY, n, size, 1, np.int32(step)))
        places = sorted({0, size - 1})
        assert rows[places].tolist() == [reference(step * size + place, n) for place in places]


@settings(max_examples=30)
@given(st.integers(0, LAST), st.integers(0, 2**64 - 1))
def test_a_batch_across_the_end_of_an_epoch_is_its_end_and_the_next_beginning(step, seed):
    n, size = 97, 40
    key = keys.root_key(seed)
    rows = np.asarray(chosen(key, n, size, 1, np.int32(step)))
    epoch, offset = divmod(step * size, n)
    orders = [
        np.asarray(shuffle.permute_index(keys.fold_in(key, e >> 32, e & 0xFFFF_FFFF), np.arange(n), n))
        for e in (epoch, epoch + 1)
    ]
    assert rows.tolist() == np.concatenate(orders)[offset : offset + size].tolist()


@pytest.mark.parametrize(
    ("size", "n", "epochs"),
    [
        (4, 12, 1),
        (12, 12, 1),
        (24, 12, 2),
        (5, 12, 2),
        (7, 5, 3),
        (6, 4, 2),
        (1, 1, 1),
        (3, 1, 3),
        (5, 97, 2),
    ],
)
def test_the_orders_at_hand_are_as_many_as_a_batch_can_touch(size, n, epochs):
    assert num_epochs(size, n) == epochs
    touched = {(t * size + size - 1) // n - t * size // n + 1 for t in range(n)}
    assert max(touched) == epochs


def test_the_order_is_fresh_in_each_epoch_and_its_key_meets_no_step_key():
    n, size, sampling = 1000, 250, keys.split_root(0).sampling
    source = NamedBatchSource(
        {"data": ShuffledRowSampler({"index": np.arange(n, dtype=np.int32)})}, {"data": size}, sampling
    )
    epochs = [np.concatenate([source(4 * e + t)["data"]["index"] for t in range(4)]) for e in range(20)]
    assert len({tuple(epoch) for epoch in epochs}) == 20
    # Two independent orders agree in one place on average, and in more than 9 once in 1e7.
    assert all((a == b).sum() < 10 for i, a in enumerate(epochs) for b in epochs[:i])
    used = {keys.fingerprint(keys.fold_in(KEY, 0, epoch)) for epoch in range(100)}
    steps = {keys.fingerprint(keys.step_key(sampling, step)) for step in range(2000)}
    places = {keys.fingerprint(key) for t in range(100) for key in source.sampler_keys(t).values()}
    assert not used & (steps | places | {keys.fingerprint(sampling)})


@pytest.mark.parametrize(
    "implementation", mostly_full(["threefry4x32", "philox4x32", "rbg"], everyday=["rbg"])
)
@pytest.mark.parametrize("size", [7, 30])
def test_every_key_implementation_has_epochs(implementation, size):
    key = jax.random.key(3, impl=implementation)
    rows = np.asarray(chosen(key, 10, size, 9, np.int32(2)))
    assert assert_epochs(rows, 2 * size, 10) >= 5


def test_two_samplers_of_one_source_are_shuffled_apart():
    pools = {name: {"index": np.arange(50, dtype=np.int32)} for name in ("a", "b")}
    source = NamedBatchSource.from_pools(
        pools, {"a": 50, "b": 50}, keys.split_root(0).sampling, order="shuffled"
    )
    batches = source(0)
    assert sorted(batches["a"]["index"].tolist()) == sorted(batches["b"]["index"].tolist()) == list(range(50))
    assert first_difference(batches["a"], batches["b"]) is not None


def test_nothing_of_the_size_of_the_pool_is_made():
    index = jax.jit(lambda key, step: sampler(2**31 - 1).choose_at(key, step, 64))
    used = index.lower(KEY, np.int32(0)).compile().memory_analysis()
    assert used.temp_size_in_bytes < 2**15


@pytest.mark.parametrize("n", [2, 97])
def test_distinct_rows_of_one_batch_are_distinct_up_to_all_of_them(n):
    pool = RandomRowSampler({"index": np.arange(n, dtype=np.int32)}, replace=False)
    assert sorted(pool.sample(KEY, n)["index"].tolist()) == list(range(n))
