"""Uniform coordinates whose bits do not depend on how the program was compiled.

XLA contracts `lo + span * u` into one fused multiply-add in some kernels and not in others, by
batch size, sharding and instruction set. Here the product's bits pass through an exclusive-or with
a zero that the compiler cannot prove, so the product is rounded before the sum, always: the
result is that of NumPy's two operations, for normal magnitudes (XLA on CPU flushes subnormals to zero).
"""

import jax
import jax.numpy as jnp

from phijax_rng._types import KeyScalar

_WORDS = {"float32": jnp.uint32, "float64": jnp.uint64}


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
