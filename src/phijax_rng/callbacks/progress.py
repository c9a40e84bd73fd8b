"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere.

Everything goes to standard error and nothing is read back, so no number of the run depends on it.
"""

import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

_SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """What a run shows its progress on."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step and its losses."""
        ...

    def log(self, text: str) -> None:
        """Shows a message: where the run continues, where it was saved."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


class Silent:
    """A display that shows nothing."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows nothing."""

    def log(self, text: str) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Does nothing."""


class _Rate:
    """Steps per second over the last ten calls."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def at(self, step: int) -> str:
        # The first call comes behind the compilation, so it only starts the clock.
        self._seen = [*self._seen[-9:], (time.perf_counter(), step)]
        (before, first), (now, last) = self._seen[0], self._seen[-1]
        return f"{(last - first) / max(now - before, 1e-9):.0f} steps/s" if last > first else ""


class Lines:
    """A display of one line every five seconds, and one at the end."""

    def __init__(self, start: int, stop: int, stream: TextIO):
        self._stop = stop
        self._stream = stream
        self._rate = _Rate()
        self._shown = time.perf_counter()
        self._line = ""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line if the last one is old enough; else keeps it for later."""
        shown = (f"step {step}/{self._stop}", _metrics(metrics), self._rate.at(step))
        self._line = "  ".join(part for part in shown if part)
        if time.perf_counter() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._print()

    def log(self, text: str) -> None:
        """Prints the text on a separate line, after the line that waits."""
        self._print()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Prints the last line."""
        self._print()

    def _print(self) -> None:
        if self._line:
            print(self._line, file=self._stream, flush=True)
        self._line, self._shown = "", time.perf_counter()


class Bar:
    """A display by a `rich` progress bar, with loss and steps per second."""

    def __init__(self, start: int, stop: int, stream: TextIO):
        # Imported here, since it would make the import of the package slower.
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
            # Log messages then appear above the bar instead of through it.
            redirect_stderr=stream is sys.stderr,
        )
        self._task = self._progress.add_task("fit", total=stop, completed=start, losses="compiling", rate="")
        self._progress.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar."""
        rate = self._rate.at(step)
        self._progress.update(self._task, completed=step, losses=_metrics(metrics), rate=rate)

    def log(self, text: str) -> None:
        """Prints the text above the bar."""
        self._progress.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._progress.stop()


def make_progress(shown: bool, start: int, stop: int, stream: TextIO | None = None) -> Display:
    """The display for this stream: a bar on a terminal, lines elsewhere, nothing if `shown` is false."""
    stream = stream or sys.stderr
    if not shown:
        return Silent()
    return Bar(start, stop, stream) if stream.isatty() else Lines(start, stop, stream)


def _metrics(metrics: Mapping[str, float]) -> str:
    name = next(iter(metrics), None)
    return "" if name is None else f"{name} {metrics[name]:.3e}"
