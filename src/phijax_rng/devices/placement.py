"""The placement of a run on one device or on several.

    state        replicated, or sharded by the user's `shardings(state)`
    batches      split by rows over the data axis, by a constraint inside the compiled program
    all else     replicated: keys, pools, the step to stop at

A batch is drawn with one key on any number of devices: with partitionable Threefry each device computes the
random bits of its own rows, so the rows equal those of one device bit for bit and drawing needs no
communication. On one device the program is the same as without this module.

>>> import jax
>>> place = resolve(1)
>>> place.mesh is None, len(place.devices)
(True, 1)
"""

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng.devices import processes
from phijax_rng.devices.row_sharding import Shares
from phijax_rng.state import TrainState, with_constants_of

T = TypeVar("T")

Devices: TypeAlias = int | np.integer[Any] | Literal["auto"] | jax.Device | Sequence[jax.Device] | Mesh
"""The argument of `resolve`: a number of devices, the devices, or a mesh of them."""

DATA_AXIS = "data"
"""The axis of a mesh that batches are split over; the first axis if none has this name."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices, and the sharding of states and batches on them.

    Attributes:
        devices: all of them, in the order of the mesh.
        mesh: `None` for one device.
        shardings: `state -> shardings`, a pytree (or a prefix of one) whose leaves are shardings,
            `PartitionSpec`s of this mesh, or `None` for a copy on every device.
        uneven: one of `row_sharding.UNEVEN`.
    """

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None = None
    shardings: Callable[[TrainState], Any] | None = None
    uneven: str = "refuse"

    @property
    def replicated(self) -> Sharding:
        """The sharding of replicated arrays."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def host_device(self) -> jax.Device:
        """The first of the devices that belong to this process; computations for the host run there."""
        # A process can use its own devices only, and the first of the mesh may belong to another one.
        index = jax.process_index()
        return next(device for device in self.devices if device.process_index == index)

    @property
    def is_multiprocess(self) -> bool:
        """Whether the devices belong to several processes."""
        return not self.replicated.is_fully_addressable

    @property
    def data_axis(self) -> str:
        """The axis of the mesh that rows are split over."""
        assert self.mesh is not None
        names = self.mesh.axis_names
        return DATA_AXIS if DATA_AXIS in names else str(names[0])

    @property
    def shares(self) -> Shares:
        """Which rows of a batch are on which device."""
        return Shares(self.mesh, "" if self.mesh is None else self.data_axis, self.uneven)

    def of_state(self, state: TrainState) -> Any:
        """The sharding of each leaf of a state, which may be abstract.

        Raises:
            TypeError: `shardings` returns a leaf that is not a sharding.
            ValueError: the shardings do not fit the state.
        """
        if self.mesh is None or self.shardings is None:
            return jax.tree.map(lambda leaf: self.replicated, state)
        shardings = self.shardings(state)
        if isinstance(shardings, TrainState):
            shardings = with_constants_of(shardings, state)
        try:
            full = jax.tree.broadcast(shardings, state, is_leaf=_is_sharding)
        except ValueError as error:
            raise ValueError(
                f"shardings(state) must be a tree like the state, or a prefix of one: {error}. "
                "Return jax.tree.map(rule, state)."
            ) from error
        # By the structure of the state: a `None` in the state is no leaf, one in its place in `full` is.
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        structure: Any = jax.tree.structure(state)
        requested = structure.flatten_up_to(full)
        placed = jax.tree.unflatten(structure, [*map(self._sharding, paths, requested)])
        _require_fit(placed, state)
        return placed

    def place(self, state: TrainState) -> TrainState:
        """A state on its devices and strongly typed; arrays that already are so are not copied.

        With several processes the bits are the primary process's.
        """
        # Each process initializes a state of its own, and another kind of CPU may round it differently.
        return jax.tree.map(_place, state, self.of_state(state))

    def replicate(self, tree: T) -> T:
        """Replicates arrays that every process has; arrays on this mesh are returned as they are."""
        if self.mesh is None:
            return jax.device_put(tree, self.replicated)
        return jax.tree.map(self._replicate, tree)

    def place_if_distributed(self, state: TrainState) -> TrainState:
        """The state to restore into: placed on several devices, unchanged on one."""
        return state if self.mesh is None else self.place(state)

    def _replicate(self, leaf: ArrayLike) -> jax.Array:
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        if isinstance(leaf, jax.Array) and isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return leaf
        if self.is_multiprocess:
            return processes.replicate(leaf, self.replicated)
        return jax.device_put(leaf, self.replicated)

    def constrain(self, state: TrainState, shardings: TrainState) -> TrainState:
        """Constrains the state to its shardings, from `of_state`, inside a compiled program."""
        # On one device the constraint would change the text of the program, and with it the last bits.
        if self.mesh is None:
            return state
        return jax.tree.map(jax.lax.with_sharding_constraint, state, shardings)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract; empty for one device, unless batches have masks."""
        found: dict[str, Any] = {"uneven": self.uneven} if self.shares.pads else {}
        if self.mesh is None:
            return found
        found["devices"] = len(self.devices)
        if len(self.mesh.axis_names) > 1:
            found["mesh"] = {str(name): int(size) for name, size in self.mesh.shape.items()}
        return found

    def describe_state(self, state: TrainState) -> dict[str, Any]:
        """`describe`, and a digest of the shardings of the state if it has any."""
        found = self.describe()
        if self.mesh is None or self.shardings is None:
            return found
        # Specs and not shardings: the text of a sharding has the mesh too, which `describe` compares apart.
        specs = [str(sharding.spec) for sharding in jax.tree.leaves(self.of_state(state))]
        return {**found, "shardings": hashlib.sha256("\n".join(specs).encode()).hexdigest()[:16]}

    def _sharding(self, path: KeyPath[Any], requested: object) -> NamedSharding:
        assert self.mesh is not None
        # A replicated sharding on any other mesh or device means the same copy on every device here.
        if requested is None or (isinstance(requested, Sharding) and requested.is_fully_replicated):
            requested = PartitionSpec()
        spec = requested.spec if isinstance(requested, NamedSharding) else requested
        axes = _axes(spec) if isinstance(spec, PartitionSpec) else []
        if not isinstance(spec, PartitionSpec) or not set(axes) <= set(self.mesh.axis_names):
            raise TypeError(
                f"shardings(state){jax.tree_util.keystr(path)} must be a PartitionSpec over the axes "
                f"{validation.shown(self.mesh.axis_names)}, a NamedSharding of them or None, "
                f"got {requested!r}. Name axes of the mesh."
            )
        if len(set(axes)) < len(axes):
            raise ValueError(
                f"shardings(state){jax.tree_util.keystr(path)} names an axis of the mesh twice, got "
                f"{spec!r}. Split each array over an axis once."
            )
        return NamedSharding(self.mesh, spec)


def on_device(device: jax.Device | None = None) -> Placement:
    """Everything on one device; the default device for `None`."""
    return Placement((device or default_device(),))


def resolve(
    devices: Devices = 1, *, shardings: Callable[[TrainState], Any] | None = None, uneven: str = "refuse"
) -> Placement:
    """The placement for the options of a trainer; starts JAX's backend.

    Args:
        devices: 1 for the default device, a number for that many, `"auto"` for all, a device,
            a sequence of devices, or a mesh, whose axis `"data"` (else the first) the rows are split over.
        shardings: see `Placement`.
        uneven: see `Placement`.

    Raises:
        ValueError: there are fewer devices, or the list is empty.
    """
    if isinstance(devices, jax.Device):
        devices = [devices]
    if isinstance(devices, Mesh):
        # Rows are split by a constraint, which axes of other types than Auto refuse.
        mesh = Mesh(devices.devices, devices.axis_names)
        _require_all_processes(tuple(devices.devices.flat))
        return Placement(tuple(devices.devices.flat), mesh, shardings, uneven)
    chosen = _chosen(devices)
    _require_all_processes(chosen)
    mesh_of_chosen = Mesh(np.array(chosen), (DATA_AXIS,)) if len(chosen) > 1 else None
    return Placement(tuple(chosen), mesh_of_chosen, shardings, uneven)


def require_devices(devices: object) -> Devices:
    """Checks the argument of `resolve` without starting a backend.

    Raises:
        TypeError: it is of another type.
        ValueError: a number that is not positive, an empty list, or a repeated device.
    """
    if isinstance(devices, Mesh):
        return _filled_mesh(devices)
    if isinstance(devices, jax.Device) or (isinstance(devices, str) and devices == "auto"):
        return devices
    if isinstance(devices, (list, tuple)):
        return _distinct(tuple(devices))
    if isinstance(devices, (int, np.integer)) and not isinstance(devices, bool) and devices >= 1:
        return devices
    kind = ValueError if isinstance(devices, str) or validation.is_whole(devices) else TypeError
    raise kind(
        "devices must be a positive int, 'auto', a device, a list of devices or a mesh, "
        f"got {devices!r}. Pass 'auto' to use every device, or jax.devices('cpu') for those of a kind."
    )


def default_device() -> jax.Device:
    """`jax_default_device` if it is set, else the first local device."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]


def _place(leaf: ArrayLike, sharding: Sharding) -> jax.Array:
    # Typed keys have no weak type. A weakly typed leaf (from a Python number) does not fit the program,
    # whose outputs, and so whose next inputs, are strongly typed.
    if not keys.is_typed_key(leaf) and not (isinstance(leaf, jax.Array) and not leaf.weak_type):
        array = np.asarray(leaf)
        # In native byte order, the only one that JAX has.
        leaf = array.astype(jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")))
    if not sharding.is_fully_addressable:
        return processes.place(leaf, sharding)
    # The user may write to the memory of a NumPy array later, so it is never shared.
    return jax.device_put(leaf, sharding, may_alias=isinstance(leaf, jax.Array))


def _chosen(devices: int | np.integer[Any] | str | Sequence[jax.Device]) -> Sequence[jax.Device]:
    if not isinstance(devices, (str, int, np.integer)):
        return tuple(devices)
    if not isinstance(devices, str) and devices == 1:
        return (default_device(),)
    # Of the platform of the default device: with jax_default_device a CPU, jax.devices() still lists GPUs.
    available = jax.devices(default_device().platform)
    if devices == "auto":
        return available
    if int(devices) > len(available):
        raise ValueError(
            f"devices={devices!r} is more than the {len(available)} {available[0].platform} devices "
            "available. Pass 'auto' to use all of them."
        )
    # jax.devices() begins with those of process 0, so its first n may leave a process without any.
    each, left_over = divmod(int(devices), jax.process_count())
    if left_over:
        raise ValueError(
            f"devices={devices!r} does not divide equally over {jax.process_count()} processes. "
            "Pass 'auto' to use every device of each."
        )
    return _first_of_each(available, each)


def _first_of_each(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """The first `count` devices of each process."""
    owners = range(jax.process_count())
    return [d for owner in owners for d in [d for d in devices if d.process_index == owner][:count]]


def _require_all_processes(devices: Sequence[jax.Device]) -> None:
    """Raises if a process would train alone, on the rows that the others train on too."""
    # Equal counts: every process must call each collective, and feeds the same number of rows.
    owners = [device.process_index for device in devices]
    counts = [owners.count(index) for index in range(jax.process_count())]
    if len(set(counts)) > 1:
        raise ValueError(
            f"devices names {', '.join(map(str, counts))} devices of the {len(counts)} processes, but each "
            "must have equally many. Pass devices='auto' to use every device of each."
        )


def _distinct(devices: tuple[jax.Device, ...]) -> tuple[jax.Device, ...]:
    for index, device in enumerate(devices):
        if not isinstance(device, jax.Device):
            raise TypeError(f"devices[{index}] must be a JAX device, got {device!r}. Use jax.devices().")
    if not devices:
        raise ValueError(f"devices must name at least one device, got {devices!r}. Use jax.devices().")
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices must name distinct devices, got {devices!r}. Name each one once.")
    return devices


def _filled_mesh(mesh: Mesh) -> Mesh:
    """Checks a mesh; XLA would end the process for one without devices."""
    if not mesh.axis_names or not np.size(mesh.devices):
        raise ValueError(
            f"devices must be a mesh of at least one axis and one device, got shape {dict(mesh.shape)}. "
            "Use jax.make_mesh."
        )
    _distinct(tuple(mesh.devices.flat))
    return mesh


def _axes(spec: PartitionSpec) -> list[Hashable]:
    """The axes of the mesh that a spec names, in its order."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [axis for entry in entries for axis in entry if axis is not None]


def _is_sharding(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, (PartitionSpec, Sharding))


def _require_fit(placed: TrainState, state: TrainState) -> None:
    """Raises for a leaf whose axes the mesh does not divide."""
    leaves = jax.tree.leaves(state)
    for (path, sharding), leaf in zip(jax.tree_util.tree_leaves_with_path(placed), leaves, strict=True):
        shape = tuple(np.shape(leaf))
        if len(sharding.spec) > len(shape) or not _divides(sharding, shape):
            raise ValueError(
                f"shardings(state){jax.tree_util.keystr(path)} is {tuple(sharding.spec)}, "
                f"which does not divide shape {list(shape)}. Replicate that leaf, or change its shape."
            )


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
