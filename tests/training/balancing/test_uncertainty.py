"""Learned weights: the joint Adam of parameters and logarithms, by Optax, is the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import HostPool, LossModule, PoolDataModule, Trainer
from phijax_rng.training.balancing import UncertaintyBalancer

NAMES = ("near", "far")
RATE = 0.05


def _losses(params, batches):
    return {"near": jnp.sum((params["w"] - 1) ** 2), "far": 30 * jnp.sum((params["w"] + 2) ** 2)}


def joint(num_steps, start):
    """Optax's Adam on parameters and logarithms together, on the total of the papers."""

    def total(both):
        losses, s = _losses(both["params"], None), both["s"]
        return sum(jnp.exp(-s[i]) * losses[name] / 2 + s[i] / 2 for i, name in enumerate(NAMES))

    both = {"params": {"w": jnp.zeros(2)}, "s": jnp.full(2, start, jnp.float32)}
    optimizer = optax.adam(RATE)
    state, totals = optimizer.init(both), []
    for _ in range(num_steps):
        value, grads = jax.value_and_grad(total)(both)
        updates, state = optimizer.update(grads, state)
        both = optax.apply_updates(both, updates)
        totals.append(float(value))
    return both, totals


@pytest.mark.full
def test_a_fit_is_the_joint_descent_of_both():
    balancer = UncertaintyBalancer(NAMES, learning_rate=RATE, initial_log_variance=0.5)
    module = LossModule(lambda key: {"w": jnp.zeros(2)}, _losses, batch_keys=("data",))
    data = PoolDataModule({"data": HostPool(np.zeros((2, 1), np.float32))}, {"data": 1})
    result = Trainer(25, progress=False, log_every_n_steps=1).fit(
        module, datamodule=data, optimizer=optax.adam(RATE), seed=0, balancer=balancer
    )
    both, totals = joint(25, 0.5)
    np.testing.assert_allclose([row["total_loss"] for row in result.history], totals, rtol=1e-4)
    np.testing.assert_allclose(result.state.model_state["w"], both["params"]["w"], rtol=1e-4)
    np.testing.assert_allclose(result.state.balancer_state["next"], both["s"], rtol=1e-4)
    assert not np.allclose(both["s"], 0.5, atol=0.1)  # control: they have moved
    last = result.history[-1]
    weights = np.exp(-result.state.balancer_state["used"]) / 2
    np.testing.assert_allclose([last[f"weight/{name}"] for name in NAMES], weights, rtol=1e-6)


def test_a_loss_of_zero_keeps_its_weight():
    balancer = UncertaintyBalancer(NAMES, learning_rate=RATE)
    state, observe = balancer.initialize(), jax.jit(balancer.observe)
    key, losses = jax.random.key(0), {"near": jnp.float32(0), "far": jnp.float32(9)}
    for _ in range(200):
        state = observe(losses, key, state)
    weights = balancer.diagnostics(state)
    np.testing.assert_allclose(weights["near"], 1, rtol=1e-6)
    np.testing.assert_allclose(weights["far"], 1 / 18, rtol=0.2)  # on the way to a variance of 9
    state = observe({**losses, "near": jnp.float32(4)}, key, state)
    moved = state["next"] - balancer.initialize()["next"]
    assert 0 < moved[0] < 4 * RATE


def test_the_default_starts_with_weights_of_one():
    balancer = UncertaintyBalancer(NAMES)
    shown = balancer.diagnostics(balancer.initialize())
    np.testing.assert_allclose([float(weight) for weight in shown.values()], 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0}, "learning_rate must be positive and finite, got 0. Pick a number above 0."),
        (
            {"initial_log_variance": float("inf")},
            "initial_log_variance must be finite, got inf. Pick a finite number.",
        ),
        (
            {"initial_log_variance": -81},
            "initial_log_variance must be in [-80, 80], got -81. "
            "Pick the logarithm of a variance that float32 holds.",
        ),
    ],
)
def test_settings_are_checked_at_construction(options, message):
    with pytest.raises(ValueError) as caught:
        UncertaintyBalancer(NAMES, **options)
    assert str(caught.value) == message
