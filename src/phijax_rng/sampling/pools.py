"""Finite pools of rows on the host.

A `HostPool` is the list of rows that a sampler picks from: `inputs`, and with them optional
`targets` and `aux`, all with the same number of rows. It never changes after construction.
This module knows NumPy only; the sampler puts the rows on a device.

>>> pool = HostPool(inputs=[[0.0], [0.5], [1.0]], targets=[0.0, 1.0, 0.0])
>>> pool.num_rows, sorted(pool.fields())
(3, ['inputs', 'targets'])
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.validation import formatted


@dataclasses.dataclass(frozen=True, eq=False)
class HostPool:
    """Immutable rows on the host.

    Arrays are copied and made read-only. Memory maps, and chunked arrays on disk that offer
    `shape`, `dtype`, `chunks` and indexing (an HDF5 dataset, a Zarr array), are
    not copied: writing to their file changes the pool. Dtypes stay; JAX narrows 64-bit values on a
    device unless x64 is on.

    Attributes:
        inputs: shape `(rows, ...)`.
        targets: shape `(rows, ...)`, or `None` for rows without targets.
        aux: more values of each row, a mapping from field name to an array of shape `(rows, ...)`.
    """

    inputs: Any
    targets: Any = None
    aux: Any = None

    def __post_init__(self) -> None:
        for name in ("inputs", "targets", "aux"):
            value = getattr(self, name)
            if name == "inputs" or value is not None:
                checked = _checked_aux(value) if name == "aux" else _checked(value, name)
                assign(self, **{name: checked})
        _check_equally_many(self.fields())

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self.inputs.shape[0])

    def fields(self) -> dict[str, Any]:
        """The fields that are present, by name; with the entries of `aux`."""
        named = {"inputs": self.inputs, "targets": self.targets, **(self.aux or {})}
        return {name: value for name, value in named.items() if value is not None}

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={array.dtype}[{', '.join(map(str, array.shape))}]"
            for name, array in self.fields().items()
        )
        return f"HostPool({shown})"


@runtime_checkable
class _HasFields(Protocol):
    """A `HostPool`, or what offers its fields alike."""

    def fields(self) -> Mapping[str, Any]: ...


def as_fields(fields: Any) -> dict[str, Any]:
    """The checked fields of a pool, or of a mapping from field name to array.

    Arrays on a device stay there; the others are stored as by `HostPool`.
    """
    if isinstance(fields, _HasFields):
        fields = fields.fields()
    validation.mapping(fields, "fields")
    checked = {name: _checked(value, f"fields[{name!r}]") for name, value in fields.items()}
    _check_equally_many(checked)
    return checked


def _checked_aux(aux: Any) -> dict[str, Any]:
    taken = {"inputs", "targets"} & set(validation.mapping(aux, "aux"))
    if taken:
        raise ValueError(
            f"aux must not have the field {validation.shown(taken)}. Pass it as an argument of HostPool."
        )
    return {name: _checked(value, f"aux[{name!r}]") for name, value in aux.items()}


def _checked(value: object, name: str) -> Any:
    if isinstance(value, Mapping):
        raise TypeError(f"{name} must be an array, got {formatted(value)}. Put named extras into aux.")
    if hasattr(value, "block_until_ready"):
        return _check_array(value, name)
    if not _is_lazy(value):
        value = _copied(value, name)
    elif isinstance(value, np.memmap):
        value = value.view()
        value.flags.writeable = False
    return _check_array(value, name)


def _copied(value: object, name: str) -> np.ndarray[Any, Any]:
    try:
        array = np.array(value)
    except ValueError as error:
        raise ValueError(
            f"{name} must be an array, and its rows do not have one shape. "
            "Give every row equally many entries."
        ) from error
    array.flags.writeable = False
    return array


def _check_array(value: Any, name: str) -> Any:
    dtype = value.dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcV" or dtype.names:
        raise TypeError(
            f"{name} must hold numbers, got dtype {value.dtype}. Convert the rows to one numeric dtype."
        )
    if len(value.shape) == 0:
        raise TypeError(f"{name} must have a leading axis of rows, got a scalar. Pass one entry per row.")
    if value.shape[0] == 0:
        raise ValueError(f"{name} must have at least one row, got shape {tuple(value.shape)}. Fill the pool.")
    return value


def _check_equally_many(fields: Mapping[str, Any]) -> None:
    lengths = {name: int(array.shape[0]) for name, array in fields.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"all fields must have equally many rows; {listed}. Give each one entry per row.")


def _is_lazy(value: object) -> bool:
    """Memory maps, and chunked arrays on disk (HDF5, Zarr, Dask) which have `chunks`."""
    if isinstance(value, np.ndarray):
        return isinstance(value, np.memmap)
    offers = ("shape", "dtype", "chunks", "__getitem__", "__len__")
    return all(hasattr(value, name) for name in offers)
