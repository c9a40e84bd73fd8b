"""Rows of several fields at once: drawing, picking, sorting, describing.

`fields` is a mapping from field name to an array, or to a mapping of arrays, whose leading axes
agree. All functions may be traced.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from phijax_rng import _checks, shuffle
from phijax_rng._types import BatchSize, KeyScalar

METHODS = ("permutation", "sort")
"""How distinct rows are found: a keyed permutation, O(size); or a sort of all rows, as PhiJAX does."""


def num_rows(fields: Mapping[str, Any]) -> int:
    """The length of the leading axis."""
    return int(jax.tree.leaves(fields)[0].shape[0])


def draw_indices(key: KeyScalar, size: int, n: int, replace: bool, method: str) -> jax.Array:
    """`size` int32 indices of `range(n)`: independent ones, or distinct ones by the named method."""
    if replace:
        return jax.random.randint(key, (size,), 0, n, dtype=jnp.int32)
    if method == "sort":
        return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32))[:size]
    return shuffle.permute_index(key, jnp.arange(size, dtype=jnp.int32), n)


def check_distinct(size: BatchSize, name: str, n: int) -> None:
    """Raises if `n` rows cannot give `size` distinct ones."""
    if size != "all" and int(size) > n:
        raise ValueError(
            f"{name} must be at most the {n} rows of the pool when replace=False, got {size}. "
            "Use 'all', a smaller size, or replace=True."
        )


def take(fields: Any, indices: jax.Array) -> Any:
    """The rows with these indices, which must be in range."""
    # Out-of-range cannot happen, and "clip" spares the compiled program the masking of "fill".
    return jax.tree.map(lambda array: jnp.take(jnp.asarray(array), indices, axis=0, mode="clip"), fields)


def sort(rows: Any, sort_axis: int | None) -> Any:
    """`rows` in ascending order of one column of `inputs`; ties keep their order."""
    if sort_axis is None:
        return rows
    return take(rows, jnp.argsort(rows["inputs"][:, sort_axis], stable=True))


def checked_axis(axis: Any, name: str, fields: Mapping[str, Any]) -> int:
    """`axis` as a column of `inputs`."""
    inputs = fields.get("inputs")
    if inputs is None or len(inputs.shape) != 2:
        found = "absent" if inputs is None else f"of shape {tuple(inputs.shape)}"
        raise ValueError(f"{name}={axis!r} needs inputs of shape (rows, axes); they are {found}. Drop it.")
    return _checks.whole_number(axis, name, int(inputs.shape[1]))


def describe(fields: Any) -> dict[str, list[Any]]:
    """Path -> [dtype, shape] for every array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(fields)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): [str(leaf.dtype), list(leaf.shape)]
        for path, leaf in flat
    }
