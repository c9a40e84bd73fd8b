"""Stop when a number has not improved for a while.

Best value and patience are remembered with the run, so a resumed run stops where the uninterrupted one
would have, and a run that has been stopped is over when it is started again.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from phijax_rng._base import validation
from phijax_rng.callbacks.protocol import Event
from phijax_rng.devices import processes

MODES = ("min", "max")

_log = logging.getLogger("phijax_rng")


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """A callback that asks to stop after `patience` looks in a row without improvement.

    NaN is no improvement; a stop that came of it is told in a warning.

    Attributes:
        metric: a loss, or what a callback before this one reports.
        patience: looks without improvement.
        min_delta: by how much a number must beat the best to count; not negative.
        mode: whether less (`"min"`) or more (`"max"`) is better.
        every_n_steps: updates between two looks.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """

    metric: str = "total_loss"
    _: dataclasses.KW_ONLY
    patience: int = 10
    min_delta: float = 0.0
    mode: str = "min"
    every_n_steps: int = 100

    def __post_init__(self) -> None:
        validation.names((self.metric,), "metric")
        validation.positive(self.patience, "patience")
        validation.positive(self.every_n_steps, "every_n_steps")
        validation.one_of(self.mode, "mode", MODES)
        validation.at_least_zero(self.min_delta, "min_delta")

    @property
    def name(self) -> str:
        """Its memory belongs to one number."""
        return f"EarlyStopping/{self.metric}"

    @property
    def follows(self) -> str:
        """The number it cannot do without."""
        return self.metric

    def may_report(self, name: str) -> bool:
        """It reports nothing."""
        return False

    def __call__(self, event: Event) -> bool:
        """Whether patience has run out.

        Raises:
            ValueError: the number is not there at this step.
        """
        if self.metric not in event.metrics:
            raise ValueError(
                f"EarlyStopping follows {self.metric!r}, and step {event.step} has "
                f"{validation.shown(event.metrics)}. Follow one of them, or put the callback that reports it "
                "before, at the same steps."
            )
        value = event.metrics[self.metric]
        if self._improves(value, event.memory.get("best")):
            event.memory.update(best=value, best_step=event.step, waited=0, nan=0)
        else:
            event.memory["waited"] = event.memory.get("waited", 0) + 1
            event.memory["nan"] = event.memory.get("nan", 0) + math.isnan(value)
        over = self.is_over(event.memory)
        if over and event.memory["nan"] and processes.is_first():
            _log.warning(
                "EarlyStopping asks to stop at step %d: %r was NaN at %d of the last %d looks",
                *(event.step, self.metric, event.memory["nan"], event.memory["waited"]),
            )
        return over

    def is_over(self, memory: Mapping[str, Any]) -> bool:
        """Whether a run that remembers this has been asked to stop, with the patience there is now."""
        return bool(memory.get("waited", 0) >= self.patience)

    def _improves(self, value: float, best: float | None) -> bool:
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta
