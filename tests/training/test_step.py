"""One update: what is trained, what is carried, and what Optax is given."""

import functools

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
    advance,
    initialize_train_state,
    keys,
)
from phijax_rng.training import TrainStep
from tests._bitwise import assert_trees_bitwise_equal, first_difference

BATCHES = {"data": {"inputs": jnp.array([[0.0], [0.5], [1.0]]), "targets": jnp.array([1.0, 2.0, 3.0])}}
KEY = jax.random.key(5)
LINE = {"w": jnp.array([0.0, 0.0])}


def line(model_state, batches):
    data = batches["data"]
    error = model_state["w"][0] * data["inputs"][:, 0] + model_state["w"][1] - data["targets"]
    return {"fit": jnp.mean(error**2), "size": 0.1 * jnp.sum(model_state["w"] ** 2)}


SGD = optax.sgd(0.1)


def setup(losses, model_state, optimizer=SGD, balancer=None, **options):
    """A train step and a fresh state for it."""
    module = LossModule(lambda key: model_state, losses, batch_keys=("data",), **options)
    balancer_state = balancer.initialize() if balancer else {}
    state = initialize_train_state(model_state, optimizer, balancer_state, keys.split_root(0))
    return LossTrainStep(module, optimizer, balancer), state


def updated(losses, model_state, *args, num_steps=1, **options):
    """The state and the output after some updates."""
    step, state = setup(losses, model_state, *args, **options)
    step = jax.jit(functools.partial(step))
    for _ in range(num_steps):
        state, output = step(state, BATCHES, KEY)
    return state, output


# What an update does


def test_an_update_is_the_gradient_step_of_the_sum_and_one_more_step():
    step, state = setup(line, LINE)
    following, output = step(state, BATCHES, KEY)
    total, grad = jax.value_and_grad(lambda model: sum(line(model, BATCHES).values()))(LINE)
    np.testing.assert_allclose(following.model_state["w"], LINE["w"] - 0.1 * grad["w"], rtol=1e-6)
    assert_trees_bitwise_equal(following.step, np.int32(1))
    assert list(output.losses) == ["total_loss", "fit", "size"]
    np.testing.assert_allclose(output.losses["total_loss"], total, rtol=1e-6)
    assert_trees_bitwise_equal(output.losses["fit"], line(LINE, BATCHES)["fit"])


def test_an_update_leaves_keys_and_balancer_alone():
    balancer = StaticLossBalancer(("fit", "size"))
    step, state = setup(line, LINE, balancer=balancer)
    following, _ = step(state, BATCHES, KEY)
    assert_trees_bitwise_equal(
        following.replace(model_state=state.model_state, step=state.step), state, dict_order=False
    )


def test_the_optimizer_remembers_from_step_to_step():
    optimizer = optax.adam(0.1)
    state, _ = updated(line, LINE, optimizer, num_steps=5)
    params, memory = LINE, optimizer.init(LINE)
    grad = jax.jit(jax.grad(lambda model: sum(line(model, BATCHES).values())))
    for _ in range(5):
        updates, memory = optimizer.update(grad(params), memory, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.model_state["w"], params["w"], rtol=1e-5)
    assert int(state.optimizer_state[0].count) == 5


def test_weights_of_the_balancer_move_the_update():
    balancer = StaticLossBalancer(("fit", "size"), weights={"fit": 0})
    state, output = updated(line, {"w": jnp.array([1.0, 2.0])}, balancer=balancer)
    np.testing.assert_allclose(state.model_state["w"], [0.98, 1.96], rtol=1e-6)
    np.testing.assert_allclose(output.losses["total_loss"], output.losses["size"], rtol=1e-6)


def test_losses_are_summed_in_the_order_the_module_names_them():
    def losses(model_state, batches):
        w = model_state["w"]
        return {"a": w * 1e8, "b": w, "c": -w * 1e8}

    def total(order, balancer):
        _, output = updated(
            losses, {"w": jnp.float32(1)}, optax.sgd(0.0), balancer=balancer, loss_names=order
        )
        return output.losses["total_loss"]

    orders = [("a", "b", "c"), ("a", "c", "b")]
    named = [total(order, StaticLossBalancer(order)) for order in orders]
    assert first_difference(*named) is not None, "these losses round to the same sum in every order"
    assert_trees_bitwise_equal([total(order, None) for order in orders], named)


def test_losses_get_the_key_of_the_step():
    def noisy(model_state, batches, key):
        return {"fit": jax.random.uniform(key) * jnp.sum(model_state["w"])}

    step, state = setup(noisy, {"w": jnp.ones(2)})
    losses = [step(state, BATCHES, key)[1].losses["fit"] for key in (KEY, jax.random.key(6))]
    assert_trees_bitwise_equal(losses[0], noisy({"w": jnp.ones(2)}, BATCHES, KEY)["fit"])
    assert first_difference(*losses) is not None


@pytest.mark.parametrize("balancer", [None, StaticLossBalancer(("fit", "size"), weights={"fit": 2.0})])
def test_a_train_step_can_be_jitted(balancer):
    step, state = setup(line, LINE, balancer=balancer)
    assert isinstance(step, TrainStep)
    following, _ = jax.jit(step)(state, BATCHES, KEY)
    expected, _ = step(state, BATCHES, KEY)
    np.testing.assert_allclose(following.model_state["w"], expected.model_state["w"], rtol=1e-6)


# What is trained and what is carried


MIXED = {
    "w": jnp.ones(2),
    "mean": jnp.ones(2),
    "count": jnp.int32(7),
    "on": jnp.bool_(True),
    "key": jax.random.key(1),
    "nothing": None,
}


def mixed(model_state, batches):
    renewed = {
        **model_state,
        "mean": 0.5 * model_state["mean"] + jnp.mean(batches["data"]["targets"]),
        "count": model_state["count"] + 1,
        "key": jax.random.split(model_state["key"])[0],
    }
    # The loss depends on the variable as well, which must not train it.
    loss = jnp.sum(model_state["w"] ** 2) + jnp.sum(model_state["mean"] ** 2)
    return StepOutput({"fit": loss}, renewed, {"spread": jnp.float32(3)})


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "weight decay": optax.adamw(0.1, weight_decay=0.5),
    "decay after scaling": optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-0.1)),
    "noise": optax.noisy_sgd(0.1, key=jax.random.key(2)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_variables_are_carried_as_returned_and_not_moved_by_the_optimizer(optimizer):
    state, output = updated(mixed, MIXED, optimizer, num_steps=2)
    model = state.model_state
    assert_trees_bitwise_equal(model["mean"], jnp.full(2, 0.5 * (0.5 + 2) + 2))
    assert_trees_bitwise_equal(model["count"], np.int32(9))
    first = jax.random.split(MIXED["key"])[0]
    assert_trees_bitwise_equal(model["key"], jax.random.split(first)[0])
    assert_trees_bitwise_equal(model["on"], MIXED["on"])
    assert model["nothing"] is None
    assert np.all(np.asarray(model["w"]) < 0.99), "nothing was trained"
    assert_trees_bitwise_equal(output.diagnostics, {"spread": np.float32(3)})


def test_a_floating_leaf_handed_back_as_it_came_is_trained_and_decayed():
    def losses(model_state, batches):
        return StepOutput({"fit": jnp.sum(model_state["w"] ** 2)}, dict(model_state))

    state, _ = updated(losses, {"w": jnp.ones(2), "unused": jnp.ones(2)}, OPTIMIZERS["weight decay"])
    assert np.all(np.asarray(state.model_state["w"]) < 0.95)
    np.testing.assert_allclose(state.model_state["unused"], 0.95, rtol=1e-6)


def test_the_optimizer_sees_no_gradient_of_a_variable():
    def losses(model_state, batches):
        loss = jnp.sum(model_state["w"]) + 1e6 * jnp.sum(model_state["mean"])
        return StepOutput({"fit": loss}, {**model_state, "mean": model_state["mean"] + 1})

    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    state, _ = updated(losses, {"w": jnp.zeros(4), "mean": jnp.zeros(4)}, clipped)
    np.testing.assert_allclose(state.model_state["w"], -0.5, rtol=1e-6)


def test_no_gradient_flows_into_a_variable_of_the_next_step():
    def losses(model_state, batches):
        renewed = {**model_state, "sum": jnp.sum(model_state["w"])}
        return StepOutput({"fit": jnp.sum(model_state["w"]) * 0 + model_state["sum"]}, renewed)

    state, _ = updated(losses, {"w": jnp.ones(2), "sum": jnp.float32(0)}, num_steps=3)
    assert_trees_bitwise_equal(state.model_state["w"], jnp.ones(2))


def test_leaves_that_are_not_floating_are_carried_without_a_step_output():
    def losses(model_state, batches):
        return {"fit": jnp.sum(model_state["w"] ** 2) * model_state["count"]}

    state, _ = updated(losses, MIXED, OPTIMIZERS["weight decay"])
    for name in ("count", "on", "key"):
        assert_trees_bitwise_equal(state.model_state[name], MIXED[name])


def test_a_model_without_a_trainable_leaf_is_carried():
    def losses(model_state, batches):
        renewed = {"count": model_state["count"] + 1}
        return StepOutput({"fit": 1.0 * model_state["count"]}, renewed)

    state, _ = updated(losses, {"count": jnp.int32(0)}, optax.adam(0.1), num_steps=3)
    assert_trees_bitwise_equal(state.model_state, {"count": np.int32(3)})


def test_complex_parameters_descend():
    def losses(model_state, batches):
        return {"fit": jnp.abs(model_state["z"] - (1 - 2j)) ** 2}

    state, output = updated(losses, {"z": jnp.asarray(3 + 4j, jnp.complex64)}, num_steps=60)
    np.testing.assert_allclose(state.model_state["z"], 1 - 2j, rtol=1e-4)
    assert float(output.losses["fit"]) < 1e-6


def everything_replaced(model_state, batches):
    return StepOutput({"fit": jnp.sum(model_state["w"])}, {"w": model_state["w"] * 1})


@jax.jit
def handed_through_jit(model_state, batches):
    return StepOutput({"fit": jnp.sum(model_state["w"])}, model_state)


@pytest.mark.parametrize("losses", [everything_replaced, handed_through_jit])
def test_a_step_in_which_every_parameter_was_replaced_is_refused(losses):
    step, state = setup(losses, {"w": jnp.ones(2)})
    with pytest.raises(ValueError) as caught:
        step(state, BATCHES, KEY)
    assert str(caught.value) == (
        "losses returned a model_state in which every floating leaf was replaced, so nothing would be "
        "trained. Return the parameters unchanged, for example "
        "{**model_state, 'batch_stats': new}, with no jit or checkpoint around `losses`."
    )


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda model: {**model, "extra": 1.0}, "nothing is missing, model_state['extra'] is new"),
        (lambda model: {}, "model_state['w'] is missing, nothing is new"),
        (lambda model: [model["w"]], "model_state['w'] is missing, model_state[0] is new"),
        (lambda model: {"w": None}, "model_state['w'] is missing, nothing is new"),
    ],
    ids=["a leaf more", "a leaf less", "a list", "a leaf dropped"],
)
def test_a_model_state_of_another_structure_is_refused_with_the_paths(returned, shown):
    def losses(model_state, batches):
        return StepOutput({"fit": jnp.sum(model_state["w"])}, returned(model_state))

    step, state = setup(losses, {"w": jnp.ones(2)})
    with pytest.raises(ValueError) as caught:
        step(state, BATCHES, KEY)
    assert str(caught.value) == (
        f"losses returned a model_state of another structure: {shown}. "
        "Return the whole model state, with updated variables."
    )


# What is refused


def losses_named(*names):
    return lambda model_state, batches: {name: jnp.sum(model_state["w"]) for name in names}


OUTSIDE = {"w": jnp.array([0.5, 0.5])}
NOTHING = {
    "a model outside": lambda model_state, batches: line(OUTSIDE, batches),
    "a constant": lambda model_state, batches: {"fit": jnp.float32(1.0)},
    "stop_gradient": lambda model_state, batches: jax.lax.stop_gradient(line(model_state, batches)),
    "rounding": lambda model_state, batches: {"fit": jnp.sum(jnp.round(model_state["w"]))},
    "a comparison": lambda model_state, batches: {
        "fit": jnp.mean((model_state["w"] > 0).astype(jnp.float32))
    },
    "under jit": lambda model_state, batches: jax.jit(line)(OUTSIDE, batches),
    "in a scan": lambda model_state, batches: {
        "fit": jax.lax.scan(lambda c, x: (c + x[0], None), 0.0, batches["data"]["inputs"])[0]
    },
}


@pytest.mark.parametrize("losses", NOTHING.values(), ids=NOTHING)
def test_losses_that_no_parameter_moves_are_refused(losses):
    step, state = setup(losses, LINE)
    message = r"no loss depends on any of the 1 trainable leaves .* \(the first is model_state\[.w.\]\)"
    with pytest.raises(ValueError, match=message):
        jax.jit(step)(state, BATCHES, KEY)


SOMETHING = {
    "a gradient that is zero here": lambda model_state, batches: {"fit": jnp.sum(0 * model_state["w"])},
    "a branch that is not taken": lambda model_state, batches: {
        "fit": jnp.where(batches["data"]["targets"][0] > 5, jnp.sum(model_state["w"]), 0.0)
    },
    "one of two losses": lambda model_state, batches: {**line(model_state, batches), "fit": jnp.float32(1.0)},
    "one of two leaves": lambda model_state, batches: {"fit": jnp.sum(model_state["w"][:1])},
}


@pytest.mark.parametrize("losses", SOMETHING.values(), ids=SOMETHING)
def test_losses_that_a_parameter_may_move_are_trained(losses):
    state, _ = updated(losses, LINE)
    assert int(state.step) == 1


@pytest.mark.parametrize(
    ("losses", "options", "message"),
    [
        (
            losses_named("pde", "bc"),
            {"loss_names": ("pde",)},
            "losses returned 'pde', 'bc', but the module's loss_names are 'pde'. Make them agree.",
        ),
        (
            losses_named("pde"),
            {"balancer": StaticLossBalancer(("pde", "bc"))},
            "losses returned 'pde', but the balancer's loss_names are 'pde', 'bc'. Make them agree.",
        ),
        (
            losses_named("pde", "total_loss"),
            {},
            "losses must not return 'total_loss', the name of their balanced sum. Rename that loss.",
        ),
        (
            lambda model_state, batches: {"pde": 1j * jnp.sum(model_state["w"])},
            {},
            "losses['pde'] must be a real scalar, got complex64[]. Take its real part, or its modulus.",
        ),
        (
            lambda model_state, batches: {"pde": model_state["w"]},
            {},
            "losses['pde'] must be a scalar, got shape (2,). Reduce it, for example with jnp.mean.",
        ),
    ],
    ids=["module names", "balancer names", "taken name", "complex", "rows"],
)
def test_losses_that_do_not_fit_are_refused(losses, options, message):
    step, state = setup(losses, {"w": jnp.ones(2)}, **options)
    with pytest.raises(ValueError) as caught:
        step(state, BATCHES, KEY)
    assert str(caught.value) == message


class Own:
    loss_names = None

    def initialize(self):
        return {}

    def combine(self, losses, state):
        return jnp.stack(list(losses.values()))

    def diagnostics(self, state):
        return {}


def test_a_balancer_that_does_not_give_one_scalar_is_refused():
    step, state = setup(losses_named("pde", "bc"), {"w": jnp.ones(2)}, balancer=Own())
    with pytest.raises(ValueError) as caught:
        step(state, BATCHES, KEY)
    assert str(caught.value) == (
        "Own.combine must return one real scalar, got float32[2]. "
        "Fix it: its gradient is what trains the model."
    )


# Optimizers that want more than gradients


def rosenbrock(model_state, batches):
    x = model_state["x"]
    return {"rosenbrock": jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)}


def test_a_line_search_gets_what_it_wants_and_leaves_variables_to_the_losses():
    def losses(model_state, batches):
        renewed = {**model_state, "count": model_state["count"] + 1, "mean": model_state["mean"] + 0.5}
        return StepOutput(rosenbrock(model_state, batches), renewed)

    def value_fn(params):
        return rosenbrock(params, None)["rosenbrock"]

    @jax.jit
    def by_hand(params, memory):
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, memory = optimizer.update(grad, memory, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), memory

    optimizer = optax.lbfgs()
    params = {"x": jnp.array([-1.2, 1.0])}
    memory = optimizer.init(params)
    step, state = setup(losses, {**params, "count": jnp.int32(0), "mean": jnp.float32(0)}, optimizer)
    step = jax.jit(functools.partial(step))
    for number in range(1, 51):
        params, memory = by_hand(params, memory)
        state, _ = step(state, BATCHES, KEY)
        # Rounding differs between the two programs, and grows with every step.
        if number <= 5:
            np.testing.assert_allclose(state.model_state["x"], params["x"], rtol=1e-4)
    np.testing.assert_allclose(state.model_state["x"], 1, rtol=1e-3)
    assert_trees_bitwise_equal(state.model_state["count"], np.int32(50))
    assert_trees_bitwise_equal(state.model_state["mean"], np.float32(25))


def test_a_schedule_that_watches_the_loss_gets_it():
    plateau = optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    optimizer = optax.chain(optax.sgd(0.1), plateau)

    def flat(model_state, batches):
        return {"fit": 1 + 0 * jnp.sum(model_state["w"])}

    state, _ = updated(flat, {"w": jnp.ones(2)}, optimizer, num_steps=6)
    assert float(state.optimizer_state[1].scale) < 0.5


# In a custom loop


def test_a_custom_loop_is_a_scan_of_updates():
    step, start = setup(line, LINE, optax.adam(0.1))

    def update(state, _):
        state, key = advance(state)
        return step(state, BATCHES, key)

    last, outputs = jax.lax.scan(update, start, None, 300)
    assert int(last.step) == 300
    assert outputs.losses["total_loss"].shape == (300,)
    assert float(outputs.losses["total_loss"][-1]) < float(outputs.losses["total_loss"][0]) / 4
    assert first_difference(last.rng_key, start.rng_key) is not None
