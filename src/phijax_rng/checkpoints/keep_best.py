"""Which steps stay: the newest, to resume from, and the best, to use.

Only saves at multiples of `every_n_steps` stay for being the best, so that it does not matter where, and how
often, a run is stopped. The step at which a run ended competes too, until the run goes on. Each step is saved
with the rule that decides, so that whoever opens the directory knows the best.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from phijax_rng._base import validation
from phijax_rng.checkpoints.directory import RunDirectory, StepGoneError
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError

_log = logging.getLogger("phijax_rng")


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


def dropped(steps: tuple[int, ...], max_to_keep: int | None, best: list[int]) -> list[int]:
    """The steps to delete: neither among the newest nor among the best."""
    if max_to_keep is None:
        return []
    return [step for step in steps[:-max_to_keep] if step not in best]


class Retention:
    """Selects and deletes old steps. A failure is logged, and costs no training: the steps stay."""

    def __init__(self, run: RunDirectory, max_to_keep: int | None, best: KeepBest | None):
        self._run = run
        self._max_to_keep = max_to_keep
        self._best = best
        self._values: dict[int, float] = {}
        self._warned: set[str] = set()

    def rule(self) -> KeepBest | None:
        """`keep_best` of this object; without one, that of the newest step that was saved with one."""
        if self._best is not None:
            return self._best
        rules = (self._readable_memory(step).get("keep_best") for step in reversed(self._run.steps))
        return next((KeepBest(**rule) for rule in rules if rule is not None), None)

    def best_step(self) -> int | None:
        """The best step on disk; one whose document is damaged does not compete."""
        rule, steps = self.rule(), self._run.steps
        if rule is None:
            return None
        known = self._values if rule is self._best else {}
        values = {step: known[step] if step in known else self._value(rule, step) for step in steps}
        # A run that ended at the newest step has another number there: that of its end.
        ended = {step: self._readable_memory(step).get("end", {}) for step in steps[-1:]}
        end = {step: _number(memory, rule.metric) for step, memory in ended.items()}
        return next(iter(rule.best(values, end)), None)

    def existing_best(self) -> int:
        """The best step.

        Raises:
            ValueError: there is none; the message says why.
        """
        best, rule, steps = self.best_step(), self.rule(), self._run.steps
        if best is not None:
            return best
        raise ValueError(
            f"no step in {self._run.path} is the best: none was saved with keep_best. Pass a number, "
            f"for example {steps[-1]}, or Checkpoints(..., keep_best=(metric, k)) with a number that was "
            "recorded."
            if rule is None
            else f"no step in {self._run.path} is the best: keep_best compares {rule.metric!r}, and steps "
            f"{', '.join(map(str, steps))} have no finite number of this name. Pass one of these steps."
        )

    def _value(self, rule: KeepBest, step: int) -> float:
        competes = step % rule.every_n_steps == 0
        return _number(self._readable_memory(step), rule.metric) if competes else math.nan

    def _readable_memory(self, step: int) -> dict[str, Any]:
        with contextlib.suppress(DamagedCheckpointError, StepGoneError):
            return dict(self._run.document(step)["memory"])
        return {}

    def not_kept(self) -> list[int]:
        """The steps to delete: neither among the newest nor the best, nor of a number that cannot be read."""
        try:
            steps = self._run.steps
        except OSError as error:
            self._warn(f"no old step is deleted: {error}")
            return []
        unread = self._read_values(steps)
        for step, reason in unread.items():
            self._warn(f"step {step} stays, since its number cannot be read: {reason}")
        best = [] if self._best is None else self._best.best(self._values)
        return dropped(steps, self._max_to_keep, [*best, *unread])

    def delete(self, steps: list[int]) -> None:
        """Deletes these steps, as far as the file system lets it."""
        for step in steps:
            try:
                self._run.delete(step)
            except OSError as error:
                self._warn(f"{self._run.where(step)} cannot be deleted, and stays: {error}")

    def forget(self) -> None:
        """Reads all numbers again: a step that was moved may be saved again, with another number."""
        self._values = {}

    def _read_values(self, steps: tuple[int, ...]) -> dict[int, Exception]:
        """Reads the number of each step that competes, once; returns why some cannot be read."""
        if self._best is None:
            return {}
        self._values = {step: value for step, value in self._values.items() if step in steps}
        unread: dict[int, Exception] = {}
        for step in steps:
            if step in self._values or step % self._best.every_n_steps:
                continue
            try:
                self._values[step] = _number(self._run.document(step)["memory"], self._best.metric)
            except (DamagedCheckpointError, CheckpointMismatchError, OSError) as error:
                unread[step] = error
        return unread

    def _warn(self, message: str) -> None:
        # Logged, and not a warning, which `-W error` would turn into the end of the training. Once each.
        if message not in self._warned:
            self._warned.add(message)
            _log.warning("%s", message)


def _number(memory: Mapping[str, Any], metric: str) -> float:
    return float(memory.get("metrics", {}).get(metric, math.nan))
