"""Bit-for-bit comparison of trees: states, batches, keys.

Two trees are equal when the same nodes hold the same bits in the same order. That is stricter than
`==` and than JAX's tree structure:

    dicts        by insertion order too; JAX sorts their keys and so never sees a reordering. What
                 has been through `jit` or `tree.map` comes back sorted; compare it with its like,
                 or say `dict_order=False`
    typed keys   by implementation, shape and key data
    arrays       by dtype, shape and bits: NaN payloads and the sign of zero count; a JAX array
                 equals the NumPy array of its bits; weak typing is no difference, its dtype is
    the rest     by type and value; floats by bits
"""

import struct
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyEntry, keystr, tree_flatten_with_path

Path = tuple[KeyEntry, ...]


def assert_trees_bitwise_equal(actual: Any, expected: Any, *, dict_order: bool = True) -> None:
    """Fail with the path of the first leaf that differs, and both of its values."""
    __tracebackhide__ = True
    difference = first_difference(actual, expected, dict_order=dict_order)
    if difference is not None:
        raise AssertionError(difference)


def first_difference(actual: Any, expected: Any, *, dict_order: bool = True) -> str | None:
    """A sentence on the first difference, or `None`. For controls, which must differ."""
    return next(_differences(actual, expected, (), dict_order), None)


def _differences(actual: Any, expected: Any, path: Path, dict_order: bool) -> Iterator[str]:
    where = keystr(path) or "the root"
    actual_children, actual_node = _children(actual, dict_order)
    expected_children, expected_node = _children(expected, dict_order)
    if actual_node is None and expected_node is None:
        difference = _leaf_difference(actual, expected)
        if difference is not None:
            yield f"trees differ at {where}: {difference}"
    elif type(actual) is not type(expected) or actual_node != expected_node:
        yield f"trees differ at {where}: {_both(_outline(actual), _outline(expected))}"
    elif dict_order and isinstance(actual, dict) and list(actual) != list(expected):
        yield f"trees differ at {where} in the order of keys: {_both(list(actual), list(expected))}"
    else:
        for (step, a), (_, e) in zip(actual_children, expected_children, strict=True):
            yield from _differences(a, e, (*path, *step), dict_order)


def _children(tree: Any, dict_order: bool) -> tuple[list[tuple[Path, Any]], Any]:
    """The children one level down in the order compared, and the node; no node for a leaf."""
    children, node = tree_flatten_with_path(tree, is_leaf=lambda inner: inner is not tree)
    if jax.tree_util.treedef_is_leaf(node):
        return [], None
    if dict_order and isinstance(tree, dict):
        place = {key: index for index, key in enumerate(tree)}
        children.sort(key=lambda child: place[child[0][0].key])
    return children, node


def _leaf_difference(actual: Any, expected: Any) -> str | None:
    if _is_typed_key(actual) and _is_typed_key(expected):
        implementations = str(jax.random.key_impl(actual)), str(jax.random.key_impl(expected))
        if implementations[0] != implementations[1]:
            return f"key implementations: {_both(*implementations)}"
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    elif not (_is_array(actual) and _is_array(expected)):
        return _value_difference(actual, expected)
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return _both(_outline(actual), _outline(expected))
    return _bits_difference(np.asarray(actual), np.asarray(expected))


def _bits_difference(actual: np.ndarray, expected: np.ndarray) -> str | None:
    if actual.dtype.hasobject:
        raise TypeError(f"an array of dtype {actual.dtype} has no bits to compare.")
    if actual.tobytes() == expected.tobytes():
        return None
    differ = np.any(_bytes(actual) != _bytes(expected), axis=1)
    first = int(np.argmax(differ))
    index = [int(i) for i in np.unravel_index(first, actual.shape)]
    elements = _both(_element(actual, first), _element(expected, first))
    return f"{int(differ.sum())} of {differ.size} elements; the first at {index}: {elements}"


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.itemsize)


def _element(array: np.ndarray, index: int) -> str:
    bits = int.from_bytes(_bytes(array)[index].tobytes(), sys.byteorder)
    return f"{array.reshape(-1)[index]!s} (0x{bits:0{2 * array.itemsize}x})"


def _value_difference(actual: Any, expected: Any) -> str | None:
    same = type(actual) is type(expected) and _comparable(actual) == _comparable(expected)
    return None if bool(same) else _both(_outline(actual), _outline(expected))


def _comparable(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value


def _is_typed_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _is_array(value: Any) -> bool:
    # A NumPy scalar is an array of shape () for JAX.
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and not _is_typed_key(value)


def _outline(value: Any) -> str:
    """A word on a value: arrays by dtype and shape, containers by what is in them."""
    if _is_array(value) or _is_typed_key(value):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        return f"{type(value).__name__} of {list(value)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {value!r}"


def _both(actual: Any, expected: Any) -> str:
    return f"{actual} in actual, {expected} in expected"
