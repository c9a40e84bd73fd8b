"""What `make test` leaves to `make test-full`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def mostly_full(values: Iterable[Any], *, everyday: Iterable[Any]) -> list[Any]:
    """All values for `parametrize`, those outside `everyday` marked full."""
    everyday = list(everyday)
    params = [_param(value, () if value in everyday else (pytest.mark.full,)) for value in values]
    assert sum(not param.marks for param in params) == len(everyday), "a value of everyday is not in values"
    return params


def _param(value: Any, marks: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)


def examples(few: int, many: int) -> Callable[[Any], Any]:
    """`few` examples in `make test`, and `many` when `make test-full` or a campaign runs the test again.

    For tests in which each example costs a compilation.
    """
    everyday = settings.get_current_profile_name() == "phijax_rng"

    def decorate(test: Any) -> Any:
        return pytest.mark.more(settings(max_examples=few if everyday else many)(test))

    return decorate
