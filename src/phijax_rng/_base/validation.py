"""Checks at the door, worded once.

Each check returns the value in the form the package uses inside, or raises before anything is
traced. None of them imports JAX, so that host-only modules may use them; JAX arrays are recognised
by what they offer.

>>> whole_number(3, "step", 2**31)
3
>>> whole_number(True, "step", 2**31)
Traceback (most recent call last):
TypeError: step must be a whole number, got True. Pass an int or a NumPy integer.
"""

import inspect
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np


def is_whole(value: object) -> bool:
    """Whether `value` is an integer scalar of Python, NumPy or JAX; booleans are not."""
    if isinstance(value, (bool, np.bool_)):
        return False
    if isinstance(value, (int, np.integer)):
        return True
    dtype = getattr(value, "dtype", None)
    return (
        getattr(value, "shape", None) == ()
        and isinstance(dtype, np.dtype)
        and np.issubdtype(dtype, np.integer)
    )


def whole_number(value: Any, name: str, stop: int, *, start: int = 0, fix: str = "") -> int:
    """`value` as a Python int in [start, stop)."""
    if not is_whole(value):
        raise TypeError(
            f"{name} must be a whole number, got {formatted(value)}. "
            f"{fix or 'Pass an int or a NumPy integer.'}"
        )
    number = operator.index(value)
    if not start <= number < stop:
        raise ValueError(
            f"{name} must be in [{start}, {_power(stop)}), got {number}. "
            f"{fix or 'Pick a number inside the range.'}"
        )
    return number


def step_number(value: object, name: str = "step") -> int:
    """`value` as a Python int that can be a global step."""
    return whole_number(value, name, 2**31, fix="A step counts completed optimizer updates.")


def positive(value: object, name: str) -> int:
    """`value` as a Python int of at least one."""
    return whole_number(value, name, 2**31, start=1)


def batch_size(value: Any, name: str, *, finite: bool = True) -> int | Literal["all"]:
    """`value` as a positive Python int, or the word 'all', which is offered where there is a finite pool."""
    if isinstance(value, str) and value == "all":
        return "all"
    if not is_whole(value) or operator.index(value) < 1:
        error = ValueError if is_whole(value) or isinstance(value, str) else TypeError
        wanted, fix = _SIZES[finite]
        raise error(f"{name} must be {wanted}, got {formatted(value)}. {fix}")
    return whole_number(value, name, 2**31, start=1)


_SIZES = {
    True: ("a positive int or 'all'", "Use 'all' to take every row of the pool."),
    False: ("a positive int", "Pass how many points to draw."),
}


def num_points(value: object, name: str) -> int:
    """`value` as a positive Python int; not the word 'all', since a continuous domain has no rows."""
    if isinstance(value, str) and value == "all":
        raise ValueError(
            f"{name}='all' needs a finite pool; a continuous domain has none. Pass a positive int."
        )
    return int(batch_size(value, name, finite=False))


def real_numbers(value: object) -> np.ndarray[Any, Any]:
    """`value` as float64; a TypeError for text, booleans and complex numbers, which NumPy would convert.

    And for masked entries, of which NumPy would take what is under the mask.
    """
    array = np.asarray(value)
    if array.dtype.kind in "bcOSUmM" or np.ma.is_masked(value):
        raise TypeError(f"no real numbers: {formatted(value)}. Pass floats.")
    return array.astype(np.float64)


def finite_array(
    value: object, name: str, shape: tuple[int | None, ...], dtype: Any = np.float32
) -> np.ndarray[Any, Any]:
    """`value` as a read-only array of finite numbers in `dtype`; `None` in `shape` is any positive length."""
    wanted = "one number" if not shape else f"numbers of shape ({', '.join(map(_length, shape))},)"
    try:
        array = real_numbers(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {wanted}, got {formatted(value)}. Pass floats.") from None
    with np.errstate(over="ignore"):
        array = array.astype(dtype)
    lengths = zip(array.shape, shape, strict=False)
    if array.ndim != len(shape) or not all(n == m or (m is None and n) for n, m in lengths):
        raise ValueError(f"{name} must be {wanted}, got shape {array.shape}. Pass that shape.")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} must be finite in {array.dtype}, got {formatted(value)}. Pass finite numbers."
        )
    array.flags.writeable = False
    return array


def _length(length: int | None) -> str:
    return "n" if length is None else str(length)


def finite_number(value: Any, name: str) -> float:
    """`value` as a finite float."""
    _number(value, name)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {formatted(value)}. Pick a finite number.")
    return float(value)


def at_least_zero(value: Any, name: str, *, fix: str = "Pick a number of at least 0.") -> float:
    """`value` as a finite float that is not negative."""
    _number(value, name)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {formatted(value)}. {fix}")
    return float(value)


def above_zero(value: Any, name: str) -> float:
    """`value` as a finite float above 0."""
    _number(value, name)
    if not 0 < value < math.inf:
        raise ValueError(
            f"{name} must be positive and finite, got {formatted(value)}. Pick a number above 0."
        )
    return float(value)


def _number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {formatted(value)}. Pass a float.")


def one_of(value: object, name: str, choices: Iterable[Any]) -> Any:
    """`value`, if it is one of `choices`."""
    choices = tuple(choices)
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got {formatted(value)}. Pick one of them.")
    return value


def flag(value: object, name: str) -> bool:
    """`value`, if it is a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {formatted(value)}. Pass a bool.")
    return bool(value)


def is_iterable(value: Any) -> bool:
    """Whether `value` can be iterated over; an array without axes has `__iter__`, and raises."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def names(values: Any, name: str) -> tuple[str, ...]:
    """`values` as a tuple of distinct, non-empty strings, at least one."""
    if isinstance(values, (str, bytes)) or not is_iterable(values):
        raise TypeError(
            f"{name} must be a sequence of names, got {formatted(values)}. Pass a tuple of strings."
        )
    if isinstance(values, Mapping):
        raise TypeError(
            f"{name} must be a sequence of names, got the mapping {formatted(values)}. "
            "Pass the names as a tuple, and "
            "what belongs to them as an argument of its own."
        )
    if isinstance(values, (set, frozenset)):
        raise TypeError(
            f"{name} must be in an order, got the set {formatted(values)}. Pass a tuple of strings."
        )
    listed = tuple(values)
    for index, value in enumerate(listed):
        if not isinstance(value, str) or not value:
            raise TypeError(f"{name}[{index}] must be a non-empty string, got {formatted(value)}. Name it.")
    if not listed:
        raise ValueError(f"{name} must name at least one entry, got {formatted(listed)}. Add a name.")
    if len(set(listed)) != len(listed):
        raise ValueError(f"{name} must not repeat a name, got {formatted(listed)}. Drop the repeated one.")
    return listed


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """`value`, if it is a mapping with at least one entry and string keys."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, got {formatted(value)}. Pass a dict keyed by name.")
    names(tuple(value), name)
    return value


def function(value: object, name: str) -> Any:
    """`value`, if it can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {formatted(value)}. Pass a function.")
    return value


def takes(value: Any, name: str, *arguments: str) -> Any:
    """`value`, if it can be called with arguments of these names, given by place."""
    function(value, name)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some callables of compiled code have no signature
        return value
    try:
        signature.bind(*arguments)
    except TypeError:
        wanted = f"({', '.join(arguments)})"
        raise TypeError(f"{name} must take {wanted}, got {signature}. Fix its parameters.") from None
    return value


def optimizer(value: Any) -> Any:
    """`value`, if it has the two functions of an Optax transformation."""
    fix = "Pass an Optax optimizer."
    if isinstance(value, type):
        return instance(value, "optimizer")
    if all(callable(getattr(value, name, None)) for name in ("init", "update")):
        return value
    if callable(value):
        fix = "Call it with its learning rate."
    elif isinstance(value, (list, tuple)):
        fix = "Join several into one with optax.chain(...)."
    raise TypeError(f"optimizer must offer init and update, got {described(value)}. {fix}")


def path(value: object, name: str, *, fix: str) -> str:
    """`value` as text, if it is the path of something."""
    given = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given or "\0" in given:
        raise TypeError(f"{name} must be a path, got {formatted(value)}. {fix}")
    return given


# Of two letters or more, for the drives of Windows; `Path("s3://bucket")` has one slash. With two it is an
# address wherever it stands: joined to a folder, it would become one below it.
_ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/|.*[A-Za-z][A-Za-z0-9+.-]+://", re.DOTALL)


def local_path(value: object, name: str, *, fix: str) -> str:
    """`value` as text, if it is a path in a file system of this machine.

    Raises:
        TypeError: it is no path.
        ValueError: it is the address of something else, which would become a folder called `s3:`.
    """
    given = path(value, name, fix=fix)
    if _ADDRESS.match(given):
        raise ValueError(
            f"{name} must be in a file system of this machine, got the address {given!r}. "
            "Mount it and pass a path, or write here and copy."
        )
    return given


def writable(folder: Path) -> None:
    """Raises unless entries can be made in `folder`, which may have to be made first."""
    there = folder.expanduser().absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(
            f"{there} is not a directory, so nothing can be written below it. Name another."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} may not be written to. Name another place, or fix its permissions.")


def instance(value: object, name: str) -> Any:
    """`value`, if it is not a class in place of an object of it."""
    if isinstance(value, type):
        raise TypeError(
            f"{name} must be an object, got the class {value.__qualname__}. Call it: {value.__name__}(...)."
        )
    return value


def formatted(value: object) -> str:
    """`value` for a message: its repr, of arrays dtype and shape alone, cut where it is long.

    >>> formatted({"w": np.zeros((2, 3), np.float32), "rate": 0.5})
    "{'w': float32[2, 3], 'rate': 0.5}"
    """
    text = _formatted(value, depth=2)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# A line of a terminal still has room for the sentence around the value.
_LONGEST = 120


def _formatted(value: object, depth: int) -> str:
    if not isinstance(value, type) and not isinstance(value, np.generic):
        dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
        if dtype is not None and isinstance(shape, tuple):
            return f"{dtype}[{', '.join(map(str, shape))}]"
    if type(value) in (dict, list, tuple) and depth:
        return _formatted_entries(value, depth - 1)
    text = repr(value)
    # The repr of an object prints the arrays inside it, over many lines where they are large. So do tables.
    has_numbers = "array(" in text.lower() or "\n" in text
    return f"{type(value).__qualname__}(...)" if has_numbers else text


def _formatted_entries(value: Any, depth: int) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_formatted(entry, depth)}' for name, entry in value.items())}}}"
    listed = ", ".join(_formatted(entry, depth) for entry in value)
    if isinstance(value, list):
        return f"[{listed}]"
    return f"({listed},)" if len(value) == 1 else f"({listed})"


def shown(values: Iterable[Any]) -> str:
    """`values` as `'a', 'b'` for a message; 'nothing' for none."""
    return ", ".join(repr(value) for value in values) or "nothing"


@runtime_checkable
class _TypedArray(Protocol):
    """An array of NumPy or JAX, or an abstract one."""

    dtype: Any
    shape: Any


def described(value: object) -> str:
    """`value` for a message: an array by dtype and shape, `float32[64, 2]`, and never by its numbers.

    >>> described({"w": np.zeros((2, 3)), "b": [1, None]}), described(Path)
    ("{'w': float64[2, 3], 'b': [1, None]}", 'the class Path')
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, _TypedArray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    # Exact types: the repr of a subclass is its author's, and may show anything.
    if type(value) is dict:
        return "{" + ", ".join(f"{described(k)}: {described(v)}" for k, v in value.items()) + "}"
    if type(value) in (list, tuple):
        texts = [*map(described, value)]  # type: ignore[call-overload]
        joined = ", ".join(texts) + ("," if type(value) is tuple and len(texts) == 1 else "")
        return f"[{joined}]" if type(value) is list else f"({joined})"
    return f"a {type(value).__name__}"


def _power(stop: int) -> str:
    exponent = stop.bit_length() - 1
    return f"2**{exponent}" if exponent >= 16 and stop == 1 << exponent else str(stop)
