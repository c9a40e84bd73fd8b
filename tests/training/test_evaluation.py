"""The parameters to evaluate: found in every optimizer's state, followed by all that evaluate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from phijax_rng import Checkpoints, Evaluate, Trainer, TrainState, initialize_train_state, keys
from phijax_rng.state import merge, trainable
from phijax_rng.training import evaluation_params
from phijax_rng.training.evaluation import keeps_average, stored_averages
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference

HEAT = _problems.heat()
FREE = optax.contrib.schedule_free_sgd(0.1, b1=0.8)


def trained(optimizer, model_state=None, steps=3):
    """A state after a few updates by constant gradients, made by hand."""
    start = {"a": jnp.arange(1.0, 4.0), "b": {"n": jnp.int32(3), "c": jnp.ones((2, 2))}}
    state = initialize_train_state(
        start if model_state is None else model_state, optimizer, {}, keys.split_root(0)
    )
    for _ in range(steps):
        params = trainable(state.model_state)
        grads = jax.tree.map(lambda leaf: (0.3 * leaf + 1).astype(leaf.dtype), params)
        updates, optimizer_state = optimizer.update(grads, state.optimizer_state, params)
        model_state = merge(optax.apply_updates(params, updates), state.model_state)
        state = state.replace(model_state=model_state, optimizer_state=optimizer_state)
    return state


@functools.cache
def expected():
    """What Optax's own function gives for the bare optimizer."""
    state = trained(FREE)
    found = optax.contrib.schedule_free_eval_params(state.optimizer_state, trainable(state.model_state))
    return merge(found, state.model_state)


@pytest.mark.parametrize(
    "optimizer",
    [
        FREE,
        optax.chain(optax.clip(1e9), optax.chain(FREE)),
        pytest.param(optax.named_chain(("clip", optax.clip(1e9)), ("free", FREE)), marks=pytest.mark.full),
        optax.masked(FREE, lambda params: jax.tree.map(lambda _: True, params)),
        optax.partition({"x": FREE, "y": FREE}, {"a": "x", "b": "y"}),
        pytest.param(
            optax.inject_hyperparams(optax.contrib.schedule_free_sgd)(learning_rate=0.1, b1=0.8),
            marks=pytest.mark.full,
        ),
        pytest.param(optax.MultiSteps(FREE, 1), marks=pytest.mark.full),
        pytest.param(optax.apply_if_finite(FREE, 3), marks=pytest.mark.full),
        optax.contrib.split_real_and_imaginary(FREE),
    ],
    ids=["bare", "chain", "named", "masked", "partition", "inject", "multi-steps", "if finite", "split"],
)
def test_schedule_free_is_found_wherever_it_is_wrapped(optimizer):
    state = trained(optimizer)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-6), evaluation_params(state), expected()
    )
    # Control: training is at another point.
    assert not np.allclose(state.model_state["a"], expected()["a"], rtol=1e-3)
    assert_trees_bitwise_equal(evaluation_params(from_paths(state)), evaluation_params(state))


def from_paths(state: TrainState) -> TrainState:
    """The state as `predict` has it from a checkpoint: the optimizer's by the paths of its arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {jax.tree_util.keystr(path).removeprefix("."): leaf for path, leaf in leaves}
    assert keeps_average(arrays)
    return state.replace(optimizer_state=stored_averages(arrays, state.model_state))


def test_a_part_that_is_not_averaged_stays_as_it_is():
    state = trained(optax.partition({"x": FREE, "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}))
    found = evaluation_params(state)
    np.testing.assert_allclose(found["a"], expected()["a"], rtol=2e-6)
    assert found["b"]["c"] is state.model_state["b"]["c"]
    assert_trees_bitwise_equal(evaluation_params(from_paths(state)), found)


def test_complex_leaves_that_an_optimizer_splits_are_joined():
    start = {"z": jnp.full(2, 1 + 2j, jnp.complex64)}
    state = trained(optax.contrib.split_real_and_imaginary(FREE), start)
    found = evaluation_params(state)
    assert found["z"].dtype == np.complex64
    assert abs(found["z"].imag).min() > 1.5 and (found["z"] != state.model_state["z"]).all()
    assert_trees_bitwise_equal(evaluation_params(from_paths(state)), found)


def test_the_dtypes_are_those_of_the_model():
    free = optax.contrib.schedule_free_sgd(0.1, state_dtype=jnp.float32)
    found = evaluation_params(trained(free, {"a": jnp.ones(3, jnp.bfloat16)}))
    assert found["a"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.chain(optax.ema(0.9), optax.sgd(0.1)),
        pytest.param(optax.lbfgs(0.1, linesearch=None), marks=pytest.mark.full),
    ],
    ids=["adam", "average of updates", "lbfgs"],
)
def test_without_an_average_it_is_the_model_state_itself(optimizer):
    state = trained(optimizer, {"a": jnp.ones(2)}, steps=1)
    assert evaluation_params(state) is state.model_state


def test_lookahead_is_evaluated_at_its_slow_parameters():
    pair = optax.LookaheadParams(fast={"a": jnp.ones(2)}, slow={"a": jnp.zeros(2)})
    state = initialize_train_state({"net": pair, "n": jnp.int32(1)}, optax.sgd(0.1), {}, keys.split_root(0))
    found = evaluation_params(state)
    assert_trees_bitwise_equal(found["net"], optax.LookaheadParams(fast=pair.slow, slow=pair.slow))


def test_an_average_of_another_model_is_named():
    with pytest.raises(ValueError) as caught:
        evaluation_params(trained(FREE).replace(model_state={"a": jnp.ones(3)}))
    assert str(caught.value) == (
        "the state of optax.contrib.schedule_free does not have the structure of model_state, so the "
        "parameters to evaluate are unknown. Use the optimizer that the state was initialized with."
    )


def test_evaluate_predict_and_the_result_follow_them(tmp_path):
    seen = []

    def keep(model_state):
        seen.append(model_state)
        return {"error": jnp.sum(model_state["output"]["kernel"] ** 2)}

    optimizer = optax.chain(optax.clip(1.0), optax.contrib.schedule_free_adamw(1e-2))
    arguments = {"datamodule": HEAT.datamodule, "optimizer": optimizer, "seed": 0}
    saves = Checkpoints(tmp_path, every_n_steps=4, keep_best=("evaluation/error", 1), asynchronous=False)
    trainer = Trainer(8, callbacks=(Evaluate(keep, every_n_steps=4),), checkpoints=saves, progress=False)
    result = trainer.fit(HEAT.module, **arguments)
    x = np.linspace(0, 1, 10, dtype=np.float32).reshape(5, 2)
    assert_trees_bitwise_equal(seen[-1], result.evaluation_params)
    assert first_difference(seen[-1], result.state.model_state) is not None
    assert result.metrics["evaluation/error"] == float(keep(result.evaluation_params)["error"])
    outputs = trainer.predict(result, x, batch_size=5)
    np.testing.assert_allclose(outputs, HEAT.module.predict(result.evaluation_params, x), rtol=1e-5)
    # From a checkpoint, which holds the optimizer's arrays and not the optimizer.
    stored = trainer.predict(tmp_path, x, module=HEAT.module, batch_size=5)
    np.testing.assert_array_equal(stored, outputs)
    best = Checkpoints(tmp_path).best_step
    assert best == (4 if result.history[0]["evaluation/error"] <= result.metrics["evaluation/error"] else 8)
    by_name, by_step = (
        trainer.predict(tmp_path, x, module=HEAT.module, batch_size=5, step=step) for step in ("best", best)
    )
    np.testing.assert_array_equal(by_name, by_step)
    # Nothing of it moves the training.
    plain = Trainer(8, progress=False).fit(HEAT.module, **arguments)
    assert_trees_bitwise_equal(result.state, plain.state)


def test_an_exponential_moving_average_is_followed(tmp_path):
    def error(model_state):
        return {"error": jnp.sum(model_state["output"]["kernel"] ** 2)}

    saves = Checkpoints(tmp_path, asynchronous=False)
    trainer = Trainer(6, callbacks=(Evaluate(error),), checkpoints=saves, progress=False, ema_decay=0.5)
    result = trainer.fit(HEAT.module, seed=0, **HEAT.arguments)
    average = result.state.optimizer_state.average
    assert_trees_bitwise_equal(result.evaluation_params, average)
    # Training goes its own way, as without an average.
    assert_trees_bitwise_equal(result.state.model_state, HEAT.run(6).model_state)
    assert result.metrics["evaluation/error"] == float(error(average)["error"])
    x = np.linspace(0, 1, 10, dtype=np.float32).reshape(5, 2)
    outputs = trainer.predict(result, x, batch_size=5)
    np.testing.assert_array_equal(trainer.predict(tmp_path, x, module=HEAT.module, batch_size=5), outputs)
    assert not np.allclose(outputs, HEAT.module.predict(result.state.model_state, x), rtol=1e-3)
