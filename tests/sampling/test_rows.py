"""Rows of finite pools: which rows, in which order, at which cost; and what counts as a sampler."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import (
    HostPool,
    RandomRowSampler,
    Sampler,
    SpaceTimeSampler,
    UniformDomainSampler,
    shuffle,
)
from phijax_rng.sampling import AdaptiveSampler, HostedRowSampler, StepSampler
from tests._bitwise import assert_trees_bitwise_equal, first_difference

KEY = jax.random.key(3)


def indexed(n):
    """Rows that hold their own index, in two fields."""
    index = np.arange(n)
    return {"inputs": index[:, None].astype(np.float32), "targets": index.astype(np.int32)}


def indices(sampler, size, key=KEY):
    return sampler.sample(key, size)["targets"]


# Which rows


@pytest.mark.parametrize("n", [1, 7, 64, 1000])
def test_rows_with_replacement_are_those_of_randint_and_of_choice(n):
    drawn = indices(RandomRowSampler(indexed(n)), 50)
    assert_trees_bitwise_equal(drawn, jax.random.randint(KEY, (50,), 0, n, dtype=jnp.int32))
    assert_trees_bitwise_equal(drawn, jax.random.choice(KEY, n, (50,)))


def test_all_fields_of_a_row_stay_together():
    rows = RandomRowSampler(indexed(1000)).sample(KEY, 50)
    assert_trees_bitwise_equal(rows["inputs"], rows["targets"][:, None].astype(jnp.float32))


def test_a_pool_is_as_good_as_its_fields():
    pool = HostPool(indexed(9)["inputs"], targets=indexed(9)["targets"], aux={"w": np.ones(9, np.float32)})
    rows = RandomRowSampler(pool).sample(KEY, 4)
    assert set(rows) == {"inputs", "targets", "w"}
    expected = RandomRowSampler(indexed(9)).sample(KEY, 4)
    assert_trees_bitwise_equal({name: rows[name] for name in expected}, expected)


@pytest.mark.parametrize("replace", [True, False])
def test_all_rows_come_in_the_order_of_the_pool_whatever_the_key(replace):
    sampler = RandomRowSampler(indexed(9), replace=replace)
    assert_trees_bitwise_equal(sampler.sample(KEY, "all"), indexed(9))
    assert_trees_bitwise_equal(sampler.sample(jax.random.key(4), "all"), indexed(9))


@pytest.mark.parametrize("method", ["permutation", "sort"])
@pytest.mark.parametrize(("size", "n"), [(7, 7), (50, 1000)])
def test_no_row_comes_twice_without_replacement(method, size, n):
    drawn = indices(RandomRowSampler(indexed(n), replace=False, method=method), size)
    assert len(set(drawn.tolist())) == size


def test_rows_do_come_twice_with_replacement():
    assert len(set(indices(RandomRowSampler(indexed(64)), 64).tolist())) < 64


def test_the_permutation_method_reads_off_the_keyed_permutation():
    drawn = indices(RandomRowSampler(indexed(1000), replace=False), 50)
    assert_trees_bitwise_equal(drawn, shuffle.permute_index(KEY, jnp.arange(50), 1000))


def test_the_sort_method_takes_the_head_of_the_permutation_of_jax():
    drawn = indices(RandomRowSampler(indexed(1000), replace=False, method="sort"), 50)
    assert_trees_bitwise_equal(drawn, jax.random.permutation(KEY, 1000)[:50])
    assert_trees_bitwise_equal(drawn, jax.random.choice(KEY, 1000, (50,), replace=False))


def largest_value(fn, *args):
    """The largest array that a traced function computes, with all it calls; arguments do not count."""

    def inside(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for parameter in equation.params.values():
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    yield from inside(inner)

    return max(inside(jax.make_jaxpr(fn)(*args).jaxpr))


@pytest.mark.parametrize(
    ("options", "is_small"),
    [({}, True), ({"replace": False}, True), ({"replace": False, "method": "sort"}, False)],
    ids=["with replacement", "permutation", "sort"],
)
def test_only_the_sort_method_touches_the_whole_pool(options, is_small):
    sampler = RandomRowSampler(indexed(100_000), **options)
    largest = largest_value(lambda sampler, key: sampler.sample(key, 16), sampler, KEY)
    assert (largest < 1000) == is_small


# In which order


def test_a_sorted_batch_holds_the_same_rows_in_ascending_order():
    plain = RandomRowSampler(indexed(1000)).sample(KEY, 100)
    ascending = RandomRowSampler(indexed(1000), sort_axis=0).sample(KEY, 100)
    assert_trees_bitwise_equal(ascending["targets"], jnp.sort(plain["targets"]))
    assert_trees_bitwise_equal(ascending["inputs"][:, 0], ascending["targets"].astype(jnp.float32))
    assert first_difference(plain, ascending) is not None


@pytest.mark.parametrize("size", [100, "all"])
def test_ties_keep_the_order_they_were_drawn_in(size):
    fields = {"inputs": np.array([[1, 0], [0, 0]] * 500, np.float32), "targets": np.arange(1000)}
    plain = RandomRowSampler(fields).sample(KEY, size)
    ascending = RandomRowSampler(fields, sort_axis=0).sample(KEY, size)
    first = np.asarray(plain["inputs"][:, 0]) == 0
    expected = np.concatenate([plain["targets"][first], plain["targets"][~first]])
    assert_trees_bitwise_equal(ascending["targets"], expected)


# Fields of every kind


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.float16, jnp.bfloat16, np.bool_, np.complex64])
def test_rows_keep_the_dtype_of_the_pool(dtype):
    fields = {"inputs": np.ones((5, 2, 3), dtype)}
    drawn = RandomRowSampler(fields).sample(KEY, 4)["inputs"]
    assert drawn.dtype == dtype
    assert drawn.shape == (4, 2, 3)


class OnDisk:
    """What an HDF5 or Zarr data set offers."""

    chunks = (1, 1)

    def __init__(self, rows):
        self._rows = rows
        self.shape, self.dtype = rows.shape, rows.dtype

    def __getitem__(self, where):
        return self._rows[where]

    def __len__(self):
        return len(self._rows)

    def __array__(self, dtype=None, copy=None):
        return np.array(self._rows, dtype)


@pytest.mark.parametrize("size", [4, "all"])
@pytest.mark.parametrize("place", [OnDisk, jnp.asarray], ids=["on disk", "on a device"])
def test_rows_may_be_on_disk_or_on_a_device(place, size):
    fields = {name: place(array) for name, array in indexed(9).items()}
    rows = RandomRowSampler(fields).sample(KEY, size)
    assert_trees_bitwise_equal(rows, RandomRowSampler(indexed(9)).sample(KEY, size))


def test_a_sampler_is_an_argument_of_a_compiled_program():
    draw = jax.jit(lambda sampler, key: sampler.sample(key, 4))
    sampler, other = RandomRowSampler(indexed(9)), RandomRowSampler({**indexed(9), "targets": np.ones(9)})
    assert_trees_bitwise_equal(draw(sampler, KEY), sampler.sample(KEY, 4))
    assert_trees_bitwise_equal(draw(other, KEY), other.sample(KEY, 4))
    assert first_difference(draw(sampler, KEY), draw(other, KEY)) is not None


# What is refused


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: RandomRowSampler([1.0]),
            TypeError,
            "fields must be a mapping, got [1.0]. Pass a dict keyed by name.",
        ),
        (
            lambda: RandomRowSampler({"inputs": np.zeros(3), "targets": np.zeros(2)}),
            ValueError,
            "all fields must have equally many rows; inputs has 3, targets has 2. "
            "Give each one entry per row.",
        ),
        (
            lambda: RandomRowSampler(indexed(3), replace=1),
            TypeError,
            "replace must be True or False, got 1. Pass a bool.",
        ),
        (
            lambda: RandomRowSampler(indexed(3), method="gumbel"),
            ValueError,
            "method must be one of 'permutation', 'sort', got 'gumbel'. Pick one of them.",
        ),
        (
            lambda: RandomRowSampler(indexed(3), sort_axis=1),
            ValueError,
            "sort_axis must be in [0, 1), got 1. Pick a number inside the range.",
        ),
        (
            lambda: RandomRowSampler(indexed(3), sort_axis=True),
            TypeError,
            "sort_axis must be a whole number, got True. Pass an int or a NumPy integer.",
        ),
        (
            lambda: RandomRowSampler({"inputs": np.zeros(3)}, sort_axis=0),
            ValueError,
            "sort_axis=0 needs inputs of shape (rows, axes); they are of shape (3,). Drop it.",
        ),
        (
            lambda: RandomRowSampler({"targets": np.zeros(3)}, sort_axis=0),
            ValueError,
            "sort_axis=0 needs inputs of shape (rows, axes); they are absent. Drop it.",
        ),
        (
            lambda: RandomRowSampler(indexed(3)).sample(KEY, 0),
            ValueError,
            "size must be a positive int or 'all', got 0. Use 'all' to take every row of the pool.",
        ),
        (
            lambda: RandomRowSampler(indexed(3)).sample(KEY, 2.0),
            TypeError,
            "size must be a positive int or 'all', got 2.0. Use 'all' to take every row of the pool.",
        ),
        (
            lambda: RandomRowSampler(indexed(3), replace=False).sample(KEY, 4),
            ValueError,
            "size must be at most the 3 rows of the pool when replace=False, got 4. "
            "Use 'all', a smaller size, or replace=True.",
        ),
    ],
    ids=[
        "no fields",
        "lengths",
        "replace",
        "method",
        "axis out of range",
        "axis True",
        "inputs without axes",
        "no inputs",
        "size 0",
        "size 2.0",
        "more than there are",
    ],
)
def test_what_cannot_be_drawn_is_rejected_with_a_reason(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


# What counts as a sampler


class OwnStepSampler:
    def sample_at(self, key, step, size): ...

    def sample(self, key, size): ...


class OwnAdaptiveSampler:
    def init(self, key): ...

    def sample(self, key, size, state): ...

    def due(self, step, state): ...

    def refresh(self, key, state, residuals): ...


@pytest.mark.parametrize(
    ("sampler", "kinds"),
    [
        (RandomRowSampler(indexed(3)), {Sampler}),
        (UniformDomainSampler([(0, 1)]), {Sampler}),
        (SpaceTimeSampler({"inputs": np.zeros((3, 1), np.float32)}, (0, 1)), {Sampler}),
        (OwnStepSampler(), {Sampler, StepSampler}),
        # `isinstance` sees names alone: its `sample` is no Sampler's.
        (OwnAdaptiveSampler(), {Sampler, AdaptiveSampler}),
        (HostPool([[1.0]]), set()),
    ],
    ids=["rows", "box", "space-time", "by step", "adaptive", "a pool"],
)
def test_a_sampler_is_known_by_what_it_offers(sampler, kinds):
    found = {kind for kind in (Sampler, StepSampler, AdaptiveSampler) if isinstance(sampler, kind)}
    assert found == kinds


def test_a_sampler_describes_itself_in_plain_data():
    described = RandomRowSampler(indexed(9), sort_axis=0).describe()
    assert json.loads(json.dumps(described)) == {
        "kind": "RandomRowSampler",
        "num_rows": 9,
        "fields": {"inputs": ["float32", [9, 1]], "targets": ["int32", [9]]},
        "replace": True,
        "method": None,
        "sort_axis": 0,
    }
    assert RandomRowSampler(indexed(9), replace=False).describe()["method"] == "permutation"


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        (np.array([2**40 + 3, 7]), "has numbers beyond int32, to which JAX truncates int64. "),
        (np.array([0, -(2**31) - 1]), "has numbers beyond int32, to which JAX truncates int64. "),
        (
            np.array([1, 2**32], np.uint64),
            "has numbers beyond uint32, to which JAX truncates uint64. ",
        ),
    ],
    ids=["large", "small", "unsigned"],
)
@pytest.mark.parametrize("lazy", [False, True], ids=["in memory", "on disk"])
def test_integers_that_jax_would_truncate_raise(tmp_path, lazy, numbers, shown):
    if lazy:
        np.save(tmp_path / "ids.npy", numbers)
        numbers = np.load(tmp_path / "ids.npy", mmap_mode="r")
    fields = {"inputs": np.zeros((2, 1), np.float32), "aux_id": numbers}
    with pytest.raises(ValueError) as caught:
        HostedRowSampler(RandomRowSampler(fields)).sample(KEY, 64)
    fix = "Turn on jax_enable_x64, or split the numbers into two fields."
    assert str(caught.value).endswith(shown + fix)


def test_integers_that_fit_are_narrowed():
    fields = {"inputs": np.zeros((2, 1), np.float32), "aux_id": np.array([2**31 - 1, -(2**31)])}
    rows = RandomRowSampler(fields).sample(KEY, 64)["aux_id"]
    assert set(np.asarray(rows).tolist()) == {2**31 - 1, -(2**31)}
