"""Finite pools of rows on the host.

A `HostPool` is the list of rows that a sampler picks from: `inputs`, and with them optional
`targets` and `aux`, all with the same number of rows. It never changes after construction.
This module knows NumPy only; the sampler puts the rows on a device.

>>> pool = HostPool(inputs=[[0.0], [0.5], [1.0]], targets=[0.0, 1.0, 0.0])
>>> pool.num_rows, sorted(pool.fields())
(3, ['inputs', 'targets'])
"""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.validation import formatted

# The copies that were made here. Read-only arrays of others are no copies: their owner may write into them.
_own: "weakref.WeakValueDictionary[int, np.ndarray[Any, Any]]" = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, eq=False)
class HostPool:
    """Immutable rows on the host.

    Arrays are copied and made read-only. Memory maps, and chunked arrays on disk that offer
    `shape`, `dtype`, `chunks` and indexing (an HDF5 dataset, a Zarr array), are
    not copied: writing to their file changes the pool. Dtypes stay, in native byte order; JAX narrows 64-bit
    values on a device unless x64 is on. Masked or missing entries, and dtypes that JAX does not have, raise.

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


@runtime_checkable
class _Series(Protocol):
    """A column of a table, as pandas has it, which knows its missing values."""

    dtype: Any

    def to_numpy(self) -> Any: ...

    def isna(self) -> Any: ...


@runtime_checkable
class Frame(Protocol):
    """A table with named columns, as pandas has it."""

    columns: Any

    def items(self) -> Any:
        """Name and column of each."""
        ...

    def to_numpy(self) -> Any:
        """The table as one array."""
        ...


class NativeRows:
    """Rows on disk in another byte order, converted as they are read; JAX has native order only."""

    chunks = None

    def __init__(self, rows: Any):
        self._rows = rows
        self.shape, self.dtype = tuple(rows.shape), rows.dtype.newbyteorder("=")

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, where: Any) -> np.ndarray[Any, Any]:
        return np.asanyarray(self._rows[where]).astype(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asanyarray(self._rows).astype(self.dtype if dtype is None else dtype)


def as_fields(fields: Any) -> dict[str, Any]:
    """The checked fields of a pool, of a mapping from field name to array, or of a table with named columns.

    Arrays on a device stay there; the others are stored as by `HostPool`.
    """
    if isinstance(fields, _HasFields):
        fields = fields.fields()
    elif isinstance(fields, Frame):
        validation.names(list(fields.columns), "columns")
        fields = dict(fields.items())
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


def _checked(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        raise TypeError(f"{name} must be an array, got {formatted(value)}. Put named extras into aux.")
    if hasattr(value, "block_until_ready"):
        return _check_array(value, name)
    if not _is_lazy(value):
        return _check_array(numbers(value, name), name)
    if isinstance(value, np.memmap):
        value = value.view()
        value.flags.writeable = False
    _check_array(value, name)
    return value if value.dtype.isnative else NativeRows(value)


def numbers(value: object, name: str) -> np.ndarray[Any, Any]:
    """A read-only copy of `value` as a NumPy array of a dtype that JAX has, in native byte order.

    What this function returned is not copied again.

    Raises:
        TypeError: it does not hold numbers, or numbers of a dtype that JAX does not have.
        ValueError: rows of several shapes, or entries that are masked or missing.
    """
    known = _own.get(id(value))
    if known is not None and known is value and not known.flags.writeable:
        return known
    if not isinstance(value, (np.ndarray, np.generic, list, tuple, int, float)):
        value = _of_table(value, name)
    try:
        array = np.array(value, subok=True)
    except TypeError:  # of keys
        _check_dtype(getattr(value, "dtype", type(value).__name__), name)
        raise
    except ValueError as error:
        raise ValueError(
            f"{name} must be an array, and its rows do not have one shape. "
            "Give every row equally many entries."
        ) from error
    if _has_masked(value):
        _refuse_masked(name)
    plain = unmasked(array, name)
    _check_dtype(plain.dtype, name)
    plain = plain.astype(plain.dtype.newbyteorder("="), copy=False)
    plain.flags.writeable = False
    _own[id(plain)] = plain
    return plain


def _of_table(value: object, name: str) -> object:
    """A table column by column, rows on disk, a column without missing values; anything else as it is."""
    if isinstance(value, Frame):
        columns = [numbers(column, f"{name}[{label!r}]") for label, column in value.items()]
        return np.column_stack(columns) if columns else np.zeros((0, 0))
    if _is_lazy(value):
        return value[:]  # type: ignore[index]
    if isinstance(value, _Series) and not isinstance(value.dtype, np.dtype) and np.any(value.isna()):
        _refuse_masked(name)
    return value


def unmasked(array: object, name: str) -> np.ndarray[Any, Any]:
    """What was read, without a mask; NumPy and JAX would take what is under it.

    Raises:
        ValueError: something is masked.
    """
    if np.ma.is_masked(array):
        _refuse_masked(name)
    return np.asarray(array)


def _has_masked(value: object) -> bool:
    """Whether something in nested lists is masked: NumPy drops the masks of arrays in a list."""
    if not isinstance(value, (list, tuple)):
        return np.ma.is_masked(value)
    return any(_has_masked(entry) for entry in value if isinstance(entry, (list, tuple, np.ma.MaskedArray)))


def _refuse_masked(name: str) -> None:
    raise ValueError(
        f"{name} has masked or missing entries, which have no number. "
        "Drop their rows, or fill them with .filled(number) or .fillna(number)."
    )


def _check_dtype(dtype: Any, name: str) -> None:
    is_plain = isinstance(dtype, np.dtype) and not dtype.names and not issubclass(dtype.type, np.void)
    if not is_plain or dtype.kind not in "biufcV":
        raise TypeError(
            f"{name} must hold numbers, got dtype {dtype}. Convert the rows to one numeric dtype."
        )
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        narrow = "float64" if dtype.kind == "f" else "complex128"
        raise TypeError(
            f"{name} has dtype {dtype}, which JAX does not have. Convert it with .astype(np.{narrow})."
        )


def _check_array(value: Any, name: str) -> Any:
    _check_dtype(value.dtype, name)
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
