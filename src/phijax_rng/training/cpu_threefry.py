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
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.mlir.dialects import stablehlo
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of the even and of the odd groups of four rounds


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Operations on uint32 numbers of some kind; `constant` makes one of a Python integer."""

    add: Callable[[Any, Any], Any]
    xor: Callable[[Any, Any], Any]
    either: Callable[[Any, Any], Any]
    left: Callable[[Any, Any], Any]
    right: Callable[[Any, Any], Any]
    constant: Callable[[int], Any]


ARRAYS = Arithmetic(
    operator.add, operator.xor, operator.or_, operator.lshift, operator.rshift, constant=np.uint32
)


def threefry2x32(key: tuple[Any, Any], counter: tuple[Any, Any], on: Arithmetic = ARRAYS) -> tuple[Any, Any]:
    """The hash of two words under a key of two words.

    Args:
        key: two uint32 arrays, or what `on` computes with.
        counter: two more of the same shape.
        on: what to compute with.

    Returns:
        Two of that shape.
    """
    first, second = key
    schedule = (first, second, on.xor(on.xor(first, second), on.constant(_PARITY)))
    low, high = on.add(counter[0], first), on.add(counter[1], second)
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            low = on.add(low, high)
            turned = on.either(
                on.left(high, on.constant(distance)), on.right(high, on.constant(32 - distance))
            )
            high = on.xor(low, turned)
        low = on.add(low, schedule[(group + 1) % 3])
        high = on.add(on.add(high, schedule[(group + 2) % 3]), on.constant(group + 1))
    return low, high


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
        _private_parameters=mlir.LoweringParameters(override_lowering_rules=((threefry2x32_p, _rule),))
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


def _rule(context: mlir.LoweringRuleContext, *words: Any) -> list[Any]:
    """`threefry2x32_p` with its rounds written out and a barrier on the key; see the module.

    Written in operations of the program: tracing them on arrays takes longer than all other lowering.
    """
    element = words[0].type.element_type
    target = mlir.ir.RankedTensorType.get(context.avals_out[0].shape, element)
    settled = stablehlo.OptimizationBarrierOp(words[:2]).results
    first, second, low, high = (_broadcast(word, target) for word in (*settled, *words[2:]))
    program = Arithmetic(
        stablehlo.add,
        stablehlo.xor,
        stablehlo.or_,
        stablehlo.shift_left,
        stablehlo.shift_right_logical,
        functools.cache(lambda number: _splat(number, target)),
    )
    return list(threefry2x32((first, second), (low, high), program))


def _splat(number: int, target: Any) -> Any:
    element = mlir.ir.IntegerAttr.get(target.element_type, number)
    return stablehlo.constant(mlir.ir.DenseElementsAttr.get_splat(target, element))


def _broadcast(value: Any, target: Any) -> Any:
    if value.type == target:
        return value
    axes = range(target.rank - value.type.rank, target.rank)
    return stablehlo.broadcast_in_dim(target, value, mlir.dense_int_array(list(axes)))
