"""ReLoBRaLo: the equations of the paper, the random look back, and its stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng.training.balancing import ObservingBalancer, ReLoBRaLoBalancer
from tests._bitwise import assert_trees_bitwise_equal, first_difference

NAMES = ("a", "b", "c")
ROWS = np.array([[1.0, 2.0, 4.0], [0.5, 1.9, 4.0], [0.4, 2.1, 1.0], [0.3, 1.0, 0.9]], np.float32)


def balance(now, then, temperature):
    weights = np.exp(now / (temperature * then))
    return len(now) * weights / weights.sum()


def expected(rows, alpha, temperature, looks_back):
    """The paper's recursion in float64, weights of 1 in the first step."""
    weights = np.ones(3)
    for step in range(1, len(rows)):
        history = balance(rows[step], rows[0], temperature) if looks_back[step] else weights
        weights = alpha * history + (1 - alpha) * balance(rows[step], rows[step - 1], temperature)
    return weights


def observed(balancer, rows, seed=0):
    state, observe = balancer.initialize(), jax.jit(balancer.observe)
    for step, row in enumerate(rows):
        losses = dict(zip(NAMES, jnp.asarray(row), strict=True))
        state = observe(losses, jax.random.fold_in(jax.random.key(seed), step), state)
    return state


@pytest.mark.parametrize("lookback", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_weights_follow_the_equations(lookback, temperature):
    balancer = ReLoBRaLoBalancer(NAMES, alpha=0.7, lookback=lookback, temperature=temperature)
    state = observed(balancer, ROWS)
    wanted = expected(ROWS.astype(np.float64), 0.7, temperature, [lookback == 0.0] * len(ROWS))
    np.testing.assert_allclose(state["weights"], wanted, rtol=1e-5)
    np.testing.assert_allclose(state["weights"].sum(), 3, rtol=1e-5)


def test_the_first_step_keeps_weights_of_one():
    balancer = ReLoBRaLoBalancer(NAMES, alpha=0.5, lookback=0.0)
    assert_trees_bitwise_equal(observed(balancer, ROWS[:1])["weights"], np.ones(3, np.float32))


def test_it_looks_back_as_often_as_it_is_told():
    balancer = ReLoBRaLoBalancer(NAMES, alpha=0.5, lookback=0.9)
    seen = balancer.initialize() | {
        "first": jnp.asarray(ROWS[0]),
        "previous": jnp.asarray(ROWS[1]),
        "seen": jnp.asarray(True),
    }
    losses = dict(zip(NAMES, jnp.asarray(ROWS[2]), strict=True))
    weights = jax.vmap(lambda key: balancer.observe(losses, key, seen)["weights"])(
        jax.random.split(jax.random.key(5), 1000)
    )
    stays = 0.5 * 1 + 0.5 * balance(ROWS[2], ROWS[1], 1)
    kept = np.isclose(weights, stays, rtol=1e-5).all(axis=1).sum()
    # Binomial(1000, 0.9): outside of 900 +- 47 (five standard deviations) once in 1.7 million keys.
    assert 853 <= kept <= 947


def test_a_loss_of_zero_keeps_its_weight_and_the_others_share_theirs():
    balancer = ReLoBRaLoBalancer(NAMES, alpha=0.5, lookback=0.0)
    rows = ROWS.copy()
    rows[:, 0] = 0
    weights = observed(balancer, rows)["weights"]
    others = ReLoBRaLoBalancer(NAMES[1:], alpha=0.5, lookback=0.0)
    state = others.initialize()
    for row in rows:
        losses = {"b": jnp.float32(row[1]), "c": jnp.float32(row[2])}
        state = others.observe(losses, jax.random.key(0), state)
    assert weights[0] == 1
    np.testing.assert_allclose(weights[1:], state["weights"], rtol=1e-6)


def test_a_loss_that_wakes_is_compared_with_its_own_first_value():
    balancer = ReLoBRaLoBalancer(NAMES, alpha=0.5, lookback=0.0)
    rows = np.array([[0, 1, 1], [0, 1, 1], [2, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]], np.float32)
    woken = observed(balancer, rows[:3])
    assert_trees_bitwise_equal(woken["weights"], np.ones(3, np.float32))
    compared = observed(balancer, rows[:4])["weights"]
    np.testing.assert_allclose(compared, balance(rows[3], np.float64([2, 1, 1]), 1), rtol=1e-5)
    state = observed(balancer, rows)
    np.testing.assert_allclose(state["first"], [2, 1, 1])
    assert state["weights"].max() < 1.5


def test_losses_that_are_all_zero_keep_the_weights():
    state = observed(ReLoBRaLoBalancer(NAMES, alpha=0.5, lookback=0.5), np.zeros((3, 3), np.float32))
    assert_trees_bitwise_equal(state["weights"], np.ones(3, np.float32))


def test_x64_moves_no_draw_and_no_weight():
    balancer = ReLoBRaLoBalancer(NAMES, alpha=0.5, lookback=0.5)
    rows = np.tile(ROWS, (5, 1))
    plain = observed(balancer, rows)
    with jax.enable_x64(True):
        assert_trees_bitwise_equal(observed(balancer, rows), plain)
    assert first_difference(observed(balancer, rows, seed=1), plain) is not None


def test_it_is_known_as_one_that_observes():
    assert isinstance(ReLoBRaLoBalancer(NAMES), ObservingBalancer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1}, "alpha must be in [0, 1), got 1. Pick a number in that range."),
        ({"lookback": 1.5}, "lookback must be in [0, 1], got 1.5. Pick a probability."),
        ({"temperature": 0}, "temperature must be positive and finite, got 0. Pick a number above 0."),
    ],
)
def test_settings_are_checked_at_construction(options, message):
    with pytest.raises(ValueError) as caught:
        ReLoBRaLoBalancer(NAMES, **options)
    assert str(caught.value) == message
