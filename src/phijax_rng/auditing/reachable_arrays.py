"""A digest of the arrays that a computation can reach: arguments, closures, defaults, globals.

Two differentiations with equal digests compute the same thing; with another batch or other parameters the
digests differ.
"""

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import jax
import numpy as np

from phijax_rng.auditing.events import words_of


def digest_of(value: object) -> str:
    """A digest of every array that a value reaches."""
    digest = hashlib.sha256()
    for array in _arrays(value, set(), 0):
        digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _arrays(value: object, seen: set[int], depth: int) -> Iterator[np.ndarray[Any, Any]]:
    # Six levels reach a batch inside a partial, a closure and a state; deeper ones cost more than they tell.
    if depth > 6 or id(value) in seen:
        return
    seen.add(id(value))  # the value outlives the walk, so the id stays its own
    value = _known(value)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        yield words_of(value).rows
    elif isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if not isinstance(value, jax.core.Tracer):
            yield np.asarray(value)
    elif not isinstance(value, (str, bytes, bool, int, float, complex, type(None))):
        # Python numbers are ignored: a gradient per loss term differs in such a number, the index.
        for part in _parts(value):
            yield from _arrays(part, seen, depth + 1)


def _known(value: object) -> object:
    """The concrete value under the tracers of outer transformations."""
    while isinstance(value, jax.core.Tracer):
        inner = getattr(value, "val", getattr(value, "primal", None))
        if inner is None:
            return value
        value = inner
    return value


def _parts(value: object) -> Iterator[object]:
    """The contents of a function or a container, in a fixed order."""
    value = value.__func__ if inspect.ismethod(value) else value
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif inspect.isfunction(value):
        yield from _reached_by_function(value)
    elif callable(wrapped := vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None):
        yield wrapped
    else:
        try:
            children = jax.tree.leaves(value, is_leaf=lambda inner: inner is not value)
        except ValueError:  # jax cannot sort the keys of this dict
            return
        if not (len(children) == 1 and children[0] is value):
            yield from children


def _reached_by_function(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (jax.Array, np.ndarray, dict, list, tuple)):
            yield value
