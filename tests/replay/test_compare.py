"""Two runs are told apart at their first difference, and equal ones are found equal."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import Checkpoints, LossModule, NamedBatchSource, Trainer, initialize_train_state, keys
from phijax_rng.replay import compare_runs

POOL = {"x": np.linspace(-1, 1, 40, dtype=np.float32)}
STOP, EVERY = 24, 4


def losses(model_state, batches):
    return {"fit": jnp.mean((model_state["w"] * batches["data"]["x"] - 1) ** 2)}


def train(
    folder,
    stop=STOP,
    *,
    seed=0,
    rate=0.1,
    pool=POOL,
    size=8,
    every=EVERY,
    log=1,
    chunk=None,
    trainer=(),
    **options,
):
    """A run that saves in `folder`."""
    optimizer = optax.adam(rate)
    streams = keys.split_root(seed)
    module = LossModule(lambda key: {"w": jnp.full(3, 0.5)[:, None]}, losses, batch_keys=("data",))
    state = initialize_train_state({"w": jnp.full(3, 0.5)[:, None]}, optimizer, {}, streams)
    source = NamedBatchSource.from_pools({"data": pool}, {"data": size}, streams.sampling)
    kept = Checkpoints(folder, every_n_steps=every, asynchronous=False, max_to_keep=None)
    trainer = Trainer(
        stop, checkpoints=kept, log_every_n_steps=log, chunk_size=chunk, progress=False, **dict(trainer)
    )
    return trainer.fit_state(module, state, optimizer=optimizer, source=source, **options)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder)
    return folder


def resumed(folder):
    train(folder, 10)
    train(folder, resume=True)


def rewound(folder):
    train(folder)
    train(folder, resume=True, ckpt_step=8)


EQUAL = {
    "again": train,
    "other chunks": lambda folder: train(folder, chunk=3),
    "other log interval": lambda folder: train(folder, log=6),
    "other saves": lambda folder: train(folder, every=6),
    "resumed": resumed,
    "rewound": rewound,
    "not as far": lambda folder: train(folder, 12),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_runs_are_found_equal(one, tmp_path, make):
    make(tmp_path)
    found = compare_runs(one, tmp_path)
    assert found.equal, str(found)
    assert (found.row, found.step, found.leaves) == (None, None, ())
    assert found.verdict.startswith("equal to step ")
    assert json.loads(json.dumps(found.plain(), default=str))["equal"] is True


DIFFERENT = {
    "seed": ({"seed": 1}, 1, "keys"),
    "pool": ({"pool": {"x": POOL["x"] * np.float32(1.01)}}, 1, "batch"),
    "batch size": ({"size": 9}, 1, "batch"),
    "learning rate": ({"rate": 0.11}, 2, "program"),
}


@pytest.mark.parametrize(("change", "row", "cause"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_change_is_found_at_its_step_with_its_cause(one, tmp_path, change, row, cause):
    train(tmp_path, **change)
    found = compare_runs(one, tmp_path)
    assert (found.row, found.step, found.cause) == (row, EVERY, cause), str(found)
    assert not found.equal
    assert found.leaves


def test_a_planted_bit_is_found_with_its_leaf(one, tmp_path):
    shutil.copytree(one, tmp_path / "run")
    train(tmp_path / "run", 12, resume=True, ckpt_step=8)  # a run that ends at 12
    like = initialize_train_state({"w": jnp.zeros((3, 1))}, optax.adam(0.1), {}, keys.split_root(0))
    kept = Checkpoints(tmp_path / "run", asynchronous=False)
    state = kept.restore(like, 12)
    word = jax.lax.bitcast_convert_type(state.model_state["w"], jnp.uint32)
    planted = jax.lax.bitcast_convert_type(word.at[1].add(1), jnp.float32)
    contract, memory = kept.contract(12), kept.memory(12)
    shutil.rmtree(tmp_path / "run" / "12")
    with kept:
        kept.save(state.replace(model_state={"w": planted}), contract, memory)
    found = compare_runs(one, tmp_path / "run")
    assert (found.row, found.step, found.equal_step, found.cause) == (None, 12, 8, None)
    (leaf,) = found.leaves
    assert (leaf.path, leaf.count, leaf.size) == ("model_state['w']", 1, 3)
    assert 0 < leaf.largest < 1e-6
    assert found.verdict == "different at step 12: no setting explains it"


def test_runs_without_a_step_in_common_are_not_comparable(one, tmp_path):
    train(tmp_path, 3, log=100, every=100)
    found = compare_runs(one, tmp_path)
    assert not found.comparable
    assert "not comparable" in found.verdict


def test_other_types_are_named(one, tmp_path):
    state = initialize_train_state({"w": jnp.zeros((4, 1))}, optax.adam(0.1), {}, keys.split_root(0))
    with Checkpoints(tmp_path, asynchronous=False) as kept:
        kept.save(state.replace(step=jnp.int32(EVERY)))
    found = compare_runs(one, tmp_path)
    assert "model_state['w']: other type" in str(found)
