"""Which rows of a batch count.

    mask["pde"]    bool of shape (rows,): True for a row that was drawn, False for one that fills the batch up

Rows are filled up where several devices cannot share a batch equally and `Trainer(..., uneven="pad")` asks
for it; see `shares`. What fills up repeats a row that was drawn, so it is finite where that one is, and
whoever averages leaves it out. Elsewhere every row counts.

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
    """The mean of the rows that count; `jnp.mean(values)` up to rounding where all do. May be traced.

    Args:
        values: an array of shape `(rows, ...)`, real or complex.
        mask: bool of shape `(rows,)`, true somewhere.

    Raises:
        ValueError: the mask is not of one axis, or has another number of rows than the values.
    """
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    if mask.ndim != 1 or values.shape[:1] != mask.shape:
        raise ValueError(
            f"mask must have shape (rows,) for values of shape (rows, ...), got {mask.shape} for "
            f"{values.shape}. Pass the mask of the batch that the values are of."
        )
    # Both spread to the shape of the values: broadcasting a mask would begin at their last axis.
    spread = jnp.broadcast_to(mask.reshape(-1, *(1,) * (values.ndim - 1)), values.shape)
    return jnp.mean(values, where=spread)


def every_row(batches: Batches) -> dict[str, np.ndarray[Any, Any]]:
    """A mask under which every row counts, as NumPy arrays.

    Raises:
        TypeError: batches without names.
        ValueError: fields of one batch that differ in their number of rows.
    """
    return {name: np.ones(count, np.bool_) for name, count in row_counts(batches).items()}


def row_counts(batches: Batches, sizes: Mapping[str, Any] | None = None) -> dict[str, int]:
    """How many rows each batch has, by name; batches that have no axis are left out.

    Args:
        batches: name -> pytree of arrays.
        sizes: the same with the number of rows, 0 for none, in place of each array; read off the
            arrays for `None`.

    Raises:
        TypeError: batches without names.
        ValueError: fields of one batch that differ in their number of rows.
    """
    if not isinstance(batches, Mapping):
        raise TypeError(
            "batches must have names for a mask to speak of them. Return {name: {field: rows}} from the "
            "source, or pass another `uneven`."
        )
    sizes = jax.tree.map(rows_of, batches) if sizes is None else sizes
    return {name: count for name in batches if (count := _row_count(name, sizes[name])) is not None}


def _row_count(name: str, fields: object) -> int | None:
    counts = set(jax.tree.leaves(fields)) - {0}
    if len(counts) > 1:
        raise ValueError(
            f"batches[{name!r}] has fields of {' and '.join(map(str, sorted(counts)))} rows, which one "
            "mask cannot speak of. Make them equally long, or put them into batches of their own."
        )
    return next(iter(counts), None)


def rows_of(leaf: ArrayLike) -> int:
    """How many rows an array has; 0 for what has no axis."""
    return int(np.shape(leaf)[0]) if np.shape(leaf) else 0
