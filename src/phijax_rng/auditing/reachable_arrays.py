"""A digest of the arrays that a computation can see: arguments, closures, defaults, globals it names.

Two differentiations with one digest compute the same thing again; with another batch or other
parameters they do not.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from phijax_rng.auditing.events import words_of


def digest_of(value: Any) -> str:
    """A digest of every array that is reachable from a value: arguments, closures, defaults."""
    digest = hashlib.sha256()
    for array in _arrays(value, set(), 0):
        digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _arrays(value: Any, seen: set[int], depth: int) -> Iterator[np.ndarray[Any, Any]]:
    if depth > 6 or id(value) in seen:
        return
    seen.add(id(value))
    value = _known(value)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        yield words_of(value).rows
    elif isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if not isinstance(value, jax.core.Tracer):
            yield np.asarray(value)
    elif not isinstance(value, (str, bytes, bool, int, float, complex, type(None))):
        # Numbers of Python are left out: which of several losses is differentiated is one of them.
        for part in _parts(value):
            yield from _arrays(part, seen, depth + 1)


def _known(value: Any) -> Any:
    """What lies under the tracers of outer transformations."""
    while isinstance(value, jax.core.Tracer):
        inner = getattr(value, "val", getattr(value, "primal", None))
        if inner is None:
            return value
        value = inner
    return value


def _parts(value: Any) -> Iterator[Any]:
    """What a function or a container holds, in a fixed order."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(getattr(value, "__code__", None), type(_parts.__code__)):
        yield from _held_by_function(value)
    elif isinstance(getattr(value, "__wrapped__", None), Callable):  # type: ignore[arg-type]
        yield value.__wrapped__
    else:
        try:
            children = jax.tree.leaves(value, is_leaf=lambda inner: inner is not value)
        except ValueError:  # a dict whose keys have no order
            return
        if not (len(children) == 1 and children[0] is value):
            yield from children


def _held_by_function(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    for name in function.__code__.co_names:
        held = function.__globals__.get(name)
        if isinstance(held, (jax.Array, np.ndarray, dict, list, tuple)):
            yield held
