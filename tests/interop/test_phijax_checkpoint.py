"""The weights of a checkpoint that PhiJAX 0.2.0b5 saved: a stored one, and one of the installed package."""

import contextlib
import importlib.util
import io
import re
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    HostPool,
    LossModule,
    PoolDataModule,
    Trainer,
    initialize_train_state,
    keys,
)
from phijax_rng._base.digests import digest
from phijax_rng.errors import CheckpointMismatchError
from tests._bitwise import assert_trees_bitwise_equal, first_difference

STORED = Path(__file__).with_name("phijax-0.2.0b5.zip")
# Of the parameters as PhiJAX's trainer returned them.
DIGEST = "7800392e52f0fb822bc9638e151644ab910c06ecfbe53fb1ea0a3106aaa23325"
SHAPES = [{"b": (16,), "w": (2, 16)}, {"b": (16,), "w": (16, 16)}, {"b": (1,), "w": (16, 1)}]


def fresh(shapes=SHAPES):
    model = [{name: jnp.zeros(shape) for name, shape in layer.items()} for layer in shapes]
    return initialize_train_state(model, optax.sgd(0.1), {}, keys.split_root(0))


@pytest.fixture
def theirs(tmp_path):
    with zipfile.ZipFile(STORED) as archive:
        archive.extractall(tmp_path)
    return tmp_path


@pytest.mark.parametrize("inside", ["", "12"], ids=["the root", "the step"])
def test_the_weights_are_read_bit_for_bit(theirs, inside):
    like = fresh()
    checkpoints = Checkpoints(theirs / inside)
    restored, step = checkpoints.restore_intact(like, weights_only=True)
    assert (step, digest(restored.model_state)) == (12, DIGEST)
    assert_trees_bitwise_equal(restored.replace(model_state=like.model_state), like)
    assert_trees_bitwise_equal(checkpoints.restore(like, 12, weights_only=True), restored)
    assert digest(like.model_state) != DIGEST


def test_a_run_starts_from_the_weights(theirs, tmp_path):
    def losses(model, batches):
        hidden = jnp.tanh(batches["data"]["inputs"] @ model[0]["w"] + model[0]["b"])
        values = jnp.tanh(hidden @ model[1]["w"] + model[1]["b"]) @ model[2]["w"] + model[2]["b"]
        return {"loss": jnp.mean(values**2)}

    module = LossModule(lambda key: fresh().model_state, losses, batch_keys=("data",))
    pool = HostPool(np.random.default_rng(0).random((8, 2), dtype=np.float32))
    own = Checkpoints(tmp_path / "own", every_n_steps=1)
    options = {
        "datamodule": PoolDataModule({"data": pool}, {"data": 4}),
        "optimizer": optax.sgd(0.0),
        "seed": 0,
    }
    trainer = Trainer(1, checkpoints=own, progress=False)
    result = trainer.fit(module, **options, ckpt_path=theirs, weights_only=True)
    assert digest(result.state.model_state) == DIGEST
    origin = own.contract()["run"]["origin"]
    assert origin == {"directory": str(theirs), "step": 12, "weights_only": True, "id": None}


def test_the_whole_state_is_told_for_what_it_is(theirs):
    message = (
        f"{theirs} has checkpoints of PhiJAX, at steps 12. "
        "Pass it as ckpt_path with weights_only=True to take the weights of one."
    )
    for step in (None, 12):
        with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
            Checkpoints(theirs).restore(fresh(), step)
    assert (Checkpoints(theirs).steps, Checkpoints(theirs).latest_step) == ((), None)


def test_other_shapes_are_named_with_both_sides(theirs):
    like = fresh([*SHAPES[:2], {"b": (1,), "w": (16, 2)}])
    with pytest.raises(
        CheckpointMismatchError, match=r"model_state\[2\]\['w'\]\n.*float32\[16, 1\]\n.*float32\[16, 2"
    ):
        Checkpoints(theirs).restore(like, weights_only=True)


@pytest.mark.skipif(
    importlib.util.find_spec("phijax") is None, reason="phijax is not installed; see `make compare`"
)
def test_what_the_installed_package_saves_is_read(tmp_path):
    import phijax

    from tests.interop.test_phijax import HeatObjective, TheirData, init, network

    def factory(*, key, **_):
        return phijax.InitializedModel(apply=network, state=init(key))

    saves = phijax.callbacks.ModelCheckpoint(phijax.training.OrbaxCheckpointIO(tmp_path), every_n_steps=2)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = phijax.Trainer(
            3,
            accelerator="cpu",
            callbacks=(saves,),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    module = phijax.PhiModule(factory, HeatObjective())
    trained = trainer.fit(module, datamodule=TheirData(), optimizer=optax.adam(1e-2), seed=3).state
    like = fresh()
    restored, step = Checkpoints(saves.last_model_path).restore_intact(like, weights_only=True)
    assert step == 3
    assert_trees_bitwise_equal(restored.model_state, jax.tree.map(jnp.asarray, trained.model_state))
    before = Checkpoints(tmp_path).restore(like, 2, weights_only=True)
    assert first_difference(before.model_state, restored.model_state) is not None
