"""Pools of rows on the host: held unchanged, never copied needlessly, refused with a reason."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from phijax_rng import HostPool, PoolDataModule, keys
from phijax_rng.sampling.pools import as_fields
from tests._bitwise import assert_trees_bitwise_equal


class OnDisk:
    """What an HDF5 or Zarr data set offers, and a count of how often its rows were read."""

    def __init__(self, rows):
        self._rows = np.asarray(rows, np.float32)
        self.shape, self.dtype, self.chunks = self._rows.shape, self._rows.dtype, (1, 1)
        self.reads = 0

    def __getitem__(self, where):
        self.reads += 1
        return self._rows[where]

    def __len__(self):
        return len(self._rows)

    def __array__(self, dtype=None, copy=None):
        self.reads += 1
        return np.array(self._rows, dtype)


def test_a_pool_does_not_follow_the_array_it_was_made_from():
    rows = np.arange(6.0).reshape(3, 2)
    pool = HostPool(rows, targets=rows[:, 0])
    rows[:] = -1
    assert_trees_bitwise_equal(pool.inputs, np.arange(6.0).reshape(3, 2))
    assert_trees_bitwise_equal(pool.targets, np.array([0.0, 2.0, 4.0]))


def test_the_rows_of_a_pool_cannot_be_written():
    pool = HostPool(np.zeros((3, 1)), targets=np.zeros(3), aux={"weight": np.ones(3)})
    for array in pool.fields().values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        pool.inputs = np.ones((3, 1))


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float16, np.int64, np.uint8, np.bool_, np.complex64, ml_dtypes.bfloat16]
)
def test_dtypes_are_kept(dtype):
    assert HostPool(np.ones((2, 1), dtype)).inputs.dtype == dtype


def test_fields_are_inputs_then_targets_then_the_rest_as_declared():
    pool = HostPool([[0.0]], targets=[1.0], aux={"z": [2], "a": [3]})
    assert list(pool.fields()) == ["inputs", "targets", "z", "a"]
    assert list(HostPool([[0.0]]).fields()) == ["inputs"]


def test_the_number_of_rows_is_the_leading_axis():
    assert HostPool(np.zeros((5, 3, 2)), targets=np.zeros((5, 7))).num_rows == 5


def test_the_repr_shows_types_and_no_rows():
    pool = HostPool(np.zeros((5, 2), np.float32), targets=np.zeros(5, np.int64))
    assert repr(pool) == "HostPool(inputs=float32[5, 2], targets=int64[5])"


def test_a_memory_map_is_used_in_place_and_cannot_be_written(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(4.0)[:, None])
    mapped = np.load(path, mmap_mode="r+")
    pool = HostPool(mapped)
    assert np.shares_memory(pool.inputs, mapped)
    with pytest.raises(ValueError, match="read-only"):
        pool.inputs[0] = 7
    mapped[0] = 7  # the caller's own handle stays writeable
    assert pool.inputs[0, 0] == 7


def test_a_plain_array_is_copied_where_a_memory_map_is_not():
    rows = np.zeros((2, 1))
    assert not np.shares_memory(HostPool(rows).inputs, rows)


def test_an_array_on_disk_is_not_read():
    rows = OnDisk([[0.0], [1.0]])
    pool = HostPool(rows)
    assert pool.inputs is rows
    assert pool.num_rows == 2
    assert rows.reads == 0


def test_an_array_on_a_device_stays_there():
    rows = jnp.arange(3.0)[:, None]
    assert HostPool(rows).inputs is rows


LONG = np.zeros((3, 1))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"inputs": 3.0},
            TypeError,
            "inputs must have a leading axis of rows, got a scalar. Pass one entry per row.",
        ),
        (
            {"inputs": np.zeros((0, 2))},
            ValueError,
            "inputs must have at least one row, got shape (0, 2). Fill the pool.",
        ),
        (
            {"inputs": ["a"]},
            TypeError,
            "inputs must hold numbers, got dtype <U1. Convert the rows to one numeric dtype.",
        ),
        (
            {"inputs": None},
            TypeError,
            "inputs must hold numbers, got dtype object. Convert the rows to one numeric dtype.",
        ),
        (
            {"inputs": LONG, "targets": np.array([1, None, 2])},
            TypeError,
            "targets must hold numbers, got dtype object. Convert the rows to one numeric dtype.",
        ),
        (
            {"inputs": {"x": 1}},
            TypeError,
            "inputs must be an array, got {'x': 1}. Put named extras into aux.",
        ),
        (
            {"inputs": LONG, "targets": [1.0, 2.0]},
            ValueError,
            "all fields must have equally many rows; inputs has 3, targets has 2. "
            "Give each one entry per row.",
        ),
        (
            {"inputs": LONG, "aux": {"w": [1.0]}},
            ValueError,
            "all fields must have equally many rows; inputs has 3, w has 1. Give each one entry per row.",
        ),
        (
            {"inputs": LONG, "aux": [1.0]},
            TypeError,
            "aux must be a mapping, got [1.0]. Pass a dict keyed by name.",
        ),
        (
            {"inputs": LONG, "aux": {"targets": [1.0]}},
            ValueError,
            "aux must not have the field 'targets'. Pass it as an argument of HostPool.",
        ),
        (
            {"inputs": LONG, "aux": {"w": 1.0}},
            TypeError,
            "aux['w'] must have a leading axis of rows, got a scalar. Pass one entry per row.",
        ),
        (
            {"inputs": np.zeros(2, [("x", "f4"), ("y", "f4")])},
            TypeError,
            "inputs must hold numbers, got dtype [('x', '<f4'), ('y', '<f4')]. "
            "Convert the rows to one numeric dtype.",
        ),
    ],
    ids=[
        "scalar",
        "no rows",
        "strings",
        "nothing",
        "objects",
        "mapping as inputs",
        "fewer targets",
        "fewer extras",
        "aux is a list",
        "targets in aux",
        "scalar in aux",
        "structured",
    ],
)
def test_rows_that_cannot_be_drawn_are_rejected_by_field(fields, error, message):
    with pytest.raises(error) as caught:
        HostPool(**fields)
    assert str(caught.value) == message


def test_a_pool_of_typed_keys_is_rejected_with_a_reason():
    with pytest.raises(TypeError) as caught:
        HostPool(jax.random.split(jax.random.key(0), 3))
    assert str(caught.value) == (
        "inputs must hold numbers, got dtype key<fry>. Convert the rows to one numeric dtype."
    )


def test_a_mapping_from_field_to_array_is_as_good_as_a_pool():
    fields = as_fields({"targets": [1.0, 2.0], "inputs": np.zeros((2, 1))})
    assert list(fields) == ["targets", "inputs"]
    assert not fields["inputs"].flags.writeable
    pool = HostPool(np.zeros((2, 1)), aux={"w": np.ones(2)})
    assert_trees_bitwise_equal(as_fields(pool), pool.fields())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (np.zeros((2, 1)), TypeError, "fields must be a mapping, got float64[2, 1]. "),
        ({}, ValueError, "fields must name at least one entry, got (). "),
        ({"inputs": 1.0}, TypeError, "fields['inputs'] must have a leading axis of rows, got a scalar. "),
    ],
    ids=["array", "empty", "scalar"],
)
def test_what_is_no_mapping_of_fields_is_rejected(fields, error, message):
    with pytest.raises(error) as caught:
        as_fields(fields)
    assert str(caught.value).startswith(message)


def test_rows_of_several_lengths_raise_with_the_name_of_the_field():
    message = (
        "inputs must be an array, and its rows do not have one shape. Give every row equally many entries."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HostPool([[1.0], [2.0, 3.0]])


# Copies


@pytest.mark.parametrize("options", [{}, {"resident": False}, {"order": "shuffled"}], ids=str)
def test_the_rows_of_a_pool_are_not_copied_again(options):
    pool = HostPool(np.arange(12.0).reshape(6, 2))
    data = PoolDataModule({"data": pool}, {"data": 2}, **options)
    for _ in range(2):
        (sampler,) = data.train_batch_source(("data",), keys.split_root(0).sampling).samplers.values()
        (rows,) = (sampler.sampler if "resident" in options else sampler).fields.values()
        assert rows is pool.inputs


def test_what_its_owner_may_write_into_is_copied():
    rows = np.arange(12.0).reshape(6, 2)
    shown = rows.view()
    shown.flags.writeable = False
    assert not np.shares_memory(HostPool(shown).inputs, rows)
    pool = HostPool(rows)
    assert HostPool(pool.inputs).inputs is pool.inputs
    pool.inputs.flags.writeable = True
    assert not np.shares_memory(HostPool(pool.inputs).inputs, pool.inputs)
