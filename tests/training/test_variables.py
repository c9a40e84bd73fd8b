"""State that `losses` change in place: kept if it is returned, an error with the paths if it is not."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from phijax_rng import LossModule, LossTrainStep, StepOutput, initialize_train_state, keys
from tests import _models
from tests._bitwise import assert_trees_bitwise_equal

STREAMS = keys.split_root(0)
W = jnp.ones(2)
BATCHES = jax.tree.map(jnp.asarray, _models.BATCHES)


def traced(model, losses, microbatches=1):
    """The state after a step and its losses, as shapes."""
    module = LossModule(lambda key: model, losses, batch_keys=("data",))
    step = LossTrainStep(module, optax.sgd(0.1), microbatches=microbatches)
    state = initialize_train_state(model, optax.sgd(0.1), {}, STREAMS)
    return jax.eval_shape(step.__call__, state, BATCHES, STREAMS.runtime)


def updated(model, losses):
    module = LossModule(lambda key: model, losses, batch_keys=("data",))
    state = initialize_train_state(model, optax.sgd(0.1), {}, STREAMS)
    return LossTrainStep(module, optax.sgd(0.1))(state, BATCHES, STREAMS.runtime)[0].model_state


def fit_of(model_state):
    return {"fit": jnp.sum(model_state["w"] ** 2)}


def counted(model_state, batches):
    model_state["count"] += 1
    return fit_of(model_state)


def counted_deep(model_state, batches):
    model_state["list"][0] += 1
    return fit_of(model_state)


def called(model_state, batches):
    return {"fit": _models.squared(model_state(batches["data"]["inputs"]), batches)}


def called_stale(model_state, batches):
    before = nnx.clone(model_state)
    return StepOutput(called(model_state, batches), model_state=before)


def merged(model_state, batches):
    return called(nnx.merge(_models.GRAPH, model_state), batches)


def reseeded(model_state, batches, key):
    nnx.reseed(model_state, dropout=key)
    return fit_of({"w": model_state.inner.kernel[...]})


NNX_LEAVES = ("dropout.rngs.count.value", "norm.mean.value", "norm.var.value")
MODULE = ", ".join(f"model_state.{path}" for path in NNX_LEAVES)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("make", "losses", "paths"),
    [
        (lambda: {"w": W, "count": jnp.int32(0)}, counted, "model_state['count']"),
        (lambda: {"w": W, "count": 0}, counted, "model_state['count']"),
        (lambda: {"w": W, "list": [jnp.int32(0)]}, counted_deep, "model_state['list'][0]"),
        (lambda: _models.nnx_model(STREAMS.model), called, MODULE),
        (lambda: _models.nnx_model(STREAMS.model), called_stale, MODULE),
        (
            lambda: _models.nnx_model(STREAMS.model),
            reseeded,
            "model_state.dropout.rngs.count.value, model_state.dropout.rngs.key.value",
        ),
        (
            lambda: nnx.state(_models.nnx_model(STREAMS.model)),
            merged,
            "model_state['dropout']['rngs']['count'].value, model_state['norm']['mean'].value, "
            "model_state['norm']['var'].value",
        ),
    ],
    ids=["dict", "Python number", "list", "nnx", "nnx, an old copy returned", "nnx.reseed", "nnx.merge"],
)
def test_a_change_in_place_that_is_not_returned_is_refused_with_the_paths(make, losses, paths, microbatches):
    message = (
        f"losses changed leaves of the model state in place and did not return them: {paths}. "
        "Return StepOutput(losses, model_state=...) with the changed model, or change a copy."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        traced(make(), losses, microbatches)


def test_a_change_in_place_that_is_returned_is_kept():
    kept = updated(
        {"w": W, "count": jnp.int32(3)}, lambda model, batches: StepOutput(counted(model, batches), model)
    )
    assert_trees_bitwise_equal(kept["count"], jnp.int32(4))
    assert float(kept["w"][0]) < 1


def test_a_changed_copy_is_no_change_in_place():
    def losses(model_state, batches):
        return counted(dict(model_state), batches)

    assert int(updated({"w": W, "count": jnp.int32(3)}, losses)["count"]) == 3


def popped(model_state, batches):
    return {"fit": jnp.sum(model_state.pop("w") ** 2)}


def appended(model_state, batches):
    model_state["list"].append(W)
    return fit_of(model_state)


def in_evaluation(model_state, batches):
    model_state.eval()
    return called(model_state, batches)


class Counter(nnx.Module):
    def __init__(self):
        self.w, self.calls = nnx.Param(W), 0

    def __call__(self, inputs):
        self.calls += 1
        return jnp.sum(self.w[...])


OTHERS = "its containers, or fields that are no leaves (a mode, a name), are others"


@pytest.mark.parametrize(
    ("make", "losses", "found"),
    [
        (lambda: {"v": W, "w": W}, popped, "model_state['w'] is missing, nothing is new"),
        (lambda: {"w": W, "list": [W]}, appended, "nothing is missing, model_state['list'][1] is new"),
        (lambda: _models.nnx_model(STREAMS.model), in_evaluation, OTHERS),
        (Counter, lambda model, batches: StepOutput(called(model, batches), model), OTHERS),
    ],
    ids=["pop", "append", "eval()", "a Python counter of a module"],
)
def test_a_structure_that_is_changed_in_place_is_refused(make, losses, found):
    message = (
        f"losses changed the structure of the model state in place: {found}. "
        "Change a copy, and set modes such as that of model.eval() in init."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        traced(make(), losses)


def test_a_mode_that_is_set_already_may_be_set_again():
    def losses(model_state, batches):
        model_state.train()
        return _models.nnx_inside(model_state, batches)

    traced(_models.nnx_model(STREAMS.model), losses)


@pytest.mark.parametrize("leaf", [0, "mlp", True])
def test_a_constant_that_is_replaced_is_refused(leaf):
    def losses(model_state, batches):
        return StepOutput(fit_of(model_state), {**model_state, "leaf": leaf * 2 if leaf else 1})

    message = (
        "losses replaced leaves of the model state that are no arrays: model_state['leaf']. "
        "A compiled step keeps them as they are; make them arrays, for example with jnp.asarray."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        traced({"w": W, "leaf": leaf}, losses)
