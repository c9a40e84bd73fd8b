"""SHA-256 of what a run holds, leaf by leaf, on the host.

A digest covers each leaf's path, dtype, shape and bytes in row-major order, so two trees have one
digest exactly if every leaf has the same bits in the same place: -0.0 differs from 0.0, one NaN from
another, two swapped leaves from the original; layout, placement and sharding do not matter. Keys enter
with their implementation.

Bytes are hashed in blocks, by at most one thread a core (`hashlib` releases the interpreter lock).

>>> import numpy as np
>>> digest({"w": np.float32([0.0])}) == digest({"w": np.float32([-0.0])})
False
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_BYTES = 8 * 2**20

# Starting a thread costs more than hashing the first; so much is read ahead of the hashing.
_LEAST_BYTES, _AHEAD_BYTES = 2**16, 256 * 2**20

# SHA-256 of this much takes well under a second on one core; above it, starting a run would feel it.
SAMPLED_ABOVE_BYTES = 2**30
_SAMPLED_ROWS = 4096


def digest(tree: object) -> str:
    """The SHA-256 of a pytree of arrays, as 64 hexadecimal digits.

    Args:
        tree: any pytree of arrays, typed keys and numbers; arrays may be on a device.
    """
    return digest_leaves(
        (jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )


def digest_leaves(named: Iterable[tuple[str, Any]]) -> str:
    """The SHA-256 of leaves that have names already; in the order given."""
    whole = hashlib.sha256()
    with _Hashers() as hashers:
        for path, header, blocks in hashers.of(named):
            digested = hashlib.sha256(header)
            for block in blocks:
                digested.update(block)
            for part in (path.encode(), digested.digest()):
                whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()


def digest_fields(fields: Mapping[str, Any]) -> str:
    """What identifies the content of a pool: `sha256:...`, or `sha256-sampled:...` for a large one.

    A pool of more than a gigabyte is known by the shape and dtype of every field and by 4096 rows, evenly
    spaced from the first to the last; a change in other rows is then not seen, and the prefix says so.
    """
    flat = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(fields)]
    if sum(_num_bytes(leaf) for _, leaf in flat) <= SAMPLED_ABOVE_BYTES:
        return f"sha256:{digest_leaves([(path, np.asarray(leaf)) for path, leaf in flat])}"
    return f"sha256-sampled:{digest_leaves([(f'{path}{leaf.shape}', _spread(leaf)) for path, leaf in flat])}"


def _num_bytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def _spread(array: Any) -> np.ndarray[Any, Any]:
    """Evenly spaced rows, one index at a time: what HDF5 and Zarr arrays can all do."""
    rows = np.unique(np.linspace(0, array.shape[0] - 1, _SAMPLED_ROWS).round().astype(np.int64))
    return np.stack([np.asarray(array[int(row)]) for row in rows])


@dataclasses.dataclass(frozen=True)
class Digested:
    """A leaf that is known by its header and the digests of its blocks."""

    header: bytes
    blocks: Sequence[bytes]


def digest_blocks(blocks: Iterable[tuple[int, np.ndarray[Any, Any]]]) -> dict[int, bytes]:
    """Number -> the SHA-256 of each block; of one above `BLOCK_BYTES`, that of those of its parts."""
    with _Hashers() as hashers:
        found = hashers.of((str(number), block) for number, block in blocks)
        return {int(name): _as_one(*parts) for name, _, parts in found}


def _as_one(first: bytes, *others: bytes) -> bytes:
    return hashlib.sha256(b"".join((first, *others))).digest() if others else first


def header_of(dtype: object, shape: Sequence[int]) -> bytes:
    """What a digest knows of an array besides its bytes."""
    return f"{dtype}{list(shape)}".encode()


class _Hashers:
    """Threads that hash blocks, at most one for each core that this process may use."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def __enter__(self) -> "_Hashers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def of(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, bytes, Iterator[bytes]]]:
        """Path, header, and the digest of each block, leaf by leaf."""
        ahead: collections.deque[tuple[int, tuple[str, bytes, Iterator[bytes]]]] = collections.deque()
        for path, leaf in named:
            if isinstance(leaf, Digested):
                ahead.append((0, (path, leaf.header, iter(leaf.blocks))))
            else:
                dtype, array = _host_bytes(leaf)
                ahead.append((array.nbytes, (path, header_of(dtype, array.shape), self._hashed(array))))
            # Not all leaves at once: of an array on a device this holds a copy.
            while sum(size for size, _ in ahead) > _AHEAD_BYTES and len(ahead) > 1:
                yield ahead.popleft()[1]
        while ahead:
            yield ahead.popleft()[1]

    def _hashed(self, array: np.ndarray[Any, Any]) -> Iterator[bytes]:
        # A view of unsigned bytes, since bfloat16 and its like do not export a buffer. Dtypes such as int4
        # take one byte for each element in NumPy.
        flat = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        blocks = [flat[start : start + BLOCK_BYTES] for start in range(0, len(flat), BLOCK_BYTES)]
        if len(flat) < _LEAST_BYTES:
            return iter([_sha256(block) for block in blocks])
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(num_cores())
        return self._pool.map(_sha256, blocks)


def _sha256(block: memoryview) -> bytes:
    return hashlib.sha256(block).digest()


def num_cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on every system
        return os.cpu_count() or 1


def _host_bytes(leaf: Any) -> tuple[str, np.ndarray[Any, Any]]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key<{jax.random.key_impl(leaf)}>", np.asarray(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return str(array.dtype), array
