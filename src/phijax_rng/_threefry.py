"""The Threefry hash with its rounds written out, for programs that run on CPUs.

JAX compiles the hash for CPUs as a loop of five trips, whose many little kernels cost a small step more
than the hash does, and a large draw three times as much. Here it is compiled straight through. It
is integer arithmetic of the same definition, so no bit can differ.

    keys --> barrier --> 20 rounds --> bits

Without the barrier XLA fuses a chain of keys, fold after split after fold, into one kernel whose code
doubles with every link: on JAX 0.12 a chain of five did not compile in two minutes.

Source of the hash: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

_PARITY = np.uint32(0x1BD11BDA)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of the even and of the odd groups of four rounds


def threefry2x32(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
    """The hash of two words under a key of two words.

    Args:
        key: two uint32 arrays.
        counter: two uint32 arrays; all four broadcast against each other.

    Returns:
        Two uint32 arrays of the common shape.
    """
    first, second = jax.lax.optimization_barrier(key)
    schedule = (first, second, first ^ second ^ _PARITY)
    low, high = counter[0] + first, counter[1] + second
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            low = low + high
            high = low ^ _rotated(high, distance)
        low = low + schedule[(group + 1) % 3]
        high = high + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return low, high


def _rotated(word: jax.Array, distance: int) -> jax.Array:
    return (word << np.uint32(distance)) | (word >> np.uint32(32 - distance))


def lower(program: Any, arguments: tuple[Any, ...], platform: str) -> jax.stages.Lowered:
    """`program.lower(*arguments)`, with this hash in the place of JAX's where the program runs on CPUs.

    The door to it is not public. Where a JAX has moved it, JAX's own hash is compiled, to the same bits.

    Args:
        program: a jitted function.
        arguments: arrays, or their shapes and dtypes.
        platform: `device.platform` of the devices to run on.
    """
    traced = program.trace(*arguments)
    if platform != "cpu" or not is_open():
        return traced.lower()
    return traced.lower(
        _private_parameters=mlir.LoweringParameters(override_lowering_rules=((threefry2x32_p, _RULE),))
    )


def is_open() -> bool:
    """Whether this JAX takes another rule for a primitive of one program."""
    taken = inspect.signature(jax.stages.Traced.lower).parameters
    known = getattr(mlir, "LoweringParameters", None)
    return (
        "_private_parameters" in taken
        and dataclasses.is_dataclass(known)
        and "override_lowering_rules" in {field.name for field in dataclasses.fields(known)}
    )


def _hashed(first: Any, second: Any, low: Any, high: Any) -> tuple[Any, Any]:
    return threefry2x32((first, second), (low, high))


_RULE = mlir.lower_fun(_hashed, multiple_results=True)
