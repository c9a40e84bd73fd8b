"""States split over devices: saved and verified tile by tile, and readable on any other devices."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from phijax_rng import Checkpoints, initialize_train_state, keys
from phijax_rng._base import digests
from phijax_rng.checkpoints import split_leaves, stored_leaves
from phijax_rng.devices import processes
from phijax_rng.errors import DamagedCheckpointError
from phijax_rng.testing import first_difference
from tests import _pair
from tests._subprocess import Servers

SHAPES = {"columns": (3, 16), "deep": (8, 5, 8), "half": (24,), "odd": (40, 7)}


def arrays():
    """Leaves of several shapes and dtypes, with all kinds of bits."""
    rng = np.random.default_rng(0)
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    found["odd"][3, 2:5] = [np.nan, -0.0, np.inf]
    return {**found, "half": found["half"].astype(jnp.bfloat16)}


def placed(layout, step=1):
    """The state, split by one of the layouts."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(4, 2), ("a", "b"))
    line = Mesh(devices[::-1], ("a",))  # tiles in another order than devices
    specs = {
        "rows": (line, {"columns": (None, "a"), "deep": ("a",), "half": ("a",), "odd": ("a",)}),
        "grid": (mesh, {"columns": (None, "b"), "deep": ("b", None, "a"), "half": ("a",), "odd": ("b",)}),
        "ends": (
            mesh,
            {"columns": (None, "a"), "deep": (None, None, "a"), "half": (("a", "b"),), "odd": ("a",)},
        ),
        "whole": (mesh, dict.fromkeys(SHAPES, ())),
    }
    state = initialize_train_state(arrays(), optax.sgd(0.1), {}, keys.split_root(0))
    state = state.replace(step=jnp.int32(step))
    if layout == "one device":
        return jax.tree.map(lambda leaf: processes.place(leaf, SingleDeviceSharding(devices[0])), state)
    where, found = specs[layout]
    shardings = {name: NamedSharding(where, PartitionSpec(*axes)) for name, axes in found.items()}
    everywhere = NamedSharding(where, PartitionSpec())
    rest = jax.tree.map(lambda leaf: processes.place(leaf, everywhere), state.replace(model_state=None))
    return rest.replace(model_state=jax.tree.map(processes.place, state.model_state, shardings))


LAYOUTS = ("rows", "grid", "ends", "whole")


@contextlib.contextmanager
def small_blocks():
    """Blocks of 64 bytes, and no array that is gathered whole."""
    kept, gather = digests.BLOCK_BYTES, processes.gather
    digests.BLOCK_BYTES = split_leaves.BLOCK_BYTES = 64
    processes.gather = None
    try:
        yield
    finally:
        digests.BLOCK_BYTES = split_leaves.BLOCK_BYTES = kept
        processes.gather = gather


def saved_and_restored(folder, *layouts):
    """Saves each layout and restores it into each; prints what differs, and how a flipped bit is told."""
    with small_blocks():
        for step, layout in enumerate(layouts, start=1):
            with Checkpoints(folder, max_to_keep=None) as checkpoints:
                checkpoints.save(placed(layout, step))
        reader, into = Checkpoints(folder), (*layouts, *(() if jax.process_count() > 1 else ("one device",)))
        for step, layout in enumerate(layouts, start=1):
            for other in into:
                like = placed(other, step)
                found = reader.restore(like, step)
                assert jax.tree.map(lambda leaf: leaf.sharding, found.model_state) == jax.tree.map(
                    lambda leaf: leaf.sharding, like.model_state
                )
                for name, leaf in found.model_state.items():
                    for shard in leaf.addressable_shards:
                        wanted = arrays()[name][shard.index]
                        assert np.asarray(shard.data).tobytes() == wanted.tobytes(), (layout, other, name)
                for name in SHAPES:
                    with flipped(name), contextlib.suppress(DamagedCheckpointError):
                        reader.restore(like, step)
                        raise AssertionError(f"{layout} into {other}: a flipped bit of {name} is not seen")
        print(
            "documents",
            [sorted(reader._document(step).get("tiles", {})) for step in range(1, 1 + len(layouts))],
        )


@contextlib.contextmanager
def flipped(name):
    """The lowest bit of the last element of a leaf, on every read."""
    read = stored_leaves.read_arrays

    def spoilt(path, parts):
        found = read(path, parts)
        (leaf,) = (leaf for leaf in parts["model_state"] if leaf.path.endswith(f"[{name!r}]"))
        array = found["model_state"][leaf.name]
        bits = jnp.uint16 if array.dtype == jnp.bfloat16 else jnp.uint32
        last = tuple(size - 1 for size in array.shape)

        def flip(array):
            words = jax.lax.bitcast_convert_type(array, bits)
            return jax.lax.bitcast_convert_type(words.at[last].set(words[last] ^ 1), array.dtype)

        found["model_state"][leaf.name] = jax.jit(flip, out_shardings=array.sharding)(array)
        return found

    stored_leaves.read_arrays = spoilt
    try:
        yield
    finally:
        stored_leaves.read_arrays = read


SEEN = "documents [['model_state', 'rest'], ['model_state', 'rest'], ['model_state', 'rest'], []]\n"


def test_a_state_saved_in_tiles_is_verified_in_any_others(in_eight, tmp_path):
    assert (
        in_eight(saved_and_restored, tmp_path, "rows", "whole") == "documents [['model_state', 'rest'], []]\n"
    )


@pytest.mark.full
def test_every_layout_is_verified_in_every_other(in_eight, tmp_path):
    assert in_eight(saved_and_restored, tmp_path, *LAYOUTS) == SEEN


@pytest.mark.full
def test_two_processes_verify_what_each_of_them_has(tmp_path):
    with contextlib.closing(Servers(_pair.pair_of_servers)) as both:
        assert both(saved_and_restored, tmp_path, *LAYOUTS) == [SEEN, SEEN]


def test_tiles_that_do_not_divide_an_array_are_refused():
    for tile in ([3], [6, 7], [0, 7], [40, 7, 1]):
        with pytest.raises(ValueError, match=r"^an array of shape \[40, 7\] has no tiles of shape "):
            split_leaves.verifiable(jnp.zeros((40, 7)), tile)


def test_an_array_on_one_device_has_the_digest_of_its_bytes():
    whole = {"w": jnp.arange(6.0)}
    assert digests.digest(whole) == digests.digest_leaves(
        [("['w']", split_leaves.verifiable(whole["w"], None))]
    )
    assert first_difference(whole, {"w": jnp.arange(6.0) + 1})
