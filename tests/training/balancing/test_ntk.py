"""Exact traces of the neural tangent kernel: the definition, its limits, and what it asks of a module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import LossModule, NTKBalancer
from tests import _balancing
from tests._balancing import LOSSES

NAMES = ("a", "b", "c")
KEY = jax.random.key(0)
POINTS = np.arange(1, 9, dtype=np.float32).reshape(4, 2)


def _residuals(model_state, batches):
    points, others, w = batches["d"]["x"], batches["e"]["x"], model_state["w"]
    return {"a": points[:, 0] * w[0], "b": points * w, "c": others[:, :1] * w[0] * jnp.ones((1, 3))}


MODULE = LossModule(lambda key: None, lambda *_: {}, batch_keys=("d", "e"), residuals=_residuals)
BATCHES = {"d": {"x": POINTS}, "e": {"x": 10 * POINTS}}


def updated(balancer, batches=None, module=MODULE, params=None, state=None):
    params = params or {"w": jnp.ones(2)}
    update = jax.jit(lambda b, s: balancer.update(module, params, b, KEY, s))
    return update(batches or BATCHES, state or balancer.initialize())


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_traces_and_weights_are_those_of_phijax(chunk):
    balancer = NTKBalancer(
        NAMES,
        update_every_n_steps=1,
        diagnostic_batch_sizes=4,
        kernel_chunk_size=chunk,
        moving_average_coefficient=0,
    )
    state = updated(balancer)
    # The squares of the first column; of both; and three times ten times the first.
    np.testing.assert_allclose(state["traces"], [21, 51, 6300], rtol=1e-6)
    np.testing.assert_allclose(state["weights"], [101.14286, 41.64706, 0.33714285], rtol=1e-6)


@pytest.mark.full
def test_a_trace_is_the_mean_square_of_the_jacobian_row_by_row():
    params = _balancing.init(jax.random.key(3))
    module = _balancing.make_module()
    source = _balancing.make_data().train_batch_source(LOSSES, jax.random.key(1))
    batches = source.sample(jax.random.key(2), {"initial": 5, "boundary": 3, "pde": 7})
    balancer = NTKBalancer(LOSSES, update_every_n_steps=1, diagnostic_batch_sizes=4, kernel_chunk_size=2)
    state = updated(balancer, batches, module, params)
    jacobians = jax.jit(jax.jacrev(_balancing.residuals))(params, batches)
    expected = [
        sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(jacobians[name])) / size
        for name, size in zip(LOSSES, (5, 3, 7), strict=True)
    ]
    np.testing.assert_allclose(state["traces"], expected, rtol=1e-5)


# Weights 5, 7, 1 and a coefficient of 0.5. PhiJAX 0.2.0b5 (`update_from_traces`) gives the last row; it
# counts a trace of zero in the mean.
@pytest.mark.parametrize(
    ("traces", "weights"),
    [
        ([0, 2, 3], [5, 4.125, 0.9166667]),
        ([0, 0, 0], [5, 7, 1]),
        ([9e-11, 1, 1], [5, 4, 1]),
        ([1e-9, 1e-9, 3e-9], [3.3333335, 4.3333335, 0.7777778]),
    ],
)
def test_a_trace_of_zero_leaves_its_weight(traces, weights):
    balancer = NTKBalancer(
        NAMES,
        update_every_n_steps=1,
        diagnostic_batch_sizes=4,
        moving_average_coefficient=0.5,
        initial_weights={"a": 5, "b": 7},
    )

    def residuals(model_state, batches):
        return {
            n: batches["d"]["one"] * model_state[n] * np.sqrt(t) for n, t in zip(NAMES, traces, strict=True)
        }

    module = LossModule(lambda key: None, lambda *_: {}, batch_keys=("d",), residuals=residuals)
    params = {name: jnp.float32(1) for name in NAMES}
    state = updated(balancer, {"d": {"one": np.ones(4, np.float32)}}, module, params)
    np.testing.assert_allclose(state["traces"], traces, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(state["weights"], weights, rtol=1e-5)


def test_residuals_may_ask_for_the_key():
    def residuals(model_state, batches, key):
        kept = jax.random.bernoulli(key, 0.5, batches["d"]["x"].shape)
        return {"a": jnp.where(kept, batches["d"]["x"], 0) * model_state["w"]}

    module = LossModule(lambda key: None, lambda *_: {}, batch_keys=("d",), residuals=residuals)
    balancer = NTKBalancer(("a",), update_every_n_steps=1, diagnostic_batch_sizes=4)
    assert 0 <= float(updated(balancer, {"d": {"x": POINTS}}, module)["traces"][0]) <= 51


@pytest.mark.parametrize(
    ("residuals", "message"),
    [
        (
            lambda model_state, batches: {"a": batches["d"]["x"][:, 0], "b": batches["d"]["x"]},
            "the module's residuals have 'a', 'b', and the balancer's loss_names 'c' too. "
            "Return the rows of every loss that is balanced.",
        ),
        (
            lambda model_state, batches: dict.fromkeys(NAMES, jnp.sum(batches["d"]["x"])),
            "residuals['a'] must have one row for each point, got shape (). "
            "Return them before they are reduced to a loss.",
        ),
    ],
    ids=["a loss without rows", "no rows"],
)
def test_residuals_that_cannot_be_balanced_are_refused(residuals, message):
    module = LossModule(lambda key: None, lambda *_: {}, batch_keys=("d",), residuals=residuals)
    with pytest.raises(ValueError) as caught:
        updated(NTKBalancer(NAMES, update_every_n_steps=1, diagnostic_batch_sizes=4), module=module)
    assert str(caught.value) == message


def test_a_module_without_residuals_is_refused_at_the_door():
    balancer = NTKBalancer(NAMES, update_every_n_steps=1, diagnostic_batch_sizes=4)
    message = (
        "NTKBalancer needs the rows of residuals of each loss, and the module has no `residuals`. "
        "Pass LossModule(..., residuals=...), or balance with GradNormBalancer."
    )
    with pytest.raises(ValueError) as caught:
        balancer.check_module(LossModule(lambda key: None, lambda *_: {}, batch_keys=("d",)))
    assert str(caught.value) == message
