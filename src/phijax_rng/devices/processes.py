"""Several processes as one run: decisions of the primary process, and arrays on the devices of all.

After `jax.distributed.initialize()` the same script runs in every process, and the processes meet in the
collectives of one compiled program. All of them must call that program at the same time and up to the same
step. So the primary process (`jax.process_index() == 0`) makes each such decision and broadcasts it;
otherwise clocks that differ would lead to different numbers or to a hang. Only the primary process writes
files.

In one process every function here returns its argument without communication.

>>> broadcast(3, True)
(3, 1)
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jax.typing import ArrayLike

from phijax_rng import keys
from phijax_rng._base.types import Seed
from phijax_rng.errors import ProcessLostError

T = TypeVar("T")

# Copies of smaller arrays cost nothing.
_LENT_BYTES = 2**20


def is_multiprocess() -> bool:
    """Whether there is more than one process; starts JAX's backend."""
    return jax.process_count() > 1


def is_primary() -> bool:
    """Whether this process makes the decisions, shows progress and writes files."""
    return jax.process_index() == 0


def broadcast(*values: int) -> tuple[int, ...]:
    """The primary process's numbers, in [0, 2**31). All processes must call it, in the same order."""
    # int32, since without jax_enable_x64 JAX would truncate int64 on its way. A process that calls this
    # once more or less than the others waits forever, or receives the numbers of another call.
    if not is_multiprocess():
        return tuple(map(int, values))
    return tuple(map(int, broadcast_array(np.array(values, np.int32))))


def maximum(value: int) -> int:
    """The largest of the processes' numbers, in [0, 2**31). All processes must call it."""
    if not is_multiprocess():
        return int(value)
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def run_on_primary(action: Callable[[], T]) -> T | None:
    """Calls `action` in the primary process while the others wait; its result there, `None` elsewhere.

    Raises:
        Exception: if `action` raises: its exception in the primary process, a `RuntimeError` in the others.
    """
    if not is_multiprocess():
        return action()
    # Whether it failed is broadcast before anyone raises: a process that left early would hang the others
    # in their next collective.
    result, error = None, None
    if is_primary():
        try:
            result = action()
        except Exception as raised:
            error = raised
    (failed,) = broadcast(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("the primary process raised an exception. Fix what its message names.")
    return result


def broadcast_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The primary process's array, bit for bit; shape and dtype must be the same in every process."""
    if not is_multiprocess():
        return array
    # As bytes: a sum of floats, which JAX broadcasts by, turns -0.0 into 0.0.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(flat)).astype(np.uint8)
    return received.view(array.dtype).reshape(array.shape)


def require_same(array: np.ndarray[Any, Any], message: str) -> None:
    """Raises a `ValueError` with this message in every process unless all have the same bits."""
    # `maximum`, so that all raise: the primary process itself sees no difference.
    if is_multiprocess() and maximum(broadcast_array(array).tobytes() != array.tobytes()):
        raise ValueError(message)


def agreed_seed(seed: Seed) -> Seed:
    """`seed`, or its key; for `None` a seed from the operating system, the same in every process.

    Raises:
        ValueError: the seeds of the processes differ.
    """
    if not is_multiprocess():
        return seed
    if seed is None:
        drawn = keys.entropy_seed() if is_primary() else 0
        return int(broadcast_array(np.array([drawn], np.uint64))[0])
    # Compared by words: a seed may be an int in one process and the key of that int in another.
    root = keys.root_key(seed)
    words = np.asarray(jax.random.key_data(root))
    # Keys of other hashes have other numbers of words (threefry 2, rbg 4), and a broadcast needs one shape.
    padded = np.zeros(8, np.uint32)
    padded[: words.size] = words
    require_same(padded, f"seed must be the same in every process, got {seed!r} here. Pass one seed to all.")
    # The root and not the array: `root_key` warns of a legacy key, and once is enough.
    return root if isinstance(seed, (jax.Array, np.ndarray)) else seed


def place(leaf: ArrayLike, sharding: Sharding) -> jax.Array:
    """A leaf on the devices of all processes, with the primary process's bits."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if keys.is_typed_key(leaf):
        # By its words: JAX cannot device_put a typed key to a sharding that spans processes.
        words = place(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(words, impl=keys.implementation_of(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    return _place_shards(broadcast_array(np.asarray(leaf)), sharding)


def replicate(leaf: ArrayLike, sharding: Sharding) -> jax.Array:
    """A leaf that every process has, replicated on the devices of all of them without communication."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if keys.is_typed_key(leaf):
        words = replicate(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(words, impl=keys.implementation_of(leaf))
    return _place_shards(np.asarray(leaf), sharding)


def copied(leaf: jax.Array) -> jax.Array:
    """A copy of the array on the same devices, without communication."""
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, leaf.sharding, may_alias=False)
    if keys.is_typed_key(leaf):
        words = copied(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=keys.implementation_of(leaf))
    # Shard by shard: a process can copy only those on its own devices.
    parts = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def lent(leaf: jax.Array) -> jax.Array:
    """The array as another object, which the receiver may keep or donate; a large one on CPU is no copy.

    There it is the same memory, which XLA leaves alone for as long as the object is alive.
    """
    on_cpu = {device.platform for device in leaf.devices()} == {"cpu"}
    if keys.is_typed_key(leaf) or leaf.nbytes < _LENT_BYTES or not on_cpu:
        return copied(leaf)
    # Through NumPy, which holds a reference to the buffer that a donation respects; arrays of JAX that share
    # a buffer are deleted together.
    shards = leaf.addressable_shards
    parts = [jax.device_put(np.asarray(shard.data), shard.device, may_alias=True) for shard in shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def gather(leaf: T) -> T | np.ndarray[Any, Any]:
    """An array that this process can read: itself, or gathered if other processes have parts of it."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    return multihost_utils.process_allgather(leaf, tiled=True)


def gathered_part(array: jax.Array, bounds: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """A part of an array that several processes have; all of them call this.

    Args:
        array: on a mesh.
        bounds: start and stop along each axis.
    """
    starts = tuple(np.int32(start) for start, _ in bounds)
    sizes = tuple(stop - start for start, stop in bounds)
    sharding = array.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return np.asarray(_cut(everywhere)(array, starts, sizes))


@functools.lru_cache(maxsize=8)
def _cut(sharding: Sharding) -> Callable[..., jax.Array]:
    # The starts are arguments, so that one program serves all parts of a size.
    return jax.jit(jax.lax.dynamic_slice, static_argnums=2, out_shardings=sharding)


def merged(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The largest entry of all processes at each place; all of them must call it."""
    if not is_multiprocess():
        return array
    return np.asarray(multihost_utils.process_allgather(array)).max(axis=0)


def to_local(tree: T) -> T:
    """`tree` with each array that is on several devices copied to one device of this process."""
    return jax.tree.map(_to_local, tree)


@contextlib.contextmanager
def translate_runtime_errors() -> Iterator[None]:
    """Turns a runtime error of JAX inside the block into a `ProcessLostError` if there are several processes.

    The delay depends on the transport: it raises at once if it sees the connection closed, otherwise when
    JAX's coordinator misses the heartbeat of a process (100 s by default, see `jax.distributed.initialize`).
    The coordinator may also end this process without an exception.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_multiprocess():
            raise
        # The first line names the cause; the others are details of the transport.
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ProcessLostError(
            f"{describe()} cannot continue with the others: {reason}. "
            "If one of them has ended, restart all of them; with resume='auto' the run continues from its "
            "last save."
        ) from error


def describe() -> str:
    """Names this process in messages and logs."""
    return f"process {jax.process_index()} of {jax.process_count()} (pid {os.getpid()})"


def _place_shards(value: np.ndarray[Any, Any], sharding: Sharding) -> jax.Array:
    """A global array of which each process places the shards of its devices, one transfer per device."""
    # Not device_put(value, sharding): over several processes it first compares the value between all of them.
    parts = [
        jax.device_put(value[index], device, may_alias=False)
        for device, index in sharding.addressable_devices_indices_map(value.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def _to_local(leaf: T) -> T | jax.Array:
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        return leaf
    if keys.is_typed_key(leaf):
        words = jax.numpy.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(words, impl=keys.implementation_of(leaf))
    return jax.numpy.asarray(np.asarray(gather(leaf)))
