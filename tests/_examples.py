"""How many examples Hypothesis draws where each of them costs a compilation."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings


def examples(few: int, many: int) -> Callable[[Any], Any]:
    """`few` examples in `make test`, and `many` when `make test-full` or a campaign runs the test again."""
    everyday = settings.get_current_profile_name() == "phijax_rng"

    def decorate(test: Any) -> Any:
        return pytest.mark.more(settings(max_examples=few if everyday else many)(test))

    return decorate
