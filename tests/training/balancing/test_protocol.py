"""Fixed weights: a dot product in a fixed order, without a state."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import GradNormBalancer, LossBalancer, StaticLossBalancer
from phijax_rng.training.balancing import ReLoBRaLoBalancer, UncertaintyBalancer
from tests._bitwise import assert_trees_bitwise_equal, first_difference

LOSSES = {"pde": jnp.float32(2), "bc": jnp.float32(0.5), "ic": jnp.float32(4)}


def combined(balancer, losses=LOSSES):
    return balancer.combine(losses, balancer.initialize())


def test_without_names_losses_are_summed():
    assert float(combined(StaticLossBalancer())) == 6.5
    assert StaticLossBalancer().initialize() == {}
    assert StaticLossBalancer().diagnostics({}) == {}


def test_named_losses_are_weighted_and_the_rest_gets_the_default():
    balancer = StaticLossBalancer(("pde", "bc", "ic"), weights={"bc": 10}, default_weight=0.5)
    assert balancer.initialize() == {}
    assert float(combined(balancer)) == 0.5 * 2 + 10 * 0.5 + 0.5 * 4


def test_the_sum_follows_the_names_and_not_the_dict():
    losses = {"a": jnp.float32(1e8), "b": jnp.float32(1), "c": jnp.float32(-1e8)}
    backwards = dict(reversed(losses.items()))
    orders = [("a", "b", "c"), ("a", "c", "b")]
    for order in orders:
        balancer = StaticLossBalancer(order)
        assert_trees_bitwise_equal(combined(balancer, losses), combined(balancer, backwards))
    sums = [combined(StaticLossBalancer(order), losses) for order in orders]
    assert first_difference(*sums) is not None, "these losses round to the same sum in every order"


def test_new_weights_take_effect_under_any_state():
    balancer = StaticLossBalancer(("pde", "bc", "ic"), weights={"bc": 0, "ic": 0})
    assert float(jax.jit(balancer.combine)(LOSSES, {})) == 2
    shown = balancer.diagnostics({})
    assert {name: float(weight) for name, weight in shown.items()} == {"pde": 1, "bc": 0, "ic": 0}


@pytest.mark.parametrize(
    ("dtype", "expected"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (np.int32, jnp.float32)]
)
def test_the_sum_has_at_least_32_bits(dtype, expected):
    losses = {name: loss.astype(dtype) for name, loss in LOSSES.items()}
    assert combined(StaticLossBalancer(tuple(LOSSES)), losses).dtype == expected


def test_the_sum_of_losses_of_64_bits_has_64():
    with jax.enable_x64(True):
        losses = {"a": jnp.float64(1), "b": jnp.float32(2.0**-40)}
        assert_trees_bitwise_equal(combined(StaticLossBalancer(), losses), np.float64(1 + 2.0**-40))


def test_its_gradient_is_the_weight():
    balancer = StaticLossBalancer(("pde", "bc", "ic"), weights={"bc": 10})
    grads = jax.grad(lambda losses: balancer.combine(losses, balancer.initialize()))(LOSSES)
    assert {name: float(grad) for name, grad in grads.items()} == {"pde": 1, "bc": 10, "ic": 1}


def test_a_balancer_is_known_by_what_it_offers():
    assert isinstance(StaticLossBalancer(), LossBalancer)
    assert not isinstance(object(), LossBalancer)


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        (
            "pde",
            {},
            TypeError,
            "loss_names must be a sequence of names, got 'pde'. Pass a tuple of strings.",
        ),
        (
            ("pde", "pde"),
            {},
            ValueError,
            "loss_names must not repeat a name, got ('pde', 'pde'). Drop the repeated one.",
        ),
        (
            ("pde",),
            {"weights": {"bc": 1}},
            ValueError,
            "weights has 'bc'; loss_names has 'pde'. Name the losses that the weights are for.",
        ),
        (
            None,
            {"weights": {"bc": 1}},
            ValueError,
            "weights has 'bc'; loss_names has nothing. Name the losses that the weights are for.",
        ),
        (
            ("pde",),
            {"weights": {"pde": True}},
            TypeError,
            "weights['pde'] must be a number, got True. Pass a float.",
        ),
        (
            ("pde",),
            {"weights": {"pde": "1"}},
            TypeError,
            "weights['pde'] must be a number, got '1'. Pass a float.",
        ),
        (
            ("pde",),
            {"weights": {"pde": -1}},
            ValueError,
            "weights['pde'] must be finite and not negative, got -1. Pick a weight of at least 0.",
        ),
        (
            ("pde",),
            {"default_weight": float("inf")},
            ValueError,
            "default_weight must be finite and not negative, got inf. Pick a weight of at least 0.",
        ),
        (
            ("pde",),
            {"weights": {"pde": float("nan")}},
            ValueError,
            "weights['pde'] must be finite and not negative, got nan. Pick a weight of at least 0.",
        ),
        (
            ("pde", "bc"),
            {"weights": {"pde": 0}, "default_weight": 0},
            ValueError,
            "weights must have a positive entry, got {'pde': 0}. Nothing would be trained.",
        ),
    ],
    ids=[
        "one string",
        "a name twice",
        "unknown loss",
        "weights without names",
        "True",
        "a string",
        "negative",
        "infinite",
        "nan",
        "all zero",
    ],
)
def test_weights_that_cannot_balance_are_refused(names, options, error, message):
    with pytest.raises(error) as caught:
        StaticLossBalancer(names, **options)
    assert str(caught.value) == message


def test_a_default_weight_for_no_names_is_refused():
    message = "default_weight is 5 but there are no loss_names that it could be for. Pass loss_names too."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        StaticLossBalancer(default_weight=5)


@pytest.mark.parametrize(
    "kind",
    [
        StaticLossBalancer,
        functools.partial(GradNormBalancer, update_every_n_steps=2),
        ReLoBRaLoBalancer,
        UncertaintyBalancer,
    ],
    ids=["static", "gradnorm", "relobralo", "uncertainty"],
)
def test_weights_in_place_of_names_are_refused(kind):
    with pytest.raises(TypeError) as caught:
        kind({"pde": 10.0, "ic": 1.0})
    assert str(caught.value) == (
        "loss_names must be a sequence of names, got the mapping {'pde': 10.0, 'ic': 1.0}. Pass the names "
        "as a tuple, and what belongs to them as an argument of its own."
    )
