"""Rows of several fields at once: drawing, picking, sorting, describing.

`fields` is a mapping from field name to an array, or to a mapping of arrays, whose leading axes
agree. All functions may be traced.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import keys, shuffle
from phijax_rng._base import uint64, validation
from phijax_rng._base.types import BatchSize, KeyScalar

METHODS = ("permutation", "sort")
"""How distinct rows are found: a keyed permutation, O(size); or a sort of all rows, as PhiJAX does."""

ORDERS = ("random", "shuffled")
"""Rows drawn afresh at every step; or every row once per epoch."""


def num_rows(fields: Mapping[str, Any]) -> int:
    """The length of the leading axis."""
    return int(jax.tree.leaves(fields)[0].shape[0])


def require_narrow(fields: Any) -> None:
    """Raises for integers that JAX would cut to 32 bits without a word; with x64 it cuts none.

    Looked at are arrays in memory. Rows on disk are looked at when they are fetched.

    Raises:
        ValueError: naming the field and the number.
    """
    for path, array in jax.tree_util.tree_leaves_with_path(fields):
        if not isinstance(array, np.ndarray) or isinstance(array, np.memmap) or not array.size:
            continue
        narrow = jax.dtypes.canonicalize_dtype(array.dtype)
        if array.dtype.kind not in "iu" or narrow == array.dtype:
            continue
        known = np.iinfo(narrow)
        for number in (array.min(), array.max()):
            if not known.min <= number <= known.max:
                raise ValueError(
                    f"fields{jax.tree_util.keystr(path)} holds {number}, and JAX cuts {array.dtype} to "
                    f"{narrow}. Turn on jax_enable_x64, or hold the number in two fields."
                )


def draw_indices(key: KeyScalar, size: int, n: int, replace: bool, method: str) -> jax.Array:
    """`size` int32 indices of `range(n)`: independent ones, or distinct ones by the named method."""
    if replace:
        return jax.random.randint(key, (size,), 0, n, dtype=jnp.int32)
    if method == "sort":
        return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32))[:size]
    return shuffle.permute_index(key, jnp.arange(size, dtype=jnp.int32), n)


def draw_shuffled(key: KeyScalar, step: Any, size: int, n: int) -> jax.Array:
    """The int32 indices at positions step·size to (step + 1)·size - 1 of the epochs of `range(n)`."""
    size_word = jnp.asarray(np.uint32(size))
    epoch, offset = uint64.divide(*uint64.product(jnp.asarray(step).astype(jnp.uint32), size_word), n)
    place = jnp.arange(size, dtype=jnp.uint32)
    index = offset + place % np.uint32(n)
    which = place // np.uint32(n) + (index >= n)
    words = _epoch_words(key, epoch, num_epochs(size, n), n)
    # Where no end of the range is passed, the subtraction wraps to a huge number.
    return shuffle.permute_among(words, which.astype(jnp.uint32), jnp.minimum(index, index - np.uint32(n)), n)


def num_epochs(size: int, n: int) -> int:
    """How many epochs a batch can touch: offsets into an epoch are multiples of gcd(size, n)."""
    return (n - math.gcd(size, n) + size - 1) // n + 1


def _epoch_words(key: KeyScalar, epoch: Any, count: int, n: int) -> jax.Array:
    """The words of `count` epochs from the given one on, which is a number in two words."""
    ahead = jnp.arange(count, dtype=jnp.uint32)
    high, low = uint64.add(jnp.broadcast_to(epoch[0], ahead.shape), epoch[1], ahead)
    of_epoch = jax.vmap(lambda high, low: keys.fold_in(key, high, low))(high, low)
    return keys.exact_vmap(lambda key: shuffle.draw_words(key, n))(of_epoch)


def check_distinct(size: BatchSize, name: str, n: int, mend: str = "Use 'all', a smaller size") -> None:
    """Raises if `n` rows cannot give `size` distinct ones."""
    if size != "all" and int(size) > n:
        raise ValueError(
            f"{name} must be at most the {n} rows of the pool when replace=False, got {size}. "
            f"{mend}, or replace=True."
        )


def batch(fields: Any, indices: jax.Array | None, sort_axis: int | None) -> Any:
    """The rows with these indices, or all for `None`; sorted by a column of `inputs` where one is named."""
    rows = jax.tree.map(jnp.asarray, fields) if indices is None else take(fields, indices)
    return sort(rows, sort_axis)


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
    return validation.whole_number(axis, name, int(inputs.shape[1]))


def describe(fields: Any) -> dict[str, list[Any]]:
    """Path -> [dtype, shape] for every array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(fields)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): [str(leaf.dtype), list(leaf.shape)]
        for path, leaf in flat
    }
