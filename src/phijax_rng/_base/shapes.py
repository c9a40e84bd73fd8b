"""The shapes of plain data that was read from a file.

A shape is a type, `None`, alternatives in a tuple, `[each]`, a `Row`, or `{name: shape}`, where a name that
ends with `?` may be missing and `...` stands for every other name. `object` is anything.
"""

from collections.abc import Iterator, Mapping
from typing import Any


class Row(tuple[Any, ...]):
    """The shapes of the entries of a list of fixed length."""


def mistake(value: object, shape: Any, path: str = "") -> str | None:
    """What is wrong with plain data that should have this shape: a sentence, or `None`."""
    if isinstance(shape, Row):
        return _mistake_in_row(value, shape, path)
    if isinstance(shape, tuple):
        found = [mistake(value, one, path) for one in shape]
        return None if None in found else found[0]
    if isinstance(shape, list) and isinstance(value, list):
        return _first(mistake(entry, shape[0], f"{path}[{i}]") for i, entry in enumerate(value))
    if isinstance(shape, dict) and isinstance(value, Mapping):
        return _mistake_in_names(value, shape, path)
    kind = shape if isinstance(shape, type) else type(shape)
    if isinstance(value, kind) and (kind is object or not isinstance(value, bool)):
        return None
    return f"{path or 'it'} is {_kind(value)}, not {_KINDS[kind]}"


def _mistake_in_row(value: object, shape: Row, path: str) -> str | None:
    if not isinstance(value, list) or len(value) != len(shape):
        return f"{path} is not a list of {len(shape)} entries"
    return _first(mistake(entry, shape[i], f"{path}[{i}]") for i, entry in enumerate(value))


def _mistake_in_names(value: Mapping[str, Any], shape: dict[Any, Any], path: str) -> str | None:
    known = {name.removesuffix("?"): name for name in shape if name is not ...}
    for name, spelled in known.items():
        if name not in value and name == spelled:
            return f"{_below(path, name)} is missing"
    if ... not in shape:
        unknown = next((name for name in value if name not in known), None)
        if unknown is not None:
            return f"{_below(path, unknown)} is not known"
    return _first(
        mistake(entry, shape[known[name]] if name in known else shape[...], _below(path, name))
        for name, entry in value.items()
    )


_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    bool: "a truth value",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _first(mistakes: Iterator[str | None]) -> str | None:
    return next((one for one in mistakes if one is not None), None)
