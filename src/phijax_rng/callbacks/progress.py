"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere.

Everything goes to standard error and nothing is read back, so no number of the run depends on it.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

_SECONDS_BETWEEN_LINES = 5.0


class Silent:
    """Shows nothing."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes note of a step and its losses."""

    def tell(self, text: str) -> None:
        """Says something beside the steps: where the run goes on, where it was saved."""

    def close(self) -> None:
        """Ends the display."""


class _Rate:
    """Steps per second over the last looks; the first look, which compiled, only starts the clock."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def at(self, step: int) -> str:
        self._seen = [*self._seen[-9:], (time.perf_counter(), step)]
        (before, first), (now, last) = self._seen[0], self._seen[-1]
        return f"{(last - first) / max(now - before, 1e-9):.0f} steps/s" if last > first else ""


class Lines(Silent):
    """One line every five seconds, and one at the end."""

    def __init__(self, start: int, stop: int, stream: TextIO):
        self._stop = stop
        self._stream = stream
        self._rate = _Rate()
        self._shown = time.perf_counter()
        self._line = ""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the line, and prints it if the last is old enough."""
        shown = (f"step {step}/{self._stop}", _metrics(metrics), self._rate.at(step))
        self._line = "  ".join(part for part in shown if part)
        if time.perf_counter() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._print()

    def tell(self, text: str) -> None:
        """Prints the text on a line of its own, behind what is waiting to be printed."""
        self._print()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Prints the last line."""
        self._print()

    def _print(self) -> None:
        if self._line:
            print(self._line, file=self._stream, flush=True)
        self._line, self._shown = "", time.perf_counter()


class Bar(Silent):
    """A `rich` progress bar with loss and steps per second."""

    def __init__(self, start: int, stop: int, stream: TextIO):
        # Imported here: it costs an import of the package too much.
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._rate = _Rate()
        self._progress = Progress(
            TextColumn("[bold]fit"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}  {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            redirect_stdout=False,
            # What is logged meanwhile goes above the bar.
            redirect_stderr=stream is sys.stderr,
        )
        self._task: Any = self._progress.add_task(
            "fit", total=stop, completed=start, losses="compiling", rate=""
        )
        self._progress.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar."""
        rate = self._rate.at(step)
        self._progress.update(self._task, completed=step, losses=_metrics(metrics), rate=rate)

    def tell(self, text: str) -> None:
        """Prints the text above the bar."""
        self._progress.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._progress.stop()


def make_progress(shown: bool, start: int, stop: int, stream: TextIO | None = None) -> Silent:
    """The display for this stream: a bar on a terminal, lines elsewhere, nothing when not `shown`."""
    stream = stream or sys.stderr
    if not shown:
        return Silent()
    return Bar(start, stop, stream) if stream.isatty() else Lines(start, stop, stream)


def _metrics(metrics: Mapping[str, float]) -> str:
    name = next(iter(metrics), None)
    return "" if name is None else f"{name} {metrics[name]:.3e}"
