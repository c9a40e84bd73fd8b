"""Which leaves of a model state train, which are carried, which are refused, and that a state owns them."""

import collections
import copy
import dataclasses
import decimal
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from phijax_rng import LossModule, Trainer, TrainState, initialize_train_state, keys
from phijax_rng._base.pytrees import same_value
from phijax_rng.state import Model, trainable
from tests._bitwise import assert_trees_bitwise_equal, first_difference

STREAMS = keys.split_root(0)
W = jnp.ones(2)
Pair = collections.namedtuple("Pair", "w nu")


def state_of(model_state):
    return initialize_train_state(model_state, optax.adam(0.1), {}, STREAMS)


class Field(eqx.Module):
    w: jax.Array
    omega: float = 30.0
    number: np.float64 = dataclasses.field(default_factory=lambda: np.float64(2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    w: jax.Array
    rate: float


class ForeignArray:
    shape, dtype = (2,), "torch.float32"

    def __array__(self):
        return np.ones(2)


CARRIED = {
    "a text": "mlp",
    "a function": jnp.tanh,
    "a partial": functools.partial(jnp.sum, axis=0),
    "a method": W.sum,
    "a class": dict,
    "a bool": True,
    "an int": 3,
    "bytes": b"mlp",
    "a set": {1, 2},
    "a dtype": np.dtype("float32"),
    "a module of another kind": linen.Dense(3),
}


@pytest.mark.parametrize("leaf", CARRIED.values(), ids=CARRIED)
def test_what_is_no_array_is_carried_as_it_is(leaf):
    state = state_of({"w": W, "constant": leaf})
    assert state.model_state["constant"] is leaf
    assert [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(trainable(state.model_state))
    ] == ["['w']"]
    placed = jax.jit(lambda state: state)(state)
    assert placed.model_state["constant"] is leaf
    assert_trees_bitwise_equal(placed, state)
    again = dataclasses.replace(placed, step=placed.step)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert len(jax.tree.leaves(Model(state.model_state))) == 1


@pytest.mark.parametrize("model", [Field(W), Record(W, 0.5)], ids=["equinox", "a dataclass"])
def test_a_number_in_a_field_of_a_module_is_carried(model):
    state = state_of(model)
    assert [leaf.shape for leaf in jax.tree.leaves(trainable(state.model_state))] == [(2,)]
    kept = [leaf for leaf in jax.tree.leaves(state.model_state) if isinstance(leaf, float)]
    assert kept == [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, float)]


@pytest.mark.parametrize(
    ("model_state", "where", "number"),
    [
        ({"w": W, "nu": 0.05}, "['nu']", "0.05"),
        ({"nu": 0.05}, "['nu']", "0.05"),
        ([W, 1j], "[1]", "1j"),
        ((W, ({"a": 0.5},)), "[1][0]['a']", "0.5"),
        (0.05, "", "0.05"),
        (Pair(W, 0.5), ".nu", "0.5"),
        (collections.OrderedDict(w=W, nu=np.float64(2)), "['nu']", "np.float64(2.0)"),
        (Record([W, 0.5], 1), ".w[1]", "0.5"),
        ({"w": W, "nu": decimal.Decimal("0.5")}, "['nu']", "Decimal('0.5')"),
        (nnx.Dict(nu=nnx.Param(0.05), w=nnx.Param(W)), ".nu.value", "0.05"),
    ],
    ids=[
        "dict",
        "nothing else",
        "list",
        "tuple",
        "alone",
        "namedtuple",
        "NumPy",
        "in a field",
        "Decimal",
        "nnx",
    ],
)
def test_a_number_in_a_container_is_refused_with_its_path_and_both_fixes(model_state, where, number):
    message = (
        f"model_state{where} is {number}, which could be a parameter or a constant. Write "
        f"jnp.asarray({number}) to train it, or keep it out of the model state to hold it constant."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        state_of(model_state)


REFUSED = {
    "longdouble": (np.ones(2, np.longdouble), "has a dtype that JAX does not have"),
    "objects": (np.array([1, None]), "has a dtype that JAX does not have, got object[2]"),
    "text": (np.array(["a"]), "has a dtype that JAX does not have, got <U1[1]"),
    "dates": (np.array(["2020"], "M8[D]"), "has a dtype that JAX does not have"),
    "a record": (np.zeros(2, [("a", "f4")]), "has a dtype that JAX does not have"),
    "masked": (np.ma.masked_greater(np.float32([1, 9]), 5), "is a masked array in which elements are masked"),
    "another library": (ForeignArray(), "is an array of another library, got ForeignArray. Convert it"),
}


@pytest.mark.parametrize(("leaf", "message"), REFUSED.values(), ids=REFUSED)
def test_arrays_that_jax_cannot_hold_are_refused_by_path(leaf, message):
    with pytest.raises(TypeError, match=re.escape(f"model_state['leaf'] {message}")):
        state_of({"w": W, "leaf": leaf})


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">c8", ">i4", "<f4", ">f8"])
def test_every_byte_order_is_taken_in_native_order_with_equal_values(dtype):
    given = np.arange(3).astype(dtype)
    for state in (state_of({"w": given}), state_of({"w": W}).replace(model_state={"w": given})):
        assert state.model_state["w"].dtype.isnative
        np.testing.assert_array_equal(state.model_state["w"], given)
        jnp.asarray(state.model_state["w"])


@pytest.mark.parametrize(
    "leaf",
    [np.float32(0.5), np.array(0.5, np.float32), np.ma.array(np.float32([1, 2])), np.ones(2, jnp.bfloat16)],
    ids=["a NumPy number with a dtype", "0-d", "masked nowhere", "bfloat16"],
)
def test_other_numpy_arrays_train(leaf):
    state = state_of({"w": leaf})
    (kept,) = jax.tree.leaves(trainable(state.model_state))
    assert type(kept) is np.ndarray
    np.testing.assert_array_equal(kept, np.asarray(leaf))


@pytest.mark.parametrize(
    "make",
    [state_of, lambda model: state_of({"w": W}).replace(model_state=model)],
    ids=["initialize_train_state", "replace"],
)
def test_what_is_written_into_the_given_model_later_changes_no_state(make):
    weights, inner = np.ones(2, np.float32), {"b": W}
    given = {"w": weights, "inner": inner, "list": [W]}
    state = make(given)
    kept = jax.tree.map(np.array, state.model_state)
    weights[:] = 7
    inner["b"] = jnp.zeros(2)
    given["list"].append(W)
    assert_trees_bitwise_equal(state.model_state, kept)


def test_an_nnx_module_that_is_changed_later_changes_no_state():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    state = state_of(model)
    kept = np.array(state.model_state.kernel[...])
    model.kernel[...] = jnp.zeros((2, 2))
    np.testing.assert_array_equal(state.model_state.kernel[...], kept)


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (jnp.tanh, "a PjitFunction"),
        (linen.Dense(3), "a Dense"),
        (eqx.nn.Linear, "the class "),
        ("mlp", "'mlp'"),
    ],
    ids=["a function", "linen", "a class", "a text"],
)
def test_a_model_without_arrays_was_not_initialized(model, shown):
    message = f"the model state has no arrays, got {shown}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        state_of(model)
    state = state_of({"w": W}).replace(model_state=model)
    module = LossModule(lambda key: model, lambda model_state, batches: {}, batch_keys=("data",))
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        Trainer(1, progress=False).fit_state(module, state, optimizer=optax.adam(0.1), source=lambda step: {})


class Tied(nnx.Module):
    def __init__(self):
        self.inner = nnx.Param(W)
        self.outer = self.inner


class SharedRngs(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Dict(rngs=rngs, w=nnx.Param(W)) for _ in range(2)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tied, "one Param is both model_state.inner and model_state.outer; "),
        (
            lambda: SharedRngs(nnx.Rngs(0)),
            "one Rngs is both model_state.layers[0].rngs and model_state.layers[1].rngs; ",
        ),
    ],
    ids=["tied weights", "random numbers"],
)
def test_an_nnx_object_in_two_places_is_refused_and_its_state_is_not(model, message):
    for make in (state_of, lambda given: state_of({"w": W}).replace(model_state=given)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}as a pytree it would become two"):
            make(model())
    assert jax.tree.leaves(state_of(nnx.state(model())).model_state)


def test_the_leaves_of_a_state_have_the_paths_of_the_arrays_alone():
    state = state_of({"w": W, "name": "mlp", "inner": Field(W)})
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths[:2] == [".model_state['inner'].w", ".model_state['w']"]
    assert all(path.startswith(".optimizer_state") for path in paths[2:7])
    assert "2 leaves" not in repr(state) and "'mlp'" not in repr(state)
    assert jax.tree.structure(copy.deepcopy(state)) == jax.tree.structure(state)


def test_states_with_other_constants_are_other_pytrees():
    traces = []

    @jax.jit
    def loss(state):
        traces.append(state.model_state["scale"])
        return state.model_state["scale"] * state.model_state["w"]

    for scale in (2, 2, 3, True, 1):
        np.testing.assert_array_equal(
            loss(state_of({"w": W, "scale": scale})), np.float32(scale) * np.ones(2)
        )
    assert traces == [2, 3, True, 1]


def test_constants_are_compared_by_value_only_if_they_are_plain():
    nan = float("nan")
    assert all(
        same_value(a, b) for a, b in [(1.5, 1.5), (nan, float("nan")), ("ab", "a" + "b"), (W.sum, W.sum)]
    )
    assert not any(
        same_value(a, b) for a, b in [(0.0, -0.0), (1, True), (1, 1.0), ([1], [1]), (jnp.tanh, jnp.sin)]
    )


def test_a_custom_train_step_may_change_the_model_that_the_state_gives_out():
    state = state_of({"w": W, "name": "mlp"})
    state.model_state["w"] = jnp.zeros(2)
    assert not jax.tree.leaves(state)[0].any()
    assert not state.replace(step=jnp.int32(1)).model_state["w"].any()


def test_a_state_of_other_values_keeps_them_as_leaves():
    """`jax.tree.map` over a state makes states of shapes, shardings or numbers."""
    state = state_of({"w": W, "name": "mlp"})
    sizes = jax.tree.map(lambda leaf: leaf.size, state)
    assert isinstance(sizes, TrainState) and sizes.model_state == {"w": 2, "name": "mlp"}
    assert jax.tree.structure(sizes) == jax.tree.structure(state)
    assert first_difference(jax.tree.map(lambda leaf, size: leaf, state, sizes), state) is None
