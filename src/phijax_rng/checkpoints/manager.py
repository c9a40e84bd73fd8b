"""Save and restore whole train states; the only module that knows Orbax.

    <directory>/<step>/state           arrays of `model_state` and of everything else, by number
                       document        JSON: manifest, digests of the arrays, contract, memory, its SHA-256
    <directory>/superseded/            steps that a rewind or a fall-back left behind

Restoring creates and changes nothing, runs no code from the checkpoint, and verifies every bit against
the digests. A save counts when it is on disk: an asynchronous one is waited for before the next, and by
`wait` and `close`, which raise what went wrong in the background.

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
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future as ocp_future

from phijax_rng._base import validation
from phijax_rng.checkpoints import stored_leaves
from phijax_rng.checkpoints.directory import DOCUMENT, DOCUMENT_FILE, Folder
from phijax_rng.checkpoints.document import SCHEMA, dumps
from phijax_rng.checkpoints.lock import DirectoryLock
from phijax_rng.checkpoints.retention import KeepBest, dropped, minutes_or_none, positive_or_none
from phijax_rng.checkpoints.stored_leaves import MODEL
from phijax_rng.devices import processes
from phijax_rng.errors import DamagedCheckpointError, SaveError
from phijax_rng.state import TrainState

_STATE = "state"

# Running out of memory says nothing about the files.
_NOT_DAMAGE = (MemoryError, jax.errors.JaxRuntimeError)


class Checkpoints:
    """The checkpoints of one run, in one directory.

    Attributes:
        directory: where they are, absolute.
        every_n_steps: save at multiples of this step; `None` for no such saves.
        every_minutes: save when this long has passed since the last; `None` for no such saves.
        max_to_keep: how many of the newest steps are kept; `None` for all.
        keep_best: `(metric, k)` also keeps the k steps with the least number of this name, and
            `(metric, k, "max")` those with the largest: a loss, or what a callback reports at that step.
            Saves at multiples of `every_n_steps` compete; the earlier of two equal ones wins.
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
        """Nothing is created or read before the first save or restore.

        Raises:
            TypeError: a count is not a whole number, `directory` is not a path, or `keep_best` no such tuple.
            ValueError: a count or a time is not positive, or `keep_best` lacks `every_n_steps`.
        """
        where = validation.path(directory, "directory", mend="Pass where the run is kept.")
        self.directory = Path(os.path.abspath(Path(where).expanduser()))
        self.every_n_steps = positive_or_none(every_n_steps, "every_n_steps")
        self.every_minutes = minutes_or_none(every_minutes)
        self.max_to_keep = positive_or_none(max_to_keep, "max_to_keep")
        self._best = KeepBest.checked(keep_best, self.every_n_steps)
        self.keep_best = keep_best
        self.asynchronous = validation.flag(asynchronous, "asynchronous")
        self._folder = Folder(self.directory)
        self._values: dict[int, float] = {}
        self._manager: ocp.CheckpointManager | None = None
        self._lock = DirectoryLock(self.directory)
        self._in_flight: int | None = None
        self._last_save = time.monotonic()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, steps={list(self.steps)})"

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and processes.several():
            # Closing waits for every process, and what raised here need not have raised there.
            self._manager, self._in_flight = None, None
            self._lock.release()
        else:
            self.close()

    # What there is

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are on disk, ascending; empty when there is no directory."""
        return self._folder.steps

    @property
    def latest_step(self) -> int | None:
        """The highest step on disk, or `None`."""
        return self.steps[-1] if self.steps else None

    @property
    def best_step(self) -> int | None:
        """The best step on disk by `keep_best`, or `None`."""
        return next(iter(self._best_steps()), None)

    def existing(self, step: int | None = None) -> int:
        """This step if it is on disk, the latest for `None`; a `FileNotFoundError` lists those there are."""
        return self._folder.existing(step)

    def contract(self, step: int | None = None) -> dict[str, Any]:
        """The contract saved with a step (the latest for `None`), as plain data.

        Raises:
            FileNotFoundError: there is no such step; the steps there are, are listed.
            DamagedCheckpointError: the contract is unreadable or does not match its digest.
        """
        return dict(self._folder.document(self.existing(step))["contract"])

    def memory(self, step: int | None = None) -> dict[str, Any]:
        """What callbacks and history remembered at a step (the latest for `None`), as plain data.

        Raises:
            FileNotFoundError: there is no such step; the steps there are, are listed.
            DamagedCheckpointError: it is unreadable or does not match its digest.
        """
        return dict(self._folder.document(self.existing(step)).get("memory", {}))

    def readable_contract(self, step: int | None = None) -> dict[str, Any]:
        """The contract of a step, or of the newest step whose contract is readable; empty if none is."""
        return self._folder.readable_contract() if step is None else self.contract(step)

    # Saving

    def save(
        self,
        state: TrainState,
        contract: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves the state under its step; asynchronously unless told otherwise at construction.

        The arrays may be donated or changed as soon as this returns. A failure in the background is
        raised by the next `save`, by `wait` or by `close`.

        Args:
            state: what to save.
            contract: plain data that `contract` gives back, compared on a resume.
            memory: plain data that `memory` gives back; its `"metrics"` are what `keep_best` compares.

        Raises:
            TypeError: `state` is not a `TrainState`.
            FileExistsError: this step is on disk already.
            DirectoryInUseError: another job writes to this directory.
            SaveError: this save, or the one before it, could not be written.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"state must be a TrainState, got {state!r}. Use initialize_train_state.")
        step = int(state.step)
        self.wait()
        (held,) = processes.agree(step in self.steps)
        if held:
            raise FileExistsError(
                f"step {step} is already saved in {self.directory}. "
                "Continue from it, or use another directory."
            )
        parts = stored_leaves.leaves_of(state)
        arrays = {part: stored_leaves.stored_arrays(leaves) for part, leaves in parts.items()}
        document = _SaveDocument(parts, arrays, dict(contract or {}), dict(memory or {}))
        if not self.asynchronous:
            document.returned.set()
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
        """Waits for the save in flight, and drops the steps that are not to be kept.

        Raises:
            SaveError: the save could not be written; the steps before it are as they were.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error
        if processes.several() and self._in_flight is None:
            return
        self._in_flight = None
        processes.agree(0)  # what is on disk is seen by all before one of them drops a step
        self._drop()

    def close(self) -> None:
        """Waits, and lets go of the directory. The object can be used again."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None
            self._lock.release()

    def lock(self) -> None:
        """Makes this object the one writer of its directory until `close`; `save` does so too.

        Raises:
            DirectoryInUseError: another job writes to this directory.
        """
        # With several processes the first holds it for all.
        processes.first_does(self._lock.acquire)

    def require_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises at a step that competes for best without the number that decides.

        Raises:
            ValueError: `keep_best` names a number that is not among `metrics`.
        """
        best = self._best
        if best is None or not metrics or step % best.every_n_steps or best.metric in metrics:
            return
        raise ValueError(
            f"keep_best compares {best.metric!r}, and the numbers of step {step} are "
            f"{validation.shown(metrics)}. Name one of them, or report it before the save."
        )

    def require_recorded(self, names: tuple[str, ...], may_come: Callable[[str], bool]) -> None:
        """Raises if `keep_best` names a number that cannot be there at any save.

        Args:
            names: the numbers that every step records.
            may_come: whether a number of this name may be reported beside them.

        Raises:
            ValueError: neither is so.
        """
        best = self._best
        if best is not None and best.metric not in names and not may_come(best.metric):
            raise ValueError(
                f"keep_best compares {best.metric!r}, and there is {validation.shown(names)}. "
                "Name one of them, or add the callback that reports it."
            )

    def next_save(self, step: int) -> int | None:
        """The next step after `step` at which `every_n_steps` asks for a save."""
        if self.every_n_steps is None:
            return None
        return (step // self.every_n_steps + 1) * self.every_n_steps

    def is_due(self, step: int) -> bool:
        """Whether `every_n_steps` or `every_minutes` asks for a save now, at `step`."""
        by_step = self.every_n_steps is not None and step % self.every_n_steps == 0
        minutes = (time.monotonic() - self._last_save) / 60
        return by_step or (self.every_minutes is not None and minutes >= self.every_minutes)

    def start_clock(self) -> None:
        """Counts `every_minutes` from now."""
        self._last_save = time.monotonic()

    def supersede_after(self, step: int) -> list[int]:
        """Moves the steps above `step` to `superseded/`, out of the way of a run that starts there."""
        self.wait()
        later = self._folder.set_aside_after(step)
        self._values = {}
        if later and self._manager is not None:
            self._manager.reload()
        return later

    # Restoring

    def restore(self, like: TrainState, step: int | None = None, *, weights_only: bool = False) -> TrainState:
        """The state saved at a step, bit for bit.

        Args:
            like: a state of the same structure, shapes and dtypes, whose arrays (or abstract values)
                also say where to place what is read.
            step: which one; the latest for `None`.
            weights_only: take `model_state` alone, and everything else from `like`.

        Raises:
            FileNotFoundError: there is no such step; the steps there are, are listed.
            CheckpointMismatchError: the checkpoint does not fit `like`; the first leaves that differ
                are named with both sides.
            DamagedCheckpointError: files are missing, unreadable, or not what was saved.
        """
        step = self.existing(step)
        document = self._folder.document(step)
        parts = stored_leaves.leaves_of(like)
        wanted = {MODEL: parts[MODEL]} if weights_only else parts
        stored_leaves.require_fit(step, document["leaves"], wanted)
        return stored_leaves.rebuild(like, self._read(step, wanted, document))

    def restore_intact(self, like: TrainState, *, weights_only: bool = False) -> tuple[TrainState, int]:
        """The newest state that is intact, and its step.

        A damaged step is named in a warning; the next to be tried is the one it says it came from, or
        the next lower where it does not say.

        Raises:
            FileNotFoundError: there is no step at all.
            CheckpointMismatchError: an intact step does not fit `like`.
            DamagedCheckpointError: no step is intact.
        """
        return self._folder.newest_intact(
            lambda step: self.restore(like, step, weights_only=weights_only), tells=processes.is_first()
        )

    # Inside

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=None,  # Orbax would count steps by the time of their saving
                    save_root_metadata=False,
                    enable_async_checkpointing=self.asynchronous,
                    # Where they cannot be made, writers that wait for them would hold up the process's end.
                    async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                    cleanup_tmp_directories=True,  # what a killed save left; the lock says it is not in use
                ),
            )
        return self._manager

    def _start(self, step: int, items: Mapping[str, Any], document: "_SaveDocument") -> None:
        try:
            self._writer().save(step, args=ocp.args.Composite(**items), force=True)
        finally:
            document.returned.set()  # whatever happened, or its thread would wait for ever

    def _save_error(self, error: Exception) -> SaveError:
        """The error to raise; Orbax's manager is given up, since it remembers the failed step."""
        step, self._in_flight = self._in_flight, None
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.close()
        self._folder.clear_leftovers()
        kept = validation.shown(self.steps) if self.directory.is_dir() else "nothing"
        reason = str(error).strip().rstrip(".") or type(error).__name__
        return SaveError(
            f"step {step} could not be saved in {self.directory}: {reason}. "
            f"On disk: {kept}. Make room or mend the permissions, and save again.",
            step=step,
        )

    def _best_steps(self) -> list[int]:
        """The best steps on disk, by what their documents say; each is read once."""
        if self._best is None:
            return []
        self._values = self._folder.values(self._best.metric, self._values)
        return self._best.best(self._values)

    def _drop(self) -> None:
        if self._manager is not None:
            going = dropped(self.steps, self.max_to_keep, self._best_steps())
            processes.agree(0)  # nobody deletes while another still looks
            for step in going:
                self._manager.delete(step)

    def _read(
        self, step: int, parts: stored_leaves.Parts, document: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        targets = {
            part: {leaf.name: leaf.target() for leaf in leaves if leaf.is_stored}
            for part, leaves in parts.items()
        }
        arrays = self._read_arrays(step, targets)
        for part, leaves in parts.items():
            if stored_leaves.digest_stored(leaves, _whole(arrays[part])) != document["digests"][part]:
                raise DamagedCheckpointError(
                    f"{part} of step {step} in {self.directory} does not match its SHA-256: "
                    "it was damaged or edited. Restore another step."
                )
        return {
            part: [leaf.restored(arrays[part].get(leaf.name)) for leaf in leaves]
            for part, leaves in parts.items()
        }

    def _read_arrays(self, step: int, targets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
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
        # Orbax casts what it reads to the target's dtype without a word, so the types on disk are
        # taken from the manifest, which was compared, and the bits are verified by the digest.
        return {part: arrays.get(part, {}) for part in targets}


class _DocumentHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Digests the arrays and writes the document, in the background of the save.

    Restoring does not go through Orbax: the document is a plain JSON file.
    """

    async def async_save(self, directory: Any, args: "_SaveDocument") -> list[Any]:
        """Starts the work; Orbax waits for it before it makes the step visible."""
        return [
            ocp_future.CommitFutureAwaitingContractedSignals(
                self._write(directory, args), name="phijax_rng_document"
            )
        ]

    async def _write(self, directory: Any, args: "_SaveDocument") -> None:
        # Hashing takes every core; the run should go on first.
        args.returned.wait()
        if not args.is_writer:
            return
        (directory / DOCUMENT_FILE).write_text(json.dumps(args.document()))

    def save(self, directory: Any, args: "_SaveDocument") -> None:
        """The same, at once."""
        if not args.is_writer:
            return
        (directory / DOCUMENT_FILE).write_text(json.dumps(args.document()))

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Reads the document."""
        return json.loads((directory / DOCUMENT_FILE).read_text())


@ocp.args.register_with_handler(_DocumentHandler, for_save=True)
@dataclasses.dataclass
class _SaveDocument(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What the document is made of. Holding the arrays keeps their bits from being donated away.

    Attributes:
        returned: set when the call that started the save is done with its part.
        is_writer: whether this process writes the document.
    """

    parts: stored_leaves.Parts
    arrays: Mapping[str, Mapping[str, Any]]
    contract: dict[str, Any]
    memory: dict[str, Any]
    returned: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_writer: bool = True

    def __post_init__(self) -> None:
        # A view of the host's memory on CPU, a copy from other devices; while it lives, XLA copies
        # the state instead of writing into it.
        self.arrays = {
            part: {name: np.asarray(array) for name, array in _whole(stored).items()}
            for part, stored in self.arrays.items()
        }
        self.is_writer = processes.is_first()

    def document(self) -> dict[str, Any]:
        """The document, with its own SHA-256."""
        told = {"schema": SCHEMA, **stored_leaves.described(self.parts, self.arrays)}
        return dumps({**told, "contract": self.contract, "memory": self.memory})


@ocp.args.register_with_handler(_DocumentHandler, for_restore=True)
@dataclasses.dataclass
class _RestoreDocument(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Orbax wants a handler to have both."""


def _whole(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays that this process can read."""
    return {name: processes.whole(array) for name, array in arrays.items()}
