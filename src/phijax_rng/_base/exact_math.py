"""Uniform coordinates whose bits do not depend on how the program was compiled.

XLA contracts `lo + span * u` into one fused multiply-add in some kernels and not in others, by
batch size, sharding and instruction set. Here the product's bits pass through an exclusive-or with
a zero that the compiler cannot prove, so the product is rounded before the sum, always: the
result is that of NumPy's two operations, for normal magnitudes (XLA on CPU flushes subnormals to zero).
The circle and the cube root are built from such products, for the same reason.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar
from phijax_rng._base.validation import formatted

_WORDS = {"float32": jnp.uint32, "float64": jnp.uint64}

# Taylor series of sin(x pi/2) / x and cos(x pi/2) in x**2; on [0, 1/2] what is left out is below 4e-9.
_SIN = [(-1) ** n * (math.pi / 2) ** (2 * n + 1) / math.factorial(2 * n + 1) for n in range(5)]
_COS = [(-1) ** n * (math.pi / 2) ** (2 * n) / math.factorial(2 * n) for n in range(6)]


def uniform(key: KeyScalar, shape: tuple[int, ...], low: jax.Array, high: jax.Array) -> jax.Array:
    """Points of shape `shape`, uniform between `low` and `high`, which broadcast against it.

    The dtype is that of `low`. A value can round up to `high`.
    """
    return affine(jax.random.uniform(key, shape, dtype=low.dtype), low, high)


def affine(u: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """`low + (high - low) * u`, product and sum rounded one after the other.

    Args:
        u: float32 or float64 in [0, 1).
        low: the same dtype, broadcasts against `u`.
        high: as `low`.
    """
    return low + rounded((high - low) * u, u)


def rounded(product: jax.Array, u: jax.Array) -> jax.Array:
    """A product with `u` in [0, 1), float32 or float64, rounded before anything is added to it."""
    word = _WORDS[str(product.dtype)]
    zero = (u >= 2).astype(word)
    bits = jax.lax.bitcast_convert_type(product, word) ^ zero
    return jax.lax.bitcast_convert_type(bits, product.dtype)


def product(left: jax.Array, right: jax.Array, u: jax.Array) -> jax.Array:
    """`left * right`, rounded before anything else is done with it.

    Args:
        left: float32 or float64.
        right: as `left`.
        u: values below 2, not known when the program is compiled; broadcasts against the product.
    """
    return rounded(left * right, u)


def circle(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`cos(2 pi u)` and `sin(2 pi u)` to within about an ulp of 1; float32 `u` in [0, 1)."""
    quarter = jnp.floor(4 * u)
    within = 4 * u - quarter
    # Both steps are exact, and so is the reflection into the lower half of the quarter.
    reflected = within > 0.5
    x = jnp.where(reflected, 1 - within, within)
    square = product(x, x, u)
    sine, cosine = product(x, _series(_SIN, square, u), u), _series(_COS, square, u)
    sine, cosine = jnp.where(reflected, cosine, sine), jnp.where(reflected, sine, cosine)
    odd = (quarter == 1) | (quarter == 3)
    first, second = jnp.where(odd, sine, cosine), jnp.where(odd, cosine, sine)
    x_sign = jnp.where((quarter == 1) | (quarter == 2), -1, 1).astype(u.dtype)
    y_sign = jnp.where(quarter >= 2, -1, 1).astype(u.dtype)
    return x_sign * first, y_sign * second


def _series(coefficients: Sequence[float], square: jax.Array, u: jax.Array) -> jax.Array:
    total = jnp.full_like(square, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = jnp.asarray(coefficient, square.dtype) + product(total, square, u)
    return total


def cube_root(u: jax.Array) -> jax.Array:
    """The cube root of float32 `u` in [0, 1), to within two ulp; 0 below the normal numbers."""
    # A third of the exponent, by the integer arithmetic of the C libraries; then Newton's steps.
    bits = jax.lax.bitcast_convert_type(u, jnp.uint32)
    root = jax.lax.bitcast_convert_type(bits // 3 + jnp.uint32(709_958_130), jnp.float32)
    third = jnp.float32(1 / 3)
    for _ in range(3):
        quotient = u / product(root, root, u)
        root = root - product(third, root - quotient, u)
    return jnp.where(u < jnp.finfo(jnp.float32).tiny, 0, root)


def choose(u: jax.Array, thresholds: jax.Array) -> jax.Array:
    """Which part each `u` falls to: the number of cumulative shares, but the last, that it reaches."""
    reached = u[:, None] >= thresholds[:-1]
    return jnp.sum(reached, axis=1, dtype=jnp.int32)


def cumulative_shares(weights: object) -> np.ndarray[Any, Any]:
    """Cumulative shares of non-negative weights as float32, the last one 1; for `choose`.

    A part of weight zero is never chosen: its share begins where it ends.
    """
    sums = np.cumsum(np.asarray(weights, np.float64))
    shares = (sums / sums[-1]).astype(np.float32)
    shares.flags.writeable = False
    return shares


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
