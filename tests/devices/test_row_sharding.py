"""Batches whose rows do not divide equally over devices: padded, masked, and trained as on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    LossModule,
    Trainer,
    TrainLoop,
    UniformDomainSampler,
    masked_mean,
)
from phijax_rng.devices.placement import resolve
from phijax_rng.devices.row_sharding import Shares
from tests import _devices, _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import Samplers
from tests._selection import mostly_full


def true_rows(kept):
    """The rows that count, by name; the shapes are those of a batch without padding."""
    return {
        name: jax.tree.map(lambda leaf, name=name: np.asarray(leaf)[np.asarray(kept["mask"][name])], rows)
        for name, rows in kept["batches"].items()
    }


def padded_batches(hosted, *counts):
    """Batches of seven sizes on some devices beside one; or rows from the host."""
    steps = 70 if hosted else 10  # from the host there are two stacks of 64 steps
    source = _devices.uneven_source(hosted)
    alone, _ = _devices.masked_batches(resolve(1, uneven="pad"), source, steps)
    for count in counts:
        placed = resolve(count, shardings=_devices.rows_split, uneven="pad")
        seen, loop = _devices.masked_batches(placed, source, steps)
        for step, (kept, one) in enumerate(zip(seen, alone, strict=True)):
            require_equal(kept, one, source(step))
        for name in source.names:
            mask, kept = (seen[0][part][name] for part in ("mask", "batches"))
            size, filled = len(source(0)[name]["inputs"]), len(kept["inputs"])
            assert np.asarray(mask).tolist() == [place < size for place in range(filled)]
            shapes = {shard.data.shape[0] for shard in kept["inputs"].addressable_shards}
            assert shapes == {filled // count} == {-(-size // count)}
        text = loop._executable.as_text()
        assert not re.search("all-gather|all-to-all|collective-permute", text), text
        print(count, "devices: equal")


def require_equal(kept, one, batch):
    """Raises unless the rows that count are those of the batch, and so are those of one device."""
    rows = true_rows(kept)
    assert all(np.asarray(mask).all() for mask in one["mask"].values())
    for name, wanted in jax.tree.map(np.asarray, batch).items():
        if name == "normal":
            np.testing.assert_array_max_ulp(rows[name]["inputs"], wanted["inputs"], maxulp=4)
            continue
        assert_trees_bitwise_equal(rows[name], wanted)
        assert_trees_bitwise_equal(one["batches"][name], wanted)
        filling = np.asarray(kept["batches"][name]["inputs"])[len(wanted["inputs"]) :]
        assert (filling == wanted["inputs"][-1]).all(), "the last row stands in"
    other = kept["batches"]["box"]["inputs"][1]
    assert first_difference({"inputs": other}, {"inputs": batch["box"]["inputs"][0]}), "the control"


CASES = [[False, 8], [False, 2, 4], [True, 3]]


@pytest.mark.parametrize("case", mostly_full(CASES, everyday=[]), ids=str)
def test_the_rows_that_count_are_those_of_one_device_and_nothing_is_sent(in_eight, case):
    lines = in_eight(padded_batches, *case).splitlines()
    assert lines == [f"{count} devices: equal" for count in case[1:]]


def padded_run():
    """Parameters of 12 updates on several devices beside one, and losses that break it."""
    problem = _devices.uneven()
    one = _devices.fit(12, problem=problem, uneven="pad")[0].state
    away = _devices.farthest(_devices.fit(12, problem=problem, uneven="pad", devices=8)[0].state, one)
    assert away < 1e-4, away
    careless = _devices.uneven(losses="careless")
    away = _devices.farthest(_devices.fit(12, problem=careless, uneven="pad", devices=8)[0].state, one)
    assert away > 1e-2, ("the control", away)
    print("equal")


def test_a_run_on_filled_up_batches_is_that_of_one_device(in_eight):
    assert in_eight(padded_run) == "equal\n"


def padded_resume():
    """A balanced run on rows from the host, saved on four devices and resumed on three."""
    import tempfile

    from phijax_rng import Checkpoints

    problem = _devices.uneven()
    # From the host, with a balancer that reads the batches too.
    hosted = _devices.uneven(resident=False)
    options = {"balancer": _devices.balancer(), "uneven": "pad"}
    alone = _devices.fit(12, problem=problem, **options)[0].state
    folder = tempfile.mkdtemp()
    _devices.fit(5, problem=hosted, devices=4, directory=folder, **options)
    result, told = _devices.fit(12, problem=hosted, devices=3, directory=folder, **options)
    assert "machine.devices: 4 in the checkpoint, 3 in this run" in told[0], told
    assert [c["survives"] for c in Checkpoints(folder).contract()["run"]["changes"]] == ["rounding"]
    weights = [np.asarray(state.balancer_state["weights"]) for state in (result.state, alone)]
    np.testing.assert_allclose(*weights, rtol=1e-4)
    assert not np.allclose(weights[1], 1), "the balancer was never updated"
    for name in ("rng_key", "sampling_key", "balancer_key", "step"):
        assert_trees_bitwise_equal(getattr(result.state, name), getattr(alone, name))
    print("held", _devices.farthest(result.state, alone) < 1e-4)


@pytest.mark.full
def test_a_balanced_run_on_padded_batches_from_the_host_resumes_on_three(in_eight):
    assert in_eight(padded_resume) == "held True\n"


# Errors

NO_MASK = (
    "uneven='pad' pads batches with rows that must not count, and {} no mask. "
    "Add a parameter named mask, {{batch name: bool of shape (rows,)}}, and average with "
    "masked_mean(values, mask[name]); or pass another `uneven`."
)


def test_losses_that_take_no_mask_are_rejected_before_anything_is_made():
    heat = _problems.heat()
    message = NO_MASK.format("the losses of module 'module' take")
    never = LossModule(pytest.fail, heat.module.losses, batch_keys=heat.module.batch_keys)
    trainer = Trainer(1, uneven="pad", progress=False)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        trainer.fit(never, seed=0, **heat.arguments)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        trainer.fit_state(heat.module, heat.state(), optimizer=heat.optimizer, source=heat.source())
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):  # JAX adds to it
        TrainLoop(heat.train_step, heat.state(), heat.source(), placement=resolve(1, uneven="pad"))


def test_a_train_step_that_takes_no_mask_is_rejected():
    heat, message = _problems.heat(), NO_MASK.format("train_step takes")

    def train_step(state, batches, key):
        return state.replace(step=state.step + 1), {"fit": jnp.float32(0)}

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trainer(1, uneven="pad", progress=False).fit_state(
            None, heat.state(), train_step=train_step, source=heat.source()
        )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainLoop(train_step, heat.state(), heat.source(), placement=resolve(1, uneven="pad"))


def padded_slices():
    """Parameters of 12 updates on padded batches in slices, some of which have no row that counts."""
    one = _devices.fit(12, problem=_devices.uneven(), uneven="pad")[0].state
    for devices, count in ((8, 4), (3, 2), (1, 2)):
        options = {"uneven": "pad", "devices": devices, "microbatches": count}
        away = _devices.farthest(
            _devices.fit(12, problem=_devices.uneven(losses="summed"), **options)[0].state, one
        )
        assert away < 1e-4, (devices, count, away)
    print("equal")


@pytest.mark.full
def test_a_padded_batch_may_be_cut_into_slices_where_losses_are_sums_with_weights(in_eight):
    assert in_eight(padded_slices) == "equal\n"


def test_a_padded_batch_in_slices_needs_losses_with_weights():
    message = (
        "microbatches=2 with uneven='pad' needs losses as (sum, weight), and losses['initial'] is one "
        "number: slices of a padded batch differ in the rows that count. "
        "Return masked_sum(values, mask[name]) in place of masked_mean."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):  # JAX adds to it
        _devices.fit(1, problem=_devices.uneven(), uneven="pad", microbatches=2)


def test_batches_without_names_and_fields_of_different_lengths_have_no_mask():
    shares = Shares(None, "", "pad")
    message = (
        "a mask needs batches with names, got ndarray. Return {name: {field: rows}} from the source, "
        "or pass another `uneven`."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        shares.split(np.ones(3))
    message = (
        "batches['x'] has fields of 2 and 3 rows, but one mask must fit all of them. Give them equal "
        "lengths, or put them into separate batches."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        shares.split({"x": {"inputs": np.ones((3, 2)), "targets": np.ones(2)}})
    batches, mask = shares.split({"x": {"inputs": np.ones((3, 2)), "scale": 1.0}, "time": np.float32(2)})
    assert batches["x"]["scale"] == 1.0 and set(mask) == {"x"}
    assert mask["x"].tolist() == [True] * 3


POINTS = Samplers({"box": UniformDomainSampler([(0.0, 3.0)])}, {"box": 4})


def test_a_resume_without_the_mask_names_what_changed(tmp_path):
    def losses(model_state, batches, mask):
        return {"fit": masked_mean((model_state["w"] - batches["box"]["inputs"]) ** 2, mask["box"])}

    module = LossModule(lambda key: {"w": jnp.ones(1)}, losses, batch_keys=("box",))
    arguments = {"datamodule": POINTS, "optimizer": optax.adam(1e-2), "seed": 0}
    Trainer(2, uneven="pad", checkpoints=Checkpoints(tmp_path), progress=False).fit(module, **arguments)
    trainer = Trainer(4, uneven="whole", checkpoints=Checkpoints(tmp_path), progress=False)
    with pytest.warns(UserWarning, match=r"machine\.uneven: pad in the checkpoint, \(absent\) in this run"):
        assert trainer.fit(module, resume=True, **arguments).iterations == 2
