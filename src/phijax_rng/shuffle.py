"""A keyed permutation of `range(n)`, one index at a time.

    index ──▶ (row, column) ──▶ turn every row, turn every column ──▶ ... ──▶ index
                                └───────────── one round ────────┘

The n indices lie row by row on a grid of about √n × √n cells whose last row may be short. A round
turns every row by an amount of its own, then every column; the amounts are a hash of the line's
number and of words drawn from the key. A turned line is a permutation of its cells and can be
turned back, so any stack of rounds is a permutation of `range(n)` and has an exact inverse.

The invariant: `permute_index(key, index, n)` is a pure function of its three arguments in 32-bit
integer arithmetic: bit-identical eager, jitted, vmapped, scanned and sharded, with and without x64.
Nothing of size n exists at any time, and every index costs the same number of operations, so no
loop waits for a slow index and no device for another. It is a shuffle, not a cipher.

>>> import jax
>>> from phijax_rng import shuffle
>>> key = jax.random.key(0)
>>> shuffle.permute_index(key, jax.numpy.arange(5), 5).tolist()
[2, 4, 0, 3, 1]
>>> int(shuffle.invert_index(key, shuffle.permute_index(key, 123_456, 10**9), 10**9))
123456
"""

import functools
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, Integer, UInt32

from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar
from phijax_rng._base.validation import formatted

Words: TypeAlias = UInt32[Array, "..."]

_Turns: TypeAlias = Words | list[list[Words]]
"""The words of one round, an array of shape (2, 2) or arrays in lists of these lengths."""

# Up to here one of a few numbers is selected in registers, which is several times faster than a gather.
_MOST_SELECTED = 4


class _Grid(NamedTuple):
    """`rows` × `columns` cells, of which the last row has the first `last_row`."""

    rows: np.uint32
    columns: np.uint32
    last_row: np.uint32
    rounds: int


def permute_index(key: KeyScalar, index: Integer[ArrayLike, "*shape"], n: int) -> Int32[Array, "*shape"]:
    """Where the permutation of `range(n)` that belongs to `key` takes each index.

    A draw of k rows without replacement is `permute_index(key, jnp.arange(k), n)`; an epoch over a
    pool is the same at running positions. Over keys the permutations are uniform to within what
    10**7 of them could show: all n! of them for n ≤ 8, the images of a few indices beyond.

    Args:
        key: one typed key of shape `()`; may be traced. It is drawn from: use it for nothing else.
        index: integers in [0, n) of any shape; may be traced. A traced index outside the range is
            clamped to it, as JAX clamps a gather; a known one is an error.
        n: a Python or NumPy integer in [1, 2**31). Each n is a program of its own.

    Returns:
        `int32` of the shape of `index`. On a CPU it takes about as long as `jax.random.randint` of
        that shape, whatever n is: five rounds for n > 110, up to fourteen for less.

    Raises:
        TypeError: `key` is not a typed key, `index` does not hold integers, or `n` is not one.
        ValueError: `key` is a batch of keys, or `index` or `n` is out of range.

    Under `jax.vmap` over keys of `rbg` all rows get the permutation of the first key, as every draw
    does there; `keys.exact_vmap` gives each its own.
    """
    return _apply(_checked_key(key), *_checked_index(index, n), inverse=False)


def invert_index(key: KeyScalar, index: Integer[ArrayLike, "*shape"], n: int) -> Int32[Array, "*shape"]:
    """The index that `permute_index` takes to each of these; arguments and costs are the same."""
    return _apply(_checked_key(key), *_checked_index(index, n), inverse=True)


@functools.partial(jax.jit, static_argnames=("n", "inverse"))
def _apply(key: KeyScalar, index: Array, n: int, *, inverse: bool) -> Array:
    grid = _grid(n)
    words = draw_words(key, n)
    # A loop of fixed length is one small kernel per round; unrolled, XLA:CPU splits the rounds into
    # slower ones. It carries one array, not a row and a column: two independent ones make XLA:CPU
    # run parts of the program on other threads for some n (1024 indices: 55 µs instead of 17).
    turn = functools.partial(_round_back if inverse else _round, grid)
    moved, _ = jax.lax.scan(turn, _clamped(index, n), words, reverse=inverse)
    return moved.astype(jnp.int32)


def draw_words(key: KeyScalar, n: int) -> UInt32[Array, "rounds 2 2"]:
    """The random words that make up the permutation of `range(n)` that belongs to `key`."""
    return jax.random.bits(key, (_grid(n).rounds, 2, 2), jnp.uint32)


def permute_among(
    words: UInt32[Array, "keys rounds 2 2"],
    which: UInt32[Array, "*shape"],
    index: UInt32[Array, "*shape"],
    n: int,
) -> Int32[Array, "*shape"]:
    """Where each index is taken by a permutation of its own, one of a few; for rows across an epoch's end.

    Args:
        words: from `draw_words`, one entry for each permutation.
        which: the entry for each index. May be traced, is not checked.
        index: indices in [0, n). May be traced, is not checked.
        n: as in `permute_index`.
    """
    grid = _grid(n)

    def turn(cell: Words, words: Words) -> tuple[Words, None]:
        return _round(grid, cell, _chosen(words, which))

    moved, _ = jax.lax.scan(turn, index, jnp.moveaxis(words, 0, -1))
    return moved.astype(jnp.int32)


def _chosen(words: UInt32[Array, "2 2 keys"], which: Words) -> list[list[Words]]:
    """The four words of one round for each index, out of those of every permutation."""

    def pick(of_keys: Words) -> Words:
        if len(of_keys) > _MOST_SELECTED:
            return of_keys[which]
        chosen = of_keys[0]
        for number in range(1, len(of_keys)):
            chosen = jnp.where(which == np.uint32(number), of_keys[number], chosen)
        return chosen

    return [[pick(words[turn, half]) for half in range(2)] for turn in range(2)]


def _grid(n: int) -> _Grid:
    columns = math.isqrt(n - 1) + 1
    if columns * columns == n and n % 2:
        columns += 1  # turning only lines of odd length, one would get the even permutations alone
    rows = -(-n // columns)
    last_row = n - columns * (rows - 1)
    return _Grid(np.uint32(rows), np.uint32(columns), np.uint32(last_row), _num_rounds(rows))


def _num_rounds(rows: int) -> int:
    """Rounds after which no test of 10**7 permutations sees a departure from uniform.

    Were the hash ideal, the permutations would form a Markov chain whose chi-square distance from
    uniform can be computed exactly. It is about 1 after a round and a half, for pairs of indices at
    any n, and each further turn of all rows or columns divides it by about `rows`. So it is near
    2**-24 once rows**(2 * rounds - 3) ≥ 2**24. Computed at the rounds chosen: at most 2.4e-7 over
    all of S_n for n ≤ 8, 3.6e-7 for pairs (n up to 145), 9.6e-7 for triples (n up to 20), both at
    n = 9; N permutations show a distance d only where N * d is large. Five is the least, for a hash
    that is not ideal.
    """
    if rows == 1:
        return 5
    return next(rounds for rounds in range(5, 15) if rows ** (2 * rounds - 3) >= 2**24)


def _round(grid: _Grid, cell: Words, words: _Turns) -> tuple[Words, None]:
    row, column = _place(grid, cell)
    column = _turned(column, _row_length(grid, row), _hash(row, words[0]))
    row = _turned(row, _column_length(grid, column), _hash(column, words[1]))
    return row * grid.columns + column, None


def _round_back(grid: _Grid, cell: Words, words: _Turns) -> tuple[Words, None]:
    row, column = _place(grid, cell)
    row = _turned_back(row, _column_length(grid, column), _hash(column, words[1]))
    column = _turned_back(column, _row_length(grid, row), _hash(row, words[0]))
    return row * grid.columns + column, None


def _place(grid: _Grid, cell: Words) -> tuple[Words, Words]:
    row = cell // grid.columns
    return row, cell - row * grid.columns


def _row_length(grid: _Grid, row: Words) -> Words:
    return jnp.where(row == grid.rows - np.uint32(1), grid.last_row, grid.columns)


def _column_length(grid: _Grid, column: Words) -> Words:
    return jnp.where(column < grid.last_row, grid.rows, grid.rows - np.uint32(1))


def _turned(position: Words, length: Words, hashed: Words) -> Words:
    moved = position + _scaled(hashed, length)
    # Where nothing has passed the end, the subtraction wraps to a huge number.
    return jnp.minimum(moved, moved - length)


def _turned_back(position: Words, length: Words, hashed: Words) -> Words:
    moved = position - _scaled(hashed, length)
    return jnp.minimum(moved, moved + length)


def _hash(line: Words, words: Words | list[Words]) -> Words:
    """A strong mix of 32 bits: lowbias32, keyed before each of its two halves.

    Constants of Chris Wellons, "Prospecting for Hash Functions" (2018), https://nullprogram.com.
    """
    x = line ^ words[0]
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB_352D)
    x = x ^ words[1]
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846C_A68B)
    return x ^ (x >> np.uint32(16))


def _scaled(hashed: Words, length: Words) -> Words:
    """`hashed * length >> 32`: a 32-bit word taken to [0, length), for lengths below 2**16.

    Lemire, "Fast Random Integer Generation in an Interval" (2019), in two halves because there is
    no 64-bit product without x64. A remainder would be a true division: lengths differ by lane.
    """
    low = (hashed & np.uint32(0xFFFF)) * length
    high = (hashed >> np.uint32(16)) * length
    return (high + (low >> np.uint32(16))) >> np.uint32(16)


def _clamped(index: Array, n: int) -> Words:
    if jnp.iinfo(index.dtype).max < n - 1:
        index = index.astype(jnp.int32)  # int8 cannot hold the bound
    return jnp.clip(index, 0, n - 1).astype(jnp.uint32)


def _checked_key(key: KeyScalar) -> KeyScalar:
    dtype = getattr(key, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"key must be one typed JAX key, got {formatted(key)}. Make one with keys.root_key(seed)."
        )
    if key.shape != ():
        raise ValueError(
            f"key must be one key of shape (), got keys of shape {key.shape}. "
            "Pick one, or use keys.exact_vmap."
        )
    return key


def _checked_index(index: ArrayLike, n: int) -> tuple[ArrayLike, int]:
    if isinstance(n, jax.core.Tracer):
        raise TypeError(
            f"n must be known before tracing, got a traced {n.dtype}. Pass a Python int: "
            "it decides the compiled program."
        )
    n = validation.whole_number(n, "n", 2**31, start=1)
    array = index if isinstance(index, jax.Array) else np.asarray(index)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"index must hold integers, got {formatted(index)}. Pass integers in [0, n).")
    if isinstance(array, jax.Array):
        # What other processes hold cannot be looked at; it is clamped like a traced index.
        if not isinstance(array, jax.core.Tracer) and array.is_fully_addressable:
            _require_in_range(np.asarray(array), n)
        return array, n
    _require_in_range(array, n)
    return array.astype(np.int32), n


def _require_in_range(index: np.ndarray, n: int) -> None:
    outside = np.flatnonzero((index < 0) | (index >= n))
    if outside.size:
        where = np.unravel_index(outside[0], index.shape)
        name = f"index[{', '.join(str(axis) for axis in where)}]" if where else "index"
        raise ValueError(f"{name} must be in [0, {n}), got {index[where]}. Indices count from 0 to n - 1.")
