"""Stop when a number has not improved for a while.

The best value and the calls since then are saved with the run, so a resumed run stops where the uninterrupted
one would, and a run that was stopped does not train any further when it is resumed.
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
    """A callback that stops the run after `patience` calls in a row without improvement.

    NaN is no improvement; `EarlyStopping` logs a warning when NaN triggers the stop.

    Attributes:
        metric: the name of a loss, or of a number that a callback before this one reports.
        patience: calls without improvement before the stop.
        min_delta: how much better than the best a number must be to count; not negative.
        mode: whether less (`"min"`) or more (`"max"`) is better.
        every_n_steps: updates between two calls.
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
        """Each number has a separate memory."""
        return f"EarlyStopping/{self.metric}"

    @property
    def follows(self) -> str:
        """The number it needs."""
        return self.metric

    def may_report(self, name: str) -> bool:
        """It reports nothing."""
        return False

    def __call__(self, event: Event) -> bool:
        """Whether to stop.

        Raises:
            ValueError: the number is not recorded at this step.
        """
        if self.metric not in event.metrics:
            raise ValueError(
                f"EarlyStopping follows {self.metric!r}, and step {event.step} has "
                f"{validation.shown(event.metrics)}. Follow one of them, or put the callback that reports it "
                "first, with the same every_n_steps."
            )
        value = event.metrics[self.metric]
        if self._improves(value, event.memory.get("best")):
            event.memory.update(best=value, best_step=event.step, waited=0, nan=0)
        else:
            event.memory["waited"] = event.memory.get("waited", 0) + 1
            event.memory["nan"] = event.memory.get("nan", 0) + math.isnan(value)
        stop = self.is_over(event.memory)
        if stop and event.memory["nan"] and processes.is_primary():
            _log.warning(
                "EarlyStopping stops the run at step %d: %r was NaN in %d of the last %d calls",
                *(event.step, self.metric, event.memory["nan"], event.memory["waited"]),
            )
        return stop

    def is_over(self, memory: Mapping[str, Any]) -> bool:
        """Whether a run with this memory was stopped, by the current patience."""
        return bool(memory.get("waited", 0) >= self.patience)

    def _improves(self, value: float, best: float | None) -> bool:
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta
