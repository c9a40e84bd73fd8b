"""Several devices: the batches are those of one device, wherever the state is."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phijax_rng import Trainer, TrainLoop
from phijax_rng.devices.placement import on_device, require_devices, resolve
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full

WITHIN_4_ULP = ("normal",)
COUNTS = (1, 2, 4, 8)


# Batches


def batches_on(*counts):
    """Fifty steps on one device and on some; the batch of each as its compiled loop drew it."""
    from tests import _devices

    source = _devices.source()
    expected, _ = _devices.batches_in_the_loop(resolve(1), source)
    for count in counts:
        placed = resolve(count, shardings=_devices.rows_split)
        seen, loop = _devices.batches_in_the_loop(placed, source)
        assert len(seen) == len(expected) == 50
        for step, (batch, wanted) in enumerate(zip(seen, expected, strict=True)):
            for name in source.names:
                if name in WITHIN_4_ULP:
                    np.testing.assert_array_max_ulp(*(b[name]["inputs"] for b in (batch, wanted)), maxulp=4)
                else:
                    assert_trees_bitwise_equal(batch[name], wanted[name])
            other = expected[step - 1]
            assert all(first_difference(batch[name], other[name]) for name in source.names), "the control"
        kept = seen[0]["box"]["inputs"].addressable_shards
        assert [shard.data.shape for shard in kept] == [(48 // count, 2)] * count
        text = loop._executable.as_text()
        assert "all-gather" not in text and "all-to-all" not in text, text
        print(count, "devices: equal")


@pytest.mark.full
@pytest.mark.parametrize("counts", mostly_full([[8], [2, 4]], everyday=[[8]]))
def test_fifty_batches_are_those_of_one_device_and_no_device_gathers_them(in_eight, counts):
    assert in_eight(batches_on, *counts) == "".join(f"{count} devices: equal\n" for count in counts)


def memory_on_every_count():
    """Prints count, and bytes of temporary memory of a loop that draws a large batch of points."""
    import jax.numpy as jnp

    from phijax_rng import NamedBatchSource, UniformDomainSampler, initialize_train_state, keys
    from tests import _devices

    sampler = UniformDomainSampler([(0.0, 1.0)] * 4)
    source = NamedBatchSource({"box": sampler}, {"box": 2**18}, keys.split_root(0).sampling)

    def step(state, batches, key):
        total = jnp.sum(jnp.sort(batches["box"]["inputs"], axis=1) ** 2)
        return state.replace(model_state=total, step=state.step + 1), {"fit": total}

    state = initialize_train_state(np.float32(0), _devices.NoOptimizer(), {}, keys.split_root(0))
    for count in COUNTS:
        loop = TrainLoop(step, state, source, placement=resolve(count))
        print(count, loop._executable.memory_analysis().temp_size_in_bytes)


@pytest.mark.full
def test_memory_for_the_batch_falls_with_the_devices(in_eight):
    used = dict(map(int, line.split()) for line in in_eight(memory_on_every_count).splitlines())
    batch = 2**18 * 4 * 4
    assert used[1] >= batch
    for count in COUNTS[1:]:
        assert used[count] <= 1.1 * used[1] / count, used


def fed_from_the_host():
    """Rows that are fetched on the host, in stacks of which each device receives its part."""
    from tests import _devices

    table = np.arange(4000, dtype=np.float32).reshape(2000, 2)
    source = _devices.hosted_source(_devices.Watched(table))
    expected = _devices.fed_batches(resolve(1), source, 20)
    for count in COUNTS[1:]:
        placed = resolve(count, shardings=_devices.rows_split)
        assert_trees_bitwise_equal(_devices.fed_batches(placed, source, 20), expected)
        stack = np.zeros((3, 16, 2), np.float32)
        lie = placed.shares.shard_stacks(stack, 16)
        assert [shard.data.shape for shard in lie.addressable_shards] == [(3, 16 // count, 2)] * count
        assert placed.shares.shard_stacks(stack, 0).is_fully_replicated
    print("equal")


def test_rows_from_the_host_are_those_of_one_device(in_eight):
    assert in_eight(fed_from_the_host) == "equal\n"


# Training


def runs_and_resumes(*counts):
    """Every cell of a matrix of device counts at the save and at the resume, as a table."""
    import shutil
    import tempfile
    from pathlib import Path

    from phijax_rng import Checkpoints
    from tests import _devices

    folder = Path(tempfile.mkdtemp())
    whole = {}
    for count in counts:
        whole[count] = _devices.fit(12, devices=count)[0].state
        _devices.fit(5, devices=count, directory=folder / str(count))
    print("saved on | resumed on | survives | farthest from one device")
    for before in counts:
        for after in counts:
            own = shutil.copytree(folder / str(before), folder / f"{before}-{after}")
            result, told = _devices.fit(12, devices=after, directory=own)
            changes = Checkpoints(own).contract()["run"]["changes"]
            levels = [change["survives"] for change in changes]
            if before == after:
                assert_trees_bitwise_equal(result.state, whole[after])
                assert not told and not levels, told
            else:
                line = f"machine.devices: {before} in the checkpoint, {after} in this run"
                assert len(told) == 1 and line in told[0], told
                assert levels == ["rounding"], changes
            for name in ("rng_key", "sampling_key", "balancer_key", "step"):
                assert_trees_bitwise_equal(getattr(result.state, name), getattr(whole[1], name))
            away = _devices.farthest(result.state, whole[1])
            assert away < 1e-4, away
            print(before, after, levels[0] if levels else "exact", f"{away:.0e}", sep=" | ")
    other = _devices.fit(12, seed=1)[0].state
    assert _devices.farthest(other, whole[1]) > 1e-2, "the control"


@pytest.mark.parametrize("counts", mostly_full([[1, 8], [*COUNTS]], everyday=[]))
def test_a_run_saved_on_some_devices_resumes_on_others(in_eight, counts):
    table = in_eight(runs_and_resumes, *counts)
    print(table)
    assert len(table.splitlines()) == 1 + len(counts) ** 2
    assert table.count("exact") == len(counts)


def split_states():
    """A state split over the devices trains like a replicated one, and its resume has the same bits."""
    import tempfile

    from phijax_rng import Checkpoints
    from tests import _devices

    def rule(leaf):
        return PartitionSpec("data") if np.shape(leaf)[:1] == (8,) else None

    def shardings(state):
        return jax.tree.map(rule, state)

    def where_they_are(state):
        return jax.tree.map(lambda leaf: leaf.sharding, state)

    whole = _devices.fit(12)[0].state
    split = _devices.fit(12, devices=4, shardings=shardings)[0].state
    kernel, moment = split.model_state["output"]["kernel"], split.optimizer_state[0].mu["output"]["kernel"]
    for leaf in (kernel, moment):
        assert [shard.data.shape for shard in leaf.addressable_shards] == [(2, 1)] * 4
    assert _devices.farthest(split, whole) < 1e-4
    folder = tempfile.mkdtemp()
    _devices.fit(5, devices=4, shardings=shardings, directory=folder)
    result, told = _devices.fit(12, devices=4, shardings=shardings, directory=folder)
    assert_trees_bitwise_equal(result.state, split)
    assert not told, told
    result, told = _devices.fit(14, devices=4, directory=folder)
    assert "machine.shardings" in told[0] and "training.program" in told[0], told
    assert Checkpoints(folder).contract()["run"]["changes"][-1]["survives"] == "rounding"
    # A state that was made where it belongs stays there.
    problem = _devices.heat()
    trainer = Trainer(14, devices=4, shardings=where_they_are, progress=False)
    again = trainer.fit_state(problem.module, split, optimizer=problem.optimizer, source=problem.source())
    assert again.state.model_state["output"]["kernel"].sharding == kernel.sharding
    print("held")


def test_a_state_may_be_split_over_the_devices(in_eight):
    assert in_eight(split_states) == "held\n"


def on_other_meshes(*names):
    """Meshes of two axes, of explicit axes, devices by name and in another order."""
    from tests import _devices

    devices = jax.devices()
    whole = _devices.fit(8)[0].state
    chosen = {
        "two axes": Mesh(np.array(devices).reshape(4, 2), ("data", "model")),
        "data second": Mesh(np.array(devices).reshape(4, 2), ("model", "data")),
        "explicit": jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,)),
        "reversed": devices[3::-1],
        "all": "auto",
        "one device": devices[5],
    }
    for name in names:
        result = _devices.fit(8, devices=chosen[name])[0]
        assert _devices.farthest(result.state, whole) < 1e-4, name
        assert_trees_bitwise_equal(result.state.rng_key, whole.rng_key)
        if name == "one device":
            assert_trees_bitwise_equal(result.state, whole)
            assert result.state.step.devices() == {devices[5]}
        print(name)


MESHES = ["two axes", "data second", "explicit", "reversed", "all", "one device"]


@pytest.mark.parametrize("name", mostly_full(MESHES, everyday=["two axes"]))
def test_a_mesh_of_every_kind_works(in_eight, name):
    assert in_eight(on_other_meshes, name) == f"{name}\n"


def sizes_that_do_not_divide():
    """A batch drawn on every device, and the errors for other sizes."""
    from tests import _devices

    problem = _problems.heat()  # four rows of two of its batches do not go into eight devices
    fits = [
        Trainer(8, devices=count, uneven="whole", progress=False).fit(
            problem.module, seed=0, **problem.arguments
        )
        for count in (1, 8)
    ]
    assert _devices.farthest(fits[1].state, fits[0].state) < 1e-4
    try:
        Trainer(8, devices=8, progress=False).fit(problem.module, seed=0, **problem.arguments)
    except ValueError as error:
        print(error)
    try:
        Trainer(8, devices=9, progress=False).fit(problem.module, seed=0, **problem.arguments)
    except ValueError as error:
        print(error)


@pytest.mark.full
def test_sizes_that_do_not_divide_are_replicated_or_rejected(in_eight):
    assert in_eight(sizes_that_do_not_divide).splitlines() == [
        "batches['boundary']['inputs'] has 4 rows, which do not divide equally over 8 devices. Use 8 rows, "
        "Trainer(..., uneven='whole') to draw such a batch on every device, or uneven='pad' to pad it with "
        "rows that a mask excludes.",
        "devices=9 is more than the 8 cpu devices available. Pass 'auto' to use all of them.",
    ]


def guarded_steps():
    """Steps after the first make no implicit transfer between host and devices."""
    from tests import _devices

    problem = _devices.heat()
    loop = TrainLoop(problem.train_step, problem.state(), problem.source(), placement=resolve(8))
    state = loop.run(loop.place(problem.state()), 1).state
    with jax.transfer_guard("disallow"):
        for stop in range(2, 51):
            state = loop.run(state, stop).state
        try:
            jax.jit(lambda number: number)(3)
        except Exception as error:
            assert "Disallowed host-to-device" in str(error), error
            print("guarded")


@pytest.mark.full
def test_no_key_is_moved_after_the_first_step(in_eight):
    assert in_eight(guarded_steps) == "guarded\n"


# On one device


def test_one_device_has_the_program_it_would_have_without_any_of_this(monkeypatch):
    problem = _problems.heat()
    program = problem.loop().program
    monkeypatch.setattr("phijax_rng.devices.placement.Placement.constrain", lambda self, given, **_: given)
    monkeypatch.setattr(
        "phijax_rng.devices.row_sharding.Shares.split", lambda self, given, sizes: (given, None)
    )
    assert problem.loop().program == program
    monkeypatch.setattr(
        "phijax_rng.devices.row_sharding.Shares.split",
        lambda self, given, sizes: (jax.tree.map(lambda x: x * 1, given), None),
    )
    assert problem.loop().program != program, "the control"


def test_one_device_is_the_default_device():
    assert resolve() == on_device() == resolve(jax.devices()[0]) == resolve(jax.devices()[:1])
    assert resolve().describe() == {}


# What is refused

NO_DEVICES = (
    "devices must be a positive int, 'auto', a device, a list of devices or a mesh, got {}. "
    "Pass 'auto' to use every device, or jax.devices('cpu') for those of a kind."
)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0, ValueError, NO_DEVICES.format("0")),
        (True, TypeError, NO_DEVICES.format("True")),
        ("all", ValueError, NO_DEVICES.format("'all'")),
        ([], ValueError, "devices must name at least one device, got (). Use jax.devices()."),
        ([3], TypeError, "devices[0] must be a JAX device, got 3. Use jax.devices()."),
    ],
)
def test_devices_are_checked_when_the_trainer_is_made(given, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        Trainer(1, devices=given)


@pytest.mark.parametrize("devices", [np.empty((0,), object), np.array(jax.devices()[0])])
def test_a_mesh_without_devices_or_axes_is_rejected(devices):
    mesh = Mesh(devices, ("data",) * devices.ndim)
    message = (
        f"devices must be a mesh of at least one axis and one device, got shape {dict(mesh.shape)}. "
        "Use jax.make_mesh."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trainer(1, devices=mesh)


def test_a_device_is_named_once():
    device = jax.devices()[0]
    with pytest.raises(ValueError, match=r"^devices must name distinct devices, got .* each one once\.$"):
        require_devices([device, device])


@pytest.mark.parametrize(
    ("shardings", "error", "message"),
    [
        (
            lambda state: state.replace(model_state="data"),
            TypeError,
            "shardings(state).model_state['hidden']['bias'] must be a PartitionSpec over the axes 'data', "
            "a NamedSharding of them or None, got 'data'. Name axes of the mesh.",
        ),
        (
            lambda state: {"model_state": None},
            ValueError,
            "shardings(state) must be a tree like the state, or a prefix of one: ",
        ),
        (
            lambda state: jax.tree.map(lambda leaf: None, state).replace(
                model_state=PartitionSpec(None, None, "data")
            ),
            ValueError,
            "shardings(state).model_state['hidden']['bias'] is (None, None, 'data'), "
            "which does not divide shape [8]. Replicate that leaf, or change its shape.",
        ),
        (
            lambda state: jax.tree.map(lambda leaf: None, state).replace(
                model_state=PartitionSpec("data", "data")
            ),
            ValueError,
            "shardings(state).model_state['hidden']['bias'] names an axis of the mesh twice, got ",
        ),
        (
            lambda state: jax.tree.map(lambda leaf: None, state).replace(model_state=PartitionSpec("rows")),
            TypeError,
            "shardings(state).model_state['hidden']['bias'] must be a PartitionSpec over the axes ",
        ),
    ],
    ids=["no sharding", "another structure", "too many axes", "an axis twice", "no such axis"],
)
def test_shardings_are_checked_leaf_by_leaf(shardings, error, message):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    placed = resolve(mesh, shardings=shardings)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        placed.of_state(_problems.heat().state())


def test_shardings_of_another_mesh_with_the_same_axes_are_accepted():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    explicit = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    placed = resolve(mesh, shardings=lambda state: NamedSharding(explicit, PartitionSpec()))
    found = jax.tree.leaves(placed.of_state(_problems.heat().state()))
    assert set(found) == {NamedSharding(mesh, PartitionSpec())}
