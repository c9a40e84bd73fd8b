"""The directory of a run: which steps are in it, and what their documents say.

    <directory>/<step>/...             one folder for each step
    <directory>/superseded/<step>-<n>  steps that a rewind or a fall-back left behind

Reading creates and changes nothing, and reads no arrays.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from phijax_rng._base import validation
from phijax_rng.checkpoints.document import DOCUMENT, DOCUMENT_FILE, loads
from phijax_rng.checkpoints.keep_best import KeepBest
from phijax_rng.errors import DamagedCheckpointError

T = TypeVar("T")

# Writers of Orbax are threads that nobody can stop: they recreate what is removed until they have
# ended, which takes milliseconds on a local disk. Two seconds in all are long against that, and short beside
# a lost save.
_MOST_CLEARINGS = 20
_SECONDS_BETWEEN_CLEARINGS = 0.1


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """A directory with one folder for each step.

    Attributes:
        path: its absolute path.
    """

    path: Path

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps on disk, ascending; empty when there is no directory.

        Raises:
            NotADirectoryError: the path is a file.
        """
        if not self.path.is_dir():
            if self.path.exists():
                raise NotADirectoryError(f"{self.path} is not a directory. Name another for this run.")
            return ()
        return tuple(sorted(int(entry.name) for entry in self.path.iterdir() if _is_step(entry)))

    def existing(self, step: int | None = None) -> int:
        """This step if it is on disk; the latest for `None`.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
        """
        steps = self.steps
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.path}. Check the path, or start a fresh run.")
        if step is None:
            return steps[-1]
        number = validation.step_number(step)
        if number not in steps:
            raise FileNotFoundError(
                f"no checkpoint at step {number} in {self.path}; there are steps "
                f"{', '.join(map(str, steps))}. Pick one of them."
            )
        return number

    def document(self, step: int) -> dict[str, Any]:
        """The document of a step, verified.

        Raises:
            DamagedCheckpointError: it is missing, unreadable, or does not match its digest.
        """
        where = f"step {step} in {self.path}"
        path = self.path / str(step) / DOCUMENT / DOCUMENT_FILE
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise DamagedCheckpointError(
                f"{where} has no {DOCUMENT}: it is incomplete, or was not saved by phijax_rng. "
                "Restore another step."
            ) from None
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(
                f"the document of {where} cannot be read: {error}. Restore another step."
            ) from error
        return loads(data, where)

    def step_before(self, step: int) -> int | None:
        """The step that this one names as its parent, if that is on disk; else the next lower one."""
        # After a rewind the next lower number need not be an ancestor, and its bits need not be of this run.
        lower = [found for found in self.steps if found < step]
        try:
            parent = self.document(step)["contract"]["run"]["parent_step"]
        except (DamagedCheckpointError, KeyError):
            parent = None
        if parent in lower:
            return int(parent)
        return max(lower, default=None)

    def newest_intact(self, restore: Callable[[int], T], *, warn: bool = True) -> tuple[T, int]:
        """What `restore` returns for the newest step that is not damaged, and that step.

        Args:
            restore: from a step; raises `DamagedCheckpointError`.
            warn: whether a warning names each step that is damaged.

        Raises:
            FileNotFoundError: there is no step at all.
            DamagedCheckpointError: no step is intact.
        """
        step: int | None = self.existing()
        damage = []
        while step is not None:
            try:
                return restore(step), step
            except DamagedCheckpointError as error:
                damage.append(str(error))
                before, step = step, self.step_before(step)
                if step is not None and warn:
                    warnings.warn(
                        f"checkpoint at step {before} is damaged, going back to step {step}: {error}",
                        UserWarning,
                        stacklevel=3,  # the caller of `Checkpoints.restore_intact`
                    )
        raise DamagedCheckpointError(
            "no checkpoint is intact:\n  " + "\n  ".join(damage) + "\nStart a fresh run in another directory."
        )

    def readable_contract(self) -> dict[str, Any]:
        """The contract of the newest step whose document is readable; an empty dict if there is none."""
        for step in reversed(self.steps):
            with contextlib.suppress(DamagedCheckpointError):
                return dict(self.document(step)["contract"])
        return {}

    def values(self, metric: str, known: Mapping[int, float]) -> dict[int, float]:
        """The number of this name that each step was saved with.

        Args:
            metric: the name.
            known: numbers read before; a document is not read twice.
        """
        return {step: known[step] if step in known else self._value(step, metric) for step in self.steps}

    def _value(self, step: int, metric: str) -> float:
        return float(self._readable_memory(step).get("metrics", {}).get(metric, math.nan))

    def end(self, metric: str) -> dict[int, float]:
        """The newest step, if a run ended there, and the number of this name at its end; or nothing."""
        ended = {step: self._readable_memory(step).get("end", {}) for step in self.steps[-1:]}
        return {step: float(end.get("metrics", {}).get(metric, math.nan)) for step, end in ended.items()}

    def keep_best(self) -> KeepBest | None:
        """The rule of the newest step that was saved with one."""
        rules = (self._readable_memory(step).get("keep_best") for step in reversed(self.steps))
        return next((KeepBest(**rule) for rule in rules if rule is not None), None)

    def _readable_memory(self, step: int) -> dict[str, Any]:
        with contextlib.suppress(DamagedCheckpointError):
            return dict(self.document(step).get("memory", {}))
        return {}

    def set_aside_after(self, step: int) -> list[int]:
        """Moves the steps above `step` to `superseded/`, and returns them."""
        later = [found for found in self.steps if found > step]
        for found in later:
            folder = self.path / "superseded"
            folder.mkdir(exist_ok=True)
            # Not overwritten: a step may be set aside, saved again and set aside again.
            taken = sum(1 for entry in folder.iterdir() if entry.name.split("-")[0] == str(found))
            (self.path / str(found)).rename(folder / f"{found}-{taken}")
        return later

    def clear_leftovers(self) -> None:
        """Removes what a failed save left, while its other writers may still be running."""
        for _ in range(_MOST_CLEARINGS):
            leftovers = [p for p in self.path.glob("*.orbax-checkpoint-tmp*") if p.is_dir()]
            if not leftovers:
                return
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
            time.sleep(_SECONDS_BETWEEN_CLEARINGS)


def _is_step(entry: Path) -> bool:
    # Exactly the name that a save gives: "08" and digits of other scripts are somebody else's folders.
    return entry.name.isdecimal() and str(int(entry.name)) == entry.name and entry.is_dir()
