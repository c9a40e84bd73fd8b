import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import keys, shuffle
from tests._selection import mostly_full
from tests._subprocess import EIGHT_DEVICES, run_python

pytestmark = pytest.mark.strict_promotion

KEY = jax.random.key(5)
SIZES = (1, 2, 3, 9, 97, 111, 1000)
LARGE_SIZES = (2**23 + 1, 46339**2, 46340 * 46341, 2**31 - 1)
IMPLEMENTATIONS = ("threefry2x32", "threefry4x32", "philox4x32", "rbg")


def permuted(key, index, n):
    return np.asarray(shuffle.permute_index(key, index, n))


def inverted(key, index, n):
    return np.asarray(shuffle.invert_index(key, index, n))


def reference(key, index, n):
    """The same shuffle for one index, in Python's unbounded integers."""
    columns = math.isqrt(n - 1) + 1
    if n % 2 and columns**2 == n:
        columns += 1
    rows, last_row = -(-n // columns), n - columns * (-(-n // columns) - 1)
    words = jax.random.bits(key, (shuffle._num_rounds(rows), 2, 2), jnp.uint32).tolist()
    row, column = divmod(index, columns)
    for row_words, column_words in words:
        length = last_row if row == rows - 1 else columns
        column = (column + (reference_hash(row, *row_words) * length >> 32)) % length
        length = rows if column < last_row else rows - 1
        row = (row + (reference_hash(column, *column_words) * length >> 32)) % length
    return row * columns + column


def reference_hash(x, first, second):
    x ^= first
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ second
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("n", mostly_full(SIZES, everyday=[1, 9, 111, 1000]))
def test_every_index_is_reached_once_and_found_again(n):
    image = permuted(KEY, np.arange(n), n)
    np.testing.assert_array_equal(np.sort(image), np.arange(n))
    np.testing.assert_array_equal(inverted(KEY, image, n), np.arange(n))
    np.testing.assert_array_equal(permuted(KEY, inverted(KEY, np.arange(n), n), n), np.arange(n))


@pytest.mark.parametrize("n", mostly_full(LARGE_SIZES, everyday=[46339**2, 2**31 - 1]))
def test_large_ranges_are_permuted_and_inverted_too(n):
    ends = [0, 1, n // 2, n - 2, n - 1]
    index = np.unique(np.append(ends, np.random.default_rng(n).integers(0, n, 20_000)))
    image = permuted(KEY, index, n)
    assert image.min() >= 0
    assert image.max() < n
    assert len(np.unique(image)) == len(index)
    np.testing.assert_array_equal(inverted(KEY, image, n), index)


def test_one_round_permutes_and_is_undone_on_the_grid_of_every_small_range():
    sizes = np.arange(1, 513)
    grids = shuffle._Grid(
        *(np.array(column) for column in zip(*map(shuffle._grid, sizes.tolist()), strict=True))
    )
    words = jax.random.bits(KEY, (2, 2), jnp.uint32)
    cells = jnp.arange(sizes.max(), dtype=jnp.uint32)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def there_and_back(grid, cells):
        moved, _ = shuffle._round(grid, cells, words)
        back, _ = shuffle._round_back(grid, moved, words)
        return moved, back

    moved, back = there_and_back(grids, cells)
    for n, row, undone in zip(sizes, np.asarray(moved), np.asarray(back), strict=True):
        np.testing.assert_array_equal(np.sort(row[:n]), np.arange(n), err_msg=f"n={n}")
        np.testing.assert_array_equal(undone[:n], np.arange(n), err_msg=f"n={n}")


@pytest.mark.parametrize("n", [5, 10**7, 2**31 - 1])
def test_a_shuffle_is_what_unbounded_integers_say(n):
    index = sorted({0, 1, n // 3, n - 2, n - 1})
    assert permuted(KEY, np.array(index), n).tolist() == [reference(KEY, i, n) for i in index]


# Rows of every shuffled run hang on these: a change here is a new draw for every user.
@pytest.mark.parametrize(
    ("n", "image"),
    [
        (5, [2, 4, 0, 3, 1]),
        (1000, [56, 421, 35, 482, 457]),
        (10**7, [8737277, 806724, 4442695, 8259760, 5561901]),
        (2**31 - 1, [1875827362, 1396241418, 798747547, 1636958660, 1279854335]),
    ],
)
def test_the_first_places_are_pinned(n, image):
    assert permuted(jax.random.key(0), np.arange(5), n).tolist() == image


@pytest.mark.parametrize("implementation", mostly_full(IMPLEMENTATIONS, everyday=["threefry2x32"]))
def test_eager_jitted_vmapped_and_scanned_shuffles_are_the_same_bits(implementation):
    key, n = jax.random.key(7, impl=implementation), 10**7
    index = jnp.arange(n - 24, n, dtype=jnp.int32)

    def at(i):
        return shuffle.permute_index(key, i, n)

    eager = permuted(key, index, n)
    scanned = jax.jit(lambda index: jax.lax.scan(lambda carry, i: (carry, at(i)), 0, index)[1])
    with jax.disable_jit():
        op_by_op = permuted(key, index, n)
    for other in (
        jax.jit(shuffle.permute_index, static_argnums=2)(key, index, n),
        jax.vmap(at)(index),
        jax.vmap(at)(index.reshape(4, 6)),
        scanned(index),
        np.stack([permuted(key, int(i), n) for i in index]),
        op_by_op,
    ):
        np.testing.assert_array_equal(np.ravel(other), eager)
    other_key = jax.random.key(8, impl=implementation)
    assert (permuted(other_key, index, n) != eager).any()  # the control


@pytest.mark.parametrize("implementation", mostly_full(IMPLEMENTATIONS, everyday=["threefry2x32"]))
def test_a_batch_of_keys_shuffles_as_each_key_alone(implementation):
    batch = jax.random.split(jax.random.key(7, impl=implementation), 6)
    index = jnp.arange(20, dtype=jnp.int32)
    together = keys.exact_vmap(lambda key: shuffle.permute_index(key, index, 10**7))(batch)
    alone = np.stack([permuted(key, index, 10**7) for key in batch])
    np.testing.assert_array_equal(together, alone)
    assert len(np.unique(alone, axis=0)) == len(batch)  # the control


def test_keys_of_neighboring_steps_shuffle_apart():
    index = np.arange(100)
    rows = np.stack([permuted(jax.random.fold_in(KEY, step), index, 10**7) for step in range(20)])
    assert len(np.unique(rows)) > 1990  # 2000 draws of 10**7 meet 0.2 times on average


def test_x64_changes_nothing():
    index = np.array([0, 1, 123_456_789, 2**31 - 2])
    without = permuted(KEY, index, 2**31 - 1)
    with jax.enable_x64(True):
        wide = jnp.asarray(index)
        assert wide.dtype == jnp.int64
        for given in (index, wide):
            image = shuffle.permute_index(KEY, given, 2**31 - 1)
            assert image.dtype == jnp.int32
            np.testing.assert_array_equal(image, without)
            np.testing.assert_array_equal(inverted(KEY, image, 2**31 - 1), index)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.uint32])
def test_every_integer_dtype_and_shape_gives_int32_of_that_shape(kind):
    expected = permuted(KEY, np.arange(6), 1000)
    index = np.arange(6).astype(kind).reshape(2, 1, 3)
    for given in (index, jnp.asarray(index)):
        image = shuffle.permute_index(KEY, given, 1000)
        assert (image.shape, image.dtype) == ((2, 1, 3), jnp.int32)
        np.testing.assert_array_equal(np.ravel(image), expected)


def test_scalars_and_empty_arrays_have_shuffles():
    first = permuted(KEY, np.arange(3), 1000)
    for given in (2, np.int64(2), np.uint8(2), jnp.int32(2)):
        image = shuffle.permute_index(KEY, given, np.int64(1000))
        assert (image.shape, image.dtype, int(image)) == ((), jnp.int32, first[2])
    assert shuffle.permute_index(KEY, np.zeros((0, 4), np.int32), 1000).shape == (0, 4)


def test_a_traced_index_outside_the_range_is_clamped():
    place = jax.jit(lambda index: shuffle.permute_index(KEY, index, 1000))
    ends = permuted(KEY, np.array([0, 999]), 1000)
    outside = jnp.array([-(2**31), -1, 1000, 2**31 - 1], jnp.int32)
    np.testing.assert_array_equal(place(outside), ends[[0, 0, 1, 1]])
    assert place(jnp.uint32(2**32 - 1)) == ends[1]
    assert place(jnp.int8(-1)) == ends[0]


def test_memory_does_not_grow_with_the_range():
    index = jnp.arange(8, dtype=jnp.int32)
    run = jax.jit(shuffle.permute_index, static_argnums=2)
    used = [
        run.lower(KEY, index, n).compile().memory_analysis().temp_size_in_bytes for n in (10**3, 2**31 - 1)
    ]
    assert max(used) < 4096


def test_an_eager_shuffle_is_one_program():
    jaxpr = jax.make_jaxpr(lambda key: shuffle.permute_index(key, np.arange(3), 1000))(KEY)
    assert len(jaxpr.eqns) == 1


@pytest.mark.full
def test_sharded_indices_shuffle_to_the_same_bits_without_communication():
    program = """
        import jax, numpy as np
        from phijax_rng import shuffle

        sharding = jax.sharding.NamedSharding(
            jax.make_mesh((8,), ("rows",)), jax.sharding.PartitionSpec("rows")
        )
        index = np.arange(64, dtype=np.int32)
        key = jax.random.key(5)
        run = jax.jit(shuffle.permute_index, static_argnums=2).lower(
            key, jax.device_put(index, sharding), 1000
        ).compile()
        image = run(key, jax.device_put(index, sharding))
        assert len(image.sharding.device_set) == 8 and not image.is_fully_replicated
        np.testing.assert_array_equal(image, shuffle.permute_index(key, index, 1000))
        for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
            assert word not in run.as_text(), word
    """
    run_python(program, env=EIGHT_DEVICES)


@pytest.mark.parametrize("function", [shuffle.permute_index, shuffle.invert_index])
@pytest.mark.parametrize(
    ("index", "n", "error", "message"),
    [
        (7, 7, ValueError, "index must be in [0, 7), got 7. Indices count from 0 to n - 1."),
        (
            np.array([[0, 1], [-2, 9]]),
            7,
            ValueError,
            "index[1, 0] must be in [0, 7), got -2. Indices count from 0 to n - 1.",
        ),
        (
            jnp.array([3, 7], jnp.uint8),
            7,
            ValueError,
            "index[1] must be in [0, 7), got 7. Indices count from 0 to n - 1.",
        ),
        (2**40, 7, ValueError, f"index must be in [0, 7), got {2**40}. Indices count from 0 to n - 1."),
        (1.5, 7, TypeError, "index must hold integers, got 1.5. Pass integers in [0, n)."),
        (True, 7, TypeError, "index must hold integers, got True. Pass integers in [0, n)."),
        (2**70, 7, TypeError, f"index must hold integers, got {2**70}. Pass integers in [0, n)."),
        (0, 0, ValueError, "n must be in [1, 2**31), got 0. Pick a number inside the range."),
        (0, 2**31, ValueError, f"n must be in [1, 2**31), got {2**31}. Pick a number inside the range."),
        (0, 7.0, TypeError, "n must be a whole number, got 7.0. Pass an int or a NumPy integer."),
        (0, True, TypeError, "n must be a whole number, got True. Pass an int or a NumPy integer."),
    ],
)
def test_what_no_shuffle_has_is_rejected(function, index, n, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(KEY, index, n)


def test_a_range_must_be_known_and_a_key_must_be_one_typed_key():
    with pytest.raises(TypeError, match=r"^n must be known before tracing, got a traced int32\. Pass"):
        jax.jit(lambda n: shuffle.permute_index(KEY, 0, n))(jnp.int32(5))
    number = "key must be one typed JAX key, got 42. Make one with keys.root_key(seed)."
    with pytest.raises(TypeError, match=f"^{re.escape(number)}$"):
        shuffle.permute_index(42, 0, 5)
    with pytest.raises(TypeError, match=r"^key must be one typed JAX key, got uint32\[2\]\."):
        shuffle.permute_index(jax.random.key_data(KEY), 0, 5)
    batch = "key must be one key of shape (), got keys of shape (3,). Pick one, or use keys.exact_vmap."
    with pytest.raises(ValueError, match=f"^{re.escape(batch)}$"):
        shuffle.permute_index(jax.random.split(KEY, 3), 0, 5)
