"""Weights from gradient norms: the formula, its limits, and PhiJAX's weights over five updates."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import GradNormBalancer, LossBalancer, LossModule, NTKBalancer, Trainer
from phijax_rng.training.balancing import AdaptiveBalancer
from tests import _balancing
from tests._balancing import LOSSES
from tests._selection import mostly_full
from tests._subprocess import ROOT

NAMES = ("a", "b", "c")
KEY = jax.random.key(0)


def _losses(model_state, batches):
    slope, w = batches["data"]["slope"], model_state["w"]
    return {"a": slope[0] * w[0], "b": slope[1] * w[1], "c": slope[2] * w[0] + slope[3] * w[1]}


MODULE = LossModule(lambda key: {"w": jnp.ones(2)}, _losses, batch_keys=("data",))


def updated(balancer, slopes, state=None, params=None):
    batches = {"data": {"slope": jnp.asarray(slopes, jnp.float32)}}
    params = params or {"n": jnp.int32(3), "w": jnp.ones(2)}
    update = jax.jit(lambda state: balancer.update(MODULE, params, batches, KEY, state))
    return update(balancer.initialize() if state is None else state)


# PhiJAX 0.2.0b5 gave these weights for the norms 1, 2, 5 and so on, from weights of 1, where no norm is 0.
@pytest.mark.parametrize(
    ("slopes", "norms", "weights"),
    [
        ([1, 2, 3, 4], [1, 2, 5], [1.1666596, 1.0333315, 0.953333]),
        ([0, 2, 3, 4], [0, 2, 5], [1, 1.0749969, 0.9699995]),
        ([0, 2, 3, 0], [0, 2, 3], [1, 1.0249984, 0.9833326]),
        ([1e-6, 1e6, 3, 4], [1e-6, 1e6, 5], [1.0000898e4, 0.9333334, 4.0009116e3]),
        ([0, 0, 0, 0], [0, 0, 0], [1, 1, 1]),
    ],
)
def test_weights_are_those_of_phijax(slopes, norms, weights):
    state = updated(GradNormBalancer(NAMES, update_every_n_steps=3), slopes)
    np.testing.assert_allclose(state["norms"], norms, rtol=1e-6)
    np.testing.assert_allclose(state["weights"], weights, rtol=1e-6)


@pytest.mark.full
def test_a_loss_without_gradient_keeps_its_weight_to_the_bit_and_is_balanced_when_it_wakes():
    balancer = GradNormBalancer(NAMES, update_every_n_steps=1, initial_weights={"a": 0.3})
    state = balancer.initialize()
    for _ in range(200):
        state = updated(balancer, [0, 2, 3, 4], state)
    assert np.asarray(state["weights"])[0] == np.float32(0.3)
    np.testing.assert_allclose(state["weights"][1:], [1.75, 0.7], rtol=1e-4)
    woken = updated(balancer, [1, 2, 3, 4], state)
    target = np.float32([8 / 3, 4 / 3, 8 / 15])
    np.testing.assert_allclose(woken["weights"], 0.9 * state["weights"] + 0.1 * target, rtol=1e-4)


def test_the_only_loss_keeps_a_weight_of_one_and_a_gradient_of_nan_is_seen():
    alone = GradNormBalancer(("c",), update_every_n_steps=1, eps=0)
    np.testing.assert_allclose(updated(alone, [1, 2, 3, 4])["weights"], [1], rtol=1e-6)
    assert updated(alone, [0, 0, 0, 0])["weights"] == 1
    state = updated(GradNormBalancer(NAMES, update_every_n_steps=1), [np.nan, 2, 3, 4])
    assert np.isnan(state["norms"][0])  # which discards the update and is an event


def test_the_next_update_averages_with_the_last():
    balancer = GradNormBalancer(NAMES, update_every_n_steps=3, eps=0, moving_average_coefficient=0.5)
    state = updated(balancer, [1, 2, 3, 4])
    np.testing.assert_allclose(state["weights"], (1 + np.array([8 / 3, 4 / 3, 8 / 15])) / 2, rtol=1e-6)
    again = updated(balancer, [1, 2, 3, 4], state)
    target = np.array([8 / 3, 4 / 3, 8 / 15])
    np.testing.assert_allclose(again["weights"], (1 + 3 * target) / 4, rtol=1e-6)


def test_complex_parameters_count_by_their_modulus():
    def losses(model_state, batches):
        return {"a": jnp.real(model_state["w"] * (3 - 4j)), "b": jnp.abs(model_state["w"]) ** 2}

    module = LossModule(lambda key: None, losses, batch_keys=("data",))
    balancer = GradNormBalancer(("a", "b"), update_every_n_steps=1)
    state = balancer.update(module, {"w": jnp.complex64(1 + 1j)}, {}, KEY, balancer.initialize())
    np.testing.assert_allclose(state["norms"], [5, 2 * np.sqrt(2)], rtol=1e-6)


def test_it_combines_with_its_weights_and_shows_them():
    balancer = GradNormBalancer(NAMES, update_every_n_steps=3, initial_weights={"b": 4.0})
    state = balancer.initialize()
    losses = {"c": jnp.float32(100), "b": jnp.float32(10), "a": jnp.float32(1)}
    assert float(balancer.combine(losses, state)) == 141
    shown = {name: float(weight) for name, weight in balancer.diagnostics(state).items()}
    assert shown == {"a": 1, "b": 4, "c": 1}
    assert isinstance(balancer, AdaptiveBalancer)
    assert isinstance(balancer, LossBalancer)


GOLDEN = json.loads((ROOT / "tests/golden/phijax-balancing-0.2.0b5.json").read_text())["weights"]
OURS = {
    "gradnorm": GradNormBalancer(LOSSES, update_every_n_steps=3),
    "ntk": NTKBalancer(
        LOSSES, update_every_n_steps=3, diagnostic_batch_sizes=dict.fromkeys(LOSSES, _balancing.KERNEL_SIZE)
    ),
}


@pytest.mark.parametrize("kind", mostly_full(list(OURS), everyday=["gradnorm"]))
def test_five_updates_of_a_fresh_run_give_phijaxs_weights(kind):
    result = Trainer(_balancing.NUM_STEPS, progress=False, log_every_n_steps=1).fit(
        _balancing.make_module(),
        datamodule=_balancing.make_data(),
        optimizer=optax.adam(1e-2),
        seed=_balancing.SEED,
        balancer=OURS[kind],
    )
    weights = np.asarray([[row[f"weight/{name}"] for name in LOSSES] for row in result.history])
    changed = [step for step in range(1, len(weights)) if (weights[step] != weights[step - 1]).any()]
    assert tuple(changed) == _balancing.UPDATES
    # Another JAX and another machine round otherwise; a batch or a step apart moves percents.
    np.testing.assert_allclose(weights[changed], GOLDEN[kind], rtol=1e-3)
    assert not np.allclose(weights[changed][1:], GOLDEN[kind][:-1], rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"update_every_n_steps": 0},
            ValueError,
            "update_every_n_steps must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        (
            {"update_start_step": -1},
            ValueError,
            "update_start_step must be in [0, 2**31), got -1. A step counts completed optimizer updates.",
        ),
        (
            {"eps": -1.0},
            ValueError,
            "eps must be finite and not negative, got -1.0. Pick a number of at least 0.",
        ),
        (
            {"moving_average_coefficient": 1.0},
            ValueError,
            "moving_average_coefficient must be in [0, 1), got 1.0. Pick a number in that range.",
        ),
        (
            {"initial_weights": {"d": 1.0}},
            ValueError,
            "initial_weights has 'd'; loss_names has 'a', 'b', 'c'. "
            "Name the losses that the weights are for.",
        ),
        (
            {"initial_weights": [1.0]},
            TypeError,
            "initial_weights must be a mapping, got [1.0]. Pass a dict: loss name -> weight.",
        ),
        (
            {"loss_names": {"a"}},
            TypeError,
            "loss_names must be in an order, got the set {'a'}. Pass a tuple of strings.",
        ),
        (
            {"diagnostic_batch_sizes": 0},
            ValueError,
            "diagnostic_batch_sizes must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        (
            {"diagnostic_batch_sizes": {"pde": 0}},
            ValueError,
            "diagnostic_batch_sizes['pde'] must be a positive int or 'all', got 0. "
            "Use 'all' to take every row of the pool.",
        ),
        (
            {"loss_names": ()},
            ValueError,
            "loss_names must name at least one entry, got (). Add a name.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_are_checked_at_construction(change, error, message):
    with pytest.raises(error) as caught:
        GradNormBalancer(**{"loss_names": NAMES, "update_every_n_steps": 1} | change)
    assert str(caught.value) == message


def test_a_loss_that_is_not_finite_does_not_count_as_one_without_a_gradient():
    def losses(model_state, batches):
        slope = jnp.sum(model_state["w"])
        return {"a": jnp.where(batches["data"]["bad"], jnp.nan, slope), "b": 2 * slope}

    module = LossModule(lambda key: {"w": jnp.ones(2)}, losses, batch_keys=("data",))
    balancer = GradNormBalancer(("a", "b"), update_every_n_steps=1)
    state, key = balancer.initialize(), jax.random.key(0)
    for bad in (True, False):
        batches = {"data": {"bad": jnp.asarray(bad)}}
        after = balancer.update(module, {"w": jnp.ones(2)}, batches, key, state)
        assert bool(jnp.isfinite(after["norms"]).all()) is not bad  # and so the update is not taken over
