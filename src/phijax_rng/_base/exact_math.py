"""Uniform coordinates whose bits do not depend on how the program was compiled.

XLA contracts `lo + span * u` into one fused multiply-add in some kernels and not in others, by
batch size, sharding and instruction set. Here the product's bits pass through an exclusive-or with
a zero that the compiler cannot prove, so the product is rounded before the sum, always: the
result is that of NumPy's two operations, for normal magnitudes (XLA on CPU flushes subnormals to zero).
The circle, the roots and, in float64, the normal quantile are built from such products, for the same reason.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base.coordinates import require_available
from phijax_rng._base.types import KeyScalar

_WORDS = {"float32": jnp.uint32, "float64": jnp.uint64}

# Terms of the Taylor series of sin(x pi/2) / x and cos(x pi/2) in x**2; on [0, 1/2] what is left out is
# below 4e-9 in float32 and 2e-20 in float64.
_NUM_TERMS = {"float32": (5, 6), "float64": (9, 10)}

# Numerators and denominators of Wichura's normal quantile (1988), algorithm AS 241, routine PPND16.
_QUANTILE = {
    "central": (
        (
            *(3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125),
            *(45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727),
        ),
        (
            *(1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077),
            *(21213.794301586595867, 39307.895800092710610, 28729.085735721942674, 5226.4952788528545610),
        ),
    ),
    "near": (
        (
            *(1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504),
            *(1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833),
            7.74545014278341407640e-4,
        ),
        (
            *(1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550),
            *(0.148103976427480074590, 0.0151986665636164571966, 5.47593808499534494600e-4),
            1.05075007164441684324e-9,
        ),
    ),
    "far": (
        (
            *(
                6.65790464350110377720,
                5.46378491116411436990,
                1.78482653991729133580,
                0.296560571828504891230,
            ),
            *(0.0265321895265761230930, 1.24266094738807843860e-3, 2.71155556874348757815e-5),
            2.01033439929228813265e-7,
        ),
        (
            *(1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525),
            *(7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7),
            2.04426310338993978564e-15,
        ),
    ),
}


def uniform(key: KeyScalar, shape: tuple[int, ...], low: jax.Array, high: jax.Array) -> jax.Array:
    """Points of shape `shape`, uniform between `low` and `high`, which broadcast against it.

    The dtype is that of `low`. A value can round up to `high`.
    """
    return affine(unit(key, shape, low.dtype), low, high)


def unit(key: KeyScalar, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    """Uniform numbers on [0, 1), the same bits in every program.

    Args:
        key: a typed key of shape `()`; may be traced.
        shape: how many.
        dtype: float32, or float64 while x64 is on.

    Raises:
        ValueError: float64, and x64 is off: JAX would silently draw in float32.
    """
    require_available(dtype)
    return jax.random.uniform(key, shape, dtype=dtype)


def affine(u: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """`low + (high - low) * u`, product and sum rounded one after the other.

    Args:
        u: float32 or float64 in [0, 1).
        low: float32 or float64, broadcasts against `u`. The result has the wider dtype of both.
        high: as `low`.
    """
    u, low, high = alike(u, low, high)
    # JAX may be told to promote no rank by itself; scalars are none.
    low, high = (end if not end.ndim else jax.lax.broadcast_to_rank(end, u.ndim) for end in (low, high))
    return low + rounded((high - low) * u, u)


def alike(*values: Any) -> tuple[jax.Array, ...]:
    """The values as arrays of the widest of their dtypes; JAX may be told to promote none by itself."""
    dtype = np.result_type(*(value.dtype for value in values))
    return tuple(jnp.asarray(value, dtype) for value in values)


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
    """`cos(2 pi u)` and `sin(2 pi u)` to within about an ulp of 1; `u` in [0, 1)."""
    quarter = jnp.floor(4 * u)
    within = 4 * u - quarter
    # Both steps are exact, and so is the reflection into the lower half of the quarter.
    reflected = within > 0.5
    x = jnp.where(reflected, 1 - within, within)
    square = product(x, x, u)
    of_sine, of_cosine = _taylor(*_NUM_TERMS[str(u.dtype)])
    sine, cosine = product(x, _series(of_sine, square, u), u), _series(of_cosine, square, u)
    sine, cosine = jnp.where(reflected, cosine, sine), jnp.where(reflected, sine, cosine)
    odd = (quarter == 1) | (quarter == 3)
    first, second = jnp.where(odd, sine, cosine), jnp.where(odd, cosine, sine)
    x_sign = jnp.where((quarter == 1) | (quarter == 2), -1, 1).astype(u.dtype)
    y_sign = jnp.where(quarter >= 2, -1, 1).astype(u.dtype)
    return x_sign * first, y_sign * second


def _taylor(num_sine: int, num_cosine: int) -> tuple[list[float], list[float]]:
    half = math.pi / 2
    sine = [(-1) ** n * half ** (2 * n + 1) / math.factorial(2 * n + 1) for n in range(num_sine)]
    cosine = [(-1) ** n * half ** (2 * n) / math.factorial(2 * n) for n in range(num_cosine)]
    return sine, cosine


def _series(coefficients: Sequence[float], square: jax.Array, u: jax.Array) -> jax.Array:
    total = jnp.full_like(square, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = jnp.asarray(coefficient, square.dtype) + product(total, square, u)
    return total


def root(u: jax.Array, degree: int) -> jax.Array:
    """`u ** (1 / degree)` for `u` in [0, 1), to within two ulp; 0 below the normal numbers.

    The same bits in every program, but for float32 and a degree above 3, which take XLA's power.
    """
    if degree <= 2:
        return u if degree == 1 else jnp.sqrt(u)
    if u.dtype == jnp.float32:
        return cube_root(u) if degree == 3 else u ** jnp.float32(1 / degree)
    # A part of the exponent by integer arithmetic, within 0.06 / degree; then Newton's steps, which leave
    # of an error e about degree / 2 * e**2: after five nothing of the 3 % of (degree - 1) / 2 * e.
    one = 0x3FF0_0000_0000_0000
    bits = jax.lax.bitcast_convert_type(u, jnp.uint64)
    guess = jax.lax.bitcast_convert_type(bits // degree + jnp.uint64(one - one // degree), u.dtype)
    part = jnp.asarray(1 / degree, u.dtype)
    for _ in range(5):
        power = guess
        for _ in range(degree - 2):
            power = product(power, guess, u)
        guess = guess - product(part, guess - u / power, u)
    return jnp.where(u < jnp.finfo(u.dtype).tiny, 0, guess)


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


def normal_quantile(u: jax.Array) -> jax.Array:
    """The quantile of the normal distribution at float64 `u` in (0, 1), relative error about 1e-15."""
    offset = u - 0.5
    tail = jnp.minimum(u, 1 - u)
    distance = jnp.sqrt(-_logarithm(tail, u))
    near_middle = jnp.abs(offset) <= 0.425
    central = jnp.where(near_middle, 0.180625 - product(offset, offset, u), 0)
    middle = product(offset, _ratio("central", central, u), u)
    beyond = jnp.where(distance <= 5, _ratio("near", distance - 1.6, u), _ratio("far", distance - 5, u))
    return jnp.where(near_middle, middle, jnp.where(offset < 0, -beyond, beyond))


def _ratio(part: str, x: jax.Array, u: jax.Array) -> jax.Array:
    numerator, denominator = (_series(coefficients, x, u) for coefficients in _QUANTILE[part])
    # Not to be merged with a product: an unfused program divides first.
    return rounded(numerator / denominator, u)


def _logarithm(x: jax.Array, u: jax.Array) -> jax.Array:
    """The natural logarithm of normal float64 `x` in (0, 1)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64)
    exponent = (bits >> 52).astype(jnp.int32) - 1022
    mantissa = jax.lax.bitcast_convert_type(
        (bits & jnp.uint64(2**52 - 1)) | jnp.uint64(0x3FE0_0000_0000_0000), x.dtype
    )
    # Into [sqrt(1/2), sqrt(2)), where log(m) = 2 artanh(s) with s = (m - 1) / (m + 1) below 0.172.
    low = mantissa < math.sqrt(0.5)
    mantissa, exponent = jnp.where(low, 2 * mantissa, mantissa), jnp.where(low, exponent - 1, exponent)
    s = (mantissa - 1) / (mantissa + 1)
    tangent = product(2 * s, _series([1 / (2 * n + 1) for n in range(11)], product(s, s, u), u), u)
    return product(exponent.astype(x.dtype), jnp.asarray(math.log(2), x.dtype), u) + tangent


def unit_vectors(rows: jax.Array, u: jax.Array) -> jax.Array:
    """Rows divided by their lengths, the squares added in the order of the columns.

    Args:
        rows: float64, shape `(size, axes)`, no row of zeros.
        u: as in `product`; shape `(size,)`.
    """
    total, *squares = (product(column, column, u) for column in rows.T)
    for square in squares:
        total = total + square
    # XLA would turn a division by a root that it sees into a product with `rsqrt`.
    return rows / rounded(jnp.sqrt(total), u)[:, None]


def choose(u: jax.Array, thresholds: jax.Array) -> jax.Array:
    """Which part each `u` falls to: the number of cumulative shares, but the last, that it reaches."""
    numbers, shares = alike(u, thresholds)
    reached = numbers[:, None] >= shares[None, :-1]
    return jnp.sum(reached, axis=1, dtype=jnp.int32)


def cumulative_shares(weights: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Cumulative shares of non-negative weights in a dtype, the last one 1; for `choose`.

    A part of weight zero is never chosen: its share begins where it ends.
    """
    sums = np.cumsum(np.asarray(weights, np.float64))
    shares = (sums / sums[-1]).astype(dtype)
    shares.flags.writeable = False
    return shares
