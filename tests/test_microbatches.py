"""Micro-batches: the same rows in slices, a key for each, losses averaged, one slice held at a time."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    LossModule,
    LossTrainStep,
    StaticLossBalancer,
    StepOutput,
    Trainer,
    initialize_train_state,
    keys,
    masked_mean,
    masked_sum,
)
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import resumed

KEY = jax.random.key(5)
ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
BATCHES = {"data": {"inputs": ROWS, "targets": ROWS[:, 0] ** 2}, "walls": {"inputs": ROWS[:6] + 1}}
START = {"w": jnp.float32([0.1, -0.2, 0.3])}


def plain(model_state, batches):
    data, walls = batches["data"], batches["walls"]
    return {
        "fit": jnp.mean((data["inputs"] @ model_state["w"] - data["targets"]) ** 2),
        "walls": jnp.mean(jnp.tanh(walls["inputs"] @ model_state["w"]) ** 2),
    }


def updated(losses, count, model_state=START, *, balancer=None, optimizer=None, mask=None):
    optimizer = optimizer or optax.sgd(0.1)
    module = LossModule(lambda key: model_state, losses, batch_keys=("data", "walls"))
    state = initialize_train_state(
        model_state, optimizer, balancer.initialize() if balancer else {}, keys.split_root(0)
    )
    step = LossTrainStep(module, optimizer, balancer, count)
    return jax.jit(functools.partial(step))(state, BATCHES, KEY, mask)


class ProductBalancer:
    """A combination that is not linear: the mean of products is not the product of means."""

    loss_names = ("fit", "walls")

    def initialize(self):
        return {}

    def combine(self, losses, state):
        return losses["fit"] * losses["walls"]

    def diagnostics(self, state):
        return {}


@pytest.mark.parametrize(
    "balancer",
    [None, StaticLossBalancer(("walls", "fit"), weights={"walls": 3.0}), ProductBalancer()],
    ids=["sum", "weights", "product"],
)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_losses_and_gradient_are_those_of_the_whole_batch(count, balancer):
    whole, output = updated(plain, 1, balancer=balancer)
    cut, pieces = updated(plain, count, balancer=balancer)
    assert set(output.losses) == set(pieces.losses) == {"total_loss", "fit", "walls"}
    for name, loss in output.losses.items():
        np.testing.assert_allclose(pieces.losses[name], loss, rtol=1e-6)
    np.testing.assert_allclose(cut.model_state["w"], whole.model_state["w"], rtol=1e-5)
    assert int(cut.step) == 1


def test_each_loss_is_the_mean_of_its_values_over_the_slices():
    _, output = updated(plain, 3)
    slices = [
        {
            name: {
                field: array[k * len(array) // 3 : (k + 1) * len(array) // 3] for field, array in rows.items()
            }
            for name, rows in BATCHES.items()
        }
        for k in range(3)
    ]
    values = [plain(START, rows) for rows in slices]
    for name in ("fit", "walls"):
        np.testing.assert_allclose(output.losses[name], np.mean([value[name] for value in values]), rtol=1e-6)


# Losses that are no plain mean: given as (sum, weight)


LABELED = np.float32([1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1])


def labeled(as_pair, weights=LABELED):
    """The error of the labeled rows, as one number or as a sum with its weight."""

    def losses(model_state, batches):
        # The weights are found by their row, since a loss receives a slice.
        own = jnp.sum(jnp.where(batches["data"]["inputs"][:, :1] == ROWS[:, 0], weights, 0), axis=1)
        total = jnp.sum(
            own * (batches["data"]["inputs"] @ model_state["w"] - batches["data"]["targets"]) ** 2
        )
        pair = total, jnp.sum(own)
        return {
            "fit": pair if as_pair else total / jnp.maximum(pair[1], 1),
            "walls": plain_walls(model_state),
        }

    return losses


def plain_walls(model_state):
    return jnp.sum(model_state["w"] ** 2)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_sums_and_weights_add_up_to_the_loss_and_gradient_of_the_whole_batch(count):
    whole, output = updated(labeled(as_pair=True), 1)
    mean, by_hand = updated(labeled(as_pair=False), 1)
    assert_trees_bitwise_equal(whole.model_state, mean.model_state)
    assert_trees_bitwise_equal(output.losses, by_hand.losses)
    cut, pieces = updated(labeled(as_pair=True), count)
    for name, loss in output.losses.items():
        np.testing.assert_allclose(pieces.losses[name], loss, rtol=1e-6)
    np.testing.assert_allclose(cut.model_state["w"], whole.model_state["w"], rtol=1e-5)
    # The control: means over the labeled rows of each slice.
    wrong, means = updated(labeled(as_pair=False), count)
    assert abs(means.losses["fit"] / output.losses["fit"] - 1) > 0.1
    assert not np.allclose(wrong.model_state["w"], whole.model_state["w"], rtol=1e-2)


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_without_any_weight_is_a_loss_of_zero_without_gradient(count):
    state, output = updated(labeled(as_pair=True, weights=0 * LABELED), count)
    assert output.losses["fit"] == 0
    np.testing.assert_allclose(state.model_state["w"], START["w"] * 0.8, rtol=1e-6)  # of the other loss alone
    assert first_difference(output.losses["walls"], jnp.float32(0)) is not None


@pytest.mark.parametrize("count", [1, 3])
def test_a_sum_over_no_weight_is_no_loss_of_zero(count):
    def losses(model_state, batches):
        return {"fit": (jnp.sum(model_state["w"] ** 2), 0.0), "walls": (jnp.int32(2), jnp.asarray(True))}

    _, output = updated(losses, count)
    assert np.isinf(output.losses["fit"])
    assert output.losses["walls"] == 2
    assert output.losses["walls"].dtype == jnp.float32


def test_rows_that_fill_up_a_slice_do_not_count():
    mask = {"data": jnp.arange(12) < 11, "walls": jnp.arange(6) < 4}

    def losses(reduced, model_state, batches, mask):
        data, walls = batches["data"], batches["walls"]["inputs"]
        return {
            "fit": reduced((data["inputs"] @ model_state["w"] - data["targets"]) ** 2, mask["data"]),
            "walls": reduced(jnp.tanh(walls * model_state["w"]) ** 2, mask["walls"]),
        }

    whole, output = updated(functools.partial(losses, masked_mean), 1, mask=mask)
    for count in (2, 5):  # 5 divides neither batch, and leaves slices without a row that counts
        cut, pieces = updated(functools.partial(losses, masked_sum), count, mask=mask)
        for name, loss in output.losses.items():
            np.testing.assert_allclose(pieces.losses[name], loss, rtol=1e-6)
        np.testing.assert_allclose(cut.model_state["w"], whole.model_state["w"], rtol=1e-5)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (
            (1.0, 2.0, 3.0),
            "losses['fit'] must be a scalar or a pair (sum, weight), got a tuple of 3. "
            "Return a number, or a sum over rows and their number.",
        ),
        (
            (np.ones(3), 2.0),
            "losses['fit']['sum'] must be a scalar, got shape (3,). Reduce it, for example with jnp.mean.",
        ),
        (
            (1.0, np.ones(3, bool)),
            "losses['fit']['weight'] must be a scalar, got shape (3,). Reduce it, for example with jnp.mean.",
        ),
    ],
)
def test_a_pair_has_two_scalars(term, message):
    module = LossModule(lambda key: START, lambda model_state, batches: {"fit": term}, batch_keys=("data",))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module.evaluate(START, BATCHES, KEY)


def test_every_micro_batch_has_its_slice_and_a_key_of_its_own():
    words, first_rows = [], []

    def losses(model_state, batches, key):
        first = batches["data"]["inputs"][0, 0]
        jax.debug.callback(
            lambda w, r: (words.append(tuple(w)), first_rows.append(float(r))),
            jax.random.key_data(key),
            first,
        )
        return plain(model_state, batches)

    updated(losses, 3)
    jax.effects_barrier()
    expected = jax.random.key_data(jax.random.split(KEY, 3)).tolist()
    # Each is evaluated a second time for the gradient, from the last to the first, with the same key.
    assert {tuple(map(int, pair)) for pair in words} == {tuple(pair) for pair in expected}
    assert tuple(jax.random.key_data(KEY).tolist()) not in {tuple(map(int, pair)) for pair in words}
    assert set(first_rows) == {float(ROWS[4 * k, 0]) for k in range(3)}


def test_variables_are_carried_from_one_micro_batch_to_the_next():
    model_state = {
        "w": START["w"],
        "seen": {"mean": jnp.float32(1.0), "count": jnp.int32(7), "key": jax.random.key(1)},
    }

    def losses(model_state, batches):
        seen = model_state["seen"]
        renewed = {
            "mean": 0.5 * seen["mean"] + jnp.sum(batches["data"]["targets"]),
            "count": seen["count"] + 1,
            "key": jax.random.split(seen["key"])[0],
        }
        output = plain(model_state, batches)
        diagnostics = {"first": batches["data"]["inputs"][0, 0], "count": seen["count"]}
        return StepOutput(output, {"w": model_state["w"], "seen": renewed}, diagnostics)

    state, output = updated(losses, 3, model_state)
    mean, key = 1.0, jax.random.key(1)
    for part in np.split(BATCHES["data"]["targets"], 3):
        mean, key = 0.5 * mean + part.sum(), jax.random.split(key)[0]
    np.testing.assert_allclose(state.model_state["seen"]["mean"], mean, rtol=1e-6)
    assert int(state.model_state["seen"]["count"]) == 10
    assert_trees_bitwise_equal(state.model_state["seen"]["key"], key)
    np.testing.assert_allclose(output.diagnostics["first"], ROWS[[0, 4, 8], 0].mean(), rtol=1e-6)
    assert int(output.diagnostics["count"]) == 9  # not floating: the last
    assert first_difference(state.model_state["w"], START["w"]) is not None


def test_a_line_search_sees_the_losses_of_all_slices():
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=8))
    whole, _ = updated(plain, 1, optimizer=search)
    cut, _ = updated(plain, 3, optimizer=search)
    np.testing.assert_allclose(cut.model_state["w"], whole.model_state["w"], rtol=1e-4)


def test_one_slice_is_held_at_a_time():
    def losses(model_state, batches):
        hidden = batches["data"]["inputs"]
        for _ in range(8):
            hidden = jnp.tanh(hidden @ model_state["w"])
        return {"fit": jnp.mean(hidden**2)}

    model_state = {"w": jnp.eye(16)}
    module = LossModule(lambda key: model_state, losses, batch_keys=("data",))
    state = initialize_train_state(model_state, optax.sgd(0.1), {}, keys.split_root(0))
    batches = {"data": {"inputs": jnp.ones((16384, 16))}}

    def bytes_held(count):
        step = LossTrainStep(module, optax.sgd(0.1), None, count)
        program = jax.jit(functools.partial(step)).lower(state, batches, KEY).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert bytes_held(16) < bytes_held(1) / 4


# In a run


PROBLEM = _problems.dropout()


def fit(stop, count, folder=None):
    return resumed(PROBLEM, stop, folder, trainer={"microbatches": count})


def test_a_run_in_micro_batches_resumes_exactly_and_uses_the_rows_of_whole_batches(tmp_path):
    whole = fit(20, 2).state
    fit(9, 2, tmp_path)
    assert_trees_bitwise_equal(fit(20, 2, tmp_path).state, whole)
    plain_run = fit(20, 1).state
    assert_trees_bitwise_equal(plain_run, PROBLEM.run(20))
    assert_trees_bitwise_equal(plain_run.sampling_key, whole.sampling_key)
    assert first_difference(plain_run.model_state, whole.model_state) is not None  # other dropout masks


def test_another_number_of_micro_batches_is_named_on_resume(tmp_path):
    fit(4, 1, tmp_path)
    with pytest.warns(
        UserWarning, match=r"training\.microbatches: \(absent\) in the checkpoint, 2 in this run"
    ):
        fit(8, 2, tmp_path)


def test_what_cannot_be_cut_is_refused():
    message = (
        "microbatches=5 must divide every batch, and batches['data']['inputs'] has shape (12, 3). "
        "Pick sizes that it divides."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        updated(plain, 5)
    message = "microbatches must be in [1, 2**31), got 0. Pick a number inside the range."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trainer(10, microbatches=0)
    message = (
        "microbatches=2 cuts the batches of an optimizer's update, and train_step is another update. "
        "Cut them there, or pass an optimizer."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trainer(10, microbatches=2).fit_state(
            None, PROBLEM.state(), train_step=PROBLEM.train_step, source=PROBLEM.source()
        )
