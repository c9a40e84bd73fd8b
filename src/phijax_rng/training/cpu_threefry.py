"""The Threefry hash with unrolled rounds, for programs that run on CPUs.

JAX lowers the hash on CPUs to a loop of five iterations. Its many small kernels cost a small training step
more than the hash itself, and make a large draw three times slower. Here the 20 rounds are unrolled. Both
are the same integer arithmetic, so no bit can differ.

    keys --> barrier --> 20 rounds --> bits

Without the barrier XLA fuses a chain of key derivations into one kernel whose code doubles with every
derivation: with JAX 0.12 a chain of five did not compile in two minutes.

Source of the hash: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import dataclasses
import functools
import inspect
import operator
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np

PRIVATE_NAMES = (
    "jax.extend.mlir.dialects.stablehlo:OptimizationBarrierOp",
    "jax.extend.random:threefry2x32_p",
    "jax.interpreters.mlir:LoweringParameters.override_lowering_rules",
    "jax.interpreters.mlir:dense_int_array",
    "jax.interpreters.mlir:ir.DenseElementsAttr",
)
"""What `lower` needs of JAX beyond its stable API, besides `_private_parameters` of `Traced.lower`.

Checked before every use and imported nowhere else, so a JAX that lacks one compiles its own hash.
"""

_PARITY = 0x1BD11BDA  # the key schedule's constant of Threefry 2x32
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # bits, in even and odd groups of four rounds


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Operations on uint32 values, arrays or MLIR operations; `constant` makes one of a Python integer."""

    add: Callable[[Any, Any], Any]
    xor: Callable[[Any, Any], Any]
    or_: Callable[[Any, Any], Any]
    shift_left: Callable[[Any, Any], Any]
    shift_right: Callable[[Any, Any], Any]
    constant: Callable[[int], Any]


ARRAYS = Arithmetic(
    operator.add, operator.xor, operator.or_, operator.lshift, operator.rshift, constant=np.uint32
)


def threefry2x32(key: tuple[Any, Any], counter: tuple[Any, Any], on: Arithmetic = ARRAYS) -> tuple[Any, Any]:
    """The hash of two words with a key of two words.

    Args:
        key: two uint32 arrays, or values of `on`.
        counter: two more of the same shape.
        on: the operations to use.

    Returns:
        Two of that shape.
    """
    first, second = key
    schedule = (first, second, on.xor(on.xor(first, second), on.constant(_PARITY)))
    low, high = on.add(counter[0], first), on.add(counter[1], second)
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            low = on.add(low, high)
            left = on.shift_left(high, on.constant(distance))
            right = on.shift_right(high, on.constant(32 - distance))
            high = on.xor(low, on.or_(left, right))
        low = on.add(low, schedule[(group + 1) % 3])
        high = on.add(on.add(high, schedule[(group + 2) % 3]), on.constant(group + 1))
    return low, high


def lower(program: jax.stages.Wrapped, arguments: tuple[object, ...], platform: str) -> jax.stages.Lowered:
    """`program.lower(*arguments)`, with this hash in place of JAX's if the program runs on CPUs.

    A JAX that lacks one of `PRIVATE_NAMES` compiles its own hash, to the same bits.

    Args:
        program: a jitted function.
        arguments: arrays, or their shapes and dtypes.
        platform: `device.platform` of the devices to run on.
    """
    traced = program.trace(*arguments)
    if platform != "cpu" or not is_available():
        return traced.lower()
    from jax.extend.mlir.dialects import stablehlo  # noqa: PLC0415 - absent from some releases of JAX
    from jax.extend.random import threefry2x32_p  # noqa: PLC0415
    from jax.interpreters import mlir  # noqa: PLC0415

    rules = ((threefry2x32_p, _UnrolledRule(mlir, stablehlo)),)
    return traced.lower(_private_parameters=mlir.LoweringParameters(override_lowering_rules=rules))


def is_available() -> bool:
    """Whether this JAX has every private name and lets one program replace the rule of a primitive."""
    try:
        for name in PRIVATE_NAMES:
            pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return "_private_parameters" in inspect.signature(jax.stages.Traced.lower).parameters


@dataclasses.dataclass(frozen=True)
class _UnrolledRule:
    """Lowers `threefry2x32_p` to an optimization barrier on the key and 20 unrolled rounds."""

    mlir: ModuleType
    stablehlo: ModuleType

    def __call__(self, context: Any, *words: Any) -> list[Any]:
        # Emits operations directly: tracing the rounds on arrays takes longer than all other lowering.
        ops = self.stablehlo
        element = words[0].type.element_type
        target = self.mlir.ir.RankedTensorType.get(context.avals_out[0].shape, element)
        key = ops.OptimizationBarrierOp(words[:2]).results
        first, second, low, high = (self._broadcast(word, target) for word in (*key, *words[2:]))
        constant = functools.cache(functools.partial(self._splat, target))
        on = Arithmetic(ops.add, ops.xor, ops.or_, ops.shift_left, ops.shift_right_logical, constant)
        return list(threefry2x32((first, second), (low, high), on))

    def _splat(self, target: Any, number: int) -> Any:
        element = self.mlir.ir.IntegerAttr.get(target.element_type, number)
        return self.stablehlo.constant(self.mlir.ir.DenseElementsAttr.get_splat(target, element))

    def _broadcast(self, value: Any, target: Any) -> Any:
        if value.type == target:
            return value
        # Under vmap the key and the counter may differ in rank; the trailing axes are the shared ones.
        axes = self.mlir.dense_int_array(list(range(target.rank - value.type.rank, target.rank)))
        return self.stablehlo.broadcast_in_dim(target, value, axes)
