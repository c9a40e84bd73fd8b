"""Which steps of a run stay on disk: the newest, to go on from, and the best, to use.

Only saves at multiples of `every_n_steps` compete for best. Where a run is stopped, and how often, then has
no say in which they are.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from phijax_rng._base import validation


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """The best steps by a number that they were saved with.

    Attributes:
        metric: its name.
        count: how many steps.
        mode: `"min"` or `"max"`.
        every_n_steps: whose multiples compete.
    """

    metric: str
    count: int
    mode: str
    every_n_steps: int

    @classmethod
    def checked(cls, value: Any, every_n_steps: int | None) -> "KeepBest | None":
        """From `(metric, k)` or `(metric, k, "max")`.

        Raises:
            TypeError: it is not such a tuple.
            ValueError: k is not positive, the mode is unknown, or there are no saves that compete.
        """
        if value is None:
            return None
        if not isinstance(value, (tuple, list)) or len(value) not in (2, 3) or not isinstance(value[0], str):
            raise TypeError(
                f"keep_best must be (metric, k) or (metric, k, 'max'), got {value!r}. "
                "Pass, for example, ('total_loss', 3)."
            )
        metric, count, *rest = value
        mode = validation.one_of(rest[0] if rest else "min", "keep_best[2]", ("min", "max"))
        if every_n_steps is None:
            raise ValueError(
                "keep_best compares saves at multiples of every_n_steps, which is None. Pass it too."
            )
        return cls(metric, validation.positive(count, "keep_best[1]"), mode, every_n_steps)

    def best(self, values: Mapping[int, float]) -> list[int]:
        """The best steps, the best first; the earlier of two equal ones."""
        sign = 1 if self.mode == "min" else -1
        competing = {
            step: sign * value
            for step, value in values.items()
            if step % self.every_n_steps == 0 and not math.isnan(value)
        }
        return sorted(competing, key=lambda step: (competing[step], step))[: self.count]


def dropped(steps: tuple[int, ...], max_to_keep: int | None, best: list[int]) -> list[int]:
    """The steps that go: neither among the newest nor among the best."""
    if max_to_keep is None:
        return []
    return [step for step in steps[:-max_to_keep] if step not in best]


def positive_or_none(value: Any, name: str) -> int | None:
    """`value` as a positive Python int, or `None`."""
    return None if value is None else validation.positive(value, name)


def minutes_or_none(value: Any) -> float | None:
    """`every_minutes` as a positive float, or `None`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"every_minutes must be a number, got {value!r}. Pass minutes, or None.")
    if not value > 0:
        raise ValueError(f"every_minutes must be positive, got {value!r}. Pass minutes, or None.")
    return float(value)
