"""What a run remembers: where its keys come from, how the runtime stream turns, what is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import StaticLossBalancer, TrainState, advance, initialize_train_state, keys
from phijax_rng._base.model_leaves import is_trainable
from phijax_rng.state import merge, trainable
from tests._bitwise import assert_trees_bitwise_equal, first_difference

STREAMS = keys.split_root(42)
MODEL = {"w": jnp.arange(3.0), "count": jnp.int32(7), "key": jax.random.key(1)}


def initialized(*args, **options):
    return initialize_train_state(MODEL, optax.adam(0.1), {}, *args, **options)


def test_a_new_state_is_at_step_zero_with_all_arguments():
    balancer_state = {"weights": jnp.ones(2)}
    state = initialize_train_state(MODEL, optax.adam(0.1), balancer_state, STREAMS)
    assert_trees_bitwise_equal(state.step, np.int32(0))
    assert not state.step.weak_type
    assert_trees_bitwise_equal(state.model_state, jax.tree.map(jnp.asarray, MODEL))
    assert state.balancer_state is balancer_state
    assert state.sampler_state == {}
    assert_trees_bitwise_equal(
        state.optimizer_state, optax.adam(0.1).init({**MODEL, "count": None, "key": None})
    )


@pytest.mark.parametrize("implementation", keys.TESTED_IMPLEMENTATIONS)
def test_keys_may_be_given_as_streams_as_three_keys_or_as_one_root(implementation):
    streams = keys.split_root(jax.random.key(42, impl=implementation))

    def held(state):
        return state.rng_key, state.sampling_key, state.balancer_key

    expected = (streams.runtime, streams.sampling, streams.balancer)
    assert_trees_bitwise_equal(held(initialized(streams)), expected)
    apart = initialized(streams.runtime, sampling_key=streams.sampling, balancer_key=streams.balancer)
    assert_trees_bitwise_equal(held(apart), expected)
    root = jax.random.key(9, impl=implementation)
    children = jax.random.split(root, 3)
    assert_trees_bitwise_equal(held(initialized(root)), tuple(children[i] for i in range(3)))


def test_one_root_split_in_three_repeats_the_first_keys_of_a_longer_split():
    """The trap the docstring warns of: a model initialised from the same key shares its layer keys."""
    root = keys.root_key(9)
    state = initialized(root)
    layers = jax.random.split(root, 5)
    assert_trees_bitwise_equal((state.rng_key, state.sampling_key), (layers[0], layers[1]))
    streams = keys.split_root(9)
    taken = {keys.fingerprint(key) for key in (streams.runtime, streams.sampling, streams.balancer)}
    model_layers = jax.random.split(streams.model, 64)
    assert not taken & {keys.fingerprint(key) for key in model_layers}


RBG = jax.random.key(0, impl="rbg")


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        (
            (5,),
            {},
            TypeError,
            "key must be one typed JAX key, got 5. Make one with keys.root_key(seed).",
        ),
        (
            (np.array([0, 5], np.uint32),),
            {},
            TypeError,
            "key must be one typed JAX key, got uint32[2]. Make one with keys.root_key(seed).",
        ),
        (
            (jax.random.split(STREAMS.runtime, 3),),
            {},
            ValueError,
            "key must be one key of shape (), got keys of shape (3,). Pick one, or use keys.exact_vmap.",
        ),
        (
            (STREAMS,),
            {"sampling_key": STREAMS.sampling},
            TypeError,
            "key is StreamKeys and sampling_key is given too; they name the same stream. Pass one of them.",
        ),
        (
            (STREAMS,),
            {"balancer_key": STREAMS.sampling},
            TypeError,
            "key is StreamKeys and balancer_key is given too; they name the same stream. Pass one of them.",
        ),
        (
            (STREAMS.runtime,),
            {"sampling_key": STREAMS.sampling},
            TypeError,
            "sampling_key is given without the other of sampling_key and balancer_key. "
            "Pass both beside the runtime key, or one root alone.",
        ),
        (
            (STREAMS.runtime,),
            {"balancer_key": STREAMS.balancer},
            TypeError,
            "balancer_key is given without the other of sampling_key and balancer_key. "
            "Pass both beside the runtime key, or one root alone.",
        ),
        (
            (STREAMS.runtime,),
            {"sampling_key": STREAMS.sampling, "balancer_key": 7},
            TypeError,
            "balancer_key must be one typed JAX key, got 7. Make one with keys.root_key(seed).",
        ),
        (
            (STREAMS.runtime,),
            {"sampling_key": RBG, "balancer_key": STREAMS.balancer},
            ValueError,
            "the keys of one state must share an implementation; key is 'threefry2x32', "
            "sampling_key is 'rbg', balancer_key is 'threefry2x32'. Use one root.",
        ),
        (
            (dataclasses.replace(STREAMS, balancer=RBG),),
            {},
            ValueError,
            "the keys of one state must share an implementation; key is 'threefry2x32', "
            "sampling_key is 'threefry2x32', balancer_key is 'rbg'. Use one root.",
        ),
    ],
    ids=[
        "a seed",
        "a legacy key",
        "a batch of keys",
        "streams and a sampling key",
        "streams and a balancer key",
        "no balancer key",
        "no sampling key",
        "a seed as balancer key",
        "two implementations",
        "streams of two implementations",
    ],
)
def test_keys_that_do_not_make_a_state_are_rejected(args, options, error, message):
    with pytest.raises(error) as caught:
        initialized(*args, **options)
    assert str(caught.value) == message


def test_what_is_no_optimizer_is_rejected():
    with pytest.raises(TypeError) as caught:
        initialize_train_state(MODEL, 0.1, {}, STREAMS)
    assert str(caught.value) == "optimizer must offer init and update, got 0.1. Pass an Optax optimizer."


# The runtime stream


@pytest.mark.parametrize("implementation", keys.TESTED_IMPLEMENTATIONS)
def test_the_runtime_stream_carries_the_first_half_and_hands_out_the_second(implementation):
    state = initialized(keys.split_root(jax.random.key(0, impl=implementation)))
    expected = state.rng_key
    for _ in range(3):
        state, key = advance(state)
        expected, handed = jax.random.split(expected)
        assert_trees_bitwise_equal((state.rng_key, key), (expected, handed))


def test_a_turn_of_the_runtime_stream_moves_nothing_else():
    state = initialized(STREAMS)
    turned, _ = advance(state)
    assert_trees_bitwise_equal(turned.replace(rng_key=state.rng_key), state)
    assert first_difference(turned, state) is not None


def test_the_runtime_stream_turns_the_same_traced():
    state = initialized(STREAMS)
    _, scanned = jax.lax.scan(lambda state, _: advance(state), state, None, 3)
    drawn = []
    for _ in range(3):
        state, key = advance(state)
        drawn.append(key)
    assert_trees_bitwise_equal(scanned, jnp.stack(drawn))


# The state as a pytree


def test_a_state_is_frozen_and_replaced():
    state = initialized(STREAMS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 1
    later = state.replace(step=jnp.int32(5))
    assert (int(later.step), int(state.step)) == (5, 0)
    assert later.model_state is state.model_state


def test_a_state_passes_through_jax_whole():
    state = initialized(STREAMS)
    assert_trees_bitwise_equal(jax.jit(lambda s: s)(state), state, dict_order=False)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert {".rng_key", ".sampling_key", ".balancer_key", ".step", ".model_state['w']"} < paths
    assert isinstance(jax.tree.map(lambda leaf: leaf, state), TrainState)


# What is trained


@pytest.mark.parametrize(
    ("leaf", "trained"),
    [
        (np.float32(1), True),
        (np.zeros(2, np.float64), True),
        (jnp.zeros(2, jnp.bfloat16), True),
        (jnp.zeros(2, jnp.complex64), True),
        (1.5, False),
        (jnp.int32(1), False),
        (3, False),
        (np.True_, False),
        (jax.random.key(0), False),
        (jax.random.split(jax.random.key(0)), False),
        (np.array([0, 1], np.uint32), False),
    ],
    ids=[
        "float32",
        "float64",
        "bfloat16",
        "complex64",
        "float",
        "int32",
        "int",
        "bool",
        "key",
        "keys",
        "legacy key",
    ],
)
def test_floating_and_complex_leaves_are_trained_and_no_other(leaf, trained):
    assert bool(is_trainable(leaf)) == trained
    kept = jax.tree.leaves(trainable({"leaf": leaf}))
    assert kept == ([leaf] if trained and np.ndim(leaf) == 0 else kept)
    assert len(kept) == trained


def test_trained_leaves_are_put_back_among_the_others():
    trained = jax.tree.map(lambda leaf: leaf + 1, trainable(MODEL))
    merged = merge(trained, MODEL)
    assert_trees_bitwise_equal(merged, {**MODEL, "w": jnp.arange(3.0) + 1}, dict_order=False)
    assert merged["count"] is MODEL["count"]
    assert_trees_bitwise_equal(merge(trainable(MODEL), MODEL), MODEL, dict_order=False)


def test_a_model_state_may_hold_none():
    model = {"w": jnp.ones(2), "bias": None}
    assert_trees_bitwise_equal(merge(trainable(model), model), model, dict_order=False)


def test_a_balancer_is_no_balancer_state():
    balancer = StaticLossBalancer()
    with pytest.raises(TypeError) as caught:
        initialize_train_state({}, optax.sgd(0.1), balancer, keys.split_root(0))
    assert str(caught.value) == (
        f"balancer_state must be what a balancer keeps, got the balancer {balancer!r}. "
        "Pass balancer.initialize()."
    )


def test_the_repr_of_a_state_has_a_line_for_each_field_and_no_number_of_an_array():
    streams = keys.split_root(0)
    model = {"kernel": jnp.full((2, 3), 0.123), "bias": jnp.zeros(3)}
    state = initialize_train_state(model, optax.adam(1e-3), {}, streams)
    assert repr(state).splitlines() == [
        "TrainState(",
        "  model_state={['bias']: float32[3], ['kernel']: float32[2, 3]},",
        "  optimizer_state=5 leaves of float32, int32, 19 elements,",
        "  balancer_state={},",
        f"  rng_key={keys.fingerprint(streams.runtime)},",
        f"  sampling_key={keys.fingerprint(streams.sampling)},",
        f"  balancer_key={keys.fingerprint(streams.balancer)},",
        "  step=int32[],",
        "  sampler_state={},",
        ")",
    ]


def test_the_repr_of_a_traced_and_of_an_abstract_state_shows_the_same_shapes():
    state = initialize_train_state({"w": jnp.zeros((4, 2))}, optax.sgd(0.1), {}, keys.split_root(0))
    shown = []
    jax.jit(lambda traced: shown.append(repr(traced)))(state)
    shown.append(repr(jax.eval_shape(lambda: state)))
    for text in shown:
        assert "model_state={['w']: float32[4, 2]}" in text
        assert "rng_key=key<fry>[]" in text
