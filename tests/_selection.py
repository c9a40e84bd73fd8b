"""What `make test` leaves to `make test-full`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings


def mostly_full(values: Mapping[str, Any] | Iterable[Any], *, everyday: Iterable[Any]) -> list[Any]:
    """All values for `parametrize`, those outside `everyday` marked full; of a mapping by name."""
    everyday = list(everyday)
    params = []
    for value in values:
        marks = () if value in everyday else (pytest.mark.full,)
        if isinstance(values, Mapping):
            params.append(_param(values[value], marks, id=value))
        else:
            params.append(_param(value, marks))
    assert sum(not param.marks for param in params) == len(everyday), "a value of everyday is not in values"
    return params


def _param(value: Any, marks: Any, **name: str) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks, **name)


def examples(few: int, many: int) -> Callable[[Any], Any]:
    """`few` examples in `make test`, and `many` when `make test-full` or a campaign runs the test again.

    For tests in which each example costs a compilation.
    """
    everyday = settings.get_current_profile_name() == "phijax_rng"

    def decorate(test: Any) -> Any:
        return pytest.mark.more(settings(max_examples=few if everyday else many)(test))

    return decorate
