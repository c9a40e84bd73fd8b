"""Kills a run at random moments, and starts it again until it is done.

A moment is drawn between the first line that a start prints and its expected end, from a generator
of our own: the same seed draws the same delays, though what they hit depends on the machine.
"""

import dataclasses
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np

from phijax_rng import Checkpoints
from tests._subprocess import start_python

SCRIPT = Path(__file__).parent / "_run.py"


@dataclasses.dataclass(frozen=True)
class Kill:
    """One SIGKILL that met its run alive.

    Attributes:
        start: the step the run was started from.
        shown: the last step it printed.
        saved: the newest step on disk after it, 0 for none.
        saving: whether a save was under way, which left a part of it behind.
    """

    start: int
    shown: int
    saved: int
    saving: bool


@dataclasses.dataclass(frozen=True)
class Start:
    """What one start of the run came to, and how long it took from its first line to its end."""

    lines: list[str]
    seconds: float
    returncode: int


def run_once(folder: Path, max_steps: int, delay: float | None = None) -> Start:
    """Start the run, and kill it this many seconds after its first line unless it ends before."""
    with start_python(SCRIPT, folder, max_steps) as child:
        lines = [next(child.stdout, "")]
        began = time.perf_counter()
        killer = threading.Timer(0 if delay is None else delay, child.send_signal, [signal.SIGKILL])
        if delay is not None:
            killer.start()
        lines += list(child.stdout)
        seconds = time.perf_counter() - began
        child.wait(timeout=60)
        killer.cancel()
    return Start([line.rstrip("\n") for line in lines], seconds, child.returncode)


def run_until_done(
    folder: Path,
    max_steps: int,
    rng: np.random.Generator,
    *,
    per_step: float,
    kills: int,
) -> list[Kill]:
    """Start the run until it is done, killing it up to `kills` times on the way."""
    made: list[Kill] = []
    while True:
        before = Checkpoints(folder).latest_step or 0
        left = max_steps - before
        # A run that has saved its last step is let go: there is nothing in it to interrupt.
        delay = rng.uniform(0, per_step * left) if left and len(made) < kills else None
        start = run_once(folder, max_steps, delay)
        report = "\n".join(start.lines)
        if start.returncode == 0:
            assert start.lines[-1] == f"done {max_steps}", report
            return made
        assert start.returncode == -signal.SIGKILL, report
        steps = re.findall(r"^step (\d+)/", report, re.MULTILINE)
        saving = any("tmp" in entry.name for entry in folder.iterdir()) if folder.is_dir() else False
        saved = Checkpoints(folder).latest_step or 0
        assert saved >= before, report
        made.append(Kill(before, int(steps[-1]) if steps else before, saved, saving))
