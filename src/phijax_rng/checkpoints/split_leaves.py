"""Digests of arrays that are split over devices: each process hashes what it has, and gathers no array.

The shards of a save divide an array into equal tiles, and the document stores their shape. A tile is hashed
in blocks of a few rows, in the order of the tiles. A resume on other devices finds the same blocks in its own
shards; one that no process has alone is gathered, and a block is at most 8 MB, or one row of a tile.

    saved on 2 devices    [ tile 0        | tile 1        ]
    resumed on 4          [ shard | shard | shard | shard ]      each block is within one of them, or gathered
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import numpy as np
import orbax.checkpoint as ocp

from phijax_rng._base.digests import BLOCK_BYTES, Digested, digest_blocks, header_of
from phijax_rng.devices import processes

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[slice, ...]
Bounds: TypeAlias = tuple[tuple[int, int], ...]
HostArray: TypeAlias = np.ndarray[Any, Any]
Block: TypeAlias = tuple[Index, slice]
"""A part of an array, and which of its numbers in row-major order."""

# The digests of others come when they have hashed as much as this process has; hours would be a lost process.
_TIMEOUT_SECONDS = 3600


def is_split(array: object) -> TypeGuard[jax.Array]:
    """Whether no device has the whole array."""
    return isinstance(array, jax.Array) and not array.is_fully_replicated


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The tiles of an array that this process hashes, on the host.

    Attributes:
        shape: of the whole array.
        dtype: of the array.
        tile: the shape of its tiles.
        tiles: number of a tile -> its numbers.
    """

    shape: Shape
    dtype: np.dtype[Any]
    tile: Shape
    tiles: Mapping[int, HostArray]

    @staticmethod
    def of(array: jax.Array) -> "Snapshot":
        """That of a split array: views of the host's memory on CPU, copies from other devices."""
        tile = array.sharding.shard_shape(array.shape)
        numbers = {origin: number for number, origin in enumerate(_origins(array.shape, tile))}
        tiles = {
            numbers[tuple(one.start or 0 for one in shard.index)]: np.asarray(shard.data)
            for shard in array.addressable_shards
            if shard.replica_id == 0  # one of all devices that have the tile
        }
        return Snapshot(array.shape, np.dtype(array.dtype), tile, tiles)

    def digested(self, name: str) -> Digested:
        """What the digest of the array is made of, in the first process.

        Args:
            name: of the array, no other of this run; all processes call this, in any order and any thread.
        """
        rows = _rows_of_block(self.tile, self.dtype)
        count = math.ceil(self.tile[0] / rows)
        blocks = (
            (number * count + k, tile[k * rows : (k + 1) * rows])
            for number, tile in self.tiles.items()
            for k in range(count)
        )
        found = _sent_to_first(name, digest_blocks(blocks))
        header = _header(self.shape, self.dtype, self.tile)
        return Digested(header, [found[number] for number in sorted(found)])


def verifiable(array: jax.Array, tile: Sequence[int] | None) -> jax.Array | Digested:
    """What the digest of a restored array is made of; with several processes, all of them call this.

    Args:
        array: as it was restored, whatever its sharding.
        tile: the shape of the tiles that it was saved in; `None` for one that was saved whole.

    Raises:
        ValueError: the array cannot have been saved in such tiles.
    """
    if tile is None and (array.is_fully_addressable or array.is_fully_replicated):
        return array
    shape, dtype = array.shape, np.dtype(array.dtype)
    if tile is None:
        blocks, header = list(_blocks_of_whole(shape, dtype)), header_of(dtype, shape)
    else:
        fits = len(tile) == len(shape) and all(map(_divides, tile, shape))
        if not fits:
            raise ValueError(f"an array of shape {list(shape)} has no tiles of shape {list(tile)}")
        blocks, header = list(_blocks(shape, tuple(tile), dtype)), _header(shape, dtype, tuple(tile))
    own = digest_blocks(_contents(array, blocks))
    found = np.zeros((len(blocks), 32), np.uint8)
    for number, digest in own.items():
        found[number] = np.frombuffer(digest, np.uint8)
    return Digested(header, [row.tobytes() for row in processes.merged(found)])


def _divides(part: int, size: int) -> bool:
    return part > 0 and size % part == 0


def _header(shape: Shape, dtype: np.dtype[Any], tile: Shape) -> bytes:
    return header_of(dtype, shape) + f" in {list(tile)}".encode()


def _sent_to_first(name: str, own: dict[int, bytes]) -> dict[int, bytes]:
    """What all processes have, in the first of them. No device takes part, so a thread may wait here."""
    if not processes.is_multiprocess():
        return own
    client = ocp.multihost.get_jax_distributed_client()
    if not processes.is_primary():
        text = " ".join(f"{number}:{digest.hex()}" for number, digest in own.items())
        client.key_value_set(f"{name}/{jax.process_index()}", text or " ")
        return own
    every = dict(own)
    for process in range(1, jax.process_count()):
        key = f"{name}/{process}"
        for entry in client.blocking_key_value_get(key, _TIMEOUT_SECONDS * 1000).split():
            number, digest = entry.split(":")
            every[int(number)] = bytes.fromhex(digest)
        client.key_value_delete(key)
    return every


def _origins(shape: Shape, tile: Shape) -> Iterator[Shape]:
    """Where each tile begins, in the order of their numbers."""
    return itertools.product(*(range(0, size, part) for size, part in zip(shape, tile, strict=True)))


def _rows_of_block(tile: Shape, dtype: np.dtype[Any]) -> int:
    return max(1, min(tile[0], BLOCK_BYTES // max(1, math.prod(tile[1:]) * dtype.itemsize)))


def _blocks(shape: Shape, tile: Shape, dtype: np.dtype[Any]) -> Iterator[Block]:
    """The blocks of every tile, by number."""
    rows = _rows_of_block(tile, dtype)
    for origin in _origins(shape, tile):
        others = tuple(slice(at, at + part) for at, part in zip(origin[1:], tile[1:], strict=True))
        for first in range(origin[0], origin[0] + tile[0], rows):
            yield (slice(first, min(first + rows, origin[0] + tile[0])), *others), slice(None)


def _blocks_of_whole(shape: Shape, dtype: np.dtype[Any]) -> Iterator[Block]:
    """The blocks of an array that was not split: equally many bytes of its rows one after the other."""
    row, total = math.prod(shape[1:]), math.prod(shape)
    count = BLOCK_BYTES // dtype.itemsize
    others = tuple(slice(0, size) for size in shape[1:])
    for first in range(0, total, count):
        last = min(first + count, total)
        top, bottom = first // row, math.ceil(last / row)
        yield (slice(top, bottom), *others), slice(first - top * row, last - top * row)


def _contents(array: jax.Array, blocks: Sequence[Block]) -> Iterator[tuple[int, HostArray]]:
    """Number and content of each block that this process hashes."""
    held: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
    parts: dict[int, set[Bounds]] = {}
    for device, index in held.items():
        parts.setdefault(device.process_index, set()).add(_bounds(index, array.shape))
    own = {_bounds(shard.index, array.shape): shard for shard in array.addressable_shards}
    for number, (index, cut) in enumerate(blocks):
        wanted = _bounds(index, array.shape)
        size = math.prod(stop - start for start, stop in wanted)
        # The same answer in every process, for the collective below.
        common = {process: sum(_common(wanted, one) for one in parts[process]) for process in sorted(parts)}
        holder = next((process for process in common if common[process] == size), None)
        if holder is None:
            content = processes.gathered_part(array, wanted)
            if processes.is_primary():
                yield number, content.reshape(-1)[cut]
        elif holder == jax.process_index():
            yield number, _assembled(own, wanted, array.dtype).reshape(-1)[cut]


def _bounds(index: Index, shape: Shape) -> Bounds:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _common(one: Bounds, other: Bounds) -> int:
    """How many elements two parts of an array share."""
    return math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(one, other, strict=True))


def _assembled(shards: Mapping[Bounds, Any], wanted: Bounds, dtype: Any) -> HostArray:
    """A part of an array, out of the shards of this process that have some of it."""
    found = np.empty([stop - start for start, stop in wanted], dtype)
    for bounds, shard in shards.items():
        if not _common(bounds, wanted):
            continue
        inner = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, wanted, strict=True)]
        source = tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(inner, bounds, strict=True))
        data = np.asarray(shard.data)[source]
        if data.shape == found.shape:
            return data
        found[tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(inner, wanted, strict=True))] = data
    return found
