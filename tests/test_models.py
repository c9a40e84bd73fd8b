"""Models of every library: trained like a loop written by hand, resumed bit for bit, nothing lost on the way.

The model and the losses of each library are in `_models`.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from phijax_rng import Checkpoints, Evaluate, LossModule, LossTrainStep, Trainer, initialize_train_state, keys
from phijax_rng.devices.placement import resolve
from phijax_rng.state import advance, merge, trainable
from tests import _models
from tests._bitwise import assert_trees_bitwise_equal, first_difference

STREAMS = keys.split_root(0)
STEPS = 4
BATCHES = jax.tree.map(jnp.asarray, _models.BATCHES)

# The other spellings differ from these in nothing but how the library is called.
_QUICK = ("nnx, module", "nnx, state", "equinox", "linen", "plain")
QUICK_AND_FULL = [
    name if name in _QUICK else pytest.param(name, marks=pytest.mark.full) for name in _models.CASES
]


def state_of(case, optimizer=None):
    return initialize_train_state(case.init(STREAMS.model), optimizer or _models.optimizer(), {}, STREAMS)


def fit(case, stop, folder=None, **options):
    checkpoints = None if folder is None else Checkpoints(folder, asynchronous=False)
    trainer = Trainer(stop, progress=False, checkpoints=checkpoints, log_every_n_steps=1, **options)
    return trainer.fit_state(
        case.module,
        state_of(case),
        optimizer=_models.optimizer(),
        source=_models.source,
        resume=False if folder is None else "auto",
    )


@functools.cache
def trained(name):
    return fit(_models.CASES[name], STEPS)


@pytest.mark.parametrize("name", QUICK_AND_FULL)
def test_statistics_move_and_a_resume_repeats_every_bit(name, tmp_path):
    case, result = _models.CASES[name], trained(name)
    fit(case, 2, tmp_path)
    assert_trees_bitwise_equal(fit(case, STEPS, tmp_path).state, result.state)
    assert first_difference(trained(name).state, state_of(case))
    assert not np.asarray(case.mean(state_of(case).model_state)).any()
    mean = np.asarray(case.mean(result.state.model_state))
    assert np.isfinite(mean).all() and (mean != 0).all()


@pytest.mark.parametrize("name", QUICK_AND_FULL)
def test_dropout_differs_between_steps_and_repeats_with_the_state_and_the_key(name):
    """Normalization takes the rows of the batch: at fixed parameters dropout alone changes the loss."""
    module, model = _models.CASES[name].module, _models.CASES[name].init(STREAMS.model)
    first = module.evaluate(model, BATCHES, jax.random.key(1))
    again = module.evaluate(model, BATCHES, jax.random.key(1))
    later = module.evaluate(first.model_state, BATCHES, jax.random.key(2))
    assert_trees_bitwise_equal(again.losses, first.losses)
    assert float(later.losses["fit"]) != float(first.losses["fit"])


# Beside a loop written by hand


def nnx_by_hand(state):
    model = _models.nnx_model(STREAMS.model)
    optimizer = nnx.Optimizer(model, _models.optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return _models.squared(model(BATCHES["data"]["inputs"]), BATCHES)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(STEPS)]
    return model, losses


def equinox_by_hand(state):
    model, variables = _models.EQUINOX.init(STREAMS.model)
    optimizer = _models.optimizer()
    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, variables, moments, key):
        def loss(model):
            output = _models.equinox_losses((model, variables), BATCHES, key)
            return output.losses["fit"], output.model_state[1]

        (value, new), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        updates, moments = optimizer.update(grads, moments)
        return eqx.apply_updates(model, updates), new, moments, value

    losses = []
    for _ in range(STEPS):
        state, key = advance(state)
        model, variables, moments, value = step(model, variables, moments, key)
        losses.append(float(value))
    return (model, variables), losses


def arrays_by_hand(case, parameters, replaced):
    """A loop for models that are containers of arrays: `parameters` of a state, and the state with others."""

    def run(state):
        model, optimizer = case.init(STREAMS.model), _models.optimizer()
        moments = optimizer.init(parameters(model))
        fixed = {} if not isinstance(model, dict) else {k: v for k, v in model.items() if _is_constant(v)}

        @jax.jit
        def step(arrays, moments, key):
            def loss(params):
                output = case.losses(_joined(replaced(arrays, params), fixed), BATCHES, key)
                return output.losses["fit"], output.model_state

            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(parameters(arrays))
            updates, moments = optimizer.update(grads, moments)
            new = replaced(new, optax.apply_updates(parameters(arrays), updates))
            return _without(new, fixed), moments, value

        arrays, losses = _without(model, fixed), []
        for _ in range(STEPS):
            state, key = advance(state)
            arrays, moments, value = step(arrays, moments, key)
            losses.append(float(value))
        return _joined(arrays, fixed), losses

    return run


def _is_constant(value):
    return isinstance(value, (str, bool)) or callable(value)


def _joined(arrays, fixed):
    return {**arrays, **fixed} if fixed else arrays


def _without(model, fixed):
    return {name: value for name, value in model.items() if name not in fixed} if fixed else model


def _named(model):
    return model["params"]


def _with_named(model, params):
    return {**model, "params": params}


def _first(model):
    return model[0]


def _with_first(model, params):
    return (params, model[1])


BY_HAND = {
    "nnx, module": nnx_by_hand,
    "equinox": equinox_by_hand,
    "linen": arrays_by_hand(_models.LINEN, _named, _with_named),
    "haiku": arrays_by_hand(_models.HAIKU, _first, _with_first),
    "plain": arrays_by_hand(_models.PLAIN, _named, _with_named),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n == "haiku" else []) for n in BY_HAND]
)
def test_training_is_that_of_a_loop_written_by_hand(name):
    model, losses = BY_HAND[name](state_of(_models.CASES[name]))
    result = trained(name)
    np.testing.assert_allclose([row["fit"] for row in result.history], losses, rtol=1e-5)
    for own, by_hand in zip(_numbers(result.state.model_state), _numbers(model), strict=True):
        np.testing.assert_allclose(own, by_hand, rtol=1e-4, atol=1e-5)


def _numbers(model):
    leaves = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.number)]


@pytest.mark.full
@pytest.mark.parametrize(
    "spelling", [name for name in _models.NNX if name not in ("module", "reseed", "rngs passed")]
)
def test_every_spelling_of_an_nnx_model_trains_to_the_same_numbers(spelling):
    """`jit` and `remat` round differently, the others only move leaves."""
    one, other = trained("nnx, module"), trained(f"nnx, {spelling}")
    case = _models.NNX[spelling]
    np.testing.assert_allclose(
        case.mean(other.state.model_state), _models.NNX["module"].mean(one.state.model_state), rtol=1e-5
    )
    rows = [[row["fit"] for row in result.history] for result in (one, other)]
    np.testing.assert_allclose(*rows, rtol=1e-5)


# What training leaves alone


def test_the_equinox_model_in_the_result_is_the_users_own_kind_and_can_be_called():
    model, variables = trained("equinox").state.model_state
    assert (model.name, model.omega, model.dropout.p, model.dropout.inference) == (
        "classifier",
        1.5,
        0.25,
        False,
    )
    assert model.activation is jnp.tanh
    outputs, _ = eqx.nn.inference_mode(model)(jnp.ones(3), variables)
    predicted = Trainer(1, progress=False).predict(trained("equinox"), np.ones((2, 3), np.float32))
    np.testing.assert_allclose(predicted, np.stack([outputs, outputs]), rtol=1e-5)


def test_an_equinox_model_is_predicted_from_a_checkpoint(tmp_path):
    fit(_models.EQUINOX, STEPS, tmp_path)
    host = Trainer(1, progress=False)
    stored = host.predict(tmp_path, _models.INPUTS, module=_models.EQUINOX.module)
    np.testing.assert_array_equal(stored, host.predict(trained("equinox"), _models.INPUTS))


@pytest.mark.parametrize(
    "shardings",
    [
        lambda state: jax.tree.map(lambda leaf: PartitionSpec(), state),
        lambda state: jax.tree.map(lambda leaf: None, state).replace(model_state=PartitionSpec()),
        lambda state: state.replace(model_state=None, optimizer_state=None),
    ],
    ids=["of every leaf", "of the model", "left out"],
)
def test_shardings_of_a_model_with_constants(shardings):
    state = state_of(_models.EQUINOX)
    placed = resolve(Mesh(np.array(jax.devices()[:1]), ("data",)), shardings=lambda s: _no_keys(shardings(s)))
    found = placed.of_state(state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert {sharding.spec for sharding in jax.tree.leaves(found)} == {PartitionSpec()}


def _no_keys(shardings):
    return shardings.replace(rng_key=None, sampling_key=None, balancer_key=None, step=None)


def _call_it(model_state):
    return {"error": float(jnp.sum(model_state(_models.INPUTS)))}


class _Calls:
    every_n_steps = 1

    def __call__(self, event):
        event.state.model_state(_models.INPUTS)


@pytest.mark.parametrize("callback", [Evaluate(_call_it, every_n_steps=1), _Calls()], ids=["Evaluate", "own"])
def test_what_a_callback_changes_in_place_is_not_in_the_run(callback):
    assert_trees_bitwise_equal(
        fit(_models.NNX["module"], STEPS, callbacks=(callback,)).state, trained("nnx, module").state
    )


def test_what_losses_and_residuals_change_in_place_outside_of_a_step_is_discarded():
    def residuals(model_state, batches):
        return {"fit": model_state(batches["data"]["inputs"])[:, 0]}

    model = _models.nnx_model(STREAMS.model)
    before = jax.tree.leaves(model)
    module = LossModule(_models.nnx_model, _models.nnx_inside, batch_keys=("data",), residuals=residuals)
    module.residual_rows(model, BATCHES, jax.random.key(0))
    output = module.evaluate(model, BATCHES, jax.random.key(0))
    assert all(new is old for new, old in zip(jax.tree.leaves(model), before, strict=True))
    assert first_difference(output.model_state, model)


# NNX Variables say themselves what trains


class Frozen(nnx.Module):
    """A normalization in evaluation mode, whose statistics enter the loss and must not be trained."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, use_running_average=True, rngs=rngs)

    def __call__(self, inputs):
        return self.norm(self.inner(inputs))


class Spectral(nnx.Module):
    """A layer whose kernel is written at each call: its `nnx.Param` changes in place, and is trained."""

    def __init__(self, rngs):
        self.inner = nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, inputs):
        return self.outer(self.inner(inputs, update_stats=True))


@pytest.mark.parametrize(
    "kind",
    [Frozen, pytest.param(Spectral, marks=pytest.mark.full)],
    ids=["frozen statistics", "spectral norm"],
)
def test_an_nnx_param_is_trained_and_another_variable_is_not(kind):
    def init(key):
        return kind(nnx.Rngs(key))

    optimizer = optax.sgd(0.1)
    module = LossModule(init, _models.nnx_inside, batch_keys=("data",))
    state = initialize_train_state(init(STREAMS.model), optimizer, {}, STREAMS)
    step = jax.jit(LossTrainStep(module, optimizer).__call__)
    for _ in range(2):
        state, _ = step(state, BATCHES, STREAMS.runtime)
    model = init(STREAMS.model)
    by_hand = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    for _ in range(2):
        grads = nnx.grad(lambda model: _models.squared(model(BATCHES["data"]["inputs"]), BATCHES))(model)
        by_hand.update(model, grads)
    for own, expected in zip(_numbers(state.model_state), _numbers(model), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)
    moved = [np.any(a != b) for a, b in zip(_numbers(model), _numbers(init(STREAMS.model)), strict=True)]
    assert any(moved)


@pytest.mark.parametrize("spelling", ["module", pytest.param("remat", marks=pytest.mark.full)])
def test_micro_batches_carry_what_is_changed_in_place(spelling):
    """Two slices of the same rows: the mean moves twice as one slice moves it, the count by two."""
    case, half = _models.NNX[spelling], jax.tree.map(lambda rows: rows[:8], BATCHES)
    twice = jax.tree.map(lambda rows: jnp.concatenate([rows, rows]), half)
    state = state_of(case, optax.sgd(0.1))

    def updated(batches, count):
        step = LossTrainStep(case.module, optax.sgd(0.1), microbatches=count)
        return jax.jit(step.__call__)(state, batches, STREAMS.runtime)[0].model_state

    one, two = updated(half, 1), updated(twice, 2)
    assert (int(one.dropout.rngs.count[...]), int(two.dropout.rngs.count[...])) == (1, 2)
    np.testing.assert_allclose(two.norm.mean[...], one.norm.mean[...] * 1.99, rtol=1e-5)
    assert float(jnp.max(jnp.abs(two.inner.kernel[...] - state.model_state.inner.kernel[...]))) > 1e-4


def test_parameters_and_the_rest_make_the_model_again():
    for case in _models.CASES.values():
        model = state_of(case).model_state
        assert_trees_bitwise_equal(_numbers(merge(trainable(model), model)), _numbers(model))
