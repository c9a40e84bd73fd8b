"""What a package exports carries the module that users import it from, and its errors the user's lines."""

from collections.abc import Mapping
from types import FunctionType
from typing import Any, Protocol

from phijax_rng._base.tracebacks import open_door


def publish(package: Mapping[str, Any]) -> None:
    """Sets `__module__` of the classes and functions that a package lists in `__all__`.

    Tracebacks, pickles and reprs then show `phijax_rng.Trainer`, and a file can be renamed without breaking
    a pickle.

    Args:
        package: `globals()` of its `__init__`.
    """
    for name in package["__all__"]:
        value = package[name]
        if isinstance(value, (type, FunctionType)):
            value.__module__ = package["__name__"]
        if (
            isinstance(value, type)
            and not issubclass(value, BaseException)
            and Protocol not in value.__bases__
        ):
            open_door(value)
