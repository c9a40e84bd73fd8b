"""What is in the directory of a run. Reading takes no lock, so the run may train meanwhile."""

import dataclasses
import datetime
import math
import os
import time
from pathlib import Path
from typing import Any

from rich import filesize

from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError

_BARS = " .:-=+*#%@"


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """One step on disk.

    Attributes:
        step: its number.
        size: of its files, in bytes.
        saved: when, in seconds since 1970.
        damage: why it cannot be read; `None` where it can.
        metrics: the losses and reports at this step.
    """

    step: int
    size: int
    saved: float
    damage: str | None
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run directory.

    Attributes:
        directory: its path.
        run: the id of the run; `None` where no step names one.
        steps: ascending.
        superseded: the names of steps that a rewind or a fall-back left behind.
        size: of all files, in bytes.
        best: the best step by `keep_best`, or `None`.
        verified: whether the arrays were read and compared with their digests.
        keys: the fingerprints of the keys.
        origin: the run that it started from, or `None`.
        changes: what former resumes let pass.
        versions: with which it was saved.
        machine: on which.
        losses: the first column of the history: step and value of each row.
    """

    directory: str
    run: str | None
    steps: tuple[SavedStep, ...]
    superseded: tuple[str, ...]
    size: int
    best: int | None
    verified: bool
    keys: dict[str, Any]
    origin: dict[str, Any] | None
    changes: tuple[dict[str, Any], ...]
    versions: dict[str, Any]
    machine: dict[str, Any]
    losses: tuple[tuple[int, float], ...]

    @property
    def intact(self) -> bool:
        """Whether every step can be read."""
        return all(step.damage is None for step in self.steps)

    def plain(self) -> dict[str, Any]:
        """All of it as JSON can store it."""
        return {**dataclasses.asdict(self), "intact": self.intact}

    def __str__(self) -> str:
        lines = [f"{self.directory}: run {self.run or 'without a name'}, {filesize.decimal(self.size)}"]
        if self.origin:
            lines.append(f"started from step {self.origin.get('step')} of {self.origin.get('directory')}")
        lines += [f"changed at step {one.get('step')}: {one.get('survives')}" for one in self.changes]
        lines += [f"key {name}: {value}" for name, value in self.keys.items() if isinstance(value, str)]
        names = ("python", "jax", "jaxlib", "phijax-rng")
        lines.append(
            "saved with " + ", ".join(f"{n} {self.versions[n]}" for n in names if n in self.versions)
        )
        if len(self.losses) > 1:
            (first, at_first), (last, at_last) = self.losses[0], self.losses[-1]
            lines.append(f"loss {at_first:.4g} at step {first} |{self._line()}| {at_last:.4g} at step {last}")
        lines.append(f"{'step':>10}  {'size':>9}  {'saved':16}  {'arrays' if self.verified else 'document'}")
        for one in self.steps:
            when = datetime.datetime.fromtimestamp(one.saved).strftime("%Y-%m-%d %H:%M")
            best = "  best" if one.step == self.best else ""
            lines.append(
                f"{one.step:>10}  {filesize.decimal(one.size):>9}  {when}  {one.damage or 'intact'}{best}"
            )
        if self.superseded:
            lines.append(f"superseded: {', '.join(self.superseded)}")
        return "\n".join(lines)

    def _line(self, width: int = 40) -> str:
        """The losses as a line of characters, from low to high; `?` where one is not finite."""
        values = [value for _, value in self.losses]
        finite = [value for value in values if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else values
        heights = [(v - low) / (high - low or 1) if math.isfinite(v) else None for v in picked]
        return "".join("?" if h is None else _BARS[round(h * (len(_BARS) - 1))] for h in heights)


def inspect_run(
    directory: str | os.PathLike[str], step: int | None = None, *, verify: bool = False
) -> RunSummary:
    """Reads a run directory; nothing is written.

    Args:
        directory: of the run.
        step: whose contract and history to show; the newest readable one for `None`.
        verify: whether to read all arrays too, and compare them with their digests.

    Raises:
        FileNotFoundError: there is no such step; the message says what is there.
        DamagedCheckpointError: the document of the named step cannot be read.
    """
    run = Checkpoints(directory)
    run.existing(step)
    steps = tuple(_saved(run, found, verify) for found in run.steps)
    readable = [one.step for one in steps if one.damage is None]
    shown = step if step is not None else (readable[-1] if readable else None)
    contract = {} if shown is None else run.contract(shown)
    lineage = contract.get("run", {})
    left = run.directory / "superseded"
    return RunSummary(
        directory=str(run.directory),
        run=lineage.get("id"),
        steps=steps,
        superseded=tuple(sorted(path.name for path in left.iterdir())) if left.is_dir() else (),
        size=_size(run.directory),
        best=run.best_step,
        verified=verify,
        keys=dict(contract.get("keys", {})),
        origin=lineage.get("origin"),
        changes=tuple(lineage.get("changes", ())),
        versions=dict(contract.get("versions", {})),
        machine=dict(contract.get("machine", {})),
        losses=() if shown is None else _losses(run, shown),
    )


def _saved(run: Checkpoints, step: int, verify: bool) -> SavedStep:
    folder, damage, metrics = run.directory / str(step), None, {}
    try:
        metrics = run.memory(step, whole_history=False).get("metrics", {})
        if verify:
            run.arrays(step)
            run.memory(step)
    except (DamagedCheckpointError, CheckpointMismatchError, OSError) as error:
        damage = " ".join(str(error).split())
    try:
        saved = folder.stat().st_mtime
    except OSError:  # deleted meanwhile
        saved = time.time()
    return SavedStep(step, _size(folder), saved, damage, metrics)


def _losses(run: Checkpoints, step: int) -> tuple[tuple[int, float], ...]:
    try:
        table = run.memory(step).get("history", {})
    except (DamagedCheckpointError, OSError):
        return ()
    return tuple((row[0], row[1]) for row in table.get("rows", ()) if len(row) > 1 and row[1] is not None)


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # deleted meanwhile
                continue
    return total
