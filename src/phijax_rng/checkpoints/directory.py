"""The directory of a run: which steps are in it, what their documents say, and how a step is read.

    <directory>/<step>/...             one folder for each step
    <directory>/superseded/<step>-<n>  steps that a rewind or a fall-back left behind

Everything that reads a step goes through `RunDirectory.read`, which tells damage from a hiccup. Files that
are missing, cannot be parsed or do not match their digest are damage, and another step may be restored. An
error of the file system is retried and then raised, and nothing is moved or deleted after one.

Reading creates and changes nothing. A folder is a step if this library wrote it; others are left alone.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from phijax_rng._base import validation
from phijax_rng.checkpoints import faults, foreign, stored_leaves
from phijax_rng.checkpoints.document import DOCUMENT, DOCUMENT_FILE, HANDLER, loads, require_shape, run_of
from phijax_rng.checkpoints.stored_leaves import MODEL, Parts
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError
from phijax_rng.state import TrainState

STATE = "state"

T = TypeVar("T")

_PAUSES = (0.05, 0.2, 0.75)
"""Seconds between attempts: long beside a lost packet. A server that is down is the scheduler's affair."""

# Orbax removes folders of this name when it starts, if the process died while it deleted one.
_DOOMED = ".orbax-checkpoint-tmp-deleted-"

# Running out of memory says nothing about the files; a checkpoint of another shape or version is intact.
_NOT_DAMAGE = (MemoryError, jax.errors.JaxRuntimeError, CheckpointMismatchError)

# A writer that keeps one step deletes one at each save; fifty in one reading are none of its doing.
_MOST_LISTINGS = 50

# Writers of Orbax are threads that nobody can stop: they recreate what is removed until they have
# ended, which takes milliseconds on a local disk. Two seconds in all are long against that, and short beside
# a lost save.
_MOST_CLEARINGS = 20
_SECONDS_BETWEEN_CLEARINGS = 0.1


@dataclasses.dataclass(frozen=True)
class Restoration:
    """What was restored.

    Attributes:
        state: the train state.
        step: the step it was saved at.
        document: what was saved with it; without leaves, digests and seal if another program saved it.
    """

    state: TrainState
    step: int
    document: Mapping[str, Any]


class StepGoneError(FileNotFoundError):
    """A step was deleted while it was read, as the writer of its directory may do at any time."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """A directory with one folder for each step.

    Attributes:
        path: its absolute path.
    """

    path: Path

    # Which steps there are

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps on disk, ascending; empty when there is no directory.

        Raises:
            NotADirectoryError: the path is a file.
            OSError: the file system does not answer, several times.
        """
        # Twice where nothing is found: a listing may miss both a step that is deleted meanwhile and the one
        # that was saved before.
        list_once = functools.partial(_retried, self._step_names, f"{self.path} cannot be read")
        return tuple(sorted(map(int, list_once() or list_once())))

    def _step_names(self) -> list[str]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise NotADirectoryError(foreign.not_a_directory(self.path)) from None
        # The name that a save gives: "08" and digits of other scripts are somebody else's folders.
        numbers = [n for n in names if n.isascii() and n.isdecimal() and str(int(n)) == n]
        return [name for name in numbers if _is_ours(self.path / name)]

    def existing(self, step: int | None = None) -> int:
        """This step if it is on disk; the latest for `None`.

        Raises:
            FileNotFoundError: there is no such step; the message lists the steps, or says what is there.
        """
        steps = self.steps
        if not steps:
            raise FileNotFoundError(foreign.no_checkpoint(self.path))
        if step is None:
            return steps[-1]
        number = validation.step_number(step)
        if number not in steps:
            raise FileNotFoundError(
                f"no checkpoint at step {number} in {self.path}; there are steps "
                f"{', '.join(map(str, steps))}. Pick one of them."
            )
        return number

    def at(self, step: int | None, action: Callable[[int], T]) -> T:
        """What `action` returns for this step; for `None` for the latest, looked up again if it goes away."""
        for _ in range(_MOST_LISTINGS):
            found = self.existing(step)
            with contextlib.suppress(StepGoneError):
                return action(found)
        return action(self.existing(step))

    # Reading a step

    def where(self, step: int) -> str:
        """The step for a message."""
        return f"step {step} in {self.path}"

    def read(self, step: int, what: str, action: Callable[[], T]) -> T:
        """What `action` reads of a step.

        Args:
            step: the step.
            what: what is read, for messages.
            action: reads; it may be called several times.

        Raises:
            DamagedCheckpointError: files are missing, cannot be parsed or do not match their digest, twice.
            OSError: the file system failed several times; path and step are named.
            StepGoneError: the step was deleted meanwhile.
        """
        for attempt in range(len(_PAUSES) + 1):
            try:
                return action()
            except _NOT_DAMAGE:
                raise
            except Exception as error:  # of any type: Orbax raises bare ones for files it cannot read
                code = faults.system_error(error)
                if self._is_gone(step):
                    raise StepGoneError(f"{self.where(step)} was deleted while it was read.") from error
                # Once more even after damage: an unexpected error may be as short as a hiccup.
                if attempt == len(_PAUSES) or (code is None and attempt):
                    if code is None and isinstance(error, DamagedCheckpointError):
                        raise
                    raise self._failure(step, what, error, code) from error
            time.sleep(_PAUSES[attempt])
        raise AssertionError("unreachable")

    def _is_gone(self, step: int) -> bool:
        with contextlib.suppress(OSError):
            return not _exists(self.path / str(step))
        return False

    def _failure(self, step: int, what: str, error: Exception, code: int | None) -> Exception:
        if code is not None:
            text = f"{what} of {self.where(step)} cannot be read, tried {len(_PAUSES) + 1} times"
            text += f": {os.strerror(code)}. Nothing was changed; start again"
            return OSError(code, text, str(self.path / str(step)))
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return DamagedCheckpointError(
            f"{what} of {self.where(step)} cannot be read: {reason}. Restore another step."
        )

    def all_documents(self) -> Iterator[dict[str, Any]]:
        """The documents of all steps, also of those that were set aside."""
        yield from map(self.document, self.steps)
        for path in (self.path / "superseded").glob(f"*/{DOCUMENT}/{DOCUMENT_FILE}"):
            yield loads(json.loads(path.read_bytes()), str(path))

    def document(self, step: int) -> dict[str, Any]:
        """The document of a step, verified.

        Raises:
            DamagedCheckpointError: it is missing, unreadable, of another step, or does not match its digest.
            CheckpointMismatchError: a newer version of phijax_rng wrote it.
        """
        return self.read(step, f"the {DOCUMENT}", lambda: self._document(step))

    def _document(self, step: int) -> dict[str, Any]:
        where = self.where(step)
        path = self.path / str(step) / DOCUMENT / DOCUMENT_FILE
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpointError(
                f"{where} has no {DOCUMENT}: it is incomplete. Restore another step."
            ) from None
        sealed = json.loads(text)
        document = {**loads(sealed, where), "sha256": sealed["sha256"]}
        require_shape(document, where)
        saved = document.get("step", step)
        if saved != step:
            raise DamagedCheckpointError(
                f"{where} is step {saved} of a run, in a folder that was renamed or copied. "
                "Give the folder its number, or restore another step."
            )
        return document

    def require_one_run(self, step: int, document: dict[str, Any]) -> None:
        """Compares a step with its parent and other steps on disk: all must be steps of one run.

        Raises:
            DamagedCheckpointError: the parent on disk is not the one that this step continued.
            CheckpointMismatchError: the directory has steps of another run.
        """
        steps = [other for other in self.steps if other != step]
        parent = document.get("parent") or {"step": None, "sha256": None}
        lower = [other for other in steps if other < step]
        # Not all of them: a run may keep thousands of steps. A step of another run shows beside the lowest,
        # the highest or the one before it.
        replaced = None
        for other in dict.fromkeys([parent["step"], *lower[-1:], *steps[:1], *steps[-1:]]):
            if other not in steps:
                continue
            try:
                found = self.document(other)
            except (DamagedCheckpointError, CheckpointMismatchError, StepGoneError):
                continue
            if None not in (run_of(document), run_of(found)) and run_of(document) != run_of(found):
                raise CheckpointMismatchError(
                    f"{self.path} has steps of two runs: step {step} of run {run_of(document)}, step {other} "
                    f"of run {run_of(found)}. Move the steps of one of them to a directory of its own."
                )
            if other == parent["step"] and parent["sha256"] not in (None, found["sha256"]):
                replaced = other
        if replaced is not None:
            raise DamagedCheckpointError(
                f"{self.where(step)} does not continue the step {replaced} that is there: it is of a branch "
                "that was left, or was copied in. Restore another step."
            )

    def step_before(self, step: int) -> int | None:
        """The step that this one names as its parent, if that is on disk; else the next lower one."""
        # After a rewind the next lower number need not be an ancestor, and its bits need not be of this run.
        lower = [found for found in self.steps if found < step]
        try:
            parent = self.document(step)["contract"].get("run", {}).get("parent_step")
        except (DamagedCheckpointError, StepGoneError):
            parent = None
        return parent if parent in lower else max(lower, default=None)

    def newest_intact(self, restore: Callable[[int], T], *, warn: bool = True) -> tuple[T, int]:
        """What `restore` returns for the newest step that is not damaged, and that step.

        Args:
            restore: from a step; raises `DamagedCheckpointError`.
            warn: whether a warning names each step that is damaged.

        Raises:
            FileNotFoundError: there is no step at all.
            DamagedCheckpointError: no step is intact.
        """
        step: int | None = self.existing()
        damage: dict[int, str] = {}
        while step is not None:
            try:
                return restore(step), step
            except StepGoneError:
                # Another process deleted it, so there may be newer ones.
                step = next((found for found in reversed(self.steps) if found not in damage), None)
            except DamagedCheckpointError as error:
                damage[step] = str(error)
                before, step = step, self.step_before(step)
                if step is not None and warn:
                    warnings.warn(
                        f"checkpoint at step {before} is damaged, going back to step {step}: {error}",
                        UserWarning,
                        stacklevel=4,  # the caller of `Checkpoints.restore_intact`
                    )
        if not damage:
            raise FileNotFoundError(foreign.no_checkpoint(self.path))
        raise DamagedCheckpointError(
            "no checkpoint is intact:\n  "
            + "\n  ".join(damage.values())
            + "\nStart a fresh run in another directory."
        )

    def run_id(self) -> str | None:
        """The run that the newest readable document names."""
        return next((run_of(found) for found in self._readable() if run_of(found) is not None), None)

    def readable_contract(self) -> dict[str, Any]:
        """The contract of the newest step whose document is readable; an empty dict if there is none."""
        return next((dict(found["contract"]) for found in self._readable()), {})

    def _readable(self) -> Iterator[dict[str, Any]]:
        """The documents that are readable, newest first."""
        for step in reversed(self.steps):
            with contextlib.suppress(DamagedCheckpointError, StepGoneError):
                yield self.document(step)

    # Restoring a step

    def restored(self, like: TrainState, step: int, *, weights_only: bool = False) -> Restoration:
        """The state of a step, verified bit by bit, and its document; see `Checkpoints.restore`."""
        document = self.document(step)
        self.require_one_run(step, document)
        parts = stored_leaves.leaves_of(like)
        wanted = {MODEL: parts[MODEL]} if weights_only else parts
        try:
            stored_leaves.require_fit(step, document["leaves"], wanted)
        except CheckpointMismatchError:
            self._require_described(step, document)
            raise
        arrays = self._read_arrays(step, wanted, document)
        return Restoration(stored_leaves.rebuild(like, arrays), step, document)

    def arrays(self, step: int) -> dict[str, jax.Array]:
        """Every array of a step by its path, verified bit by bit."""
        document = self.document(step)
        parts = stored_leaves.saved_leaves(document["leaves"])
        read = self._read_arrays(step, parts, document)
        return {
            leaf.path: array for part in parts for leaf, array in zip(parts[part], read[part], strict=True)
        }

    def _read_arrays(
        self, step: int, parts: Parts, document: Mapping[str, Any]
    ) -> dict[str, list[jax.Array]]:
        return self.read(step, "the arrays", lambda: self._verified(step, parts, document))

    def _verified(self, step: int, parts: Parts, document: Mapping[str, Any]) -> dict[str, list[jax.Array]]:
        arrays = stored_leaves.read_arrays(self.path / str(step) / STATE, parts)
        for part, leaves in parts.items():
            found = stored_leaves.verifiable(arrays[part], document.get("tiles", {}).get(part, {}))
            digest = stored_leaves.digest_stored(leaves, found)
            if digest != document["digests"][part]:
                raise DamagedCheckpointError(
                    f"{part} of {self.where(step)} does not match its SHA-256: it was damaged or edited. "
                    "Restore another step."
                )
        return {
            part: [leaf.restored(arrays[part].get(leaf.name)) for leaf in leaves]
            for part, leaves in parts.items()
        }

    def _require_described(self, step: int, document: Mapping[str, Any]) -> None:
        """Raises a `DamagedCheckpointError` unless the stored arrays are those of the document."""
        describe = functools.partial(
            stored_leaves.misdescribed, self.path / str(step) / STATE, document["leaves"]
        )
        wrong = self.read(step, "the list of arrays", describe)
        if wrong is not None:
            raise DamagedCheckpointError(
                f"the {DOCUMENT} of {self.where(step)} is wrong: {wrong}. Restore another step."
            )

    # Changing the directory

    def set_aside_after(self, step: int) -> list[int]:
        """Moves the steps above `step` to `superseded/`, and returns them.

        Raises:
            OSError: the file system does not let one be moved, several times; path and step are named.
        """
        later = [found for found in self.steps if found > step]
        for found in later:
            move = functools.partial(self._set_aside, found)
            _retried(move, f"{self.where(found)} cannot be set aside")
        return later

    def _set_aside(self, step: int) -> None:
        folder = self.path / "superseded"
        folder.mkdir(exist_ok=True)
        # Not overwritten: a step may be set aside, saved again and set aside again.
        number = 0
        while os.path.lexists(folder / f"{step}-{number}"):
            number += 1
        os.rename(self.path / str(step), folder / f"{step}-{number}")

    def delete(self, step: int) -> None:
        """Deletes a step; whoever reads it finds all of it, or nothing.

        Raises:
            OSError: the file system does not let it be deleted.
        """
        doomed = self.path / f"{step}{_DOOMED}{uuid.uuid4().hex}"
        os.rename(self.path / str(step), doomed)
        if doomed.is_symlink():
            doomed.unlink()  # what it points to is another's
        else:
            shutil.rmtree(doomed)

    def clear_leftovers(self) -> None:
        """Removes what a failed save left, while its other writers may still be running."""
        for _ in range(_MOST_CLEARINGS):
            leftovers = [p for p in self.path.glob("*.orbax-checkpoint-tmp*") if p.is_dir()]
            if not leftovers:
                return
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
            time.sleep(_SECONDS_BETWEEN_CLEARINGS)


def _is_ours(folder: Path) -> bool:
    """Whether this library wrote the folder: it has a document, or Orbax says that it had one."""
    if _exists(folder / DOCUMENT):
        return True
    try:
        return HANDLER.encode() in (folder / "_CHECKPOINT_METADATA").read_bytes()
    except OSError as error:
        if error.errno in faults.MISSING:
            return False
        raise


def _exists(path: Path) -> bool:
    # Not `Path.exists`: since Python 3.12 it takes every error of the file system for "no".
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in faults.MISSING:
            return False
        raise
    return True


def _retried(action: Callable[[], T], failed: str) -> T:
    """What `action` returns; an error of the file system is retried, and then raised with `failed`."""
    for pause in (*_PAUSES, None):
        try:
            return action()
        except NotADirectoryError:
            raise
        except OSError as error:
            if pause is None:
                code = error.errno or errno.EIO
                reason = f"{failed}, tried {len(_PAUSES) + 1} times: {os.strerror(code)}. Nothing was changed"
                raise OSError(code, reason, error.filename) from error
            time.sleep(pause)
    raise AssertionError("unreachable")
