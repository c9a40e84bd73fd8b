"""From a key and a size to rows of a finite pool; and what a sampler is.

    pool --> sampler --> source        rows --> (key, size) -> rows --> step -> {name: batch}

    RandomRowSampler      every row as likely as any other, with or without replacement in a batch
    WeightedRowSampler    rows in proportion to weights
    ShuffledRowSampler    every row once per epoch, at any step without the steps before it

Every sampler is a frozen pytree: its arrays are leaves (so they are arguments of a compiled program,
never constants in it), its options are static. A draw is a pure function of (key, size), or of (key, step,
size), pins its dtypes, and unless rows are sorted or shuffled, a smaller batch is the beginning of a larger
one. Row numbers are drawn by `choose` or `choose_at` alone; the rows themselves may lie anywhere.

>>> import jax
>>> sampler = RandomRowSampler({"inputs": [[0.0], [1.0], [2.0]]})
>>> sampler.sample(jax.random.key(0), 2)["inputs"].shape
(2, 1)
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from phijax_rng._base import pytrees, validation
from phijax_rng._base.types import BatchSize, KeyScalar, Rows, Step
from phijax_rng.sampling import row_indices, weighted
from phijax_rng.sampling.pools import as_fields


@pytrees.record(data=("fields",), meta=("replace", "method", "sort_axis"))
@dataclasses.dataclass(frozen=True, eq=False)
class RandomRowSampler:
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
            the order of drawing. With it a row's place depends on the whole batch.

    Raises:
        TypeError: a field is not an array of numbers, or an option is of the wrong type.
        ValueError: fields of different lengths, an unknown method, or no such axis.
    """

    fields: Any
    replace: bool = True
    method: str = "permutation"
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None

    def __post_init__(self) -> None:
        _hold_fields(self)
        validation.flag(self.replace, "replace")
        validation.one_of(self.method, "method", row_indices.METHODS)

    @property
    def num_rows(self) -> int:
        """How many rows there are to pick from."""
        return row_indices.num_rows(self.fields)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many rows."""
        if not self.replace:
            row_indices.check_distinct(size, name, self.num_rows)

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Rows by field name; `"all"` gives every row in the order of the pool.

        Args:
            key: a typed key of shape `()`; may be traced. Not used for `"all"`.
            size: rows to draw; static.

        Returns:
            Field name -> array of shape `(size, ...)`, dtypes of the pool.
        """
        self.check_size(validation.batch_size(size, "size"), "size")
        chosen = None if size == "all" else self.choose(key, int(size))
        return row_indices.batch(self.fields, chosen, self.sort_axis)

    def choose(self, key: KeyScalar, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample` gives, before they are sorted."""
        return row_indices.draw_indices(key, size, self.num_rows, self.replace, self.method)

    def contents(self) -> dict[str, Any]:
        """The rows, whose digest goes into the contract."""
        return dict(self.fields)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "RandomRowSampler",
            "num_rows": self.num_rows,
            "fields": row_indices.describe(self.fields),
            "replace": self.replace,
            "method": None if self.replace else self.method,
            "sort_axis": self.sort_axis,
        }


@pytrees.record(data=("fields",), meta=("sort_axis",))
@dataclasses.dataclass(frozen=True, eq=False)
class ShuffledRowSampler:
    """Every row of a pool exactly once per epoch, in a fresh order each epoch; a `StepSampler`.

    Step t holds the rows at the positions t·size to (t + 1)·size - 1 of the epochs laid end to end, so a
    batch may end one epoch and begin the next, and no row is left out or doubled. Epoch e is the keyed
    permutation (`shuffle.permute_index`) of `fold_in(key, e >> 32, e & 0xffffffff)`. Any step can be asked
    for, at the same cost of O(size): positions are counted in two words, so none is out of reach.

    The key is a stream of its own (see `StepSampler`) and never meets the key of a step. Across the end of an
    epoch a row can come twice in one batch, once in each epoch. Another size is another run: rows then fall
    to other steps.

    Attributes:
        fields: field name -> array of shape `(num_rows, ...)`, or a `HostPool`.
        sort_axis: a column of `inputs` to sort each batch by, ascending and stable; `None` to keep
            the order of the epoch.

    Raises:
        TypeError: a field is not an array of numbers.
        ValueError: fields of different lengths, 2**31 rows or more, or no such axis.
    """

    fields: Any
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None

    def __post_init__(self) -> None:
        _hold_fields(self)
        validation.whole_number(self.num_rows, "the number of rows", 2**31, start=1)

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has."""
        return row_indices.num_rows(self.fields)

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
        return row_indices.batch(self.fields, chosen, self.sort_axis)

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """The first rows of the first epoch under `key`, for diagnostics."""
        return self.sample_at(key, 0, size)

    def choose_at(self, key: KeyScalar, step: Step, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample_at` gives, before they are sorted."""
        if not isinstance(step, jax.core.Tracer):
            step = np.int32(validation.step_number(step))
        return row_indices.draw_shuffled(key, step, size, self.num_rows)

    def choose(self, key: KeyScalar, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample` gives, before they are sorted."""
        return self.choose_at(key, 0, size)

    def contents(self) -> dict[str, Any]:
        """The rows, whose digest goes into the contract."""
        return dict(self.fields)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "ShuffledRowSampler",
            "num_rows": self.num_rows,
            "fields": row_indices.describe(self.fields),
            "sort_axis": self.sort_axis,
        }


@pytrees.record(data=("fields", "weights"), meta=("replace", "num_positive", "sort_axis"))
@dataclasses.dataclass(frozen=True, eq=False)
class WeightedRowSampler:
    """Rows of a pool in proportion to weights; a row of weight zero is never drawn.

    With replacement each row of a batch is drawn on its own, at a cost of O(log num_rows), by 64 random bits
    that are looked up in whole-number sums of the weights. Without, one after the other in proportion to
    the weights that are left, by exponential clocks, at a cost of O(num_rows) for a batch. Both are the same
    bits in every program and on every platform with IEEE arithmetic.

    Attributes:
        fields: field name -> array of shape `(num_rows, ...)`, or a `HostPool`.
        weights: one for each row, finite, not negative, at least one positive; held as sums or clocks. A
            positive weight below 2**-(62 - bits of num_rows) of the largest counts as that much; without
            replacement 2**-60 is the least. Traced weights are not checked: see `weighted_rows`.
        replace: whether a row may be drawn twice in one batch.
        sort_axis: a column of `inputs` to sort each batch by, ascending and stable; `None` to keep
            the order of drawing.

    Raises:
        TypeError: a field or the weights are not an array of numbers, or an option is of the wrong type.
        ValueError: fields of different lengths, weights that are negative, NaN, infinite, all zero or
            not one for each row, or no such axis.
    """

    fields: Any
    weights: Any
    replace: bool = True
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None
    num_positive: int | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        _hold_fields(self)
        validation.flag(self.replace, "replace")
        weights, count = self.weights, None
        if isinstance(weights, jax.core.Tracer):
            _require_shape(weights, self.num_rows)
            held: tuple[Any, ...] = _traced_table(weights, self.replace)
        else:
            weights = weighted.check(weights, "weights", self.num_rows)
            count = int(np.count_nonzero(weights))
            held = weighted.sums_of(weights) if self.replace else (weighted.clocks_of(weights),)
        object.__setattr__(self, "weights", held)
        object.__setattr__(self, "num_positive", count)

    @property
    def num_rows(self) -> int:
        """How many rows there are, those of weight zero too."""
        return row_indices.num_rows(self.fields)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many rows."""
        unknown = self.replace or self.num_positive is None  # traced weights have no number to tell
        _require_rows(size, name, self.num_rows if unknown else self.num_positive, self.replace)

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Rows by field name; `"all"` gives every row in the order of the pool, whatever its weight.

        Args:
            key: a typed key of shape `()`; may be traced. Not used for `"all"`.
            size: rows to draw; static.

        Returns:
            Field name -> array of shape `(size, ...)`, dtypes of the pool.
        """
        self.check_size(validation.batch_size(size, "size"), "size")
        chosen = None if size == "all" else self.choose(key, int(size))
        return row_indices.batch(self.fields, chosen, self.sort_axis)

    def choose(self, key: KeyScalar, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample` gives, before they are sorted."""
        if self.replace:
            return weighted.draw(key, size, self.weights)
        return weighted.draw_distinct(key, size, *self.weights)

    def contents(self) -> dict[str, Any]:
        """The rows and what is held of the weights, whose digest goes into the contract."""
        return {"fields": dict(self.fields), "weights": self.weights}

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "WeightedRowSampler",
            "num_rows": self.num_rows,
            "num_positive": self.num_positive,
            "fields": row_indices.describe(self.fields),
            "replace": self.replace,
            "sort_axis": self.sort_axis,
        }


def weighted_rows(key: KeyScalar, weights: Any, size: int, *, replace: bool = True) -> Int32[Array, " size"]:
    """`size` row numbers in proportion to weights, which may be traced.

    Args:
        key: a typed key of shape `()`; may be traced. Used for nothing else.
        weights: shape `(n,)`, taken as float32. Known ones are checked. Of traced ones, what is
            NaN, infinite, negative or below 2**-126 counts as 0; if nothing is left, all rows are equally
            likely; and without replacement, if there are fewer positive weights than `size`, their
            rows come again in the same order rather than a row of weight zero.
        size: a positive int, static; at most n without replacement.
        replace: whether a row may be drawn twice.

    Returns:
        `int32` of shape `(size,)`. A smaller draw is the beginning of a larger one. It costs O(n).

    Raises:
        TypeError: known weights are not numbers.
        ValueError: known weights are not finite, negative or all zero, or too few are positive.
    """
    size = validation.positive(size, "size")
    validation.flag(replace, "replace")
    if isinstance(weights, jax.core.Tracer):
        _require_shape(weights, None)
        _require_rows(size, "size", weights.shape[0], replace)
    else:
        checked = weighted.check(weights, "weights")
        _require_rows(size, "size", int(np.count_nonzero(checked)), replace)
        weights = checked.astype(np.float32)
    return _weighted_rows(key, weights, size, replace)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _weighted_rows(key: KeyScalar, weights: Array, size: int, replace: bool) -> Array:
    table = _traced_table(weights, replace)
    return weighted.draw(key, size, table) if replace else weighted.draw_distinct(key, size, *table)


def _traced_table(weights: Array, replace: bool) -> tuple[Array, ...]:
    usable = weighted.safe(weights)
    return weighted.traced_sums(usable) if replace else (weighted.traced_clocks(usable),)


def _hold_fields(sampler: Any) -> None:
    """Replaces a new sampler's `fields` and `sort_axis` by checked ones."""
    object.__setattr__(sampler, "fields", as_fields(sampler.fields))
    row_indices.require_narrow(sampler.fields)
    if sampler.sort_axis is not None:
        axis = row_indices.checked_axis(sampler.sort_axis, "sort_axis", sampler.fields)
        object.__setattr__(sampler, "sort_axis", axis)


def _require_shape(weights: Array, n: int | None) -> None:
    if weights.ndim != 1 or not weights.shape[0] or (n is not None and weights.shape[0] != n):
        wanted = "one weight for each row" if n is None else f"one weight for each of {n} rows"
        raise ValueError(f"weights must have {wanted}, got shape {weights.shape}. Give every row a weight.")


def _require_rows(size: BatchSize, name: str, available: int | None, replace: bool) -> None:
    if not replace and size != "all" and available is not None and int(size) > available:
        raise ValueError(
            f"{name} must be at most the {available} rows of positive weight when replace=False, got {size}. "
            "Use a smaller size, more positive weights, or replace=True."
        )
