"""The folder of a run on disk: which steps are there, what their documents say, what is set aside.

Reading creates and changes nothing. Arrays are not read here.
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
from typing import Any

from phijax_rng._base import validation
from phijax_rng.checkpoints.document import loads
from phijax_rng.errors import DamagedCheckpointError

DOCUMENT = "document"
DOCUMENT_FILE = "document.json"

_MOST_CLEARINGS = 20
_SECONDS_BETWEEN_CLEARINGS = 0.1


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder with one folder for each step.

    Attributes:
        path: where it is, absolute.
    """

    path: Path

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are on disk, ascending; empty when there is no folder.

        Raises:
            NotADirectoryError: there is a file in its place.
        """
        if not self.path.is_dir():
            if self.path.exists():
                raise NotADirectoryError(f"{self.path} is not a directory. Name another for this run.")
            return ()
        return tuple(sorted(int(entry.name) for entry in self.path.iterdir() if _is_step(entry)))

    def existing(self, step: int | None = None) -> int:
        """This step if it is on disk; the latest for `None`.

        Raises:
            FileNotFoundError: there is no such step; the steps there are, are listed.
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
        """The step that this one says it came from, if that is on disk; else the next lower one."""
        lower = [found for found in self.steps if found < step]
        try:
            parent = self.document(step)["contract"]["run"]["parent_step"]
        except (DamagedCheckpointError, KeyError):
            parent = None
        if parent in lower:
            return int(parent)
        return max(lower, default=None)

    def newest_intact(self, restore: Callable[[int], Any], *, tells: bool = True) -> tuple[Any, int]:
        """What `restore` gives for the newest step at which it finds no damage, and that step.

        Args:
            restore: from a step; raises `DamagedCheckpointError`.
            tells: whether steps that are passed over are named in warnings.

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
                if step is not None and tells:
                    warnings.warn(
                        f"checkpoint at step {before} is damaged, going back to step {step}: {error}",
                        UserWarning,
                        stacklevel=3,
                    )
        raise DamagedCheckpointError(
            "no checkpoint is intact:\n  " + "\n  ".join(damage) + "\nStart a fresh run elsewhere."
        )

    def readable_contract(self) -> dict[str, Any]:
        """The contract of the newest step whose document is readable; empty if none is."""
        for step in reversed(self.steps):
            with contextlib.suppress(DamagedCheckpointError):
                return dict(self.document(step)["contract"])
        return {}

    def values(self, metric: str, known: Mapping[int, float]) -> dict[int, float]:
        """The number of this name that each step was saved with; what is known is not read again."""
        return {step: known[step] if step in known else self._value(step, metric) for step in self.steps}

    def _value(self, step: int, metric: str) -> float:
        with contextlib.suppress(DamagedCheckpointError):
            return float(self.document(step).get("memory", {}).get("metrics", {}).get(metric, math.nan))
        return math.nan

    def set_aside_after(self, step: int) -> list[int]:
        """Moves the steps above `step` to `superseded/`; which ones."""
        later = [found for found in self.steps if found > step]
        for found in later:
            folder = self.path / "superseded"
            folder.mkdir(exist_ok=True)
            taken = sum(1 for entry in folder.iterdir() if entry.name.split("-")[0] == str(found))
            (self.path / str(found)).rename(folder / f"{found}-{taken}")
        return later

    def clear_leftovers(self) -> None:
        """Removes what a failed save left, while writers of other parts of it may still be at work."""
        for _ in range(_MOST_CLEARINGS):
            leftovers = [p for p in self.path.glob("*.orbax-checkpoint-tmp*") if p.is_dir()]
            if not leftovers:
                return
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
            time.sleep(_SECONDS_BETWEEN_CLEARINGS)


def _is_step(entry: Path) -> bool:
    return entry.name.isdecimal() and str(int(entry.name)) == entry.name and entry.is_dir()
