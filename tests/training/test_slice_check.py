"""Micro-batches before training: losses that slices change are refused with both numbers, others are not."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    HostPool,
    LossModule,
    LossTrainStep,
    PoolDataModule,
    StepOutput,
    Trainer,
    initialize_train_state,
    keys,
    masked_mean,
    masked_sum,
)
from phijax_rng.training import slice_check
from tests._selection import mostly_full

RNG = np.random.default_rng(2)
POOL = HostPool(
    RNG.normal(size=(64, 3)).astype(np.float32),
    RNG.normal(size=64).astype(np.float32),
    aux={"labeled": RNG.random(64) < 0.3},
)
DATA = PoolDataModule({"data": POOL}, {"data": 16})
START = {"w": jnp.float32([0.5, -0.2, 0.3]), "seen": jnp.float32(0)}


def module(loss):
    def losses(model_state, batches):
        data = batches["data"]
        errors = (data["inputs"] @ model_state["w"] - data["targets"]) ** 2
        return {"decay": jnp.sum(model_state["w"] ** 2), "fit": loss(errors, data["labeled"])}

    return LossModule(lambda key: START, losses, batch_keys=("data",))


def fit(own, stop=1, **options):
    trainer = Trainer(stop, progress=False, **{"microbatches": 4, **options})
    return trainer.fit(own, datamodule=DATA, optimizer=optax.sgd(0.1), seed=0)


def labeled_mean(errors, labeled):
    return jnp.sum(errors * labeled) / jnp.maximum(jnp.sum(labeled), 1)


WRONG = {
    "labeled rows": labeled_mean,
    "no labeled row in a slice": lambda errors, labeled: jnp.sum(errors * labeled) / jnp.sum(labeled),
    "root of the mean": lambda errors, labeled: jnp.sqrt(jnp.mean(errors)),
    "maximum": lambda errors, labeled: jnp.max(errors),
    "median": lambda errors, labeled: jnp.median(errors),
    "log of a mean": lambda errors, labeled: jax.nn.logsumexp(errors) - jnp.log(len(errors)),
    "sum": lambda errors, labeled: jnp.sum(errors),
    "mean by the size of the whole batch": lambda errors, labeled: jnp.sum(errors) / 16,
    "mean with weights of the batch": lambda errors, labeled: jnp.sum(jax.nn.softmax(errors) * errors),
    "mean of the first rows": lambda errors, labeled: jnp.mean(errors[:2]),
    "variance": lambda errors, labeled: jnp.var(errors),
    "mean of neighbors": lambda errors, labeled: jnp.mean(errors[1:] * errors[:-1]),
    "masked mean": masked_mean,
    "sum over a mean": lambda errors, labeled: (jnp.sum(errors * labeled), jnp.mean(labeled)),
}
RIGHT = {
    "mean": lambda errors, labeled: jnp.mean(errors),
    "mean of masked errors": lambda errors, labeled: jnp.mean(errors * labeled),
    "labeled rows as a pair": masked_sum,
    "weights as a pair": lambda errors, labeled: (jnp.sum(errors * (1 + labeled)), jnp.sum(1 + labeled)),
    "sum as a pair": lambda errors, labeled: (jnp.sum(errors), len(errors) / 16),
    "mean as a pair": lambda errors, labeled: (jnp.sum(errors), len(errors)),
    "a number of each slice": lambda errors, labeled: (jnp.float32(3), 1),
}


@pytest.mark.parametrize("kind", mostly_full(list(WRONG), everyday=["labeled rows"]))
def test_a_loss_that_slices_change_is_refused_with_both_numbers(kind):
    loss = WRONG[kind]
    with pytest.raises(ValueError) as caught:
        fit(module(loss))
    message = str(caught.value)
    pattern = (
        r"losses\['fit'\] of the first batch is (\S+), and (\S+) in microbatches=4\. Return it as "
        r"\(sum, weight\), both of them sums over rows, such as masked_sum\(values, mask\) or "
        r"\(jnp\.sum\(errors\), len\(errors\)\)\."
        "\n"
        r"Where each slice is meant to count for itself, pass Trainer\(\.\.\., check_microbatches=False\)\."
    )
    found = re.fullmatch(pattern, message)
    assert found, message
    whole, sliced = map(float, found.groups())
    batch = DATA.train_batch_source(("data",), keys.split_root(0).sampling)(0)["data"]
    slices = [jax.tree.map(lambda rows, k=k: rows[4 * k : 4 * k + 4], batch) for k in range(4)]
    terms = [
        module(loss).evaluate_terms(START, {"data": rows}, jax.random.key(0)).losses["fit"]
        for rows in (batch, *slices)
    ]
    if isinstance(terms[0], tuple):
        by_hand = [np.divide(*np.sum(np.asarray(some, float), axis=0)) for some in (terms[:1], terms[1:])]
    else:
        by_hand = [np.mean(np.asarray(some)) for some in (terms[:1], terms[1:])]
    assert [whole, sliced] == pytest.approx(by_hand, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("kind", mostly_full(list(RIGHT), everyday=["labeled rows as a pair"]))
def test_a_loss_that_is_a_mean_or_adds_up_trains_as_with_whole_batches(kind):
    loss = RIGHT[kind]
    whole, sliced = fit(module(loss), 5, microbatches=1), fit(module(loss), 5)
    expected = np.asarray(whole.state.model_state["w"])
    # Every entry has the rounding of the largest: with a sum the steps are long, and entries cancel.
    within = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(sliced.state.model_state["w"], expected, rtol=0, atol=within)
    for name, value in whole.metrics.items():
        assert sliced.metrics[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.full
def test_losses_that_draw_or_replace_leaves_are_not_compared(caplog):
    def dropped(model_state, batches, key):
        inputs = batches["data"]["inputs"]
        kept = jax.random.bernoulli(key, 0.5, inputs.shape)
        return {"fit": jnp.sqrt(jnp.mean((jnp.where(kept, inputs, 0) @ model_state["w"]) ** 2))}

    def with_statistics(model_state, batches):
        values = batches["data"]["inputs"] @ model_state["w"]
        seen = {**model_state, "seen": jnp.var(values)}
        return StepOutput({"fit": jnp.mean(values**2) / jnp.var(values)}, seen)

    def takes_a_key(model_state, batches, key):
        return {"fit": jnp.max(batches["data"]["inputs"] @ model_state["w"])}

    with jax.debug_key_reuse(True):
        fit(LossModule(lambda key: START, dropped, batch_keys=("data",)))
    with caplog.at_level(logging.INFO, logger="phijax_rng"):
        fit(LossModule(lambda key: START, with_statistics, batch_keys=("data",)))
    assert "micro-batches are not compared with the batch" in caplog.text
    # The control: a key that is not used.
    with pytest.raises(ValueError, match=r"^losses\['fit'\] of the first batch is "):
        fit(LossModule(lambda key: START, takes_a_key, batch_keys=("data",)))


@pytest.mark.full
def test_a_loss_that_consists_of_rounding_is_no_difference():
    def noise(model_state, batches):
        values = batches["data"]["inputs"] @ model_state["w"]
        # One in exact arithmetic, and so zero.
        return {"fit": jnp.mean((jnp.sin(values) ** 2 + jnp.cos(values) ** 2 - 1) ** 2)}

    fit(LossModule(lambda key: START, noise, batch_keys=("data",)))


@pytest.mark.full
def test_a_step_made_by_hand_is_compared_too_and_one_slice_is_not():
    optimizer = optax.sgd(0.1)
    state = initialize_train_state(START, optimizer, {}, keys.split_root(0))
    own = module(labeled_mean)
    run = functools.partial(Trainer(1, progress=False).fit_state, own, state, datamodule=DATA)
    with pytest.raises(ValueError, match=r"^losses\['fit'\] of the first batch is "):
        run(train_step=LossTrainStep(own, optimizer, microbatches=2))
    assert run(train_step=LossTrainStep(own, optimizer)).iterations == 1


def test_a_batch_that_does_not_fit_as_a_whole_is_trained_with_a_warning(monkeypatch, caplog):
    class Full:
        def __init__(self, *arguments, **options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")

    monkeypatch.setattr(slice_check, "TrainLoop", Full)
    assert fit(module(labeled_mean)).iterations == 1
    assert "its losses in 4 micro-batches were not compared" in caplog.text
