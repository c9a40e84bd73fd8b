"""Predictions in batches of one size, in order, through one program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import Checkpoints, Trainer
from tests import _problems

HEAT = _problems.heat()
TRAINER = Trainer(8, progress=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(8, progress=False, checkpoints=Checkpoints(folder, every_n_steps=4, asynchronous=False))
    return trainer.fit(HEAT.module, seed=0, **HEAT.arguments), folder


def rows(count):
    return np.random.default_rng(3).random((count, 2)).astype(np.float32)


def direct(result, inputs):
    return np.asarray(jax.jit(HEAT.module.predict)(result.state.model_state, inputs))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_every_row_has_its_prediction_in_its_place(trained, count):
    inputs = rows(100)[:count]
    outputs = TRAINER.predict(trained[0], inputs, batch_size=8)
    assert isinstance(outputs, np.ndarray)
    np.testing.assert_allclose(outputs, direct(trained[0], inputs), rtol=1e-6)
    # A row's prediction depends on no other row.
    turned = TRAINER.predict(trained[0], inputs[::-1], batch_size=8)
    np.testing.assert_array_equal(turned[::-1], outputs)


def test_any_number_of_rows_goes_through_one_program(trained):
    TRAINER.predict(trained[0], rows(3), batch_size=5)
    with _problems.compilations() as compiled:
        for count in (1, 5, 6, 23):
            TRAINER.predict(trained[0], rows(count), batch_size=5)
    assert compiled == []


def test_no_rows_give_outputs_without_rows(trained):
    assert TRAINER.predict(trained[0], rows(0), batch_size=4).shape == (0, 1)


def test_a_checkpoint_predicts_as_its_result(trained):
    result, folder = trained
    expected = TRAINER.predict(result, rows(5), batch_size=4)
    for where in (folder, str(folder), Checkpoints(folder)):
        found = TRAINER.predict(where, rows(5), module=HEAT.module, batch_size=4)
        np.testing.assert_array_equal(found, expected)
    earlier = TRAINER.predict(folder, rows(5), module=HEAT.module, step=4, batch_size=4)
    assert (earlier != expected).any()


def test_inputs_and_outputs_may_be_trees(trained):
    def predict(model_state, inputs):
        field = HEAT.module.predict(model_state, jnp.stack([inputs["x"], inputs["t"]], 1))
        return {"field": field, "twice": {"x": 2 * inputs["x"]}}

    module = dataclasses.replace(HEAT.module, predict=predict)
    points = rows(6)
    outputs = TRAINER.predict(trained[0], {"t": points[:, 1], "x": points[:, 0]}, module=module, batch_size=4)
    np.testing.assert_array_equal(outputs["twice"]["x"], 2 * points[:, 0])
    np.testing.assert_allclose(outputs["field"], direct(trained[0], points), rtol=1e-6)


def mean(model_state, inputs):
    return jnp.mean(inputs, axis=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"trained": 3},
            TypeError,
            "trained must be a FitResult, a Checkpoints or a path, got 3. Pass one.",
        ),
        ({"step": 4}, ValueError, "step=4 names a checkpoint, and trained is a result. Drop the step."),
        (
            {"batch_size": 0},
            ValueError,
            "batch_size must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        (
            {"inputs": {"x": np.zeros(3), "t": np.zeros(4)}},
            ValueError,
            "inputs must be arrays with one number of rows, got shapes (4,), (3,). "
            "Give each a leading axis of that length.",
        ),
        (
            {"module": dataclasses.replace(HEAT.module, predict=mean)},
            ValueError,
            "predict must return one row for each row of inputs, got shape (2,) at outputs for 4 rows. "
            "Return arrays of shape (rows, ...).",
        ),
    ],
    ids=["no result", "a step of a result", "size", "lengths", "no rows"],
)
def test_what_cannot_be_predicted_is_refused(trained, change, error, message):
    arguments = {"trained": trained[0], "inputs": rows(3), "batch_size": 4} | change
    with pytest.raises(error) as caught:
        TRAINER.predict(arguments.pop("trained"), arguments.pop("inputs"), **arguments)
    assert str(caught.value) == message


def test_a_checkpoint_wants_a_module_that_predicts(trained):
    message = "a checkpoint holds arrays and no functions. Pass module=... too."
    with pytest.raises(TypeError) as caught:
        TRAINER.predict(trained[1], rows(3))
    assert str(caught.value) == message
    silent = dataclasses.replace(HEAT.module, predict=None)
    with pytest.raises(ValueError, match=r"^module must have a predict function, got LossModule\("):
        TRAINER.predict(trained[1], rows(3), module=silent)


def test_the_repr_of_a_result_shows_shapes_and_never_numbers_of_arrays(trained):
    result, _ = trained
    shapes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(result.state.model_state)]
    summary = ", ".join(shapes[:4]) + (", ..." if len(shapes) > 4 else "")
    assert repr(result) == (
        "FitResult(step=8, iterations=8, stopped_early=False, interrupted=False, seed=0, "
        f"metrics={list(result.metrics)}, history={len(result.history)} rows, "
        f"model_state={len(shapes)} arrays: {summary})"
    )
