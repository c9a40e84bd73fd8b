"""Settings of a part as plain data, as the contract of a run stores them in JSON.

>>> plain({"rates": (0.5, 1), "act": max})
{'rates': [0.5, 1], 'act': 'max'}
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def name_of(value: object) -> str:
    """The name of a function or class, or of the class of any other object."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def plain(value: object, other: Callable[[Any], Any] = name_of) -> Any:
    """Numbers, text, lists and dicts as JSON stores them; `other` converts what is none of these."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(entry, other) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, other) for entry in value]
    return other(value)


def kind_of(part: object) -> str:
    """The `kind` that a class states for the contract, else its name; a subclass does not inherit it."""
    return str(vars(type(part)).get("kind", type(part).__name__))


def described(part: object, *, settings: bool = False) -> dict[str, Any]:
    """What a part's `describe()` returns, else its class; with `settings`, the fields of a dataclass too."""
    describe = getattr(part, "describe", None)
    if callable(describe):
        return dict(describe())
    # The path of a module may change and `kind` does not, but runs are saved with the path where it was used.
    path = f"{type(part).__module__}.{type(part).__qualname__}"
    if not settings:
        return {"kind": path}
    kind = {"kind": vars(type(part)).get("kind") or path}
    if not dataclasses.is_dataclass(part):
        return kind
    return {**kind, **{field.name: plain(getattr(part, field.name)) for field in dataclasses.fields(part)}}
