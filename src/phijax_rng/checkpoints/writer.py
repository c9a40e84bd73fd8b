"""When steps are saved, how they are written, and which are deleted.

Orbax writes one step at a time, in the background if that is wanted, and each item of it through a handler;
the one here digests the arrays and writes the document. Old steps are deleted after a save has landed; a
failure to delete costs no training.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future as ocp_future

from phijax_rng._base import validation
from phijax_rng._base.background import Worker
from phijax_rng.checkpoints import stored_leaves
from phijax_rng.checkpoints.directory import STATE, RunDirectory, StepGoneError
from phijax_rng.checkpoints.document import DOCUMENT, DOCUMENT_FILE, HANDLER, SCHEMA, Files, RowFiles, dumps
from phijax_rng.checkpoints.fenced_path import fenced_path
from phijax_rng.checkpoints.keep_best import KeepBest
from phijax_rng.checkpoints.stored_leaves import Arrays, Parts
from phijax_rng.devices import processes
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError, DirectoryInUseError, SaveError

_log = logging.getLogger("phijax_rng")

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


class DocumentHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Digests the arrays and writes the document."""

    @classmethod
    def typestr(cls) -> str:
        """The name that Orbax stores with every step."""
        return HANDLER

    async def async_save(self, directory: Path, args: "SaveDocument") -> list[ocp_future.Future]:
        """Starts the work; Orbax waits for it before it makes the step visible."""
        return [
            ocp_future.CommitFutureAwaitingContractedSignals(
                self._write(directory, args), name="phijax_rng_document"
            )
        ]

    async def _write(self, directory: Path, args: "SaveDocument") -> None:
        # Hashing takes every core, so it starts only when `save` has returned and training continues.
        args.returned.wait()
        self.save(directory, args)
        if args.abandoned:
            raise InterruptedError("the run left before this save was complete")

    def save(self, directory: Path, args: "SaveDocument") -> None:
        """Does the work at once."""
        # Every process calls this; two writers of one file on a shared disk could tear it.
        if args.is_writer:
            # First: what a document names is there before it.
            args.row_files.write(args.rows)
            (directory / DOCUMENT_FILE).write_text(json.dumps(args.document()))
        else:
            args.send_digests()
        args.release()

    def restore(self, directory: Path, args: object = None) -> object:
        """Reads the document; Orbax calls it for whoever restores the item through its own manager."""
        return json.loads((directory / DOCUMENT_FILE).read_text())


@ocp.args.register_with_handler(DocumentHandler, for_save=True)
@dataclasses.dataclass
class SaveDocument(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What the document is made of. Holding the arrays keeps their bits from being donated away.

    Attributes:
        parts: the leaves of the state.
        arrays: the stored arrays of each part, by number.
        stored: the same, as the state has them.
        step: the number of the step.
        parent: number and SHA-256 of the document that this step continues, or `None`.
        contract: plain data.
        memory: plain data, with the last row of each table.
        tables: the files with the other rows of each table.
        rows: the text of those files that are new, by name.
        row_files: where they are written.
        sha256: the seal, once the document is written.
        returned: set when the call that started the save has returned.
        is_writer: whether this process writes the document.
        abandoned: whether the save is not to become visible any more.
        number: of this save, the same in every process.
    """

    parts: Parts
    arrays: Mapping[str, Arrays]
    step: int
    parent: dict[str, Any] | None
    contract: dict[str, Any]
    memory: dict[str, Any]
    tables: dict[str, Files]
    rows: dict[str, bytes]
    row_files: RowFiles
    sha256: str | None = None
    returned: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_writer: bool = True
    abandoned: bool = False
    stored: Mapping[str, Arrays] = dataclasses.field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.stored = self.arrays
        # A view of the host's memory on CPU, a copy from other devices; while it lives, XLA copies
        # the state instead of writing into it.
        self.arrays = {part: stored_leaves.snapshot(stored) for part, stored in self.stored.items()}
        self.is_writer = processes.is_primary()
        # The same in every process, and another for each save: under it they exchange digests.
        (self.number,) = processes.broadcast(secrets.randbelow(2**31))

    def document(self) -> dict[str, Any]:
        """The document, sealed with its SHA-256."""
        described = stored_leaves.described(self.parts, self.arrays, self.save_name)
        bound = {
            "schema": SCHEMA,
            "step": self.step,
            "parent": self.parent,
            **described,
            "tables": self.tables,
        }
        document = dumps({**bound, "contract": self.contract, "memory": self.memory})
        self.sha256 = document["sha256"]
        return document

    @property
    def save_name(self) -> str:
        """Tells this save from all others of the same processes."""
        return f"phijax_rng/{self.step}/{self.number}"

    def send_digests(self) -> None:
        """What a process does that does not write: it hashes what it has of split arrays."""
        stored_leaves.digested_tiles(self.arrays, self.save_name)

    def release(self) -> None:
        """Lets go of arrays and rows: the seal is needed until the next save, and they are large."""
        self.parts, self.arrays, self.rows = {}, {}, {}


@ocp.args.register_with_handler(DocumentHandler, for_restore=True)
@dataclasses.dataclass
class RestoreDocument(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Orbax registers a handler only with arguments for both directions."""


class StepWriter:
    """The save in flight, and Orbax's manager, which is made at the first save.

    Attributes:
        in_flight: what is being saved, or `None`.
        manager: that of Orbax; `None` unless there was a save since the last `close`.

    Before anything becomes visible, `require_lock` raises if the directory is another job's by now.
    """

    def __init__(self, run: RunDirectory, require_lock: Callable[[], None], *, asynchronous: bool):
        self._run = run
        self._require_lock = require_lock
        self._asynchronous = asynchronous
        self.manager: ocp.CheckpointManager | None = None
        self.in_flight: SaveDocument | None = None

    def _save_number(self) -> int:
        return self.in_flight.number if self.in_flight else 0

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
            # A new manager of Orbax removes unfinished saves, which may be the other job's.
            processes.run_on_primary(self._require_lock)
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
        if self.manager is not None:
            try:
                self.manager.wait_until_finished()
                self.manager.check_for_errors()
            except Exception as error:
                raise self.error(self.in_flight.step if self.in_flight else None, error) from error
        landed, self.in_flight = self.in_flight, None
        _unfinished.pop(self, None)
        return landed

    def reload(self) -> None:
        """Tells Orbax that steps were moved or deleted."""
        if self.manager is not None:
            try:
                self.manager.reload()
            except OSError:
                self.close()  # the next save makes another manager, which lists the steps anew

    def close(self) -> None:
        """Closes Orbax's manager, which waits for its threads."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()

    def abandon(self) -> None:
        """Forgets the save in flight without a wait; it does not land any more."""
        if self.in_flight is not None:
            self.in_flight.abandoned = True
        self.manager, self.in_flight = None, None
        _unfinished.pop(self, None)

    def error(self, step: int | None, error: Exception) -> SaveError:
        """The error to raise for a save; drops Orbax's manager, which remembers the failed step as saved."""
        self.in_flight = None
        _unfinished.pop(self, None)
        with contextlib.suppress(Exception):
            self.close()
        kept = "unknown, since the directory cannot be read"
        try:
            self._require_lock()
        except DirectoryInUseError as lost:
            # Whatever failed, such as a write to a folder that the other job removed, this is why.
            return SaveError(f"step {step} could not be saved: {lost}", step=step)
        except OSError:
            pass
        else:
            with contextlib.suppress(OSError):
                self._run.clear_leftovers()
        with contextlib.suppress(OSError):
            kept = validation.shown(self._run.steps) or "nothing"
        reason = str(error).strip().rstrip(".") or type(error).__name__
        return SaveError(
            f"step {step} could not be saved in {self._run.path}: {reason}. "
            f"On disk: {kept}. Free disk space or fix the permissions, and save again.",
            step=step,
        )

    def _open(self) -> ocp.CheckpointManager:
        if self.manager is None:
            self.manager = ocp.CheckpointManager(
                self._run.path,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=None,  # Orbax would delete the oldest saves, not the lowest steps
                    save_root_metadata=False,
                    enable_async_checkpointing=self._asynchronous,
                    # Where a directory cannot be made, writers that wait for it would keep the process from
                    # ending.
                    async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                    temporary_path_class=fenced_path(self._require_lock, self._save_number),
                    cleanup_tmp_directories=True,  # of a killed save; the lock says that nobody writes them
                ),
            )
            # Orbax would delete a folder of the step's name, which another job may have published since.
            checkpointer = self.manager._checkpointer
            checkpointer.save = functools.partial(_save_new, checkpointer.save)
        return self.manager


def _save_new(save: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return save(*arguments, **{**options, "force": False})


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


class Schedule:
    """Saves at multiples of a step, and so many minutes after the last save.

    Attributes:
        every_n_steps: at multiples of this step; `None` for no such saves.
        every_minutes: when this long has passed; `None` for no such saves.
    """

    def __init__(self, every_n_steps: int | None, every_minutes: float | None):
        self.every_n_steps = (
            None if every_n_steps is None else validation.positive(every_n_steps, "every_n_steps")
        )
        self.every_minutes = _minutes_or_none(every_minutes)
        self.start()

    def start(self) -> None:
        """Counts the minutes from now."""
        self._last_save = time.monotonic()

    def following(self, step: int) -> int | None:
        """The next step after `step` at which `every_n_steps` makes a save due."""
        if self.every_n_steps is None:
            return None
        return (step // self.every_n_steps + 1) * self.every_n_steps

    def is_due(self, step: int) -> bool:
        """Whether a save is due at `step`."""
        by_step = self.every_n_steps is not None and step % self.every_n_steps == 0
        minutes = (time.monotonic() - self._last_save) / 60
        return by_step or (self.every_minutes is not None and minutes >= self.every_minutes)


def _minutes_or_none(value: float | None) -> float | None:
    """`every_minutes` as a positive float, or `None`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(
            f"every_minutes must be a number, got {validation.described(value)}. Pass minutes, or None."
        )
    if not value > 0:
        raise ValueError(f"every_minutes must be positive, got {value!r}. Pass minutes, or None.")
    return float(value)


def dropped(steps: tuple[int, ...], max_to_keep: int | None, best: list[int]) -> list[int]:
    """The steps to delete: neither among the newest nor among the best."""
    if max_to_keep is None:
        return []
    return [step for step in steps[:-max_to_keep] if step not in best]
