"""The dtype of points, and bounds and centers in it.

With x64 off points are float32. With it they are float64, unless the numbers of a domain are narrower
themselves: Python's numbers, whole numbers and float64 arrays make float64 points, float32 arrays float32.

>>> resolved(None, [(0.0, 1.0)])
dtype('float32')
>>> with jax.enable_x64(True):
...     resolved(None, [(0.0, 1.0)]), resolved(None, np.float32([(0.0, 1.0)]))
(dtype('float64'), dtype('float32'))
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.validation import formatted

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def resolved(dtype: object, *given: object) -> np.dtype[Any]:
    """`dtype` if it is one of points; for `None` the dtype of points of a domain with these numbers."""
    if dtype is not None:
        return checked_dtype(dtype, "dtype of coordinates", "Use float32.")
    arrays = [
        leaf for leaf in jax.tree.leaves(given) if isinstance(leaf, (np.ndarray, np.generic, jax.Array))
    ]
    # Whole numbers carry no precision; bfloat16 and its like are of kind V.
    widths = [array.dtype.itemsize for array in arrays if array.dtype.kind not in "biu"]
    return FLOAT64 if x64_is_on() and (not widths or max(widths) >= 8) else FLOAT32


def checked_dtype(dtype: Any, name: str, fix: str) -> np.dtype[Any]:
    """`dtype` as one that points can have."""
    try:
        # NumPy takes `None` for float64, and an array for its dtype.
        found = None if dtype is None or isinstance(dtype, jax.Array) else np.dtype(dtype)
    except TypeError:
        found = None
    if found == FLOAT32 or (found == FLOAT64 and x64_is_on()):
        return FLOAT32 if found == FLOAT32 else FLOAT64
    raise ValueError(
        f"{name} must be float32, or float64 with jax_enable_x64 on, got {formatted(dtype)}. {fix}"
    )


def require_available(dtype: np.dtype[Any]) -> None:
    """Raises for float64 points while x64 is off, as where it was on only when their sampler was made."""
    if dtype == FLOAT64 and not x64_is_on():
        raise ValueError(
            "the points of this sampler are float64, and jax_enable_x64 is off now. "
            "Leave it on, or make the sampler with dtype=float32."
        )


def x64_is_on() -> bool:
    """Whether JAX has 64-bit numbers."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def checked_bounds(bounds: object, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """`bounds` as a read-only array of finite `(lo, hi)` with `lo < hi`, shape `(axes, 2)`."""
    if not isinstance(bounds, (Sequence, np.ndarray, jax.Array)) or isinstance(bounds, str):
        raise TypeError(
            f"{name} must be pairs (lo, hi), got {formatted(bounds)}. Pass one pair for each axis."
        )
    try:
        pairs = validation.real_numbers(bounds)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be pairs of numbers, got {formatted(bounds)}. Pass one (lo, hi) for each axis."
        ) from None
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs):
        raise ValueError(
            f"{name} must have shape (axes, 2), got {pairs.shape}. Pass one (lo, hi) for each axis."
        )
    with np.errstate(over="ignore"):
        narrowed = pairs.astype(dtype)
        spans = narrowed[:, 1] - narrowed[:, 0]
    for axis, span in enumerate(spans):
        if not (np.isfinite(span) and span > 0):
            raise ValueError(
                f"{name}[{axis}] must be finite with lo < hi in {dtype}, got "
                f"{tuple(pairs[axis].tolist())!r}. Pass (lo, hi)."
            )
    narrowed.flags.writeable = False
    return narrowed
