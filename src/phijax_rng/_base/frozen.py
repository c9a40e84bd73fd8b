"""Fields of frozen dataclasses, set while an instance is made."""

from typing import Any


def assign(instance: Any, **values: Any) -> None:
    """Sets fields of a frozen instance; for `__init__`, `__post_init__` and `__setstate__` alone."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
