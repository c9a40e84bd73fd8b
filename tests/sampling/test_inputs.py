"""An input gives the same rows, or the same refusal by name, wherever rows are stored."""

import os

import h5py
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
import pytest

from phijax_rng import (
    DatasetSampler,
    HostPool,
    IterableSource,
    NamedBatchSource,
    RandomRowSampler,
    UniformDomainSampler,
    WeightedRowSampler,
    keys,
)
from phijax_rng.resume.contract import digest_contents
from phijax_rng.sampling import HostedRowSampler
from phijax_rng.sampling.adapters import adapt_source
from tests._bitwise import assert_trees_bitwise_equal

KEY = keys.root_key(0)
ROWS = np.arange(12.0).reshape(6, 2)
EVERY = np.arange(6)


class OnDisk:
    """What an HDF5 or Zarr data set offers."""

    chunks = None

    def __init__(self, rows):
        self._rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, where):
        return self._rows[where]


class Tensor:
    """What a tensor of another library offers."""

    def __array__(self, dtype=None, copy=None):
        return ROWS.astype(np.float32)


def _mapped(tmp_path, dtype):
    rows = np.memmap(os.path.join(tmp_path, "rows"), dtype=dtype, mode="w+", shape=ROWS.shape)
    rows[:] = ROWS
    return rows


def _in_hdf5(path):
    return h5py.File(os.path.join(path, "rows.h5"), "w").create_dataset("rows", data=ROWS.astype(">f4"))


GIVEN = {
    **{dtype: (lambda _, d=dtype: ROWS.astype(d)) for dtype in (">f2", ">f4", ">f8", ">i4", ">u2", ">c8")},
    "bool": lambda _: ROWS > 3,
    "bfloat16": lambda _: ROWS.astype(ml_dtypes.bfloat16),
    "masked nowhere": lambda _: np.ma.masked_greater(ROWS, 1e30),
    "matrix": lambda _: ROWS.view(np.matrix),
    "frame": lambda _: pd.DataFrame(ROWS, columns=["a", "b"]),
    "column": lambda _: pd.Series(ROWS[:, 0], index=range(5, -1, -1)),
    "nullable column": lambda _: pd.Series([1, 2, 3, 4, 5, 6], dtype="Int64"),
    "memory map": lambda path: _mapped(path, ">f4"),
    "on disk": lambda _: OnDisk(ROWS.astype(">f4")),
    "HDF5": _in_hdf5,
    "tensor": lambda _: Tensor(),
}


def resident(value):
    source = NamedBatchSource({"p": RandomRowSampler({"x": value})}, {"p": 2}, KEY)
    return source.prepare().samplers["p"].fields["x"]


def on_host(value):
    return HostedRowSampler(RandomRowSampler({"x": value})).gather(EVERY)["x"]


def in_a_pool(value):
    return HostedRowSampler(RandomRowSampler(HostPool(np.zeros(6), aux={"x": value}))).gather(EVERY)["x"]


def in_a_dataset(value):
    return DatasetSampler([{"x": value}]).gather(np.zeros(1, int))["x"][0]


def in_an_iterable(value):
    return IterableSource([{"p": {"x": value}}])(0)["p"]["x"]


def in_a_source(value):
    return adapt_source(lambda step: {"p": {"x": value}})(0)["p"]["x"]


def as_a_template(value):
    return UniformDomainSampler([(0, 1)], {"x": value}).templates["x"]


WAYS = (resident, on_host, in_a_pool, in_a_dataset, in_an_iterable, as_a_template)


@pytest.mark.parametrize("given", GIVEN)
def test_an_input_is_taken_alike_wherever_rows_are_stored(given, tmp_path):
    value = GIVEN[given](tmp_path)
    expected = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    if given in ("on disk", "HDF5", "tensor"):
        expected = ROWS.astype(np.float32)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    narrow = expected.astype(jax.dtypes.canonicalize_dtype(expected.dtype))
    for way in WAYS:
        found = np.asarray(way(value))
        wanted = expected if way in (in_an_iterable, as_a_template) else narrow
        assert_trees_bitwise_equal(found, wanted)
    assert digest_contents(_pooled(value)) == digest_contents(_pooled(expected))


def _pooled(rows):
    return NamedBatchSource({"p": RandomRowSampler({"x": rows})}, {"p": 2}, KEY)


MASKED = "has masked or missing entries, which have no number. "
BEYOND = "has numbers beyond {}, to which JAX truncates {}. Turn on jax_enable_x64, or "
REFUSED = {
    "masked": (lambda: np.ma.masked_greater(ROWS, 5), MASKED),
    "masked in a list": (lambda: [np.ma.masked_array([1.0, 2.0], [0, 1])] * 6, MASKED),
    "missing": (lambda: pd.Series([1, 2, 3, 4, 5, None], dtype="Int64"), MASKED),
    "masked on disk": (lambda: OnDisk(np.ma.masked_greater(ROWS, 5)), MASKED),
    "longdouble": (lambda: ROWS.astype(np.longdouble), "which JAX does not have. Convert it with .astype("),
    "wide complex": (
        lambda: ROWS.astype(np.clongdouble),
        "which JAX does not have. Convert it with .astype(",
    ),
    "dates": (lambda: np.zeros(6, "M8[s]"), "must hold numbers, got dtype datetime64[s]. "),
    "objects": (lambda: ROWS.astype(object), "must hold numbers, got dtype object. "),
    "structured": (lambda: np.zeros(6, [("a", "f4")]), "must hold numbers, got dtype [('a', '<f4')]. "),
    "bytes": (lambda: np.zeros(6, "V4"), "must hold numbers, got dtype |V4. "),
    "categories": (lambda: pd.Series(list("aabbcc")).astype("category"), "must hold numbers, got dtype "),
    "keys": (lambda: jax.random.split(KEY, 6), "must hold numbers, got dtype key<fry>. "),
    "large integers": (lambda: np.full((6, 2), 2**40), BEYOND.format("int32", "int64")),
    "large floats": (lambda: np.full((6, 2), 1e300), BEYOND.format("float32", "float64")),
    "large complex": (lambda: np.full((6, 2), 1e300j), BEYOND.format("complex64", "complex128")),
}


@pytest.mark.parametrize("given", REFUSED)
def test_an_input_is_refused_by_name_wherever_rows_are_stored(given):
    make, wanted = REFUSED[given]
    for way in WAYS:
        with pytest.raises((TypeError, ValueError)) as caught:
            way(make())
        message = str(caught.value)
        assert wanted in message, way
        whole = given == "masked on disk" and way is resident
        assert "a field on disk" in message if whole else "'x'" in message, way
        assert "\n" not in message


@pytest.mark.parametrize("given", [name for name in GIVEN if name in (">f2", ">f8", ">i4", "memory map")])
def test_a_source_of_ones_own_may_return_other_byte_orders(given, tmp_path):
    found = in_a_source(GIVEN[given](tmp_path))
    assert found.dtype.isnative and type(found) is np.ndarray
    np.testing.assert_array_equal(found, ROWS)


@pytest.mark.parametrize(
    "given", ["masked", "longdouble", "objects", "dates", "large integers", "large floats"]
)
def test_a_source_of_ones_own_is_refused_what_a_pool_is(given):
    make, wanted = REFUSED[given]
    with pytest.raises((TypeError, ValueError)) as caught:
        in_a_source(make())
    assert str(caught.value).startswith("batch 0['p']['x']") and wanted in str(caught.value)


def test_a_batch_of_ones_own_is_passed_on_as_it_is():
    batch = {"z": {"x": ROWS}, "a": {"y": jnp.ones(3), "x": np.float32([1])}}
    assert adapt_source(lambda step: batch)(0) is batch


def test_infinite_numbers_fit_into_every_dtype():
    rows = np.array([1.0, np.inf, np.nan, -np.inf, 3e38, 0])
    assert_trees_bitwise_equal(on_host(rows), rows.astype(np.float32))


def test_a_table_is_a_pool_with_a_field_for_each_column():
    table = pd.DataFrame({"x": ROWS[:, 0], "n": np.arange(6)}, index=list("fedcba"))
    for where in (True, False):
        source = NamedBatchSource.from_pools({"p": table}, {"p": 4}, KEY, resident=where)
        batch = source(0)["p"]
        assert_trees_bitwise_equal(np.asarray(batch["x"]), np.float32(2 * np.asarray(batch["n"])))
    twice = pd.DataFrame(ROWS, columns=["x", "x"])
    with pytest.raises(ValueError, match="columns must not repeat a name"):
        NamedBatchSource.from_pools({"p": twice}, {"p": 4}, KEY)
    with pytest.raises(TypeError, match=r"columns\[0\] must be a non-empty string, got 0"):
        NamedBatchSource.from_pools({"p": pd.DataFrame(ROWS)}, {"p": 4}, KEY)
    with pytest.raises(TypeError, match="Pass it as a pool, which takes it column by column"):
        DatasetSampler(table)


def test_an_array_as_a_dataset_is_checked_when_it_is_given():
    with pytest.raises(ValueError, match="has masked or missing entries"):
        DatasetSampler(np.ma.masked_greater(ROWS, 5))
    assert DatasetSampler(ROWS.view(np.matrix)).gather(EVERY)["inputs"].shape == (6, 2)


def test_weights_are_checked_as_rows_are():
    with pytest.raises(ValueError, match="weights has masked or missing entries"):
        WeightedRowSampler({"x": ROWS}, np.ma.masked_greater(ROWS[:, 0], 5))
    plain = WeightedRowSampler({"x": ROWS}, ROWS[:, 0]).weights
    for given in (ROWS[:, 0].astype(">f4"), jnp.asarray(ROWS[:, 0], jnp.bfloat16), pd.Series(ROWS[:, 0])):
        assert_trees_bitwise_equal(WeightedRowSampler({"x": ROWS}, given).weights, plain)
