"""Save and restore complete train states with Orbax.

    <directory>/<step>/state           arrays of `model_state` and of everything else, by number
                       document        JSON: leaves, digests of the arrays, contract, memory, its SHA-256
    <directory>/superseded/            steps that a rewind or a fall-back left behind

A restore creates and changes nothing, runs no code from the checkpoint, and verifies every bit against
the digests. A save counts when it is on disk: `save`, `wait` and `close` first wait for an asynchronous
one, raise what failed in the background, and then delete the steps that are not kept.

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
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from phijax_rng._base import validation
from phijax_rng.checkpoints import stored_leaves
from phijax_rng.checkpoints.directory import RunDirectory
from phijax_rng.checkpoints.document import DOCUMENT, SaveDocument, readable_arrays
from phijax_rng.checkpoints.keep_best import KeepBest, dropped
from phijax_rng.checkpoints.lock import DirectoryLock
from phijax_rng.checkpoints.stored_leaves import MODEL, Parts
from phijax_rng.devices import processes
from phijax_rng.errors import DamagedCheckpointError, LeftUnsavedError, SaveError
from phijax_rng.state import TrainState

_STATE = "state"

# Running out of memory says nothing about the files, and another step would not fit either.
_NOT_DAMAGE = (MemoryError, jax.errors.JaxRuntimeError)


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
    ):
        """Nothing is created or read before the first save or restore."""
        where = validation.path(directory, "directory", fix="Pass the directory of the run.")
        # At once, so that a later change of the working directory does not move the run.
        self.directory = Path(os.path.abspath(Path(where).expanduser()))
        self.every_n_steps = (
            None if every_n_steps is None else validation.positive(every_n_steps, "every_n_steps")
        )
        self.every_minutes = _minutes_or_none(every_minutes)
        self.max_to_keep = None if max_to_keep is None else validation.positive(max_to_keep, "max_to_keep")
        self._best = KeepBest.checked(keep_best, self.every_n_steps)
        self.keep_best = keep_best
        self.asynchronous = validation.flag(asynchronous, "asynchronous")
        self._run = RunDirectory(self.directory)
        self._values: dict[int, float] = {}
        self._manager: ocp.CheckpointManager | None = None
        self._lock = DirectoryLock(self.directory)
        self._is_locked = False
        self._in_flight: int | None = None
        self._last_save = time.monotonic()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, steps={list(self.steps)})"

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and (processes.is_multiprocess() or issubclass(error, LeftUnsavedError)):
            # Closing waits for every process, and an error here need not be one in the others; who leaves at
            # once waits for nothing.
            self._manager, self._in_flight = None, None
            self._release()
        else:
            self.close()

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
        best = self._best or self._run.keep_best()
        if best is None:
            return None
        values = self._run.values(best.metric, self._values if best is self._best else {})
        return next(iter(best.best(values, self._run.end(best.metric))), None)

    def existing(self, step: int | str | None = None) -> int:
        """This step if it is on disk, the latest for `None`, and `best_step` for `"best"`.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            ValueError: no step is the best: none was saved with `keep_best`, or none has its number.
        """
        if not isinstance(step, str):
            return self._run.existing(step)
        validation.one_of(step, "step", ("best",))
        newest, best = self._run.existing(), self.best_step
        if best is not None:
            return best
        rule = self._best or self._run.keep_best()
        raise ValueError(
            f"no step in {self.directory} is the best: none was saved with keep_best. Pass a number, for "
            f"example {newest}, or Checkpoints(..., keep_best=(metric, k)) with a number that was recorded."
            if rule is None
            else f"no step in {self.directory} is the best: keep_best compares {rule.metric!r}, and steps "
            f"{', '.join(map(str, self.steps))} have no finite number of this name. Pass one of these steps."
        )

    def contract(self, step: int | str | None = None) -> dict[str, Any]:
        """The contract saved with a step (the latest for `None`), as plain data.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            DamagedCheckpointError: the contract is unreadable or does not match its digest.
        """
        return dict(self._run.document(self.existing(step))["contract"])

    def memory(self, step: int | str | None = None) -> dict[str, Any]:
        """The history and the memory of callbacks at a step (the latest for `None`), as plain data.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            DamagedCheckpointError: it is unreadable or does not match its digest.
        """
        return dict(self._run.document(self.existing(step)).get("memory", {}))

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
        self.wait()
        # Others may see a shared disk later; all must save, or all raise.
        (saved,) = processes.broadcast(step in self.steps)
        if saved:
            raise FileExistsError(
                f"step {step} is already saved in {self.directory}. "
                "Continue from it, or use another directory."
            )
        parts = stored_leaves.leaves_of(state)
        arrays = {part: stored_leaves.stored_arrays(leaves) for part, leaves in parts.items()}
        remembered = dict(memory or {})
        if self._best is not None:
            # So that whoever opens the directory later knows the best step without these options.
            remembered["keep_best"] = dataclasses.asdict(self._best)
        document = SaveDocument(parts, arrays, dict(contract or {}), remembered)
        if not self.asynchronous:
            document.returned.set()  # or the writer would wait for a return that waits for the writer
        items = {_STATE: ocp.args.StandardSave(arrays), DOCUMENT: document}
        self.lock()
        self._in_flight = step
        try:
            self._start(step, items, document)
        except Exception as error:
            raise self._save_error(error) from error
        self._last_save = time.monotonic()
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits for the save in flight, and deletes the steps that are not kept.

        Raises:
            SaveError: the save could not be written; the steps before it are as they were.
        """
        if self._has_landed():
            self._drop_old()

    def _has_landed(self) -> bool:
        """Waits for the save in flight; whether steps may be deleted now."""
        if self._manager is None:
            return False
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error
        # With several processes `_drop_old` costs two round trips; without a save nothing is there to delete.
        if processes.is_multiprocess() and self._in_flight is None:
            return False
        self._in_flight = None
        return True

    def _drop_old(self) -> None:
        """Deletes the steps that are neither among the newest nor among the best."""
        if self._manager is None:
            return
        processes.broadcast(0)  # every process sees the new step before one of them deletes an old one
        going = dropped(self.steps, self.max_to_keep, self._best_steps())
        processes.broadcast(0)  # and nobody deletes while another still lists
        for step in going:
            self._manager.delete(step)

    def close(self) -> None:
        """Waits, and releases the directory. The object can be used again."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None
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
        self._is_locked = True

    def _release(self) -> None:
        self._lock.release()
        self._is_locked = False

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
        best = self._best
        if best is not None and best.metric not in names and not may_come(best.metric):
            raise ValueError(
                f"keep_best compares {best.metric!r}, and the run records {validation.shown(names)}. "
                "Name one of them, or add the callback that reports it."
            )

    def next_save(self, step: int) -> int | None:
        """The next step after `step` at which `every_n_steps` makes a save due."""
        if self.every_n_steps is None:
            return None
        return (step // self.every_n_steps + 1) * self.every_n_steps

    def is_due(self, step: int) -> bool:
        """Whether `every_n_steps` or `every_minutes` makes a save due at `step`."""
        by_step = self.every_n_steps is not None and step % self.every_n_steps == 0
        minutes = (time.monotonic() - self._last_save) / 60
        return by_step or (self.every_minutes is not None and minutes >= self.every_minutes)

    def start_clock(self) -> None:
        """Counts `every_minutes` from now."""
        self._last_save = time.monotonic()

    def supersede_after(self, step: int) -> list[int]:
        """Moves the steps above `step` to `superseded/`, out of the way of a run that starts there."""
        self.wait()
        later = self._run.set_aside_after(step)
        self._values = {}  # a step that was moved may be saved again, with another number
        if later and self._manager is not None:
            self._manager.reload()
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
        step = self.existing(step)
        document = self._run.document(step)
        parts = stored_leaves.leaves_of(like)
        wanted = {MODEL: parts[MODEL]} if weights_only else parts
        stored_leaves.require_fit(step, document["leaves"], wanted)
        return stored_leaves.rebuild(like, self._read(step, wanted, document))

    def restore_intact(self, like: TrainState, *, weights_only: bool = False) -> tuple[TrainState, int]:
        """The newest state that is intact, and its step.

        A warning names each damaged step; the next to be tried is its parent, or the next lower step where
        the parent is unknown.

        Raises:
            FileNotFoundError: there is no step at all.
            CheckpointMismatchError: an intact step does not fit `like`.
            DamagedCheckpointError: no step is intact.
        """
        return self._run.newest_intact(
            lambda step: self.restore(like, step, weights_only=weights_only), warn=processes.is_primary()
        )

    def paths(self, step: int | str | None = None) -> tuple[str, ...]:
        """The path of every array of a step, such as `model_state['w']`; see `existing` for `step`."""
        leaves = self._run.document(self.existing(step))["leaves"]
        return tuple(path for rows in leaves.values() for path, _, _ in rows)

    def arrays(self, step: int | str | None = None) -> dict[str, jax.Array]:
        """Every array of a step by its path, bit for bit, on the default device; see `existing` for `step`.

        For a reader without the model and the optimizer; `restore` gives a state.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps.
            DamagedCheckpointError: files are missing, unreadable, or not what was saved.
        """
        step = self.existing(step)
        document = self._run.document(step)
        parts = stored_leaves.saved_leaves(document["leaves"])
        read = self._read(step, parts, document)
        return {
            leaf.path: array for part in parts for leaf, array in zip(parts[part], read[part], strict=True)
        }

    # Private

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=None,  # Orbax would delete the oldest saves, not the lowest steps
                    save_root_metadata=False,
                    enable_async_checkpointing=self.asynchronous,
                    # Where a directory cannot be made, writers that wait for it would keep the process from
                    # ending.
                    async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                    cleanup_tmp_directories=True,  # of a killed save; the lock says that nobody writes them
                ),
            )
        return self._manager

    def _start(self, step: int, items: Mapping[str, ocp.args.CheckpointArgs], document: SaveDocument) -> None:
        # Not in `save`: the writer must be free before `_save_error` closes the manager, which waits for it.
        try:
            self._writer().save(step, args=ocp.args.Composite(**items), force=True)
        finally:
            document.returned.set()  # also behind an error, or the writer's thread would wait for ever

    def _save_error(self, error: Exception) -> SaveError:
        """The error to raise; drops Orbax's manager, which remembers the failed step as saved."""
        step, self._in_flight = self._in_flight, None
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.close()
        self._run.clear_leftovers()
        kept = validation.shown(self.steps) if self.directory.is_dir() else "nothing"
        reason = str(error).strip().rstrip(".") or type(error).__name__
        return SaveError(
            f"step {step} could not be saved in {self.directory}: {reason}. "
            f"On disk: {kept}. Free disk space or fix the permissions, and save again.",
            step=step,
        )

    def _best_steps(self) -> list[int]:
        """The best steps on disk, by what their documents say; each is read once."""
        if self._best is None:
            return []
        self._values = self._run.values(self._best.metric, self._values)
        return self._best.best(self._values)

    def _read(self, step: int, parts: Parts, document: Mapping[str, Any]) -> dict[str, list[jax.Array]]:
        targets = {
            part: {leaf.name: leaf.target() for leaf in leaves if leaf.is_stored}
            for part, leaves in parts.items()
        }
        arrays = self._read_arrays(step, targets)
        for part, leaves in parts.items():
            digest = stored_leaves.digest_stored(leaves, readable_arrays(arrays[part]))
            if digest != document["digests"][part]:
                raise DamagedCheckpointError(
                    f"{part} of step {step} in {self.directory} does not match its SHA-256: "
                    "it was damaged or edited. Restore another step."
                )
        return {
            part: [leaf.restored(arrays[part].get(leaf.name)) for leaf in leaves]
            for part, leaves in parts.items()
        }

    def _read_arrays(
        self, step: int, targets: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]]
    ) -> dict[str, dict[str, jax.Array]]:
        path = self.directory / str(step) / _STATE
        wanted = {part: dict(named) for part, named in targets.items() if named}
        restoring = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,  # of the weights alone
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                arrays = reader.restore(path, args=restoring) if wanted else {}
        except _NOT_DAMAGE:
            raise
        except Exception as error:  # of any type: Orbax raises bare ones for files it cannot read
            reason = str(error).strip().partition("\n")[0]
            raise DamagedCheckpointError(
                f"the arrays of step {step} in {self.directory} cannot be read: {reason}. "
                "Restore another step."
            ) from error
        # Orbax casts silently to the dtype of the target. The dtypes in the document were compared with the
        # targets before, and the digest verifies the bits, so a cast cannot pass.
        return {part: arrays.get(part, {}) for part in targets}


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
