"""Writes steps with Orbax, one at a time, each in the background if that is wanted."""

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from phijax_rng._base import validation
from phijax_rng._base.background import Worker
from phijax_rng.checkpoints.directory import STATE, RunDirectory
from phijax_rng.checkpoints.document import DOCUMENT, SaveDocument
from phijax_rng.errors import DamagedCheckpointError, SaveError

# Writers with a save in flight, and the process that started it.
_unfinished: "dict[StepWriter, int]" = {}


def _wait_at_exit() -> None:
    """Waits for saves that nobody waited for."""
    for writer, process in list(_unfinished.items()):
        if process == os.getpid():  # a fork copies no thread
            with contextlib.suppress(Exception):
                writer.wait()


# Before `atexit`: there the executors that Orbax and the digests use are closed, and a save would fail.
getattr(threading, "_register_atexit", atexit.register)(_wait_at_exit)


class Parents:
    """The steps that one object saved or restored, and the seals of their documents."""

    def __init__(self, run: RunDirectory):
        self._run = run
        self._last: int | None = None
        self._seals: dict[int, str] = {}

    def saw(self, step: int, sha256: str | None) -> None:
        """Remembers a step that was saved or restored."""
        self._last = step
        if sha256 is not None:  # only the first process writes documents
            self._seals[step] = sha256

    def forget_after(self, step: int) -> None:
        """Forgets later steps, which were set aside and may be saved again."""
        self._seals = {found: seal for found, seal in self._seals.items() if found <= step}

    def of(self, contract: Mapping[str, Any]) -> dict[str, Any] | None:
        """Number and seal of the step that a save with this contract continues."""
        step = contract["run"].get("parent_step") if "run" in contract else self._last
        if step is None:
            return None
        if step not in self._seals:
            with contextlib.suppress(DamagedCheckpointError, OSError):
                self._seals[step] = self._run.document(step)["sha256"]
        return {"step": step, "sha256": self._seals.get(step)}


class StepWriter:
    """The save in flight, and Orbax's manager, which is made at the first save.

    Attributes:
        in_flight: what is being saved, or `None`.
    """

    def __init__(self, run: RunDirectory, *, asynchronous: bool):
        self._run = run
        self._asynchronous = asynchronous
        self._manager: ocp.CheckpointManager | None = None
        self.in_flight: SaveDocument | None = None

    @property
    def is_open(self) -> bool:
        """Whether there was a save since the last `close`."""
        return self._manager is not None

    def start(self, document: SaveDocument) -> None:
        """Starts a save.

        Raises:
            SaveError: it could not be started.
        """
        if not self._asynchronous:
            document.returned.set()  # or the writer would wait for a return that waits for the writer
        self.in_flight = document
        _unfinished[self] = os.getpid()
        try:
            self._save(document)
        except Exception as error:
            raise self.error(document.step, error) from error

    def _save(self, document: SaveDocument) -> None:
        # Not in `start`: the writer must be free before `error` closes the manager, which waits for it.
        items: dict[str, Any] = {STATE: ocp.args.StandardSave(document.stored), DOCUMENT: document}
        # Orbax's threads are daemons where the thread that makes them is one. Others would keep a process
        # alive that is to leave while a disk hangs; `_wait_at_exit` waits for these.
        worker = Worker("phijax_rng-save")
        args = ocp.args.Composite(**items)
        try:
            folder = self._run.path / str(document.step)
            if os.path.lexists(folder):
                raise FileExistsError(f"{folder} is there, and is no step that phijax_rng wrote; move it")
            worker.submit(lambda: self._open().save(document.step, args=args, force=True)).result()
        finally:
            worker.end()
            document.stored = {}  # Orbax has them for as long as it needs them
            document.returned.set()  # also behind an error, or the writer's thread would wait for ever

    def wait(self) -> SaveDocument | None:
        """Waits for the save in flight, and returns what was saved.

        Raises:
            SaveError: it could not be written.
        """
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
            except Exception as error:
                raise self.error(self.in_flight.step if self.in_flight else None, error) from error
        landed, self.in_flight = self.in_flight, None
        _unfinished.pop(self, None)
        return landed

    def reload(self) -> None:
        """Tells Orbax that steps were moved or deleted."""
        if self._manager is not None:
            try:
                self._manager.reload()
            except OSError:
                self.close()  # the next save makes another manager, which lists the steps anew

    def close(self) -> None:
        """Closes Orbax's manager, which waits for its threads."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def abandon(self) -> None:
        """Forgets the save in flight without a wait; it does not land any more."""
        if self.in_flight is not None:
            self.in_flight.abandoned = True
        self._manager, self.in_flight = None, None
        _unfinished.pop(self, None)

    def error(self, step: int | None, error: Exception) -> SaveError:
        """The error to raise for a save; drops Orbax's manager, which remembers the failed step as saved."""
        self.in_flight = None
        _unfinished.pop(self, None)
        with contextlib.suppress(Exception):
            self.close()
        kept = "unknown, since the directory cannot be read"
        with contextlib.suppress(OSError):
            self._run.clear_leftovers()
            kept = validation.shown(self._run.steps) or "nothing"
        reason = str(error).strip().rstrip(".") or type(error).__name__
        return SaveError(
            f"step {step} could not be saved in {self._run.path}: {reason}. "
            f"On disk: {kept}. Free disk space or fix the permissions, and save again.",
            step=step,
        )

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self._run.path,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=None,  # Orbax would delete the oldest saves, not the lowest steps
                    save_root_metadata=False,
                    enable_async_checkpointing=self._asynchronous,
                    # Where a directory cannot be made, writers that wait for it would keep the process from
                    # ending.
                    async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                    cleanup_tmp_directories=True,  # of a killed save; the lock says that nobody writes them
                ),
            )
        return self._manager
