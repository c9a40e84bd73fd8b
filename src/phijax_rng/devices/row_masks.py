"""Which rows of a batch count.

    mask["pde"]    bool of shape (rows,): True for a row that was drawn, False for padding

With `Trainer(..., uneven="pad")` a batch whose rows do not divide equally over the devices is padded; see
`row_sharding`. Padding repeats a row that was drawn, so it is finite where that row is, and a masked mean
excludes it. Otherwise every row counts.

>>> import jax.numpy as jnp
>>> float(masked_mean(jnp.array([1.0, 3.0, 3.0]), jnp.array([True, True, False])))
2.0
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from phijax_rng._base.types import Batches


def masked_mean(values: ArrayLike, mask: ArrayLike) -> jax.Array:
    """The mean over the rows whose mask is true; `jnp.mean(values)` up to rounding if all are. May be traced.

    Args:
        values: an array of shape `(rows, ...)`, real or complex.
        mask: bool of shape `(rows,)`, true for at least one row.

    Raises:
        ValueError: the mask has not one axis, or another number of rows than the values.
    """
    values, full = _with_full_mask(values, mask)
    return jnp.mean(values, where=full)


def masked_sum(values: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The sum over the rows whose mask is true, and how many values it has: a loss as `(sum, weight)`.

    The value of such a loss is that of `masked_mean`, and it may be cut into micro-batches, of which some may
    have no row that counts. The arguments are those of `masked_mean`.
    """
    values, full = _with_full_mask(values, mask)
    return jnp.sum(values, where=full), jnp.sum(full, dtype=jnp.int32)


def _with_full_mask(values: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The values, and the mask of each of them."""
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    if mask.ndim != 1 or values.shape[:1] != mask.shape:
        raise ValueError(
            f"mask must have shape (rows,) for values of shape (rows, ...), got {mask.shape} for "
            f"{values.shape}. Pass the mask of the same batch."
        )
    # Reshaped first: broadcasting aligns the last axes, and the rows are the first one.
    return values, jnp.broadcast_to(mask.reshape(-1, *(1,) * (values.ndim - 1)), values.shape)


def every_row(batches: Batches) -> dict[str, np.ndarray[Any, Any]]:
    """A mask that is true for every row, as NumPy arrays; raises as `row_counts` does."""
    return {name: np.ones(count, np.bool_) for name, count in row_counts(batches).items()}


def row_counts(batches: Batches, sizes: Mapping[str, Any] | None = None) -> dict[str, int]:
    """The number of rows of each batch, by name, without batches that have no axis.

    Args:
        batches: name -> pytree of arrays.
        sizes: the same tree with the number of rows (0 for an array without axes) in place of each array;
            `None` to read it from the shapes.

    Raises:
        TypeError: the batches have no names.
        ValueError: fields of one batch differ in their number of rows.
    """
    if not isinstance(batches, Mapping):
        raise TypeError(
            f"a mask needs batches with names, got {type(batches).__name__}. "
            "Return {name: {field: rows}} from the source, or pass another `uneven`."
        )
    sizes = jax.tree.map(rows_of, batches) if sizes is None else sizes
    return {name: count for name in batches if (count := _row_count(name, sizes[name])) is not None}


def _row_count(name: str, fields: object) -> int | None:
    counts = set(jax.tree.leaves(fields)) - {0}
    if len(counts) > 1:
        raise ValueError(
            f"batches[{name!r}] has fields of {' and '.join(map(str, sorted(counts)))} rows, but one "
            "mask must fit all of them. Give them equal lengths, or put them into separate batches."
        )
    return next(iter(counts), None)


def rows_of(leaf: ArrayLike) -> int:
    """The number of rows of an array; 0 if it has no axis."""
    return int(np.shape(leaf)[0]) if np.shape(leaf) else 0
