"""Bit-for-bit comparison of states, batches and keys: that of `phijax_rng.testing`, and the order of dicts.

JAX sorts the keys of a dict and so never sees a reordering, which would be another run. What has been through
`jit` or `tree.map` comes back sorted: compare it with its like, or say `dict_order=False`.
"""

from typing import Any

import jax
from jax.tree_util import keystr

from phijax_rng import testing


def assert_trees_bitwise_equal(actual: Any, expected: Any, *, dict_order: bool = True) -> None:
    """Fail with the path of the first leaf that differs, and both of its values."""
    __tracebackhide__ = True
    difference = first_difference(actual, expected, dict_order=dict_order)
    if difference is not None:
        raise AssertionError(difference)


def first_difference(actual: Any, expected: Any, *, dict_order: bool = True) -> str | None:
    """A sentence on the first difference, or `None`. For controls, which must differ."""
    difference = testing.first_difference(actual, expected)
    return _reordering(actual, expected) if difference is None and dict_order else difference


def _reordering(actual: Any, expected: Any, where: str = "") -> str | None:
    """The first dict of two equal trees whose keys are in another order."""
    if isinstance(actual, dict) and list(actual) != list(expected):
        return f"{where or 'the value'}: the order {list(actual)} here, {list(expected)} there"
    below, _ = jax.tree_util.tree_flatten_with_path(actual, is_leaf=lambda inner: inner is not actual)
    other = jax.tree.leaves(expected, is_leaf=lambda inner: inner is not expected)
    pairs = zip(below, other, strict=True)
    found = (_reordering(one, two, where + keystr(path)) for (path, one), two in pairs if path)
    return next((difference for difference in found if difference is not None), None)
