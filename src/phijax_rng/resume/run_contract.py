"""The contract of a run in the making: built when the run starts, completed while it compiles.

at the start       keys, source, training, environment, lineage      compared at once
while compiling    the digest of the pools, in a thread of its own
before step one    the program's digest and the canary               compared then
at each save       the canary of the next batch, and the parent step
"""

import concurrent.futures
import dataclasses
import logging
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

from phijax_rng._base.digests import digest
from phijax_rng.devices import processes
from phijax_rng.errors import RunChangedError
from phijax_rng.resume import contract
from phijax_rng.resume.plan import Restored, Start
from phijax_rng.sampling.adapters import adapt_source
from phijax_rng.state import TrainState

_log = logging.getLogger("phijax_rng")


class Record:
    """What this run promises, and what the run it continues promised.

    Attributes:
        own: whether the trainer's own run goes on.
        may_save: whether what changed since the save has been settled, so that a new save tells of it.
        changes: what was let pass at each resume: step, surviving level, settings with both values.
    """

    def __init__(self, base: dict[str, Any], source: Any, start: Start, restored: Restored, on_change: str):
        """Starts to digest the pools.

        Args:
            base: from `contract.build`, without lineage.
            source: the prepared source.
            start: where the run starts.
            restored: what it starts from.
            on_change: whether a change that moves batches is an `"error"` or a `"warn"`.
        """
        before = dict(restored.contract.get("run", {}))
        self.own = start.own
        self._id = before["id"] if start.own and "id" in before else uuid.uuid4().hex
        self._origin = before.get("origin") if start.own else _origin(start, restored, before)
        # With the weights alone, nothing of what happened to the other run concerns this one.
        inherited = [] if start.weights_only else before.get("changes", [])
        self.changes: list[dict[str, Any]] = list(inherited)
        self._parent = restored.step if start.own else None
        self._base = base
        self._on_change = on_change
        self._source = adapt_source(source)
        self._saved = (restored.contract or {"keys": restored.streams}) if start.continues else {}
        self.may_save = not self._saved
        self._contents: dict[str, str] | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="phijax_rng-digest")
        self._hashing = self._worker.submit(contract.digest_contents, source)
        self._worker.shutdown(wait=False)

    def refuse_early(self) -> None:
        """Raises what can be told to have changed before anything is compiled.

        Raises:
            RunChangedError: the keys or the source changed, with `on_change="error"`.
        """
        if self._saved and self._on_change == "error":
            known = {name: value for name, value in self._saved.items() if name in self._base}
            current = {name: value for name, value in self._base.items() if name in known}
            _refuse(contract.compare(_without_program(known), current), self._step)

    def settle(
        self, state: TrainState, program: str | None, loss_names: tuple[str, ...] | None = None
    ) -> None:
        """Compares everything; refuses, warns of or passes over what changed, and records it.

        Args:
            state: what the run starts from.
            program: the program's digest; `None` if there is nothing left to run.
            loss_names: the losses that the program records; `None` likewise.

        Raises:
            RunChangedError: keys or batches would not be those of the saved run, with `on_change="error"`.
        """
        if program is not None:
            training = {**self._base["training"], "program": program}
            training["losses"] = training.get("losses") or list(loss_names or ())
            self._base = {**self._base, "training": training}
        if not self._saved:
            return
        self._compare(state, program)
        self.may_save = True

    def _compare(self, state: TrainState, program: str | None) -> None:
        saved = dict(self._saved)
        current = {name: value for name, value in self._complete().items() if name in saved}
        if program is None:
            saved = _without_program({name: value for name, value in saved.items() if name != "canary"})
        elif "canary" in saved:
            current["canary"] = self._canary(state)
        differences = contract.compare(saved, current)
        if not differences:
            return
        if self._on_change == "error":
            _refuse(differences, self._step)
        level = contract.surviving(differences)
        settings = [dataclasses.asdict(difference) for difference in differences]
        self.changes.append({"step": self._step, "survives": level, "settings": settings})
        if processes.is_first():
            warnings.warn(_told(differences, self._step), UserWarning, stacklevel=6)

    def at(self, state: TrainState) -> dict[str, Any]:
        """The contract to save with this state; the next one will name it as its parent."""
        lineage = {
            "id": self._id,
            "parent_step": self._parent,
            "origin": self._origin,
            "changes": self.changes,
        }
        self._parent = int(state.step)
        return {**self._complete(), "canary": self._canary(state), "run": lineage}

    @property
    def _step(self) -> int:
        return self._parent if self._parent is not None else self._origin["step"] if self._origin else 0

    def _complete(self) -> dict[str, Any]:
        return {**self._base, "contents": self._hashing.result()}

    def _canary(self, state: TrainState) -> str | None:
        """The digest of the batch that comes next; `None` if the source cannot give it.

        A source may end where training does, and a save must not fail for it.
        """
        try:
            batch = self._source(int(state.step), processes.local(state.sampler_state))
        except Exception as error:  # whatever a user's source raises
            _log.info(
                "the source gave no batch for step %d, so the save has no canary: %r", state.step, error
            )
            return None
        return digest(batch)


def _origin(start: Start, restored: Restored, before: Mapping[str, Any]) -> dict[str, Any] | None:
    if start.checkpoints is None:
        return None
    return {
        "directory": str(start.checkpoints.directory),
        "step": restored.step,
        "weights_only": start.weights_only,
        "id": before.get("id"),
    }


def _without_program(saved: Mapping[str, Any]) -> dict[str, Any]:
    if "training" not in saved:
        return dict(saved)
    training = {name: value for name, value in saved["training"].items() if name != "program"}
    return {**saved, "training": training}


def _refuse(differences: list[contract.Difference], step: int) -> None:
    if contract.surviving(differences) in contract.REFUSED_LEVELS:
        raise RunChangedError(
            f"{_told(differences, step)}\n"
            "Undo the change, pass on_change='warn' to go on with it, or start a fresh run."
        )


def _told(differences: list[contract.Difference], step: int) -> str:
    return f"resuming at step {step} changes the run:\n{contract.report(differences)}"
