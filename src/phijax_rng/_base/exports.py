"""What a package exports carries the module that users import it from."""

from collections.abc import Mapping
from types import FunctionType
from typing import Any


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
