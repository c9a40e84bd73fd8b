"""Whole numbers below 2**64 as two 32-bit words, high before low, inside `jit` and without x64.

Positions in a shuffled pool and sums of weights outgrow 32 bits, and JAX has no wider integers unless
x64 is on. All functions are exact, work on scalars and arrays alike, and give the same bits everywhere.
"""

from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

Word: TypeAlias = UInt32[Array, "..."]

_HALF = np.uint32(16)
_LOW = np.uint32(0xFFFF)


def product(left: Word, right: Word) -> tuple[Word, Word]:
    """The 64 bits of `left * right`."""
    a, b = left >> _HALF, left & _LOW
    c, d = right >> _HALF, right & _LOW
    # Each sum stays below 2**32: (2**16 - 1)**2 + 2 * (2**16 - 1) < 2**32.
    low = b * d
    middle = a * d + (low >> _HALF)
    other = b * c + (middle & _LOW)
    return a * c + (middle >> _HALF) + (other >> _HALF), (other << _HALF) | (low & _LOW)


def add(high: Word, low: Word, word: Word) -> tuple[Word, Word]:
    """`(high, low) + word`, modulo 2**64."""
    total = low + word
    return high + (total < low).astype(jnp.uint32), total


def plus(left: tuple[Word, Word], right: tuple[Word, Word]) -> tuple[Word, Word]:
    """The sum of two pairs, modulo 2**64; associative."""
    high, low = add(*left, right[1])
    return high + right[0], low


def less(left: tuple[Word, Word], right: tuple[Word, Word]) -> Array:
    """Whether `left < right`, as a bool array."""
    return (left[0] < right[0]) | ((left[0] == right[0]) & (left[1] < right[1]))


def divide(high: Word, low: Word, n: int) -> tuple[tuple[Word, Word], Word]:
    """The quotient of `(high, low)` by n as two words, and the remainder.

    Schoolbook division in 16-bit digits with a known divisor: Knuth, The Art of Computer Programming,
    volume 2, 4.3.1, algorithm D. No loop, so that a device does not wait for the slowest lane.

    Args:
        high: uint32.
        low: uint32 of the same shape.
        n: a Python int in [1, 2**31).
    """
    divisor = np.uint32(n)
    first = high // divisor
    rest = high - first * divisor
    shift = 32 - n.bit_length()  # at least 1: the leading bit of the shifted divisor is set
    scaled = np.uint32(n << shift)
    upper = (rest << np.uint32(shift)) | (low >> np.uint32(32 - shift))
    lower = low << np.uint32(shift)
    one, upper = _digit(upper, lower >> _HALF, scaled)
    two, upper = _digit(upper, lower & _LOW, scaled)
    return (first, (one << _HALF) | two), upper >> np.uint32(shift)


def _digit(upper: Word, digit: Word, divisor: np.uint32) -> tuple[Word, Word]:
    """`upper * 2**16 + digit` by the divisor: one 16-bit digit of the quotient, and the rest."""
    lead, tail = divisor >> _HALF, divisor & _LOW
    quotient = upper // lead
    rest = upper - quotient * lead
    for _ in range(2):  # the estimate is too large by two at most
        over = (quotient > _LOW) | (quotient * tail > ((rest << _HALF) | digit))
        over &= rest <= _LOW
        quotient -= over.astype(jnp.uint32)
        rest += jnp.where(over, lead, np.uint32(0))
    return quotient, (upper << _HALF) + digit - quotient * divisor


def fraction_of(bits: tuple[Word, Word], total: tuple[Word, Word]) -> tuple[Word, Word]:
    """`bits * total >> 64`: 64 random bits taken to [0, total), exact to one part in `2**64 / total`.

    Lemire, "Fast Random Integer Generation in an Interval" (2019).
    """
    carry_high, carry = product(bits[0], total[1])
    other_high, other = product(bits[1], total[0])
    lowest, _ = product(bits[1], total[1])
    high, low = product(bits[0], total[0])
    middle_high, middle = add(carry_high, carry, lowest)
    sum_high, _ = add(other_high, middle, other)
    # Each of the two middle products leaves its upper half, with a carry, for the words above.
    return plus((high, low), plus((jnp.zeros_like(high), middle_high), (jnp.zeros_like(high), sum_high)))
