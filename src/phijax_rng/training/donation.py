"""Which arrays of a state a program writes over, and how it receives them.

A state of at least 64 MB is updated in place, so that a run needs one copy of it and not two. The rule looks
at the state alone: the same run has the same program on every machine.
"""

import collections
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import keys
from phijax_rng.devices import processes
from phijax_rng.state import TrainState

T = TypeVar("T")

LARGE_BYTES = 64 * 2**20
"""Bytes of model and optimizer state from which on a state is updated in place; see `docs/decisions.md`."""

# Keys and counters may be held by samplers too, and cost nothing to keep.
_LEAST_BYTES = 2**16
_FIELDS = ("model_state", "optimizer_state")


@dataclasses.dataclass(frozen=True)
class Donation:
    """The leaves of a large state, in two lists: those that are written over, and the others.

    Attributes:
        structure: that of the state.
        is_given: whether each leaf is written over.
    """

    structure: Any
    is_given: tuple[bool, ...]

    @staticmethod
    def of(state: TrainState) -> "Donation | None":
        """That of a large state; `None` for others. The leaves may be abstract."""
        # The leaves of the state, not of its fields: what a model carries beside its arrays is none of them.
        found, structure = jax.tree_util.tree_flatten_with_path(state)
        sizes = [_bytes(leaf) if path[0].name in _FIELDS else None for path, leaf in found]
        if sum(size or 0 for size in sizes) < LARGE_BYTES:
            return None
        return Donation(structure, tuple(size is not None and size >= _LEAST_BYTES for size in sizes))

    def split(self, state: TrainState) -> tuple[list[Any], list[Any]]:
        """The leaves that are written over, and the others."""
        leaves = jax.tree.leaves(state)
        parts: tuple[list[Any], list[Any]] = ([], [])
        for leaf, given in zip(leaves, self.is_given, strict=True):
            parts[not given].append(leaf)
        return parts

    def joined(self, given: list[Any], kept: list[Any]) -> TrainState:
        """The state with these leaves."""
        parts = iter(given), iter(kept)
        leaves = [next(parts[not is_given]) for is_given in self.is_given]
        state: TrainState = jax.tree.unflatten(self.structure, leaves)
        return state

    def owned(self, take: Callable[[], TrainState]) -> TrainState:
        """A state whose arrays may be written over: where anything else refers to one, that is copied.

        Args:
            take: returns the state. What it was the last reference to is not copied.
        """
        leaves = jax.tree.leaves(take())
        owners = collections.Counter(
            pointer for array in jax.live_arrays() if not array.is_deleted() for pointer in _pointers(array)
        )
        for index, given in enumerate(self.is_given):
            if not given:
                continue
            leaf = leaves[index]
            # Held by the list, the variable and the call; another array may have the same buffer.
            held = sys.getrefcount(leaf) > 3 or any(owners[pointer] > 1 for pointer in _pointers(leaf))
            if held:
                leaves[index] = jax.block_until_ready(processes.copied(leaf))
            del leaf  # or the next copy is made while this array still exists
        state: TrainState = jax.tree.unflatten(self.structure, leaves)
        return state


def with_cloned_keys(tree: T) -> T:
    """The same bits, with keys that JAX's check of key reuse takes for others.

    An update that is made twice, or not at all, uses its keys twice or once, and always for the same numbers.
    """
    return jax.tree.map(lambda leaf: jax.random.clone(leaf) if keys.is_typed_key(leaf) else leaf, tree)


def _pointers(array: jax.Array) -> list[int]:
    """Where the parts of an array are that this process has."""
    if len(array.sharding.device_set) == 1 and not keys.is_typed_key(array):
        return [array.unsafe_buffer_pointer()]
    if keys.is_typed_key(array):
        return []
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _bytes(leaf: Any) -> int:
    if keys.is_typed_key(leaf):
        return 0
    size = int(np.prod(np.shape(leaf), dtype=np.int64))
    return size * jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)).itemsize
