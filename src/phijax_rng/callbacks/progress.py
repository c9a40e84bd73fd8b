"""What a person sees while a run trains: a bar on a terminal and in a notebook, plain lines elsewhere.

    terminal   fit ━━━━━━━━━━━━ 400/1000  812 steps/s  0:00:01
               total_loss 1.250e-01  mean/total_loss 1.301e-01  evaluation/error 2.000e-02
    elsewhere  step 400/1000  total_loss 1.250e-01  ...  812 steps/s

Nothing is read back, so no number of the run depends on it.
"""

import html
import importlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

# A log that follows a run for a day still fits an editor, and its first minute tells enough.
_SECONDS_BETWEEN_LINES = (5.0, 60.0)
_SECONDS_BETWEEN_UPDATES = 0.2


class Display(Protocol):
    """What a run shows its progress on."""

    def phase(self, name: str) -> None:
        """Shows what the run waits for, and for how long; called again and again while it waits."""
        ...

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows a step and its numbers."""
        ...

    def log(self, text: str) -> None:
        """Shows a message: where the run continues, where it was saved."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


class Silent:
    """A display that shows nothing."""

    def phase(self, name: str) -> None:
        """Shows nothing."""

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows nothing."""

    def log(self, text: str) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Does nothing."""


class _Status:
    """The newest step, numbers and speed; or what the run waits for, with the time it has waited."""

    def __init__(self, start: int):
        self.step = start
        self._numbers = ""
        self._phase = ""
        self._since = time.perf_counter()
        self._seen: list[tuple[float, int]] = []

    def phase(self, name: str) -> float:
        """Begins a phase, or continues it; returns for how long it has lasted."""
        now = time.perf_counter()
        if name != self._phase:
            self._phase, self._since = name, now
        return now - self._since

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        self._phase = ""
        self._numbers = "  ".join(
            f"{name} {value}" if isinstance(value, int) else f"{name} {value:.3e}"
            for name, value in numbers.items()
        )
        # The first call comes behind the compilation, so it only starts the clock.
        if not self._seen or self._seen[-1][1] != step:
            self._seen = [*self._seen[-9:], (time.perf_counter(), step)]
        self.step = step

    def __str__(self) -> str:
        """The numbers, or the phase."""
        if not self._phase:
            return self._numbers
        waited = int(time.perf_counter() - self._since)
        return f"{self._phase}, {waited} s" if waited else self._phase

    @property
    def rate(self) -> str:
        """Steps per second over the last ten calls."""
        if len(self._seen) < 2:
            return ""
        (before, first), (now, last) = self._seen[0], self._seen[-1]
        rate = (last - first) / max(now - before, 1e-9)
        return f"{rate:.0f} steps/s" if rate >= 10 else f"{rate:.2g} steps/s"


class Lines:
    """A display of lines: every five seconds at first, every minute in a long run, and one at the end."""

    def __init__(self, start: int, stop: int, stream: TextIO):
        self._stop = stop
        self._stream = stream
        self._status = _Status(start)
        self._began = self._shown = time.perf_counter()
        self._line = ""

    def phase(self, name: str) -> None:
        """Prints what takes longer than a second, and how long it takes from time to time."""
        waited = self._status.phase(name)
        if waited >= 1 and (self._shown <= time.perf_counter() - waited or self._is_due()):
            self._line = str(self._status)
            self._print()

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """Prints the line if the last one is old enough; else keeps it for later."""
        if not self._status.rate:
            self._began = time.perf_counter()
        self._status.show(step, numbers)
        parts = (f"step {step}/{self._stop}", str(self._status), self._status.rate)
        self._line = "  ".join(part for part in parts if part)
        if self._is_due():
            self._print()

    def log(self, text: str) -> None:
        """Prints the text on a separate line, after the line that waits."""
        self._print()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Prints the last line."""
        self._print()

    def _is_due(self) -> bool:
        now, (least, most) = time.perf_counter(), _SECONDS_BETWEEN_LINES
        return now - self._shown >= min(max((now - self._began) / 20, least), most)

    def _print(self) -> None:
        if self._line:
            print(self._line, file=self._stream, flush=True)
        self._line, self._shown = "", time.perf_counter()


class Bar:
    """A display by a `rich` progress bar with the speed, and the numbers in a line below it."""

    def __init__(self, start: int, stop: int, stream: TextIO):
        # Imported here, since it would make the import of the package slower.
        from rich.console import Console, Group  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text  # noqa: PLC0415

        self._status = _Status(start)
        self._progress = Progress(
            TextColumn("[bold]fit"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status].rate}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("fit", total=stop, completed=start, status=self._status)
        self._live = Live(
            # Made again ten times a second, by a thread: a phase shows its time while Python is busy.
            get_renderable=lambda: Group(self._progress, Text(str(self._status))),
            console=Console(file=stream),
            refresh_per_second=10,
            redirect_stdout=False,
            # Log messages then appear above the bar instead of through it.
            redirect_stderr=stream is sys.stderr,
        )
        self._live.start()

    def phase(self, name: str) -> None:
        """Shows it below the bar."""
        self._status.phase(name)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """Moves the bar."""
        self._status.show(step, numbers)
        self._progress.update(self._task, completed=step)

    def log(self, text: str) -> None:
        """Prints the text above the bar."""
        self._live.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._live.stop()


class Notebook:
    """A display by the browser's own progress bar, in the output of a notebook's cell."""

    def __init__(self, start: int, stop: int, display: Any):
        """Shows the bar.

        Args:
            start: the first step.
            stop: the last step.
            display: `IPython.display.display`.
        """
        self._stop = stop
        self._status = _Status(start)
        self._messages: list[str] = []
        self._updated = time.perf_counter()
        self._handle = display(self._content(), raw=True, display_id=True)

    def phase(self, name: str) -> None:
        """Shows it beside the bar."""
        self._status.phase(name)
        self._update_if_due()

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """Moves the bar."""
        self._status.show(step, numbers)
        self._update_if_due()

    def log(self, text: str) -> None:
        """Shows the text above the bar."""
        self._messages.append(text)
        self._update()

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._update()

    def _update_if_due(self) -> None:
        if time.perf_counter() - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self._update()

    def _update(self) -> None:
        self._updated = time.perf_counter()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """The bar, and as text for what shows no HTML."""
        status = self._status
        parts = (f"step {status.step}/{self._stop}", str(status), status.rate)
        line = "  ".join(part for part in parts if part)
        rows = [f"<div>{html.escape(text)}</div>" for text in self._messages]
        bar = f'<progress value="{status.step}" max="{max(self._stop, 1)}" style="width: 20em"></progress>'
        rows.append(f"<div>{bar} {html.escape(line)}</div>")
        style = "font-family: monospace; white-space: pre-wrap"
        return {
            "text/html": f'<div style="{style}">{"".join(rows)}</div>',
            "text/plain": "\n".join([*self._messages, line]),
        }


def make_progress(shown: bool, start: int, stop: int, stream: TextIO | None = None) -> Display:
    """The display of a run.

    A bar in a notebook or on a terminal, lines elsewhere, nothing if `shown` is false. A stream is never a
    notebook.
    """
    if not shown:
        return Silent()
    display = _notebook_display() if stream is None else None
    if display is not None:
        return Notebook(start, stop, display)
    stream = stream or sys.stderr
    return Bar(start, stop, stream) if stream.isatty() else Lines(start, stop, stream)


def _notebook_display() -> Any:
    """`IPython.display.display` in the kernel of a notebook, else `None`."""
    # Never imported here: who is in a notebook has imported it.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # The shells of ipykernel and of Colab; the one of a terminal has a bar of its own.
    if type(shell).__name__ not in ("ZMQInteractiveShell", "Shell"):
        return None
    return importlib.import_module("IPython.display").display
