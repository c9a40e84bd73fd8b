"""Stop when a number has not improved for a while, has reached a target, or has diverged.

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

    It looks at multiples of `every_n_steps` at which the number is there. NaN is no improvement. A warning is
    logged where NaN or divergence stops the run.

    Attributes:
        metric: the name of a loss, or of a number that a callback before this one reports.
        patience: calls without improvement before the stop; `None` for any number of them.
        min_delta: how much better than the best a number must be to count; not negative.
        mode: whether less (`"min"`) or more (`"max"`) is better.
        every_n_steps: updates between two calls.
        target: stops the run once the number is this good or better; `None` for no target.
        diverges_at: stops the run once the number is this bad or worse, or NaN; `None` for no limit.
        restore_best: whether the state in the result is the one with the best number; the last one for
            `False`. With checkpoints it is that of the best step, and `keep_best` must name the same number;
            without, the best state so far is kept in memory, a second one beside that of the run. What is
            saved as the last step does not change.
    """

    metric: str = "total_loss"
    _: dataclasses.KW_ONLY
    patience: int | None = 10
    min_delta: float = 0.0
    mode: str = "min"
    every_n_steps: int = 100
    target: float | None = None
    diverges_at: float | None = None
    restore_best: bool = False

    def __post_init__(self) -> None:
        validation.names((self.metric,), "metric")
        if self.patience is not None:
            validation.positive(self.patience, "patience")
        validation.positive(self.every_n_steps, "every_n_steps")
        validation.one_of(self.mode, "mode", MODES)
        validation.at_least_zero(self.min_delta, "min_delta")
        validation.flag(self.restore_best, "restore_best")
        limits = {"target": self.target, "diverges_at": self.diverges_at}
        given = [validation.finite_number(limit, name) for name, limit in limits.items() if limit is not None]
        if len(given) == 2 and not self._is_better(*given):
            raise ValueError(
                f"target must be better than diverges_at with mode={self.mode!r}, got {self.target!r} and "
                f"{self.diverges_at!r}. Exchange them, or pass the other mode."
            )

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
                "first."
            )
        value, memory = event.metrics[self.metric], event.memory
        memory["last"] = value
        if self._improves(value, memory.get("best")):
            memory.update(best=value, best_step=event.step, waited=0, nan=0)
        else:
            memory["waited"] = memory.get("waited", 0) + 1
            memory["nan"] = memory.get("nan", 0) + math.isnan(value)
        stop = self.is_over(memory)
        if stop and processes.is_primary():
            self._log_reason(event.step, value, memory)
        return stop

    def is_over(self, memory: Mapping[str, Any]) -> bool:
        """Whether a run with this memory was stopped, by the current patience and limits."""
        last = memory.get("last")
        limited = last is not None and (self._reached(last) or self._diverged(last))
        return limited or (self.patience is not None and memory.get("waited", 0) >= self.patience)

    def _log_reason(self, step: int, value: float, memory: Mapping[str, Any]) -> None:
        if self._reached(value):
            _log.info("EarlyStopping stops the run at step %d: %r reached its target", step, self.metric)
        elif self._diverged(value):
            _log.warning(
                "EarlyStopping stops the run at step %d: %r is %r, and diverges_at is %r",
                *(step, self.metric, value, self.diverges_at),
            )
        elif memory["nan"]:
            _log.warning(
                "EarlyStopping stops the run at step %d: %r was NaN in %d of the last %d calls",
                *(step, self.metric, memory["nan"], memory["waited"]),
            )

    def _reached(self, value: float) -> bool:
        return self.target is not None and (value == self.target or self._is_better(value, self.target))

    def _diverged(self, value: float) -> bool:
        # NaN is better than nothing, so it counts.
        return self.diverges_at is not None and not self._is_better(value, self.diverges_at)

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other

    def _improves(self, value: float, best: float | None) -> bool:
        if math.isnan(value):
            return False
        if best is None:
            return True
        return self._is_better(value, best - self.min_delta if self.mode == "min" else best + self.min_delta)
