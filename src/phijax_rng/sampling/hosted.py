"""Rows that stay on the host: chosen by the same keys on the device, fetched by their numbers.

    key, step --device--> row numbers --host--> rows        memory maps, HDF5, Zarr, datasets of any kind

A hosted sampler has two parts. Its `chooser` is a sampler like any other, whose one field is the numbers of
the rows; it is drawn inside a compiled program, for many steps at once. Its `gather` fetches these rows.
The chooser draws what the resident sampler would draw, so batches do not depend on where the rows are stored.

>>> import jax
>>> sampler = DatasetSampler([{"inputs": [float(i)]} for i in range(5)], order="shuffled")
>>> sorted(sampler.gather(sampler.choose(jax.random.key(0), 5))["inputs"].ravel().tolist())
[0.0, 1.0, 2.0, 3.0, 4.0]
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from phijax_rng._base import pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import BatchSize, KeyScalar, Rows, Step
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.pools import Frame, as_fields, numbers, unmasked
from phijax_rng.sampling.protocols import INDEX, StepSampler
from phijax_rng.sampling.rows import (
    METHODS,
    ORDERS,
    RandomRowSampler,
    ShuffledRowSampler,
    describe_fields,
    require_narrow,
)
from phijax_rng.sampling.weighted import WeightedRowSampler

RowSampler: TypeAlias = RandomRowSampler | ShuffledRowSampler | WeightedRowSampler

# A contract reads this many elements of a dataset: enough to notice another one, in a moment.
_ELEMENTS_OF_CONTRACT = 64


@runtime_checkable
class Dataset(Protocol):
    """Elements by number, as `DatasetSampler` takes them."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


@pytrees.record(data=("sampler",))
@dataclasses.dataclass(frozen=True, eq=False)
class Chooser:
    """The row numbers that a sampler draws from a key."""

    sampler: Any

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """`{"index": int32 of shape (size,)}`."""
        return {INDEX: _every(self.sampler) if size == "all" else self.sampler.choose(key, int(size))}


@pytrees.record(data=("sampler",))
@dataclasses.dataclass(frozen=True, eq=False)
class StepChooser:
    """The row numbers that a sampler draws from a key and a step."""

    sampler: Any

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """`{"index": int32 of shape (size,)}`."""
        return self.sample_at(key, 0, size)

    def sample_at(self, key: KeyScalar, step: Step, size: BatchSize) -> Rows:
        """`{"index": int32 of shape (size,)}`."""
        chosen = _every(self.sampler) if size == "all" else self.sampler.choose_at(key, step, int(size))
        return {INDEX: chosen}


class _FetchedRows:
    """What the samplers of this module share: `sampler` draws the numbers that `gather` fetches."""

    sampler: Any

    @property
    def chooser(self) -> Chooser | StepChooser:
        """What draws row numbers: `sampler` without its rows."""
        # What it draws from has as many rows, and none of their values.
        bare = _with_fields(self.sampler, _numbered(self.num_rows))
        return StepChooser(bare) if isinstance(self.sampler, StepSampler) else Chooser(bare)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self.sampler.num_rows)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many rows."""
        if not isinstance(self.sampler, ShuffledRowSampler):  # an epoch ends within any batch
            self.sampler.check_size(size, name)

    def sample(self: Any, key: KeyScalar, size: BatchSize) -> Rows:
        """Rows by field name, as NumPy arrays."""
        self.check_size(validation.batch_size(size, "size"), "size")
        return dict(self.gather(np.asarray(self.chooser.sample(key, size)[INDEX])))


@dataclasses.dataclass(frozen=True, eq=False)
class HostedRowSampler(_FetchedRows):
    """A sampler of a pool whose rows stay on the host, with the batches of the sampler that it wraps.

    Attributes:
        sampler: a `RandomRowSampler`, `ShuffledRowSampler` or `WeightedRowSampler`. Its arrays may be memory
            maps, HDF5 datasets, Zarr or Dask arrays; only the rows of a batch are read.
    """

    sampler: Any

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, (RandomRowSampler, ShuffledRowSampler, WeightedRowSampler)):
            raise TypeError(
                f"sampler must be a sampler of rows of a pool, got {formatted(self.sampler)}. "
                "Pass a RandomRowSampler, ShuffledRowSampler or WeightedRowSampler."
            )
        on_host = jax.tree.map(
            lambda array: np.asarray(array) if isinstance(array, jax.Array) else array, self.sampler.fields
        )
        assign(self, sampler=_with_fields(self.sampler, on_host))

    def gather(self, index: np.ndarray[Any, Any]) -> Rows:
        """The rows with these numbers, in the dtypes that JAX would give them."""
        return _sorted(fetch(self.sampler.fields, np.asarray(index)), self.sampler.sort_axis)

    def contents(self) -> dict[str, Any]:
        """What the sampler picks from."""
        return dict(self.sampler.contents())

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract: it does not say where the rows are stored."""
        return dict(self.sampler.describe())


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetSampler(_FetchedRows):
    """Elements of a dataset that offers `len(dataset)` and `dataset[i]`, fetched on the host.

    Grain's `MapDataset`, a PyTorch dataset of arrays, a NumPy array, a list: an element is a mapping from
    field name to array, or one array (field `inputs`), or a tuple of two (`inputs`, `targets`). All elements
    have the shapes and dtypes of the first. Element i must be the same at every access.

    Attributes:
        dataset: the elements.
        order: `"random"` for elements picked uniformly, `"shuffled"` for every element once per epoch
            (as `ShuffledRowSampler`).
        replace: with `order="random"`, whether an element may come twice in one batch.
        weights: one for each element, to pick them in proportion (as `WeightedRowSampler`); `None` for
            all alike.
    """

    dataset: Any
    _: dataclasses.KW_ONLY
    order: str = "random"
    replace: bool = True
    weights: Any = None
    sampler: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.dataset, np.ndarray) and is_dataset(self.dataset):
            assign(self, dataset=as_fields({"inputs": self.dataset})["inputs"])
        assign(self, sampler=self._numbers())
        self.gather(np.zeros(1, np.int32))

    def _numbers(self) -> Any:
        if isinstance(self.dataset, Frame):
            raise TypeError(
                f"dataset must hold elements by number, got {formatted(self.dataset)} with named columns. "
                "Pass it as a pool, which takes it column by column."
            )
        if not is_dataset(self.dataset):
            raise TypeError(
                f"dataset must offer len(dataset) and dataset[i], got {formatted(self.dataset)}. "
                "Wrap an iterable in an IterableSource."
            )
        validation.one_of(self.order, "order", ORDERS)
        count = validation.whole_number(len(self.dataset), "len(dataset)", 2**31, start=1)
        return row_sampler(_numbered(count), order=self.order, replace=self.replace, weights=self.weights)

    def choose(self, key: KeyScalar, size: int) -> jax.Array:
        """The numbers of the elements that `sample` gives."""
        return self.sampler.choose(key, size)

    def gather(self, index: np.ndarray[Any, Any]) -> Rows:
        """The elements with these numbers, stacked field by field."""
        index = np.asarray(index)
        rows = _stacked([_element(self.dataset, number) for number in index.ravel().tolist()])
        return jax.tree.map(lambda array: array.reshape(*index.shape, *array.shape[1:]), rows)

    def contents(self) -> dict[str, Any]:
        """Up to 64 elements, evenly spaced, whose digest goes into the contract."""
        count = min(self.num_rows, _ELEMENTS_OF_CONTRACT)
        numbers = np.linspace(0, self.num_rows - 1, count).round().astype(np.int64)
        elements = {f"{count} of {self.num_rows} elements": self.gather(numbers)}
        return elements if self.weights is None else {**elements, "weights": self.sampler.weights}

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            **self.sampler.describe(),
            "kind": "DatasetSampler",
            "fields": describe_fields({k: v[0] for k, v in self.gather(np.zeros(1, np.int32)).items()}),
            "order": self.order,
        }


def row_sampler(
    fields: object,
    *,
    order: str = "random",
    replace: bool = True,
    method: str = "permutation",
    weights: object = None,
    sort_axis: int | None = None,
) -> RowSampler:
    """The sampler of rows of a pool that these options of `NamedBatchSource.from_pools` name."""
    validation.one_of(method, "method", METHODS)
    if method != "permutation" and (order == "shuffled" or weights is not None):
        option = "order='shuffled'" if order == "shuffled" else "weights"
        raise ValueError(
            f"method={method!r} is for random rows without weights, got {option}. Drop one of them."
        )
    if validation.one_of(order, "order", ORDERS) == "shuffled":
        if weights is not None or not validation.flag(replace, "replace"):
            option = "weights" if weights is not None else "replace=False"
            raise ValueError(
                f"order='shuffled' takes every row once per epoch, which contradicts {option}. "
                "Pass one of them."
            )
        return ShuffledRowSampler(fields, sort_axis=sort_axis)
    if weights is not None:
        return WeightedRowSampler(fields, weights, replace, sort_axis=sort_axis)
    return RandomRowSampler(fields, replace, method, sort_axis=sort_axis)


def is_dataset(value: object) -> bool:
    """Whether `value` offers elements by number, and is neither text nor a mapping."""
    return (
        isinstance(value, Dataset)
        and not isinstance(value, (str, bytes, Mapping, Frame))
        and getattr(value, "shape", None) != ()  # an array without axes has __len__, and raises
    )


def fetch(fields: Mapping[str, Any], index: np.ndarray[Any, Any]) -> Rows:
    """These rows of every field, as NumPy arrays in the dtypes that JAX would give them."""
    labels = {name: f"fields[{name!r}]" for name in fields}
    return {
        name: _narrowed(unmasked(_picked(array, index), labels[name]), labels[name])
        for name, array in fields.items()
    }


def _stacked(elements: list[dict[str, Any]]) -> Rows:
    """Elements of one structure, stacked leaf by leaf."""
    columns = [jax.tree.flatten(element) for element in elements]
    shapes = [[np.shape(leaf) for leaf in leaves] for leaves, _ in columns]
    for element, (_, structure), shape in zip(elements, columns, shapes, strict=True):
        if (structure, shape) != (columns[0][1], shapes[0]):
            raise ValueError(
                f"all elements of a dataset must have the fields and shapes of the first, got "
                f"{_outline(element)} beside {_outline(elements[0])}. Make them alike."
            )
    arrays = [np.stack(leaves) for leaves in zip(*(leaves for leaves, _ in columns), strict=True)]
    stacked = jax.tree.unflatten(columns[0][1], arrays)
    return dict(
        jax.tree_util.tree_map_with_path(
            lambda path, array: _narrowed(array, f"dataset[...]{jax.tree_util.keystr(path)}"), stacked
        )
    )


def _picked(array: Any, index: np.ndarray[Any, Any]) -> Any:
    if isinstance(array, (np.ndarray, jax.Array)) and not isinstance(array, np.memmap):
        return np.take(np.asarray(array), index, axis=0)
    # In ascending order and each once: HDF5 demands it, and a disk likes it.
    rows, positions = np.unique(index, return_inverse=True)
    return np.asanyarray(array[rows])[positions.reshape(index.shape)]


def _narrowed(array: np.ndarray[Any, Any], label: str) -> np.ndarray[Any, Any]:
    require_narrow(array, label)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _sorted(rows: Rows, sort_axis: int | None) -> Rows:
    if sort_axis is None:
        return rows
    order = np.argsort(rows["inputs"][..., sort_axis], axis=-1, kind="stable")

    def ordered(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        positions = order.reshape(*order.shape, *(1,) * (array.ndim - order.ndim))
        return np.take_along_axis(array, positions, axis=order.ndim - 1)

    return jax.tree.map(ordered, rows)


def _element(dataset: Any, number: int) -> dict[str, Any]:
    element = dataset[number]
    if isinstance(element, Mapping):
        fields = dict(element)
    elif isinstance(element, tuple) and len(element) == 2:
        fields = {"inputs": element[0], "targets": element[1]}
    elif isinstance(element, tuple) and any(map(np.ndim, element)):
        raise TypeError(
            f"dataset[{number}] must be an array, a pair (inputs, targets) or a dict of fields, got the "
            f"tuple {formatted(element)}. Return a dict that names each."
        )
    else:
        fields = {"inputs": element}
    if not fields:
        raise ValueError(
            f"dataset[{number}] must have at least one field, got {formatted(element)}. Name what it holds."
        )
    return dict(
        jax.tree_util.tree_map_with_path(
            lambda path, leaf: numbers(leaf, f"dataset[{number}]{jax.tree_util.keystr(path)}"),
            fields,
            is_leaf=lambda leaf: not isinstance(leaf, Mapping),
        )
    )


def _with_fields(sampler: object, fields: object) -> Any:
    other = copy.copy(sampler)
    assign(other, fields=fields)
    return other


def _numbered(count: int) -> dict[str, Any]:
    """`count` rows that take no memory."""
    return {"inputs": np.zeros((count, 0), np.float32)}


def _every(sampler: Any) -> jax.Array:
    return jax.numpy.arange(sampler.num_rows, dtype=np.int32)


def _outline(element: object) -> str:
    return str(jax.tree.map(lambda leaf: f"{np.asarray(leaf).dtype}{list(np.shape(leaf))}", element))
