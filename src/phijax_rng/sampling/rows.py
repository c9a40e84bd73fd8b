"""From a key and a size to rows of a finite pool.

    RandomRowSampler      every row as likely as any other, with or without replacement in a batch
    ShuffledRowSampler    every row once per epoch, at any step without the steps before it

Every sampler is a frozen pytree: its arrays are leaves (so they are arguments of a compiled program,
never constants in it), its options are static. A draw is a pure function of (key, size), or of (key, step,
size), pins its dtypes, and unless rows are sorted or shuffled, a smaller batch is the beginning of a larger
one. Row numbers are drawn by `choose` or `choose_at` only; the rows may be stored anywhere.

>>> import jax
>>> sampler = RandomRowSampler({"inputs": [[0.0], [1.0], [2.0]]})
>>> sampler.sample(jax.random.key(0), 2)["inputs"].shape
(2, 1)
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from phijax_rng import keys, shuffle
from phijax_rng._base import pytrees, uint64, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import BatchSize, KeyScalar, Rows, Step
from phijax_rng.sampling.pools import as_fields, unmasked

METHODS = ("permutation", "sort")
"""How distinct rows are found: a keyed permutation, O(size); or a sort of all rows, as PhiJAX does."""

ORDERS = ("random", "shuffled")
"""Rows drawn afresh at every step; or every row once per epoch."""


class PoolRows:
    """What the samplers of rows of a pool share.

    Attributes:
        fields: field name -> array of shape `(num_rows, ...)`.
        sort_axis: the column of `inputs` that a batch is sorted by.
    """

    fields: Any
    sort_axis: int | None

    @property
    def num_rows(self) -> int:
        """How many rows there are to pick from."""
        return count_rows(self.fields)

    def contents(self) -> dict[str, Any]:
        """The rows, whose digest goes into the contract."""
        return dict(self.fields)


class _Chooses(Protocol):
    """What `KeyedPoolRows` needs of the samplers that it completes."""

    @property
    def fields(self) -> Any: ...

    @property
    def sort_axis(self) -> int | None: ...

    def check_size(self, size: BatchSize, name: str) -> None: ...

    def choose(self, key: KeyScalar, size: int) -> jax.Array: ...


class KeyedPoolRows(PoolRows):
    """Those of them that draw from a key alone."""

    def sample(self: _Chooses, key: KeyScalar, size: BatchSize) -> Rows:
        """Rows by field name; `"all"` gives every row in the order of the pool.

        Args:
            key: a typed key of shape `()`; may be traced. Not used for `"all"`.
            size: rows to draw; static.

        Returns:
            Field name -> array of shape `(size, ...)`, dtypes of the pool.
        """
        self.check_size(validation.batch_size(size, "size"), "size")
        chosen = None if size == "all" else self.choose(key, int(size))
        return batch_of(self.fields, chosen, self.sort_axis)


@pytrees.record(data=("fields",), meta=("replace", "method", "sort_axis"))
@dataclasses.dataclass(frozen=True, eq=False)
class RandomRowSampler(KeyedPoolRows):
    """Rows of a pool, picked uniformly.

    With replacement the indices are `jax.random.randint(key, (size,), 0, num_rows, dtype=int32)`, which
    equals `jax.random.choice` with x64 off. Without replacement, `method="permutation"` takes the first
    `size` places of a keyed permutation (`shuffle.permute_index`) at a cost of O(size), and
    `method="sort"` takes `jax.random.permutation(key, num_rows)[:size]` at a cost of
    O(num_rows log num_rows), for the rows that PhiJAX would draw.

    Attributes:
        fields: field name -> array of shape `(num_rows, ...)`, or a `HostPool`.
        replace: whether a row may be drawn twice in one batch.
        method: how distinct rows are found; without influence when `replace` is true.
        sort_axis: a column of `inputs` to sort each batch by, ascending and stable; `None` to keep
            the order of drawing. With it the position of a row depends on all rows of the batch.
    """

    fields: Any
    replace: bool = True
    method: str = "permutation"
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        validation.flag(self.replace, "replace")
        validation.one_of(self.method, "method", METHODS)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many rows."""
        if not self.replace:
            check_distinct(size, name, self.num_rows)

    def choose(self, key: KeyScalar, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample` gives, before they are sorted."""
        return draw_indices(key, size, self.num_rows, self.replace, self.method)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "RandomRowSampler",
            "num_rows": self.num_rows,
            "fields": describe_fields(self.fields),
            "replace": self.replace,
            "method": None if self.replace else self.method,
            "sort_axis": self.sort_axis,
        }


@pytrees.record(data=("fields",), meta=("sort_axis",))
@dataclasses.dataclass(frozen=True, eq=False)
class ShuffledRowSampler(PoolRows):
    """Every row of a pool exactly once per epoch, in a fresh order each epoch; a `StepSampler`.

    Step t holds the rows at the positions t·size to (t + 1)·size - 1 of the epochs laid end to end, so a
    batch may end one epoch and begin the next, and no row is left out or doubled. Epoch e is the keyed
    permutation (`shuffle.permute_index`) of `fold_in(key, e >> 32, e & 0xffffffff)`. Any step can be drawn
    at the same cost of O(size): positions are counted in two words, so none is out of reach.

    The key is a stream of its own (see `StepSampler`) and never meets the key of a step. Across the end of an
    epoch a row can come twice in one batch, once in each epoch. Another size is another run: rows then fall
    to other steps.

    Attributes:
        fields: field name -> array of shape `(num_rows, ...)`, or a `HostPool`.
        sort_axis: a column of `inputs` to sort each batch by, ascending and stable; `None` to keep
            the order of the epoch.
    """

    fields: Any
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        validation.whole_number(self.num_rows, "the number of rows", 2**31, start=1)

    def sample_at(self, key: KeyScalar, step: Step, size: BatchSize) -> Rows:
        """Rows by field name; `"all"` gives every row in the order of the pool, at every step.

        Args:
            key: a typed key of shape `()`, the same at every step; may be traced.
            step: a whole number in [0, 2**31); may be traced.
            size: rows to draw; static. It may exceed the number of rows.

        Returns:
            Field name -> array of shape `(size, ...)`, dtypes of the pool.
        """
        size = validation.batch_size(size, "size")
        chosen = None if size == "all" else self.choose_at(key, step, size)
        return batch_of(self.fields, chosen, self.sort_axis)

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """The first rows of the first epoch under `key`, for diagnostics."""
        return self.sample_at(key, 0, size)

    def choose_at(self, key: KeyScalar, step: Step, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample_at` gives, before they are sorted."""
        if not isinstance(step, jax.core.Tracer):
            step = np.int32(validation.step_number(step))
        return draw_shuffled(key, step, size, self.num_rows)

    def choose(self, key: KeyScalar, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample` gives, before they are sorted."""
        return self.choose_at(key, 0, size)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "ShuffledRowSampler",
            "num_rows": self.num_rows,
            "fields": describe_fields(self.fields),
            "sort_axis": self.sort_axis,
        }


def check_fields(sampler: Any) -> None:
    """Replaces a new sampler's `fields` and `sort_axis` by checked ones."""
    fields, axis = as_fields(sampler.fields), sampler.sort_axis
    require_narrow(fields)
    assign(
        sampler, fields=fields, sort_axis=axis if axis is None else checked_axis(axis, "sort_axis", fields)
    )


def count_rows(fields: Mapping[str, Any]) -> int:
    """The length of the leading axis."""
    return int(jax.tree.leaves(fields)[0].shape[0])


def require_narrow(fields: object, label: str = "fields") -> None:
    """Raises for numbers beyond the 32 bits to which JAX narrows them; with x64 it narrows none.

    Arrays in memory are checked here, rows on disk when they are fetched.

    Raises:
        ValueError: naming the field.
    """
    for path, array in jax.tree_util.tree_leaves_with_path(fields):
        if not isinstance(array, np.ndarray) or isinstance(array, np.memmap) or not array.size:
            continue
        narrow = jax.dtypes.canonicalize_dtype(array.dtype)
        if narrow != array.dtype and _is_beyond(array, narrow):
            fix = "scale them" if array.dtype.kind in "fc" else "split the numbers into two fields"
            raise ValueError(
                f"{label}{jax.tree_util.keystr(path)} has numbers beyond {narrow}, to which JAX truncates "
                f"{array.dtype}. Turn on jax_enable_x64, or {fix}."
            )


def _is_beyond(array: np.ndarray[Any, Any], narrow: np.dtype[Any]) -> bool:
    if array.dtype.kind == "c":
        return _is_beyond(array.real, np.dtype(np.float32)) or _is_beyond(array.imag, np.dtype(np.float32))
    if array.dtype.kind == "f":
        largest = max(array.max(), -array.min())
        # Infinities and NaN are in both dtypes; among them the finite numbers count alone.
        finite = array if np.isfinite(largest) else array[np.isfinite(array)]
        with np.errstate(over="ignore"):
            return bool(finite.size and np.isinf(np.abs(finite).max().astype(narrow)))
    known = np.iinfo(narrow)
    return not (known.min <= array.min() and array.max() <= known.max)


def draw_indices(key: KeyScalar, size: int, n: int, replace: bool, method: str) -> jax.Array:
    """`size` int32 indices of `range(n)`: independent ones, or distinct ones by the named method."""
    if replace:
        return jax.random.randint(key, (size,), 0, n, dtype=jnp.int32)
    if method == "sort":
        return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32))[:size]
    return shuffle.permute_index(key, jnp.arange(size, dtype=jnp.int32), n)


# From so many on, samplers that choose alike share one loop. XLA compiles the hash of each sampler anew, in
# 0.1 s and more. Below, programs stay as they are.
_MANY = 16


def choose_together(
    samplers: Mapping[str, object], sizes: Mapping[str, BatchSize], split: Mapping[str, KeyScalar]
) -> dict[str, jax.Array]:
    """The row numbers of many `RandomRowSampler`s that choose alike, by name; the others are left out.

    They are those of `choose`: the loop draws from one key after the other, where `vmap` would draw other
    numbers with some key types.
    """
    alike: dict[tuple[int, int, bool, str], list[str]] = {}
    for name, sampler in samplers.items():
        if type(sampler) is RandomRowSampler and sizes[name] != "all":
            way = (int(sizes[name]), sampler.num_rows, sampler.replace, sampler.method)
            alike.setdefault(way, []).append(name)
    chosen: dict[str, jax.Array] = {}
    for way, names in alike.items():
        if len(names) >= _MANY:
            draw = functools.partial(_draw_from, way)
            # A clone, since `jax_debug_key_reuse` takes stacked keys for used ones.
            stacked = jax.random.clone(jnp.stack([split[name] for name in names]))
            numbers = jax.lax.map(draw, stacked)
            chosen |= {name: numbers[position] for position, name in enumerate(names)}
    return chosen


def _draw_from(way: tuple[int, int, bool, str], key: KeyScalar) -> jax.Array:
    return draw_indices(key, *way)


def draw_shuffled(key: KeyScalar, step: object, size: int, n: int) -> jax.Array:
    """The int32 indices at positions step·size to (step + 1)·size - 1 of the epochs of `range(n)`."""
    size_word = jnp.asarray(np.uint32(size))
    epoch, offset = uint64.divide(*uint64.product(jnp.asarray(step).astype(jnp.uint32), size_word), n)
    place = jnp.arange(size, dtype=jnp.uint32)
    index = offset + place % np.uint32(n)
    which = place // np.uint32(n) + (index >= n).astype(jnp.uint32)
    words = _epoch_words(key, epoch, num_epochs(size, n), n)
    # Where no end of the range is passed, the subtraction wraps to a huge number.
    return shuffle.permute_among(words, which, jnp.minimum(index, index - np.uint32(n)), n)


def num_epochs(size: int, n: int) -> int:
    """How many epochs a batch can touch: offsets into an epoch are multiples of gcd(size, n)."""
    return (n - math.gcd(size, n) + size - 1) // n + 1


def _epoch_words(key: KeyScalar, epoch: Any, count: int, n: int) -> jax.Array:
    """The words of `count` epochs, from one on whose number has two words."""
    ahead = jnp.arange(count, dtype=jnp.uint32)
    high, low = uint64.add(jnp.broadcast_to(epoch[0], ahead.shape), epoch[1], ahead)
    of_epoch = jax.vmap(lambda high, low: keys.fold_in(key, high, low))(high, low)
    return keys.exact_vmap(lambda key: shuffle.draw_words(key, n))(of_epoch)


def check_distinct(size: BatchSize, name: str, n: int, fix: str = "Use 'all', a smaller size") -> None:
    """Raises if `n` rows cannot give `size` distinct ones."""
    if size != "all" and int(size) > n:
        raise ValueError(
            f"{name} must be at most the {n} rows of the pool when replace=False, got {size}. "
            f"{fix}, or replace=True."
        )


def batch_of(fields: object, indices: jax.Array | None, sort_axis: int | None) -> Any:
    """The rows with these indices, or all for `None`; sorted by a column of `inputs` where one is named."""
    rows = (
        jax.tree.map(lambda array: jnp.asarray(read(array)), fields)
        if indices is None
        else take(fields, indices)
    )
    return sort_rows(rows, sort_axis)


def take(fields: object, indices: jax.Array) -> Any:
    """The rows with these indices, which must be in range."""
    # Out-of-range cannot happen, and "clip" spares the compiled program the masking of "fill".
    return jax.tree.map(
        lambda array: jnp.take(jnp.asarray(read(array)), indices, axis=0, mode="clip"), fields
    )


def read(array: Any) -> Any:
    """All rows of a field; those on disk are read, and checked as those in memory were before."""
    if isinstance(array, (jax.Array, np.ndarray)) and not isinstance(array, np.memmap):
        return array
    rows = unmasked(np.asanyarray(array[:]), "a field on disk")
    require_narrow(rows, "a field on disk")
    return rows


def sort_rows(rows: Any, sort_axis: int | None) -> Any:
    """`rows` in ascending order of one column of `inputs`; ties keep their order."""
    if sort_axis is None:
        return rows
    return take(rows, jnp.argsort(rows["inputs"][:, sort_axis], stable=True))


def checked_axis(axis: object, name: str, fields: Mapping[str, Any]) -> int:
    """`axis` as a column of `inputs`."""
    inputs = fields.get("inputs")
    if inputs is None or len(inputs.shape) != 2:
        found = "absent" if inputs is None else f"of shape {tuple(inputs.shape)}"
        raise ValueError(f"{name}={axis!r} needs inputs of shape (rows, axes); they are {found}. Drop it.")
    return validation.whole_number(axis, name, int(inputs.shape[1]))


def describe_fields(fields: object) -> dict[str, list[Any]]:
    """Path -> [dtype, shape] for every array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(fields)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): [str(leaf.dtype), list(leaf.shape)]
        for path, leaf in flat
    }
