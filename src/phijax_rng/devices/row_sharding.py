"""How the rows of a batch are divided over devices: equally, with padding if necessary.

    uneven="pad", 10 rows on 4 devices
    rows     0 1 2 | 3 4 5 | 6 7 8 | 9 9 9        padding repeats the last row
    mask     T T T | T T T | T T T | T F F

The rows that count are bit for bit those of one device, in the same order. One device needs no padding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from phijax_rng._base.types import Batches
from phijax_rng.devices import processes, row_masks

UNEVEN = ("refuse", "whole", "pad")
"""What to do with a batch whose rows do not divide equally: raise, replicate it, or pad it."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Which rows of a batch are on which device.

    Attributes:
        mesh: `None` for one device.
        axis: the axis of the mesh that rows are split over; empty for one device.
        uneven: one of `UNEVEN`.
    """

    mesh: Mesh | None
    axis: str
    uneven: str

    @property
    def pads(self) -> bool:
        """Whether batches are padded, with a mask of the rows that count."""
        return self.uneven == "pad"

    @property
    def parts(self) -> int:
        """The number of parts that rows are split into."""
        return 1 if self.mesh is None else int(self.mesh.shape[self.axis])

    def filled(self, size: int) -> int:
        """The number of rows of a batch of `size` rows, with padding."""
        return -(-size // self.parts) * self.parts if self.pads else size

    # Inside a compiled program

    def split(
        self, batches: Batches, sizes: Mapping[str, Any] | None = None
    ) -> tuple[Batches, dict[str, jax.Array] | None]:
        """Batches with their rows split over the devices, and a mask of the rows that count; `None` for all.

        Arrays without axes are replicated. A batch whose rows do not divide equally is replicated with
        `uneven="whole"` and padded with `"pad"`.

        Args:
            batches: as the source returns them.
            sizes: the number of rows without padding, in place of each array, for batches that have padding.

        Raises:
            TypeError: with `uneven="pad"`, the batches have no names.
            ValueError: with `uneven="refuse"`, the rows do not divide equally.
        """
        if self.pads:
            return self._padded(batches, sizes)
        if self.mesh is None:
            return batches, None
        return jax.tree_util.tree_map_with_path(self._split, batches), None

    def _padded(
        self, batches: Batches, sizes: Mapping[str, Any] | None
    ) -> tuple[Batches, dict[str, jax.Array]]:
        counts = row_masks.row_counts(batches, sizes)
        mask = {name: self._mask(count) for name, count in counts.items()}
        filled = {name: jax.tree.map(self._pad, rows) for name, rows in batches.items()}
        return filled, mask

    def _mask(self, count: int) -> jax.Array:
        # Computed, not captured: a constant array would be copied to every device and stored in the program.
        return self._on_rows(jnp.arange(self.filled(count), dtype=jnp.int32) < count)

    def _pad(self, leaf: jax.Array) -> jax.Array:
        if self.mesh is None or not np.shape(leaf):
            return leaf
        size = int(np.shape(leaf)[0])
        if not size % self.parts:
            return self._on_rows(leaf)
        # Every device draws all rows and keeps its part, so no communication is needed.
        replicated = jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, PartitionSpec()))
        indices = np.minimum(np.arange(self.filled(size), dtype=np.int32), size - 1)
        return self._on_rows(replicated[indices])

    def _on_rows(self, leaf: jax.Array) -> jax.Array:
        if self.mesh is None:
            return leaf
        rows = NamedSharding(self.mesh, PartitionSpec(self.axis))
        return jax.lax.with_sharding_constraint(leaf, rows)

    def _split(self, path: KeyPath[Any], leaf: jax.Array) -> jax.Array:
        assert self.mesh is not None
        if not np.shape(leaf):
            return leaf
        if np.shape(leaf)[0] % self.parts:
            self._require_divisible(path, int(np.shape(leaf)[0]))
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, PartitionSpec()))
        return self._on_rows(leaf)

    def _require_divisible(self, path: KeyPath[Any], rows: int) -> None:
        if self.uneven == "whole":
            return
        below, above = rows // self.parts * self.parts, (rows // self.parts + 1) * self.parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"batches{jax.tree_util.keystr(path)} has {rows} rows, which do not divide equally over "
            f"{self.parts} devices. Use {nearest} rows, Trainer(..., uneven='whole') to draw such a batch on "
            "every device, or uneven='pad' to pad it with rows that a mask excludes."
        )

    # On the host

    def local_rows(self, size: int) -> np.ndarray[Any, Any] | None:
        """The rows of a batch, without padding, that this process needs, ascending; `None` for all."""
        if self.mesh is None or not self._spans or self.filled(size) % self.parts:
            return None
        # Unique, since padding repeats the last row and the source must read no row twice.
        indices = [np.arange(rows.start, rows.stop) for rows in self._rows_of(self.filled(size)).values()]
        return np.unique(np.minimum(np.concatenate(indices), size - 1))

    def shard_stacks(self, stacks: Batches, sizes: Mapping[str, Any]) -> Batches:
        """Batches of several steps on the devices, the rows of each step split over them.

        Args:
            stacks: a pytree of host arrays of shape `(steps, rows, ...)`; they have all rows of a batch, or
                those of `local_rows`.
            sizes: a pytree of the same structure: the number of rows of a batch; 0 for a leaf to replicate.
        """
        return jax.tree.map(self._shard_stack, stacks, sizes)

    def _shard_stack(self, leaf: np.ndarray[Any, Any], size: int) -> jax.Array:
        if not size or self.filled(size) % self.parts:
            return self._everywhere(leaf)
        # Only a source that fetches the rows of this process alone returns fewer than the batch has.
        local = self.local_rows(size)
        if local is None or leaf.shape[1] == size:
            local = np.arange(size)
        parts = []
        for device, rows in self._rows_of(self.filled(size)).items():
            wanted = np.minimum(np.arange(rows.start, rows.stop), size - 1)
            piece = np.take(np.asarray(leaf), np.searchsorted(local, wanted), axis=1)
            parts.append(jax.device_put(piece, device, may_alias=False))
        shape = (len(leaf), self.filled(size), *leaf.shape[2:])
        return jax.make_array_from_single_device_arrays(shape, self._stacks, parts)

    def _everywhere(self, leaf: ArrayLike) -> jax.Array:
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return processes.replicate(leaf, sharding) if self._spans else jax.device_put(leaf, sharding)

    @property
    def _spans(self) -> bool:
        return not self._stacks.is_fully_addressable

    @property
    def _stacks(self) -> NamedSharding:
        """The sharding of batches of several steps, whose second axis is rows."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(None, self.axis))

    def _rows_of(self, size: int) -> dict[jax.Device, slice]:
        """The rows of a batch on each device of this process."""
        slices = self._stacks.addressable_devices_indices_map((1, size)).items()
        return {device: slice(*index[1].indices(size)[:2]) for device, index in slices if index is not None}
