"""The history of a run, its wall time and its speed in TensorBoard and in Weights & Biases.

Both are callbacks that only display: a run can be resumed with or without them. A logger that is added later
begins with the rows of the history so far. With several processes the primary process alone writes. The
packages are extras, `phijax-rng[tensorboard]` and `phijax-rng[wandb]`, imported when the fit begins.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from phijax_rng._base import validation
from phijax_rng.callbacks.protocol import Event, Memory
from phijax_rng.devices import processes


class _Writer(Protocol):
    """What is called of `tensorboardX.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: float, /) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class _Run(Protocol):
    """What is called of a run of Weights & Biases."""

    def log(self, data: dict[str, float], step: float) -> None: ...


class TensorBoardLogger:
    """A callback that writes the history as TensorBoard scalars.

    When a run is resumed, TensorBoard discards rows that a killed process wrote after its last checkpoint, so
    no step is shown twice.

    Attributes:
        directory: the directory of the event files.
        every_n_steps: updates between two calls.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every_n_steps: int = 100):
        self.directory = validation.local_path(directory, "directory", fix="Name where the event files go.")
        self.every_n_steps = validation.positive(every_n_steps, "every_n_steps")
        self._writer: _Writer | None = None

    @property
    def name(self) -> str:
        """Each directory has a separate memory."""
        return f"TensorBoardLogger/{self.directory}"

    def may_report(self, name: str) -> bool:
        """It reports nothing."""
        return False

    def check(self, memory: Memory) -> None:
        """Raises if the files could not be written.

        Raises:
            ImportError: tensorboardX is not installed.
            OSError: the directory cannot be made or written to.
        """
        processes.run_on_primary(self._require_writable)

    def _require_writable(self) -> None:
        _summary_writer_class()
        validation.writable(Path(self.directory))

    def __call__(self, event: Event) -> None:
        """Writes the new rows."""
        shown = event.memory.get("shown", 0)
        if self._writer is None and processes.is_primary():
            self._writer = _summary_writer(self.directory, shown + 1)
        self._write(event, event.step)

    def _write(self, event: Event, end: int) -> None:
        rows = _rows(event, end)
        if self._writer is None:
            return
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def finish(self, event: Event) -> None:
        """Writes the last rows and closes the files."""
        try:
            self(event)
            self._write(event, event.step + 1)
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()


class WandbLogger:
    """A callback that logs the history to Weights & Biases, each row at its step.

    To continue the same run there after a resume, pass `id="..."` and `resume="allow"`; Weights & Biases
    then ignores steps that it already has.

    Attributes:
        run: a run from `wandb.init`, which stays open; `None` to start one and finish it with the fit.
        every_n_steps: updates between two calls.
        options: arguments of `wandb.init` if `run` is `None`.
    """

    def __init__(self, run: _Run | None = None, *, every_n_steps: int = 100, **options: object):
        validation.instance(run, "run")
        if run is not None and not isinstance(run, _Run):
            raise TypeError(
                f"run must have a method log(data, step), got {validation.described(run)}. "
                "Pass what wandb.init returns."
            )
        if run is not None and options:
            raise TypeError(
                f"run excludes options of wandb.init, got {validation.shown(options)} too. "
                "Pass one of the two."
            )
        self.run = run
        self.every_n_steps = validation.positive(every_n_steps, "every_n_steps")
        self.options = options
        self._started: Any = None

    def may_report(self, name: str) -> bool:
        """It reports nothing."""
        return False

    def check(self, memory: Memory) -> None:
        """Raises if a run cannot be started.

        Raises:
            ImportError: wandb is not installed.
        """
        if self.run is None:
            processes.run_on_primary(_wandb)

    def __call__(self, event: Event) -> None:
        """Logs the new rows."""
        if self.run is None and self._started is None and processes.is_primary():
            self._started = _wandb().init(**self.options)
        self._log(event, event.step)

    def _log(self, event: Event, end: int) -> None:
        rows = _rows(event, end)
        if not processes.is_primary():
            return
        run = self.run or self._started
        for row in rows:
            run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def finish(self, event: Event) -> None:
        """Logs the last rows, and finishes a run that it started."""
        try:
            self(event)
            self._log(event, event.step + 1)
        finally:
            run, self._started = self._started, None
            if run is not None:
                run.finish()


def _rows(event: Event, end: int) -> list[Mapping[str, float]]:
    """The rows before the step `end` that were not written yet; the row of this step may still grow."""
    shown = event.memory.get("shown", 0)
    event.memory["shown"] = end - 1
    timing = {row["step"]: row for row in event.timing.after(shown)}
    return [{**row, **timing.get(row["step"], {})} for row in event.history.after(shown) if row["step"] < end]


def _summary_writer(directory: str, purge_step: int) -> _Writer:
    # tensorboardX names files by the second, so two files of one second would be one. TensorBoard reads them
    # in the order of their names.
    suffix = f".{time.time_ns()}"
    folder = os.path.expanduser(directory)
    return _summary_writer_class()(folder, purge_step=purge_step, filename_suffix=suffix)


def _summary_writer_class() -> Callable[..., _Writer]:
    try:
        from tensorboardX import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("TensorBoardLogger needs tensorboardX. Install phijax-rng[tensorboard].") from error
    return SummaryWriter


def _wandb() -> ModuleType:
    try:
        import wandb  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("WandbLogger needs wandb. Install phijax-rng[wandb].") from error
    return wandb
