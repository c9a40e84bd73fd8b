"""Rows on the host: the batches of the resident sampler, wherever the rows lie; and datasets of others."""

import json
import re

import grain
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import (
    DatasetSampler,
    HostPool,
    NamedBatchSource,
    RandomRowSampler,
    ShuffledRowSampler,
    UniformDomainSampler,
    keys,
)
from phijax_rng.sampling import HostedRowSampler, HostSampler, from_pools
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import resumed
from tests._selection import mostly_full

KEY = keys.split_root(0).sampling
N = 500


def rows_of(n=N):
    """Rows with ties in `inputs`, in dtypes that JAX narrows and keeps."""
    index = np.arange(n)
    return {
        "inputs": (index[:, None] % 40 / 7) @ np.ones((1, 2)),
        "targets": index.astype(np.int64),
        "flags": index % 2 == 0,
        "half": index.astype(jnp.bfloat16),
    }


OPTIONS = {
    "distinct": {"replace": False},
    "sorted out": {"replace": False, "method": "sort"},
    "shuffled": {"order": "shuffled"},
    "weighted": {"weights": {"data": np.arange(N) % 3}},
    "weighted, distinct": {"weights": {"data": np.arange(N) % 3}, "replace": False},
    "in ascending order": {"sort_axes": {"data": 1}},
    "shuffled, in ascending order": {"order": "shuffled", "sort_axes": {"data": 0}},
}


def source(resident, pool=None, size=60, **options):
    """A big pool and a small box, in one source."""
    return NamedBatchSource.from_pools(
        {"data": pool or rows_of()}, {"data": size}, KEY, resident=resident, **options
    )


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("options", mostly_full(OPTIONS, everyday=["shuffled, in ascending order"]))
def test_batches_do_not_depend_on_where_the_rows_are_stored(options):
    resident, on_disk = source(True, **options), source(False, **options)
    assert (resident.traceable, on_disk.traceable) == (True, False)
    batches = [resident(step) for step in (0, 7, 8, 9)]
    for step, batch in zip((0, 7, 8, 9), batches, strict=True):
        assert_trees_bitwise_equal(on_disk(step), on_host(batch), dict_order=False)
    together = jax.tree.map(lambda *leaves: np.stack(leaves), *batches[1:])
    assert_trees_bitwise_equal(on_disk.stacked_batches(range(7, 10), 5), together, dict_order=False)
    assert first_difference(on_disk(8), on_host(batches[1]), dict_order=False) is not None
    assert on_disk.describe() == resident.describe()


def test_diagnostics_are_drawn_from_the_host_too():
    on_disk, resident = source(False), source(True)
    drawn = on_disk.sample(KEY, {"data": 9}), on_host(resident.sample(KEY, {"data": 9}))
    assert_trees_bitwise_equal(*drawn, dict_order=False)


def test_the_size_all_takes_every_row_on_the_host_too():
    assert_trees_bitwise_equal(
        source(False, size="all")(3), on_host(source(True, size="all")(3)), dict_order=False
    )


class Chunked:
    """What HDF5, Zarr and Dask arrays have in common; notes what is read."""

    def __init__(self, array):
        self.array, self.read = array, []
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, (64,)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        assert (np.diff(rows) > 0).all(), "HDF5 wants ascending numbers"
        self.read.append(rows)
        return self.array[rows]


def memory_map(path, array):
    np.save(path / "rows.npy", array)
    return np.load(path / "rows.npy", mmap_mode="r")


def hdf5(path, array):
    with h5py.File(path / "rows.h5", "w") as file:
        file["rows"] = array
    return h5py.File(path / "rows.h5", "r")["rows"]


def hdf5_in_chunks(path, array):
    with h5py.File(path / "rows.h5", "w") as file:
        file.create_dataset("rows", data=array, chunks=(64, 2))
    return h5py.File(path / "rows.h5", "r")["rows"]


@pytest.mark.parametrize(
    "options", [{}, {"order": "shuffled", "sort_axes": {"data": 0}}], ids=["random", "shuffled"]
)
@pytest.mark.parametrize("store", [memory_map, hdf5_in_chunks, lambda path, array: Chunked(array)])
def test_rows_on_disk_are_read_as_they_are_needed(tmp_path, store, options):
    array = rows_of()["inputs"].astype(np.float32)
    stored = store(tmp_path, array)
    on_disk = source(False, HostPool(stored), **options)
    resident = source(True, HostPool(array), **options)
    for step in (0, 3):
        assert_trees_bitwise_equal(on_disk(step), on_host(resident(step)))
    if isinstance(stored, Chunked):
        assert [len(rows) <= 60 for rows in stored.read] == [True, True]


def test_a_contiguous_hdf5_dataset_is_read_into_memory_since_it_has_no_chunks(tmp_path):
    array = rows_of()["inputs"].astype(np.float32)
    batch = source(False, HostPool(hdf5(tmp_path, array)))(3)
    assert_trees_bitwise_equal(batch, on_host(source(True, HostPool(array))(3)))


def test_auto_places_on_the_device_what_fits_the_smallest_first(monkeypatch):
    pools = {
        name: {"inputs": np.zeros((rows, 1), np.float32)} for name, rows in (("a", 100), ("b", 10), ("c", 50))
    }
    sizes = dict.fromkeys(pools, 4)

    def hosted_with(room):
        monkeypatch.setattr(from_pools, "_RESIDENT_BYTES", room)
        made = NamedBatchSource.from_pools(pools, sizes, KEY)
        return [name for name, sampler in made.samplers.items() if isinstance(sampler, HostSampler)]

    assert hosted_with(10**6) == []
    assert hosted_with(240) == ["a"]
    assert hosted_with(239) == ["a", "c"]
    assert hosted_with(39) == ["a", "b", "c"]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_resident_is_one_of_three_values(value):
    message = f"resident must be one of True, False, 'auto', got {value!r}. Pick one of them."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        source(value)


def test_a_source_mixes_rows_on_the_host_and_points_on_the_device():
    samplers = {
        "pde": UniformDomainSampler([(0.1, 0.7)]),
        "data": HostedRowSampler(ShuffledRowSampler(rows_of())),
    }
    resident = {**samplers, "data": samplers["data"].sampler}
    sizes = {"pde": 8, "data": 8}
    mixed, whole = NamedBatchSource(samplers, sizes, KEY), NamedBatchSource(resident, sizes, KEY)
    for step in (0, 70):
        assert list(mixed(step)) == ["pde", "data"]
        assert_trees_bitwise_equal(on_host(mixed(step)), on_host(whole(step)), dict_order=False)
    assert mixed.samplers["data"] is samplers["data"]
    assert isinstance(mixed.prepare(), NamedBatchSource)


def test_the_last_steps_of_all_can_be_stacked_too():
    on_disk = source(False)
    last = 2**31 - 1
    stacked = on_disk.stacked_batches(range(last - 1, last + 1), 5)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), on_disk(last - 1), on_disk(last))
    assert_trees_bitwise_equal(stacked, expected, dict_order=False)


def fit(problem, stop, folder=None, **options):
    """A regression on a pool that lies where `resident` says."""
    pools = {"data": problem.datamodule.pools["data"]}
    source = NamedBatchSource.from_pools(pools, {"data": 4}, problem.state().sampling_key, **options)
    return resumed(problem, stop, folder, source=source, saves={"every_n_steps": 50}).state


@pytest.mark.parametrize("order", mostly_full(["random", "shuffled"], everyday=["shuffled"]))
def test_a_run_on_rows_of_the_host_is_the_run_on_resident_rows_and_resumes(tmp_path, order):
    problem = _problems.dropout()
    resident = fit(problem, 150, resident=True, order=order)
    assert_trees_bitwise_equal(fit(problem, 150, resident=False, order=order), resident)
    fit(problem, 70, tmp_path, resident=False, order=order)
    assert_trees_bitwise_equal(fit(problem, 150, tmp_path, resident=False, order=order), resident)


# Datasets


class Elements:
    """The least that a dataset offers."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, number):
        return tuple(column[number] for column in self.columns)


POOL = {"inputs": np.arange(60, dtype=np.float32).reshape(30, 2), "targets": np.arange(30, dtype=np.int32)}
DATASETS = {
    "a list of dicts": [{name: array[i] for name, array in POOL.items()} for i in range(30)],
    "a dataset of tuples": Elements(*POOL.values()),
    "Grain": grain.MapDataset.range(30).map(lambda i: {name: array[i] for name, array in POOL.items()}),
    "shuffled Grain": grain.MapDataset.source(Elements(*POOL.values()))
    .shuffle(seed=3)
    .map(lambda element: {"inputs": element[0], "targets": element[1]}),
}


@pytest.mark.parametrize("order", mostly_full(["random", "shuffled"], everyday=["shuffled"]))
@pytest.mark.parametrize("dataset", mostly_full(DATASETS, everyday=["a list of dicts", "shuffled Grain"]))
def test_elements_of_a_dataset_are_the_rows_of_the_pool_they_make_up(dataset, order):
    rows = [dataset[i] for i in range(30)]
    columns = [tuple(row.values()) if isinstance(row, dict) else row for row in rows]
    pool = {name: np.stack([row[k] for row in columns]) for k, name in enumerate(POOL)}
    of_dataset = NamedBatchSource.from_pools({"data": dataset}, {"data": 8}, KEY, order=order)
    of_pool = NamedBatchSource.from_pools({"data": pool}, {"data": 8}, KEY, order=order)
    assert not of_dataset.traceable
    for step in (0, 5):
        assert_trees_bitwise_equal(of_dataset(step), on_host(of_pool(step)), dict_order=False)
    json.dumps(of_dataset.describe())


def test_arrays_and_numbers_are_datasets_of_inputs():
    for dataset in (POOL["inputs"], POOL["inputs"].tolist()):
        rows = DatasetSampler(dataset).gather(np.array([[3, 4], [0, 0]]))
        np.testing.assert_array_equal(rows["inputs"], POOL["inputs"][[[3, 4], [0, 0]]])
    assert DatasetSampler([1.0, 2.0]).gather(np.array([1]))["inputs"].tolist() == [2.0]


@pytest.mark.full
def test_elements_can_be_weighted_and_distinct():
    weights = np.arange(30) % 2
    sampler = DatasetSampler(DATASETS["Grain"], weights=weights, replace=False)
    assert sorted(sampler.sample(KEY, 15)["targets"].tolist()) == list(range(1, 30, 2))


REFUSED = {
    "an iterable": (
        lambda: DatasetSampler({1, 2}),
        TypeError,
        "dataset must offer len(dataset) and dataset[i], got {1, 2}. Wrap an iterable in an IterableSource.",
    ),
    "an endless dataset": (
        lambda: DatasetSampler(grain.MapDataset.range(5).repeat()),
        ValueError,
        f"len(dataset) must be in [1, 2**31), got {2**63 - 1}. Pick a number inside the range.",
    ),
    "text": (
        lambda: DatasetSampler(["a", "b"]),
        TypeError,
        "dataset[0]['inputs'] must hold numbers, got dtype <U1. Convert the rows to one numeric dtype.",
    ),
    "a filtered element": (
        lambda: DatasetSampler(grain.MapDataset.range(5).filter(lambda i: i % 2 == 0)).gather(np.array([1])),
        TypeError,
        "dataset[1]['inputs'] must hold numbers, got dtype object. Convert the rows to one numeric dtype.",
    ),
    "elements that differ": (
        lambda: DatasetSampler([[1.0], [1.0, 2.0]]).gather(np.array([0, 1])),
        ValueError,
        "all elements of a dataset must have the fields and shapes of the first, got "
        "{'inputs': 'float64[2]'} beside {'inputs': 'float64[1]'}. Make them alike.",
    ),
    "two ways at once": (
        lambda: source(True, order="shuffled", replace=False),
        ValueError,
        "order='shuffled' takes every row once per epoch, which contradicts replace=False. Pass one of them.",
    ),
    "shuffled weights": (
        lambda: source(True, order="shuffled", weights={"data": np.ones(N)}),
        ValueError,
        "order='shuffled' takes every row once per epoch, which contradicts weights. Pass one of them.",
    ),
    "an unknown order": (
        lambda: source(True, order="bogus"),
        ValueError,
        "order must be one of 'random', 'shuffled', got 'bogus'. Pick one of them.",
    ),
    "weights of no pool": (
        lambda: source(True, weights={"other": [1.0]}),
        ValueError,
        "weights names 'other', but there is only 'data'. Drop it, or add what it names.",
    ),
    "a sorted dataset": (
        lambda: source(True, DATASETS["Grain"], size=5, sort_axes={"data": 0}),
        ValueError,
        "sort_axes names 'data', a dataset, whose batches are not sorted. Drop it, or pass arrays.",
    ),
    "too many distinct elements": (
        lambda: source(True, DATASETS["Grain"], size=31, replace=False),
        ValueError,
        "batch_sizes['data'] must be at most the 30 rows of the pool when replace=False, got 31. "
        "Use 'all', a smaller size, or replace=True.",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_sizes_that_a_sampler_cannot_serve_are_rejected(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_another_dataset_has_other_contents():
    one, same, other = (
        DatasetSampler([[float(i + shift)] for i in range(10)]).contents() for shift in (0, 0, 1)
    )
    assert list(one) == ["10 of 10 elements"]
    assert_trees_bitwise_equal(one, same)
    assert first_difference(one, other) is not None


def test_a_hosted_sampler_takes_rows_off_the_device():
    fields = {"inputs": jnp.arange(6.0)[:, None]}
    sampler = HostedRowSampler(RandomRowSampler(fields))
    assert isinstance(sampler.sampler.fields["inputs"], np.ndarray)
    assert_trees_bitwise_equal(sampler.sample(KEY, 4), on_host(RandomRowSampler(fields).sample(KEY, 4)))
