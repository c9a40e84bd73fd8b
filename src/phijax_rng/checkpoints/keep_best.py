"""Which steps stay: the newest, to resume from, and the best, to use.

Only saves at multiples of `every_n_steps` stay for being the best, so that it does not matter where, and how
often, a run is stopped. The step at which a run ended competes too, until the run goes on. Each step is saved
with the rule that decides, so that whoever opens the directory knows the best.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from phijax_rng._base import validation


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Which steps are the best, by a number that each was saved with.

    Attributes:
        metric: the name of the number.
        count: how many steps are kept for being the best.
        mode: `"min"` or `"max"`.
        every_n_steps: steps that are multiples of it compete.
    """

    metric: str
    count: int
    mode: str
    every_n_steps: int

    @classmethod
    def checked(cls, value: object, every_n_steps: int | None) -> "KeepBest | None":
        """From `(metric, k)` or `(metric, k, "max")`.

        Raises:
            ValueError: `every_n_steps` is `None`, so that no save would compete.
        """
        if value is None:
            return None
        if not isinstance(value, (tuple, list)) or len(value) not in (2, 3) or not isinstance(value[0], str):
            raise TypeError(
                f"keep_best must be (metric, k) or (metric, k, 'max'), got {validation.described(value)}. "
                "Pass, for example, ('total_loss', 3)."
            )
        metric, count, *rest = value
        mode = validation.one_of(rest[0] if rest else "min", "keep_best[2]", ("min", "max"))
        if every_n_steps is None:
            raise ValueError(
                "keep_best compares saves at multiples of every_n_steps, which is None. Pass it too."
            )
        return cls(metric, validation.positive(count, "keep_best[1]"), mode, every_n_steps)

    def require(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises a `ValueError` unless the number that decides is among those of a step."""
        if self.metric in metrics:
            return
        raise ValueError(
            f"keep_best compares {self.metric!r}, and the numbers of step {step} are "
            f"{validation.shown(metrics)}. Name one of them, or report it before the save."
        )

    def require_recorded(self, names: tuple[str, ...], may_come: Callable[[str], bool]) -> None:
        """See `Checkpoints.require_recorded`."""
        if self.metric not in names and not may_come(self.metric):
            raise ValueError(
                f"keep_best compares {self.metric!r}, and the run records {validation.shown(names)}. "
                "Name one of them, or add the callback that reports it."
            )

    def best(self, values: Mapping[int, float], end: Mapping[int, float] | None = None) -> list[int]:
        """The best steps, best first; of two equal ones the earlier. Only finite numbers compete.

        Args:
            values: the number that each step was saved with.
            end: the number at the step at which the run ended.
        """
        sign = 1 if self.mode == "min" else -1
        on_time = {step: value for step, value in values.items() if step % self.every_n_steps == 0}
        candidates = [*on_time.items(), *(end or {}).items()]
        competing = {step: sign * value for step, value in candidates if math.isfinite(value)}
        return sorted(competing, key=lambda step: (competing[step], step))[: self.count]
