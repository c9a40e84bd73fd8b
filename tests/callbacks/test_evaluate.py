"""Evaluations: on a separate stream, at fixed steps, without influence, seen by later callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import Checkpoints, Evaluate, Trainer, keys
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal

HEAT = _problems.heat()


def draw(model_state, key):
    return {"draw": jax.random.uniform(key), "weight": jnp.sum(model_state["output"]["kernel"])}


def fit(stop, *callbacks, **options):
    trainer = Trainer(stop, callbacks=callbacks, progress=False, **{"log_every_n_steps": 4} | options)
    return trainer.fit(HEAT.module, seed=0, **HEAT.arguments)


def test_evaluations_join_the_history_at_their_steps():
    result = fit(9, Evaluate(draw, every_n_steps=3, name="own"))
    assert [row["step"] for row in result.history] == [3, 4, 6, 8, 9]
    assert [row["step"] for row in result.history if "own/draw" in row] == [3, 6, 9]
    assert all("total_loss" in row for row in result.history)
    assert result.metrics["own/draw"] == result.history[-1]["own/draw"]
    balancer_key = HEAT.state().balancer_key
    own = keys.stream(balancer_key, "callback", "evaluation", "own")
    for row in result.history:
        if "own/draw" in row:
            assert row["own/draw"] == float(jax.random.uniform(keys.fold_in(own, row["step"])))
            weight = jnp.sum(HEAT.run(row["step"]).model_state["output"]["kernel"])
            assert row["own/weight"] == float(weight)


def test_evaluations_change_no_number_of_the_run():
    plain = fit(12).state
    for callback in (Evaluate(draw, every_n_steps=1), Evaluate(draw, every_n_steps=5, name="b")):
        assert_trees_bitwise_equal(fit(12, callback).state, plain)


def test_another_name_is_another_stream():
    first, second = Evaluate(draw, every_n_steps=4, name="a"), Evaluate(draw, every_n_steps=4, name="b")
    row = fit(4, first, second).history[-1]
    assert row["a/draw"] != row["b/draw"]
    assert row["a/weight"] == row["b/weight"]


def test_a_function_without_a_key_is_called_without_one():
    result = fit(2, Evaluate(lambda model_state: {"one": np.float64(1)}, every_n_steps=2))
    assert result.metrics["evaluation/one"] == 1.0


def test_what_a_function_does_to_its_copy_stays_there():
    def spoil(model_state):
        for leaf in jax.tree.leaves(model_state):
            leaf.delete()
        return {"done": 1}

    assert_trees_bitwise_equal(fit(6, Evaluate(spoil, every_n_steps=2)).state, fit(6).state)


def test_the_best_step_may_be_chosen_by_an_evaluation(tmp_path):
    distances = iter([3.0, 0.5, 2.0, 0.5, 1.0])
    saves = Checkpoints(
        tmp_path, every_n_steps=2, max_to_keep=1, keep_best=("evaluation/distance", 1), asynchronous=False
    )
    fit(10, Evaluate(lambda model_state: {"distance": next(distances)}, every_n_steps=2), checkpoints=saves)
    assert (saves.best_step, saves.steps) == (4, (4, 10))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda model_state: 3.0,
            TypeError,
            "the result of 'evaluation' must be a mapping, got 3.0. Pass a dict keyed by name.",
        ),
        (
            lambda model_state: {"error": np.zeros(2)},
            TypeError,
            "report['evaluation/error'] must be a number, got float64[2]. Reduce it first.",
        ),
    ],
    ids=["no dict", "no number"],
)
def test_results_other_than_numbers_by_name_raise(function, error, message):
    with pytest.raises(error) as caught:
        fit(2, Evaluate(function, every_n_steps=2))
    assert str(caught.value) == message
    assert caught.value.__notes__ == ["raised by the callback 'evaluation' at step 2"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "function must be callable, got 3. Pass a function."),
        (
            lambda: {"one": 1},
            "function must take (model_state), and may take key by that name, got (). Fix its parameters.",
        ),
        (
            lambda model_state, points: {"one": 1},
            "function must take (model_state), and may take key by that name, got (model_state, points). "
            "Fix its parameters.",
        ),
        (
            lambda model_state, points, *, key: {"one": 1},
            "function must take (model_state), and may take key by that name, got (model_state, points, *, "
            "key). Fix its parameters.",
        ),
    ],
    ids=["no function", "no parameter", "one too many", "one too many beside the key"],
)
def test_a_function_with_other_parameters_raises_at_construction(function, message):
    with pytest.raises(TypeError) as caught:
        Evaluate(function)
    assert str(caught.value) == message


def test_a_key_may_be_taken_by_place():
    def by_name(model_state, key):
        return {"draw": jax.random.uniform(key)}

    def by_place(model_state, key, /):
        return by_name(model_state, key)

    first, second = (fit(2, Evaluate(own, every_n_steps=2, name="own")) for own in (by_place, by_name))
    assert first.metrics["own/draw"] == second.metrics["own/draw"]
