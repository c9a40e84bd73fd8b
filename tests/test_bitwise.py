"""The comparison that every exactness test stands on: what it lets pass, and what it must catch."""

import collections
import dataclasses
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests._bitwise import assert_trees_bitwise_equal, first_difference


class Moments(NamedTuple):
    mu: Any
    nu: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    weights: Any
    key: Any
    kind: str = dataclasses.field(metadata={"static": True}, default="plain")


def float32_of(bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


QUIET_NAN, OTHER_NAN = float32_of(0x7FC00000), float32_of(0x7FC00001)
NAN_64 = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


def state(**changes: Any) -> State:
    fields = {"weights": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3)}}
    return State(**({**fields, "key": jax.random.key(7)} | changes))


EQUAL = {
    "a state and its copy": (state(), state()),
    "one NaN payload": (QUIET_NAN, QUIET_NAN.copy()),
    "a JAX array and its NumPy bits": (jnp.arange(3), np.arange(3, dtype=np.int32)),
    "a weak and a strong type of one dtype": (jnp.asarray(1.0), jnp.ones((), jnp.float32)),
    "a NumPy scalar and an array of shape ()": (np.float32(2), jnp.float32(2)),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), np.ones(2, ml_dtypes.bfloat16)),
    "two layouts of one array": (np.asfortranarray(np.eye(2, 3)), np.eye(2, 3)),
    "nothing": (None, None),
    "zero rows": (jnp.zeros((0, 2)), np.zeros((0, 2), np.float32)),
    "Python values": ((1, 2.5, "x", True, 1j), (1, 2.5, "x", True, 1j)),
    "Python NaN": (float("nan"), float("nan")),
    "batches of keys": (jax.random.split(jax.random.key(0)), jax.random.split(jax.random.key(0))),
}

DIFFERENT = {
    "NaN payload": (QUIET_NAN, OTHER_NAN),
    "Python NaN payload": (float("nan"), NAN_64),
    "sign of zero": (jnp.float32(0.0), jnp.float32(-0.0)),
    "sign of a Python zero": (0.0, -0.0),
    "sign of an imaginary zero": (complex(1, 0.0), complex(1, -0.0)),
    "last bit": (jnp.float32(1), jnp.nextafter(jnp.float32(1), jnp.float32(2))),
    "dtype": (np.float32(1), np.float64(1)),
    "signedness": (jnp.int32(1), jnp.uint32(1)),
    "shape": (jnp.zeros((2, 3)), jnp.zeros((3, 2))),
    "rank": (jnp.zeros(()), jnp.zeros((1,))),
    "zero rows of another width": (jnp.zeros((0, 2)), jnp.zeros((0, 3))),
    "bool and int": (True, 1),
    "Python float and array": (1.0, jnp.float32(1)),
    "key data": (jax.random.key(0), jax.random.key(1)),
    "key implementation": (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
    "key and its data": (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
    "one key and a batch of one": (jax.random.key(0), jax.random.key(0)[None]),
    "order of a dict": ({"pde": 1, "bc": 2}, {"bc": 2, "pde": 1}),
    "order of an OrderedDict": (
        collections.OrderedDict(pde=1, bc=2),
        collections.OrderedDict(bc=2, pde=1),
    ),
    "keys of a dict": ({"pde": 1}, {"bc": 1}),
    "dict and OrderedDict": ({"pde": 1}, collections.OrderedDict(pde=1)),
    "order of a list": ([1, 2], [2, 1]),
    "list and tuple": ([1], (1,)),
    "tuple and named tuple": ((1, 2), Moments(1, 2)),
    "length": ((1,), (1, 1)),
    "None and a leaf": ({"a": None}, {"a": 0}),
    "None and an empty tuple": (None, ()),
    "leaf and container": (1, (1,)),
    "static field": (state(), state(kind="fancy")),
    "string": ("a", "b"),
}


@pytest.mark.parametrize(("actual", "expected"), EQUAL.values(), ids=EQUAL)
def test_equal_bits_pass(actual: Any, expected: Any) -> None:
    assert_trees_bitwise_equal(actual, expected)
    assert first_difference([actual], [expected]) is None


@pytest.mark.parametrize(("actual", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_every_difference_is_caught_in_both_directions(actual: Any, expected: Any) -> None:
    for left, right in ((actual, expected), (expected, actual)):
        with pytest.raises(AssertionError, match=r"here, .* there|elements differ"):
            assert_trees_bitwise_equal(left, right)
        with pytest.raises(AssertionError, match=r"here, .* there|elements differ"):
            assert_trees_bitwise_equal({"deep": (0, left)}, {"deep": (0, right)})


def test_the_message_names_the_first_leaf_with_both_values() -> None:
    actual = {"z": state(), "a": Moments(jnp.zeros(2), jnp.zeros(2))}
    weights = {"w": jnp.arange(6.0).reshape(2, 3).at[1, 1].set(5), "b": jnp.zeros(3)}
    expected = {"z": state(weights=weights), "a": Moments(jnp.zeros(2), jnp.zeros(2))}
    assert first_difference(actual, expected) == (
        "['z'].weights['w']: 1 of 6 elements differ; the first at [1, 1]: 4.0 here, 5.0 there"
    )


def test_the_message_shows_both_sides_of_a_reordering() -> None:
    one, other = {"pde": 1, "bc": 2}, {"bc": 2, "pde": 1}
    assert first_difference((0, {"deep": one}), (0, {"deep": other})) == (
        "[1]['deep']: the order ['pde', 'bc'] here, ['bc', 'pde'] there"
    )


def test_the_order_of_dicts_can_be_left_out_and_nothing_else_with_it() -> None:
    declared = {"z": jnp.ones(2), "a": {"y": 1, "b": 2}}
    through_jax = jax.tree.map(lambda leaf: leaf, declared)
    assert list(through_jax) == ["a", "z"]
    assert first_difference(declared, through_jax) is not None
    assert_trees_bitwise_equal(declared, through_jax, dict_order=False)
    through_jax["a"]["y"] = 3
    assert first_difference(declared, through_jax, dict_order=False) == "['a']['y']: 1 here, 3 there"


def test_the_message_shows_both_dtypes_and_shapes() -> None:
    assert first_difference((jnp.zeros(3),), (np.zeros((3, 1)),)) == (
        "[0]: float32[3] here, float64[3, 1] there"
    )
