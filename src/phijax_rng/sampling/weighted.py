"""Rows in proportion to weights, exactly: sums are whole numbers, so they are the same bits everywhere.

    weights --quantize--> whole numbers --sum--> cumulative sums --search for a random number--> row

A sum of floats would depend on the order in which a device adds, and would lose small weights beside large
ones. Here each weight becomes a whole number below `2**(62 - bits of n)`, in proportion to the largest,
and is added up in 64 bits. A weight of exactly zero adds nothing and is never found by the search.

Without replacement each row gets an exponential clock at its weight as rate, and the rows whose clocks
ring first are taken (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006), which is
drawing one row after the other in proportion to the weights that are left.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from phijax_rng._base import exact_math, pytrees, uint64, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import BatchSize, KeyScalar
from phijax_rng.sampling import pools, rows

# Weights below this part of the largest one count as this part of it in draws without replacement, so
# that a clock stays within float32.
_LEAST = 2.0**-60

# -log(1 - t) / t on [0, 1/2], the Chebyshev interpolant of degree 9; relative error of Horner's rule in
# float32 below 8e-8, one rounding.
_LOGARITHM = np.asarray(
    [
        *(1.0, 0.5000013709068298, 0.3332449793815613, 0.2521698474884033, 0.17321175336837769),
        *(0.35381534695625305, -0.6350128650665283, 2.049731969833374, -2.5557680130004883),
        1.7770181894302368,
    ],
    np.float32,
)
_LN2 = np.float32(0.6931471805599453)


@pytrees.record(data=("fields", "weights"), meta=("replace", "num_positive", "sort_axis"))
@dataclasses.dataclass(frozen=True, eq=False)
class WeightedRowSampler(rows.KeyedPoolRows):
    """Rows of a pool in proportion to weights; a row of weight zero is never drawn.

    With replacement each row of a batch is drawn on its own, at a cost of O(log num_rows), by 64 random bits
    that are looked up in whole-number sums of the weights. Without, one after the other in proportion to
    the weights that are left, by exponential clocks, at a cost of O(num_rows) for a batch. Both are the same
    bits in every program and on every platform with IEEE arithmetic.

    Attributes:
        fields: field name -> array of shape `(num_rows, ...)`, or a `HostPool`.
        weights: one for each row, finite, not negative, at least one positive; stored as sums or clocks. A
            positive weight below 2**-(62 - bits of num_rows) of the largest counts as that much; without
            replacement 2**-60 is the least. Traced weights are not checked: see `weighted_rows`.
        replace: whether a row may be drawn twice in one batch.
        sort_axis: a column of `inputs` to sort each batch by, ascending and stable; `None` to keep
            the order of drawing.
    """

    fields: Any
    weights: Any
    replace: bool = True
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None
    num_positive: int | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rows.check_fields(self)
        validation.flag(self.replace, "replace")
        weights, count = self.weights, None
        if isinstance(weights, jax.core.Tracer):
            _require_shape(weights, self.num_rows)
            table: tuple[Any, ...] = _traced_table(weights, self.replace)
        else:
            weights = check(weights, "weights", self.num_rows)
            count = int(np.count_nonzero(weights))
            table = sums_of(weights) if self.replace else (clocks_of(weights),)
        assign(self, weights=table, num_positive=count)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many rows."""
        unknown = (
            self.replace or self.num_positive is None
        )  # the number of positive traced weights is unknown
        _require_rows(size, name, self.num_rows if unknown else self.num_positive, self.replace)

    def choose(self, key: KeyScalar, size: int) -> Int32[Array, " size"]:
        """The numbers of the rows that `sample` gives, before they are sorted."""
        if self.replace:
            return draw(key, size, self.weights)
        return draw_distinct(key, size, *self.weights)

    def contents(self) -> dict[str, Any]:
        """The rows and what is stored of the weights, whose digest goes into the contract."""
        return {"fields": dict(self.fields), "weights": self.weights}

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "WeightedRowSampler",
            "num_rows": self.num_rows,
            "num_positive": self.num_positive,
            "fields": rows.describe_fields(self.fields),
            "replace": self.replace,
            "sort_axis": self.sort_axis,
        }


def weighted_rows(
    key: KeyScalar, weights: object, size: int, *, replace: bool = True
) -> Int32[Array, " size"]:
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
        checked = check(weights, "weights")
        _require_rows(size, "size", int(np.count_nonzero(checked)), replace)
        weights = checked.astype(np.float32)
    return _weighted_rows(key, weights, size, replace)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _weighted_rows(key: KeyScalar, weights: Array, size: int, replace: bool) -> Array:
    table = _traced_table(weights, replace)
    return draw(key, size, table) if replace else draw_distinct(key, size, *table)


def _traced_table(weights: Array, replace: bool) -> tuple[Array, ...]:
    usable = safe(weights)
    return traced_sums(usable) if replace else (traced_clocks(usable),)


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


def check(weights: object, name: str, n: int | None = None) -> np.ndarray[Any, Any]:
    """Known weights as float64, if they are that: finite, not negative, one of them positive.

    Args:
        weights: anything NumPy takes for an array of real numbers.
        name: for messages.
        n: how many there must be; any number but 0 for `None`.
    """
    array = pools.unmasked(np.asanyarray(weights), name)
    if array.dtype.kind == "V" and np.can_cast(array.dtype, np.float64):  # bfloat16 and its like
        array = array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} must hold real numbers, got dtype {array.dtype}. Pass one weight for each row."
        )
    if array.ndim != 1 or not len(array) or (n is not None and len(array) != n):
        wanted = "one weight for each row" if n is None else f"one weight for each of {n} rows"
        raise ValueError(f"{name} must have {wanted}, got shape {array.shape}. Give every row a weight.")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        first = int(bad[0])
        raise ValueError(
            f"{name}[{first}] must be finite and not negative. Use 0 for a row that must not be drawn."
        )
    if not np.any(array > 0):
        raise ValueError(
            f"{name} must have a positive entry, got {len(array)} zeros. Nothing could be drawn."
        )
    return array.astype(np.float64)


def sums_of(weights: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The cumulative sums of checked weights, on the host; for float32 weights those of `traced_sums`."""
    fraction, exponent = np.frexp(weights)
    power = 62 - len(weights).bit_length() + exponent.astype(np.int64) - int(exponent[weights.argmax()])
    whole = np.ldexp(fraction, power).astype(np.uint64)
    sums = np.cumsum(np.where(weights > 0, np.maximum(whole, 1), 0).astype(np.uint64))
    return (sums >> np.uint64(32)).astype(np.uint32), sums.astype(np.uint32)


def traced_sums(weights: Float32[Array, " n"]) -> tuple[UInt32[Array, " n"], UInt32[Array, " n"]]:
    """The cumulative sums of `safe` weights."""
    scaled = _scaled(weights)
    upper = scaled * np.float32(2.0 ** (30 - len(weights).bit_length()))
    high = upper.astype(jnp.uint32)
    # A product with a power of two and a difference of neighbors: nothing is rounded.
    low = ((upper - high.astype(jnp.float32)) * np.float32(2.0**32)).astype(jnp.uint32)
    low = jnp.where((weights > 0) & (high == 0), jnp.maximum(low, np.uint32(1)), low)
    return jax.lax.associative_scan(uint64.plus, (high, low))


def clocks_of(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mean time of each row's clock, float32, infinite for weight zero; on the host."""
    with np.errstate(divide="ignore"):
        relative = np.ldexp(weights, -np.frexp(weights.max())[1])
        mean = 1 / np.maximum(relative, _LEAST)
    return np.where(weights > 0, mean, np.inf).astype(np.float32)


def traced_clocks(weights: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """The mean time of each row's clock for `safe` weights."""
    mean = 1 / jnp.maximum(_scaled(weights), np.float32(_LEAST))
    return jnp.where(weights > 0, mean, np.float32(np.inf))


def safe(weights: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """Traced weights that can be drawn from: what is not finite or negative is 0; if all are 0, all are 1."""
    weights = weights.astype(jnp.float32)
    usable = (weights >= np.finfo(np.float32).tiny) & jnp.isfinite(weights)
    return jnp.where(jnp.any(usable), jnp.where(usable, weights, 0), 1).astype(jnp.float32)


def draw(key: KeyScalar, size: int, sums: tuple[Any, ...]) -> Int32[Array, " size"]:
    """`size` rows, each in proportion to the weights whose cumulative sums these are."""
    high, low = (jnp.asarray(word) for word in sums)
    bits = jax.random.bits(key, (size, 2), jnp.uint32)
    target = uint64.fraction_of((bits[:, 0], bits[:, 1]), (high[-1], low[-1]))
    n = len(high)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        first, last = bounds
        middle = first + (last - first) // 2
        beyond = uint64.less(target, (high[middle], low[middle]))
        return jnp.where(beyond, first, middle + 1), jnp.where(beyond, middle, last)

    # The first row whose sum exceeds the target: a row of weight zero has the sum of the row before it.
    start = jnp.zeros(size, jnp.int32), jnp.full(size, n - 1, jnp.int32)
    return jax.lax.fori_loop(0, (n - 1).bit_length(), halve, start)[0]


def draw_distinct(key: KeyScalar, size: int, clocks: object) -> Int32[Array, " size"]:
    """The `size` rows whose clocks ring first, in that order; again from the first where they run out."""
    clocks = jnp.asarray(clocks)
    bits = jax.random.bits(key, (len(clocks), 2), jnp.uint32)
    times = exponential(bits[:, 0], bits[:, 1]) * clocks
    _, first = jax.lax.top_k(-times, size)
    count = jnp.sum(jnp.isfinite(clocks), dtype=jnp.int32)
    return first.astype(jnp.int32)[jnp.arange(size, dtype=jnp.int32) % count]


def exponential(high: UInt32[Array, "*n"], low: UInt32[Array, "*n"]) -> Float32[Array, "*n"]:
    """Standard exponential variates from 64 random bits each, the same bits in every program.

    `-log(1 - x)` of the fraction x that the words make up; small ones keep 24 bits, down to 2**-64. The
    logarithm of XLA may differ in the last bits from program to program; here every product is rounded
    before it is added.
    """
    low = low | np.uint32(1)  # a clock at exactly zero would ring whatever its weight
    left, left_low = ~high, ~low  # 1 - x
    deep = left == 0
    lead, follow = jnp.where(deep, left_low, left), jnp.where(deep, np.uint32(0), left_low)
    shift = jax.lax.clz(lead)
    top = (lead << shift) | jnp.where(shift > 0, follow >> (np.uint32(32) - shift), np.uint32(0))
    halvings = shift + jnp.where(deep, np.uint32(32), np.uint32(0))
    fraction = high.astype(jnp.float32) * np.float32(2.0**-32) + low.astype(jnp.float32) * np.float32(
        2.0**-64
    )
    t = jnp.where(halvings > 0, (~top).astype(jnp.float32) * np.float32(2.0**-32), fraction)
    series = jnp.full_like(t, _LOGARITHM[-1])
    for coefficient in _LOGARITHM[-2::-1]:
        series = coefficient + exact_math.rounded(series * t, t)
    whole = exact_math.rounded(halvings.astype(jnp.float32) * _LN2, t)
    return whole + exact_math.rounded(series * t, t)


def _scaled(weights: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """`weights` times the power of two that brings the largest into [1/2, 1)."""
    _, exponent = jnp.frexp(jnp.max(weights))
    half = -exponent // 2
    return weights * _power_of_two(half) * _power_of_two(-exponent - half)


def _power_of_two(exponent: Int32[Array, ""]) -> Float32[Array, ""]:
    """`2.0**exponent`, exactly, for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
