"""The exponential moving average of a model state: against a loop by hand, and over a resume."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    HostPool,
    LossModule,
    LossTrainStep,
    PoolDataModule,
    StepOutput,
    Trainer,
    initialize_train_state,
    keys,
)
from phijax_rng.errors import CheckpointMismatchError
from phijax_rng.training import AveragedState, evaluation_params, with_average
from phijax_rng.training.averaging import averaged
from tests._bitwise import assert_trees_bitwise_equal, first_difference

DECAY = 0.75
START = {
    "w": jnp.float32([1.0, -2.0, 0.5]),
    "half": jnp.bfloat16(1.0),
    "statistics": jnp.float32(0.0),
    "count": jnp.int32(0),
}
DATA = PoolDataModule({"data": HostPool(np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3))}, {"data": 4})


def losses(model_state, batches):
    rows = batches["data"]["inputs"]
    fit = jnp.mean((rows @ model_state["w"] - 3) ** 2) + (model_state["half"].astype(jnp.float32) - 2) ** 2
    fit = jnp.where(model_state["count"] == BREAKS["at"], jnp.nan, fit)
    following = {
        **model_state,
        "statistics": 0.5 * model_state["statistics"] + jnp.mean(rows),
        "count": model_state["count"] + 1,
    }
    return StepOutput({"fit": fit}, following)


BREAKS = {"at": -1}
MODULE = LossModule(lambda key: START, losses, batch_keys=("data",))


class Kept:
    """The model state after every update."""

    every_n_steps = 1

    def __init__(self):
        self.states = []

    def __call__(self, event):
        self.states.append(jax.tree.map(np.asarray, event.state.model_state))


def fit(stop, folder=None, *, decay=DECAY, callbacks=(), **options):
    saves = None if folder is None else Checkpoints(folder, asynchronous=False, max_to_keep=None)
    trainer = Trainer(
        stop, checkpoints=saves, progress=False, ema_decay=decay, callbacks=callbacks, **options
    )
    resume = False if folder is None else "auto"
    return trainer.fit(MODULE, datamodule=DATA, optimizer=optax.adam(0.1), seed=3, resume=resume)


def by_hand(states, decay=DECAY):
    """The mean of the states, the newest with weight 1, the one before with `decay`, and so on."""
    weights = decay ** np.arange(len(states) - 1, -1, -1, dtype=np.float64)
    return {
        name: np.tensordot(weights, [np.asarray(state[name], np.float64) for state in states], 1)
        / weights.sum()
        for name in ("w", "half", "statistics")
    }


@pytest.mark.full
def test_the_average_is_that_of_a_loop_by_hand_to_the_bit():
    kept = Kept()
    result = fit(12, callbacks=(kept,))

    @jax.jit
    def following(average, weight, params):
        weight = np.float32(DECAY) * weight + 1
        return average + (1 / weight) * (params - average), weight

    average, weight = kept.states[0], jnp.float32(1)
    for state in kept.states[1:]:
        together = {
            name: following(average[name], weight, jnp.asarray(state[name], jnp.float32))
            for name in ("w", "half", "statistics")
        }
        average = {name: one for name, (one, _) in together.items()}
        weight = together["w"][1]
    found = result.state.optimizer_state
    assert_trees_bitwise_equal({name: found.average[name] for name in average}, average)
    assert_trees_bitwise_equal(found.weight, weight)
    wanted = by_hand(kept.states)
    for name, value in wanted.items():
        np.testing.assert_allclose(found.average[name], value, rtol=1e-5)
        assert not np.allclose(found.average[name], by_hand(kept.states, 0.7)[name], rtol=1e-4)
    evaluated = result.evaluation_params
    assert evaluated["half"].dtype == jnp.bfloat16
    assert found.average["half"].dtype == jnp.float32
    assert_trees_bitwise_equal(evaluated["w"], found.average["w"])
    assert int(evaluated["count"]) == 12
    assert found.average["count"] is None


def test_the_first_update_replaces_the_initial_parameters():
    result = fit(1)
    assert_trees_bitwise_equal(evaluation_params(result.state), result.state.model_state)
    assert first_difference(result.state.model_state["w"], START["w"]) is not None


def test_before_an_update_the_model_itself_is_evaluated():
    state = with_average(initialize_train_state(START, optax.adam(0.1), {}, keys.split_root(0)))
    other = state.replace(model_state={**START, "w": START["w"] + 1})
    assert_trees_bitwise_equal(evaluation_params(other), dict(sorted(other.model_state.items())))


def test_what_is_infinite_or_does_not_move_keeps_its_bits():
    third = jnp.float32(1 / 3)
    model_state = {"mask": jnp.float32([0, -jnp.inf]), "best": jnp.float32(jnp.inf), "frozen": third}
    state = with_average(initialize_train_state(model_state, optax.sgd(0.1), {}, keys.split_root(0)))
    kept = state.optimizer_state
    for best in (jnp.inf, 5.0, 3.0):
        kept = averaged(kept, (), {**model_state, "best": jnp.float32(best)}, DECAY)
    assert_trees_bitwise_equal(
        {name: kept.average[name] for name in ("mask", "frozen")},
        {name: model_state[name] for name in ("mask", "frozen")},
    )
    assert 3 < kept.average["best"] < 5  # from the first finite value on


def test_training_goes_on_as_without_an_average():
    plain, averaged = fit(12, decay=None), fit(12)
    assert_trees_bitwise_equal(averaged.state.model_state, plain.state.model_state)
    assert_trees_bitwise_equal(averaged.state.optimizer_state.optimizer_state, plain.state.optimizer_state)


def test_an_average_resumes_exactly(tmp_path):
    whole = fit(12).state
    fit(5, tmp_path)
    resumed = fit(12, tmp_path).state
    assert_trees_bitwise_equal(resumed, whole)
    # The control: an average that starts at the cut is another one.
    restored = Checkpoints(tmp_path).restore(whole, 5)
    begun = with_average(restored.replace(optimizer_state=restored.optimizer_state.optimizer_state))
    again = Trainer(12, progress=False, ema_decay=DECAY).fit_state(
        MODULE, begun, optimizer=optax.adam(0.1), datamodule=DATA
    )
    assert_trees_bitwise_equal(again.state.model_state, whole.model_state)
    assert first_difference(again.state.optimizer_state, whole.optimizer_state) is not None


def test_an_update_that_is_skipped_leaves_the_average_alone(monkeypatch):
    monkeypatch.setitem(BREAKS, "at", 4)
    before = fit(4, on_nonfinite="skip").state
    after = fit(7, on_nonfinite="skip").state  # the count stays 4, so every later update is skipped
    assert int(after.step) == 7
    assert_trees_bitwise_equal(after.optimizer_state, before.optimizer_state)


def test_a_custom_loop_has_the_same_average():
    optimizer = optax.adam(0.1)
    state = with_average(initialize_train_state(START, optimizer, {}, keys.split_root(3)))
    step = LossTrainStep(MODULE, optimizer, ema_decay=DECAY)
    result = Trainer(12, progress=False).fit_state(MODULE, state, train_step=step, datamodule=DATA)
    by_trainer = Trainer(12, progress=False, ema_decay=DECAY).fit_state(
        MODULE,
        initialize_train_state(START, optimizer, {}, keys.split_root(3)),
        optimizer=optimizer,
        datamodule=DATA,
    )
    assert isinstance(result.state.optimizer_state, AveragedState)
    assert_trees_bitwise_equal(result.state, by_trainer.state)


def test_another_decay_and_a_run_without_an_average_are_named(tmp_path):
    fit(2, tmp_path)
    contract = Checkpoints(tmp_path).contract()["training"]
    assert contract["ema_decay"] == DECAY
    assert contract["optimizer"][0] == "AveragedState" and len(contract["optimizer"]) > 1
    with pytest.warns(UserWarning, match=r"training\.ema_decay: 0\.75 in the checkpoint, 0\.5 in this run"):
        fit(4, tmp_path, decay=0.5)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer_state"):
        fit(6, tmp_path, decay=None)


@pytest.mark.parametrize("decay", [1.0, -0.1, "0.9", float("nan")])
def test_a_decay_outside_of_its_range_is_refused(decay):
    step = functools.partial(LossTrainStep, MODULE, optax.sgd(0.1), ema_decay=decay)
    for make in (functools.partial(Trainer, 1, ema_decay=decay), step):
        with pytest.raises((ValueError, TypeError), match=r"^ema_decay must be "):
            make()


def test_a_state_that_does_not_fit_the_option_is_refused():
    state = initialize_train_state(START, optax.adam(0.1), {}, keys.split_root(0))
    cases = [
        (
            LossTrainStep(MODULE, optax.adam(0.1), ema_decay=0.5),
            state,
            "ema_decay=0.5 averages the parameters, and the state has no average. "
            "Pass training.with_average(state).",
        ),
        (
            LossTrainStep(MODULE, optax.adam(0.1)),
            with_average(state),
            "the state has an average of its parameters, and ema_decay is None. Pass the decay of the "
            "run, or drop the average: optimizer_state=state.optimizer_state.optimizer_state.",
        ),
    ]
    for step, given, message in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            step(given, {"data": {"inputs": jnp.ones((4, 3))}}, jax.random.key(0))
    message = (
        "ema_decay=0.5 averages after an optimizer's update, and train_step is another update. "
        "Pass LossTrainStep(..., ema_decay=...) as train_step, or an optimizer."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trainer(1, ema_decay=0.5).fit_state(MODULE, state, train_step=cases[1][0], datamodule=DATA)
