"""Save and restore complete train states with Orbax.

    <directory>/<step>/state           arrays of `model_state` and of everything else, by number
                       document        JSON: leaves, digests of the arrays, contract, memory, its SHA-256
    <directory>/rows/                  the history, in files that later saves do not repeat
    <directory>/superseded/            steps that a rewind or a fall-back left behind

A restore creates and changes nothing, runs no code from the checkpoint, and verifies every bit against
the digests. A save counts when it is on disk: `save`, `wait` and `close` first wait for an asynchronous
one, raise what failed in the background, and then delete the steps that are not kept. That a step cannot be
deleted is logged, and costs no training.

>>> import tempfile, jax, optax
>>> from phijax_rng import keys, initialize_train_state
>>> state = initialize_train_state({"w": jax.numpy.ones(3)}, optax.sgd(0.1), {}, keys.split_root(0))
>>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
...     checkpoints.save(state)
...     checkpoints.wait()
...     restored = checkpoints.restore(like=state)
...     checkpoints.steps, bool(restored.sampling_key == state.sampling_key)
((0,), True)
"""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from phijax_rng._base import validation
from phijax_rng._base.background import LeaveNow
from phijax_rng.checkpoints import foreign, stored_leaves
from phijax_rng.checkpoints.directory import Restoration, RunDirectory
from phijax_rng.checkpoints.document import TABLES, Files, Parents, RowFiles, Table, require_contract, split
from phijax_rng.checkpoints.fenced_path import require_local
from phijax_rng.checkpoints.keep_best import KeepBest
from phijax_rng.checkpoints.lock import KINDS, DirectoryLock, require_shared
from phijax_rng.checkpoints.writer import Retention, SaveDocument, Schedule, StepWriter
from phijax_rng.devices import processes
from phijax_rng.errors import DirectoryInUseError
from phijax_rng.state import TrainState


class Checkpoints:
    """The checkpoints of one run, in one directory.

    Attributes:
        directory: its absolute path.
        every_n_steps: save at multiples of this step; `None` for no such saves.
        every_minutes: save when this long has passed since the last save; `None` for no such saves.
        max_to_keep: how many of the newest steps are kept; `None` for all.
        keep_best: `(metric, k)` also keeps the k steps with the least number of this name, and
            `(metric, k, "max")` those with the largest: a loss, or what a callback reports at that step.
            Saves at multiples of `every_n_steps` with a finite number of this name compete; of two equal ones
            the earlier wins.
        asynchronous: whether `save` returns before the files are written.
        lock: what keeps a second job out: `"file"`, a lock of the operating system; `"lease"`, a lease beside
            it, for disks whose locks other hosts do not see; `"auto"`, a lease on network file systems and
            where there are no locks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = 10,
        max_to_keep: int | None = 3,
        keep_best: tuple[str, int] | tuple[str, int, str] | None = None,
        asynchronous: bool = True,
        lock: str = "auto",
    ):
        """Nothing is created or read before the first save or restore."""
        where = validation.local_path(directory, "directory", fix="Pass the directory of the run.")
        # At once, so that a later change of the working directory does not move the run.
        self.directory = Path(os.path.abspath(Path(where).expanduser()))
        require_local(self.directory)
        self._schedule = Schedule(every_n_steps, every_minutes)
        self.every_n_steps, self.every_minutes = self._schedule.every_n_steps, self._schedule.every_minutes
        self.max_to_keep = None if max_to_keep is None else validation.positive(max_to_keep, "max_to_keep")
        self._best = KeepBest.checked(keep_best, self.every_n_steps)
        self.keep_best = keep_best
        self.asynchronous = validation.flag(asynchronous, "asynchronous")
        self._run = RunDirectory(self.directory)
        self._retention = Retention(self._run, self.max_to_keep, self._best)
        self._lock = DirectoryLock(self.directory, validation.one_of(lock, "lock", KINDS))
        self._writer = StepWriter(self._run, self._lock.check, asynchronous=self.asynchronous)
        self._locked_by: int | None = None
        self._depth = 0
        self._in_fit = threading.Lock()
        self._parents = Parents(self._run.document)
        self._row_files = RowFiles(self.directory)

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, steps={list(self.steps)})"

    def __enter__(self) -> "Checkpoints":
        self._depth += 1
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._depth -= 1
        outermost = self._depth == 0
        if error is not None and (processes.is_multiprocess() or issubclass(error, LeaveNow)):
            # Closing waits for every process, and an error here need not be one in the others; who leaves at
            # once waits for nothing.
            self._writer.abandon()
            if outermost:
                self._release(at_once=issubclass(error, LeaveNow))
        elif outermost:
            self.close()
        else:
            self.wait()

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """A `with` block for one fit, which has the directory locked; a lock that the caller holds stays.

        Raises:
            DirectoryInUseError: another job writes to this directory, or another fit uses this object.
        """
        if not self._in_fit.acquire(blocking=False):
            raise DirectoryInUseError(
                f"another fit of this process uses this Checkpoints of {self.directory}. "
                "Wait for it to end, or give each fit a directory of its own."
            )
        held = int(self._is_locked)  # by the caller, for whom it stays
        self._depth += held
        try:
            self.lock()
            with self:
                yield
        finally:
            self._depth -= held
            self._in_fit.release()

    # What is on disk

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are on disk, ascending; empty when there is no directory."""
        return self._run.steps

    @property
    def latest_step(self) -> int | None:
        """The highest step on disk, or `None`."""
        return self.steps[-1] if self.steps else None

    @property
    def best_step(self) -> int | None:
        """The best step on disk, or `None`.

        By `keep_best` of this object; where it has none, by that of the newest save with one. The step at
        which a run ended competes as long as it is the newest.
        """
        return self._retention.best_step()

    @property
    def run_id(self) -> str | None:
        """The run whose steps these are, by the newest one that says so."""
        return self._run.run_id()

    def existing(self, step: int | str | None = None, *, weights_only: bool = False) -> int:
        """This step if it is on disk, the latest for `None`, and `best_step` for `"best"`.

        With `weights_only`, steps that PhiJAX saved count too.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            ValueError: no step is the best: none was saved with `keep_best`, or none has its number.
        """
        if isinstance(step, str):
            return self._existing_best(step)
        theirs = self._phijax_steps() if weights_only else {}
        if theirs and (step is None or step in theirs):
            return max(theirs) if step is None else step
        return self._run.existing(step)

    def _existing_best(self, step: str) -> int:
        validation.one_of(step, "step", ("best",))
        self._run.existing()
        return self._retention.existing_best()

    def _document(self, step: int | str | None) -> dict[str, Any]:
        return self._run.at(self.existing(step) if isinstance(step, str) else step, self._run.document)

    def _phijax_steps(self) -> dict[int, Path]:
        return {} if self.directory.is_file() or self.steps else foreign.phijax_steps(self.directory)

    def contract(self, step: int | str | None = None) -> dict[str, Any]:
        """The contract saved with a step (the latest for `None`), as plain data.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            DamagedCheckpointError: the contract is unreadable or does not match its digest.
        """
        return dict(self._document(step)["contract"])

    def memory(self, step: int | str | None = None, *, whole_history: bool = True) -> dict[str, Any]:
        """The history and the memory of callbacks at a step (the latest for `None`), as plain data.

        Args:
            step: which one; see `existing`.
            whole_history: whether to read all rows, or the last one alone.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            DamagedCheckpointError: it is unreadable or does not match its digest.
        """
        document = self._document(step)
        return self.memory_of(document) if whole_history else dict(document["memory"])

    def memory_of(
        self, document: Mapping[str, Any], lost: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """The memory of a document of this directory with its whole history; see `RowFiles.joined`."""
        return self._run.read(
            document.get("step", 0), "the history", lambda: self._row_files.joined(document, lost)
        )

    def digests(self, step: int | str | None = None) -> dict[str, str]:
        """The SHA-256 of each part of the state of a step: two states with the same have the same bits."""
        return dict(self._document(step)["digests"])

    def readable_contract(self, step: int | str | None = None) -> dict[str, Any]:
        """The contract of a step; for `None` of the newest step with a readable one, or an empty dict."""
        return self._run.readable_contract() if step is None else self.contract(step)

    # Saving

    def save(
        self,
        state: TrainState,
        contract: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves the state under its step; in the background, unless `asynchronous` is `False`.

        The arrays may be donated or changed as soon as this returns. A failure in the background is
        raised by the next `save`, by `wait` or by `close`.

        Args:
            state: what to save.
            contract: plain data that `contract` returns, compared on a resume.
            memory: plain data that `memory` returns; `keep_best` compares its `"metrics"`, and is added.
                `"history"` and `"timing"` may be any `Table`.

        Raises:
            FileExistsError: this step is on disk already.
            DirectoryInUseError: another job writes to this directory.
            SaveError: this save, or the one before it, could not be written.
        """
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state must be a TrainState, got {validation.described(state)}. Use initialize_train_state."
            )
        step = int(state.step)
        contract, memory = dict(contract or {}), dict(memory or {})
        if self._best is not None:
            # So that whoever opens the directory later knows the best step without these options.
            memory["keep_best"] = dataclasses.asdict(self._best)
        require_contract(contract, memory)
        self.wait()
        if self.is_saved(step):
            raise FileExistsError(
                f"step {step} is already saved in {self.directory}. "
                "Continue from it, or use another directory."
            )
        self.lock()
        parts = stored_leaves.leaves_of(state)
        arrays = {part: stored_leaves.stored_arrays(leaves) for part, leaves in parts.items()}
        parent, (kept, *tables) = self._parents.of(contract), self._split(memory, contract)
        self._writer.start(
            SaveDocument(parts, arrays, step, parent, contract, kept, *tables, self._row_files)
        )
        self._schedule.start()
        if not self.asynchronous:
            self.wait()

    def _split(
        self, memory: Mapping[str, Any], contract: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Files], dict[str, bytes]]:
        """What of the memory goes into the document, the files of its tables, and the text of new ones."""
        kept, tables = dict(memory), dict[str, Files]()
        new: dict[str, bytes] = {}
        before = self._parents.tables(contract)
        for name in TABLES:
            # A table as plain data stays as it is: who saves by hand need not continue the step before.
            if name in memory and not isinstance(memory[name], Mapping):
                table: Table = memory[name]
                kept[name], tables[name], text = split(table, before.get(name, []))
                new |= text
        return kept, tables, new

    def is_saved(self, step: int) -> bool:
        """Whether a step is on disk, as the first process sees it.

        Raises:
            SaveError: the directory cannot be read.
        """
        # A shared disk may show the step to one process before another; all save, or none.
        saved, failed = False, None
        try:
            saved = step in self.steps
        except OSError as error:
            failed = error
        saved, fails = map(bool, processes.broadcast(saved, failed is not None))
        if fails:
            reason = failed or OSError("the first process cannot read the directory")
            raise self._writer.error(step, reason) from failed
        return saved

    def wait(self) -> None:
        """Waits for the save in flight, and deletes the steps that are not kept.

        Raises:
            SaveError: the save could not be written; the steps before it are as they were.
        """
        if self._is_copy_in_child() or self._writer.in_flight is None:
            return
        landed = self._writer.wait()
        if landed is not None:
            self._parents.saw(
                landed.step,
                {"sha256": landed.sha256, "contract": landed.contract, "tables": landed.tables},
            )
            self._drop_old()

    def _drop_old(self) -> None:
        """Deletes the steps that are neither among the newest nor among the best."""
        processes.broadcast(0)  # every process sees the new step before one of them deletes an old one
        going = self._retention.not_kept()
        processes.broadcast(0)  # and nobody deletes while another still lists
        if processes.is_primary() and self._is_ours():
            self._retention.delete(going)
            if going:
                self._row_files.delete_unnamed(self._run.all_documents)
        if going:
            self._writer.reload()

    def _is_ours(self) -> bool:
        with contextlib.suppress(DirectoryInUseError, OSError):
            self._lock.check()
            return True
        return False  # the next save raises

    def close(self) -> None:
        """Waits, and releases the directory. The object can be used again."""
        try:
            self.wait()
        finally:
            manager, self._writer.manager = self._writer.manager, None
            if manager is not None:
                manager.close()
            self._release()

    def lock(self) -> None:
        """Makes this object the one writer of its directory until `close`; `save` does so too.

        Raises:
            DirectoryInUseError: another job writes to this directory.
        """
        if self._is_locked:
            return
        # The first process locks for all: on one host the others would find the directory in use by it.
        processes.run_on_primary(self._lock.acquire)
        try:
            require_shared(self.directory)
        except ValueError:
            self._lock.release()
            raise
        self._locked_by = os.getpid()

    @property
    def _is_locked(self) -> bool:
        # By number, since the copy of this object in a forked process holds nothing.
        return self._locked_by == os.getpid()

    def _release(self, *, at_once: bool = False) -> None:
        self._lock.release(at_once=at_once)
        self._locked_by = None

    def _is_copy_in_child(self) -> bool:
        """Whether a fork copied this object; the threads that write stay with its parent."""
        if self._locked_by in (None, os.getpid()):
            return False
        self._writer.abandon()
        self._locked_by = None
        return True

    @property
    def best_rule(self) -> KeepBest | None:
        """`keep_best` as one value."""
        return self._best

    def require_recorded(self, names: tuple[str, ...], may_come: Callable[[str], bool]) -> None:
        """Raises a `ValueError` if no save can have the number that `keep_best` names.

        Args:
            names: the numbers that every step records.
            may_come: whether a number of this name may be reported beside them.
        """
        if self._best is not None:
            self._best.require_recorded(names, may_come)

    def next_save(self, step: int) -> int | None:
        """The next step after `step` at which `every_n_steps` makes a save due."""
        return self._schedule.following(step)

    def is_due(self, step: int) -> bool:
        """Whether `every_n_steps` or `every_minutes` makes a save due at `step`."""
        return self._schedule.is_due(step)

    def start_clock(self) -> None:
        """Counts `every_minutes` from now."""
        self._schedule.start()

    def supersede_after(self, step: int) -> list[int]:
        """Moves the steps above `step` to `superseded/`, out of the way of a run that starts there."""
        self.wait()
        if self._is_locked:
            self._lock.check()
        later = self._run.set_aside_after(step)
        if later:  # they may be saved again, with other numbers
            self._retention.forget()
            self._parents.forget_after(step)
            self._writer.reload()
        return later

    # Restoring

    def restore(
        self, like: TrainState, step: int | str | None = None, *, weights_only: bool = False
    ) -> TrainState:
        """The state saved at a step, bit for bit.

        Args:
            like: a state of the same structure, shapes and dtypes, whose arrays (or abstract values)
                also say where to place what is read.
            step: which one; the latest for `None`, `best_step` for `"best"`.
            weights_only: take `model_state` alone, and everything else from `like`.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            CheckpointMismatchError: the checkpoint does not fit `like`; the message shows both sides of
                the first leaves that differ.
            DamagedCheckpointError: files are missing, unreadable, or not what was saved.
        """
        return self.restored(like, step, weights_only=weights_only).state

    def restored(
        self, like: TrainState, step: int | str | None = None, *, weights_only: bool = False
    ) -> Restoration:
        """What `restore` returns, its step, and the document that was saved with it."""
        step = self.existing(step) if isinstance(step, str) else step
        theirs = self._phijax_steps() if weights_only else {}
        if theirs and (step is None or step in theirs):
            found = max(theirs) if step is None else step
            weights = functools.partial(foreign.phijax_weights, theirs[found], found, like)
            state = RunDirectory(theirs[found].parent).read(found, "the weights", weights)
            return Restoration(state, found, {"contract": {}, "memory": {}})
        return self._seen(
            self._run.at(step, lambda n: self._run.restored(like, n, weights_only=weights_only))
        )

    def restore_intact(self, like: TrainState, *, weights_only: bool = False) -> tuple[TrainState, int]:
        """The newest state that is intact, and its step.

        A warning names each damaged step; the next to be tried is its parent, or the next lower step where
        the parent is unknown.

        Raises:
            FileNotFoundError: there is no step at all.
            CheckpointMismatchError: an intact step does not fit `like`, is of another run, or was written
                by a newer version of phijax_rng.
            DamagedCheckpointError: no step is intact.
            OSError: the file system failed, several times.
        """
        found = self.restored_intact(like, weights_only=weights_only)
        return found.state, found.step

    def restored_intact(self, like: TrainState, *, weights_only: bool = False) -> Restoration:
        """What `restore_intact` returns, and the document that was saved with it."""
        if weights_only and self._phijax_steps():
            return self.restored(like, weights_only=True)
        found, _ = self._run.newest_intact(
            lambda step: self._run.restored(like, step, weights_only=weights_only),
            warn=processes.is_primary(),
        )
        return self._seen(found)

    def paths(self, step: int | str | None = None) -> tuple[str, ...]:
        """The path of every array of a step, such as `model_state['w']`; see `existing` for `step`."""
        return tuple(path for rows in self._document(step)["leaves"].values() for path, _, _ in rows)

    def arrays(self, step: int | str | None = None) -> dict[str, jax.Array]:
        """Every array of a step by its path, bit for bit, on the default device; see `existing` for `step`.

        For a reader without the model and the optimizer; `restore` gives a state.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            DamagedCheckpointError: files are missing, unreadable, or not what was saved.
        """
        return self._run.at(self.existing(step) if isinstance(step, str) else step, self._run.arrays)

    def _seen(self, found: Restoration) -> Restoration:
        self._parents.saw(found.step, found.document)
        return found
