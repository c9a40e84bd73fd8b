"""Where a run starts: fresh, from its own last checkpoint, or from another run's.

| options                               | the run starts                                                     |
|---------------------------------------|--------------------------------------------------------------------|
| (none)                                | fresh; an error if the directory has a run                         |
| `resume="auto"`                       | from its own newest step; without one, as the other options say    |
| `resume=True`, or `ckpt_path="last"`  | from its own newest step, which must exist                         |
| `resume=True, ckpt_step=n`            | from its own step n; later steps are moved to `superseded/`        |
| `resume="best"`                       | the same from its best step, see `Checkpoints.best_step`           |
| `ckpt_path=root`                      | from the newest step of another run (its *origin*)                 |
| `ckpt_path=root, ckpt_step=n`         | from step n of another run; `"best"` is its best step              |
| `ckpt_path=root, weights_only=True`   | fresh, with the model state of another run                         |

So one command line with `resume="auto"` always continues, however often it is killed.

    options --> plan --> restore --> compare --> compile --> compare program and canary --> commit

A fresh run goes the same way; it restores nothing, and nothing is compared.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.devices.placement import Placement
from phijax_rng.errors import RunExistsError
from phijax_rng.resume import run_contract
from phijax_rng.resume.run_contract import Lineage, RunContract
from phijax_rng.sampling.adapters import AdaptedSource
from phijax_rng.state import TrainState

_log = logging.getLogger("phijax_rng")


@dataclasses.dataclass(frozen=True)
class Resume:
    """The resume options of `Trainer.fit` and `Trainer.fit_state`, as one value.

    Attributes:
        resume: `True`, `False`, `"auto"` or `"best"`; see the table of this module.
        ckpt_path: the root of another run, or `"last"`.
        ckpt_step: which step to restore, a number or `"best"`; the newest for `None`.
        weights_only: whether only the model state is restored.
        on_change: `"error"` or `"warn"`, for a change that moves keys or batches.
    """

    resume: bool | str = False
    ckpt_path: str | os.PathLike[str] | None = None
    ckpt_step: int | str | None = None
    weights_only: bool = False
    on_change: str = "error"

    def __post_init__(self) -> None:
        validation.one_of(self.on_change, "on_change", ("error", "warn"))
        validation.one_of(self.resume, "resume", (False, True, "auto", "best"))
        if isinstance(self.ckpt_step, str):
            validation.one_of(self.ckpt_step, "ckpt_step", ("best",))
        validation.flag(self.weights_only, "weights_only")
        if self.ckpt_path is not None and not isinstance(self.ckpt_path, (str, os.PathLike)):
            raise TypeError(
                f"ckpt_path must be a path or 'last', got {validation.formatted(self.ckpt_path)}. "
                "Pass the root of a run."
            )


@dataclasses.dataclass(frozen=True)
class ResumePlan:
    """Where a run starts.

    Attributes:
        checkpoints: what to restore from; `None` for a fresh run.
        step: the step to restore; `None` for the newest intact one, or a fresh run.
        weights_only: whether only the model state is restored.
        is_own_run: whether the trainer's own run continues.
        on_change: `"error"` or `"warn"`.
        may_be_restart: whether a fresh run may be one that was killed before its first save.
    """

    checkpoints: Checkpoints | None = None
    step: int | None = None
    weights_only: bool = False
    is_own_run: bool = False
    on_change: str = "error"
    may_be_restart: bool = False

    @property
    def continues(self) -> bool:
        """Whether keys and step come from a checkpoint."""
        return self.checkpoints is not None and not self.weights_only

    def root(self) -> KeyScalar:
        """The root key of the run that continues.

        Raises:
            ValueError: it is not recorded.
        """
        assert self.checkpoints is not None
        known = self.checkpoints.readable_contract(self.step).get("keys", {}).get("root")
        if known is None:
            raise ValueError(
                "seed=None takes the checkpoint's seed, and this checkpoint records none. Pass the seed."
            )
        return keys.from_fingerprint(known)

    def restore(self, fresh: TrainState) -> "Restored":
        """The state to start from, and what was saved with it.

        A named step must be intact; without one, damaged steps are skipped with a warning.
        """
        if self.checkpoints is None:
            return Restored(fresh, {}, None, {}, {}, {})
        # State and document of one reading: the step of a running job may be deleted at any time.
        if self.step is None:
            found = self.checkpoints.restored_intact(fresh, weights_only=self.weights_only)
        else:
            found = self.checkpoints.restored(fresh, self.step, weights_only=self.weights_only)
        state, saved = found.state, found.document
        streams = {
            "sampling": keys.fingerprint(state.sampling_key),
            "balancer": keys.fingerprint(state.balancer_key),
        }
        memory = {} if self.weights_only else self.checkpoints.memory_of(saved, _warn_of_lost_rows)
        hyperparameters = run_contract.hyperparameters(state.optimizer_state)
        return Restored(state, saved["contract"], found.step, streams, memory, hyperparameters)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a run starts from.

    Attributes:
        state: the train state.
        contract: the contract it was saved with; empty for a fresh run.
        step: the step it was saved at; `None` for a fresh run.
        streams: fingerprints of the saved keys, for a state that was saved without a contract.
        memory: the stored memory of history and callbacks; empty for a fresh run.
        hyperparameters: those in the saved optimizer state, see `run_contract.hyperparameters`.
    """

    state: TrainState
    contract: Mapping[str, Any]
    step: int | None
    streams: Mapping[str, str]
    memory: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]


def _warn_of_lost_rows(reason: str) -> None:
    _log.warning("%s The run goes on without these rows", reason)


@contextlib.contextmanager
def locked_plan(checkpoints: Checkpoints | None, options: Resume) -> Iterator[ResumePlan]:
    """A `with` block around a run: its plan, with the trainer's directory locked until the run ends."""
    # Once before the lock, which creates the directory: options that contradict each other create nothing.
    plan = make_plan(checkpoints, options)
    if checkpoints is None:
        yield plan
        return
    with checkpoints.reserved():
        # Once more under the lock: another job may have saved, or deleted steps, in between.
        yield make_plan(checkpoints, options)


def make_plan(checkpoints: Checkpoints | None, options: Resume) -> ResumePlan:
    """The resume plan for these options and for what is on disk.

    Raises:
        ValueError: options that contradict each other, or need a directory that the trainer lacks; processes
            that do not see the same checkpoints.
        FileNotFoundError: there is no such checkpoint.
        RunExistsError: a fresh run in a directory that has a run.
    """
    resume, ckpt_path = options.resume, options.ckpt_path
    if ckpt_path == "last":
        resume, ckpt_path = _last(resume), None
    other = _other_run(checkpoints, ckpt_path)
    if ckpt_path is not None and other is None and not options.weights_only:
        resume = resume or True
    _require_consistent(checkpoints, dataclasses.replace(options, resume=resume), other)
    resume, ckpt_step = (True, "best") if resume == "best" else (resume, options.ckpt_step)
    newest = checkpoints.latest_step if checkpoints is not None else None
    _require_seen_by_all(newest, None if other is None else other.latest_step)
    if checkpoints is not None and (resume is True or (resume == "auto" and newest is not None)):
        step = None if resume == "auto" else ckpt_step
        return ResumePlan(
            checkpoints, _explicit(checkpoints, step), is_own_run=True, on_change=options.on_change
        )
    if checkpoints is not None and newest is not None:
        start = "a fresh one" if other is None else f"another one from {other.directory}"
        raise RunExistsError(
            f"{checkpoints.directory} has a run at step {newest}, and this call would start {start}. "
            "Pass resume='auto' to continue it, another directory to keep both, or delete it."
        )
    fresh = ResumePlan(on_change=options.on_change, may_be_restart=resume == "auto")
    if other is None:
        return fresh
    step = _explicit(other, ckpt_step, weights_only=options.weights_only)
    return dataclasses.replace(fresh, checkpoints=other, step=step, weights_only=options.weights_only)


def _require_seen_by_all(*newest: int | None) -> None:
    """Raises unless every process sees the same newest steps."""
    # Before anything else is compared: processes that plan different starts would wait in different
    # collectives, for ever.
    seen = next((step for step in newest if step is not None), None)
    processes.require_same(
        np.array([-1 if step is None else step for step in newest], np.int64),
        f"the processes see different checkpoints; the newest that is seen here is {seen}. "
        "Keep them in a directory that every process sees.",
    )


def _explicit(checkpoints: Checkpoints, step: int | str | None, *, weights_only: bool = False) -> int | None:
    """`step`, which must be on disk, as a number; with `None` there must be any step."""
    found = checkpoints.existing(step, weights_only=weights_only)
    return None if step is None else found


def _last(resume: bool | str) -> bool:
    if resume == "auto":
        raise ValueError(
            "ckpt_path='last' needs a checkpoint and resume='auto' works without one; "
            "they contradict each other. Pass one of them."
        )
    if resume == "best":
        raise ValueError(
            "ckpt_path='last' names the newest step and resume='best' another. Pass one of them."
        )
    return True


def _other_run(
    checkpoints: Checkpoints | None, ckpt_path: str | os.PathLike[str] | None
) -> Checkpoints | None:
    """The other run's checkpoints; `None` where `ckpt_path` is absent or the trainer's own directory."""
    if ckpt_path is None:
        return None
    other = Checkpoints(ckpt_path)
    # Resolved, since one directory has many names: a link, or `.` in the path.
    if checkpoints is not None and other.directory.resolve() == checkpoints.directory.resolve():
        return None
    return other


def _require_consistent(checkpoints: Checkpoints | None, options: Resume, other: Checkpoints | None) -> None:
    resume, ckpt_step = options.resume, options.ckpt_step
    if resume and checkpoints is None:
        raise ValueError(
            f"resume={resume!r} needs a directory to continue from; the trainer has checkpoints=None. "
            "Pass Trainer(..., checkpoints=Checkpoints(directory))."
        )
    if resume in (True, "best") and other is not None:
        best = "\nAdd ckpt_step='best' for the other's best step." if resume == "best" else ""
        raise ValueError(
            f"resume={resume!r} continues this trainer's run and ckpt_path={str(other.directory)!r} names "
            "another. Pass resume='auto' to start from the other run and continue this one from then on."
            f"{best}"
        )
    if resume == "best" and ckpt_step is not None:
        raise ValueError(
            f"resume='best' goes back to the best step and ckpt_step={ckpt_step!r} names one too. "
            "Pass one of them."
        )
    if resume == "auto" and ckpt_step is not None and other is None:
        raise ValueError(
            f"resume='auto' continues from the newest step and ckpt_step={ckpt_step!r} names another. "
            "Pass resume=True to go back to that step."
        )
    if ckpt_step is not None and not resume and other is None:
        raise ValueError(f"ckpt_step={ckpt_step!r} needs a run. Pass resume=True or ckpt_path too.")
    if options.weights_only and other is None:
        raise ValueError(
            "weights_only=True needs the root of another run to take the weights from. Pass ckpt_path."
        )


class RunInputs(Protocol):
    """What a resume needs to know of the inputs of a run."""

    @property
    def placement(self) -> Placement:
        """Where the run trains."""
        ...

    def make_source(self, sampling_key: KeyScalar) -> AdaptedSource:
        """The source that draws from this key; always the same one where the user passed a source."""
        ...

    def complete_state(self, state: TrainState, source: AdaptedSource) -> TrainState:
        """`state` with the first state of every adaptive sampler, and on the devices of the run."""
        ...

    def begin_at_weights(self, state: TrainState) -> TrainState:
        """`state`, a fresh one that took its model from another run, with an optimizer that begins there."""
        ...

    def describe_training(self, state: TrainState) -> Mapping[str, Any]:
        """What decides the update, as plain data for the contract."""
        ...


@dataclasses.dataclass
class ResumedRun:
    """A run that is restored and may train once it is committed.

    Attributes:
        state: the state it starts from; whoever trains it deletes it here, so that it can be reused.
        source: the prepared source, which draws from the sampling key of `state`.
        contract: the contract that its checkpoints are saved with.
        memory: the stored memory of history and callbacks; empty for a fresh run.
        plan: where it starts.
    """

    state: TrainState
    source: AdaptedSource
    contract: RunContract
    memory: Mapping[str, Any]
    plan: ResumePlan

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The changes that this and former resumes let pass."""
        return self.contract.changes

    def commit(self, program: str | None, loss_names: tuple[str, ...] = ()) -> None:
        """Compares what only the compiled program shows; from here on the run may save.

        Args:
            program: the program's digest; `None` if there is nothing left to run.
            loss_names: the losses that the program records.

        Raises:
            RunChangedError: see `RunContract.compare_compiled`.
        """
        self.contract.compare_compiled(self.state, program, loss_names)
        if program is not None and self.plan.is_own_run and self.plan.checkpoints is not None:
            # Not before the comparison: a resume that is refused leaves the directory as it is.
            supersede = functools.partial(self.plan.checkpoints.supersede_after, int(self.state.step))
            processes.run_on_primary(supersede)


def resume_run(plan: ResumePlan, inputs: RunInputs, fresh: TrainState, root: KeyScalar | None) -> ResumedRun:
    """Restores what the plan names, and compares what is known before anything is compiled.

    Args:
        plan: from `locked_plan`, while the directory is locked.
        inputs: the inputs of the run.
        fresh: the state of a fresh run.
        root: the root key; `None` where only the streams are known.

    Raises:
        RunChangedError: the keys or the source changed, with `on_change="error"`.
    """
    restored, source = _restore(plan, inputs, fresh)
    # With its arrays on the first device; the loop puts its own copy on every other one.
    source = source.prepare(inputs.placement.host_device)
    base = run_contract.build(
        restored.state,
        source,
        streams=fresh,
        root=root,
        training=inputs.describe_training(fresh),
        placement=inputs.placement,
    )
    saved: Mapping[str, Any] = {}
    if plan.continues:
        # A state may have been saved by hand, without a contract; its keys are compared all the same.
        saved = restored.contract or {"keys": restored.streams}
        if "training" in saved and restored.hyperparameters:
            # As the state has them, since an earlier resume may have kept others than it was given.
            training = {**saved["training"], "hyperparameters": restored.hyperparameters}
            saved = {**saved, "training": training}
    contract = RunContract(
        base, source, saved=saved, lineage=_lineage(plan, restored), on_change=plan.on_change
    )
    contract.compare_before_compiling()
    return ResumedRun(restored.state, source, contract, restored.memory, plan)


def _restore(plan: ResumePlan, inputs: RunInputs, fresh: TrainState) -> tuple[Restored, AdaptedSource]:
    """What the run starts from, and the source that draws from its sampling key."""
    source = inputs.make_source(processes.to_local(fresh.sampling_key))
    # The states of adaptive samplers are part of what a checkpoint must fit.
    like = inputs.complete_state(fresh, source)
    restored = plan.restore(like)
    if plan.weights_only:
        restored = dataclasses.replace(restored, state=inputs.begin_at_weights(restored.state))
    if _streams(restored.state) != _streams(like):
        if plan.on_change == "warn":
            restored = dataclasses.replace(restored, state=_with_streams_of(restored.state, like))
        else:
            # The source is made again, from the saved key: the contract then names every change, and with
            # `fit_state` a state of another seed continues a run of this one.
            source = inputs.make_source(processes.to_local(restored.state.sampling_key))
    if plan.continues and plan.on_change == "warn":
        optimizer_state = run_contract.with_hyperparameters_of(
            like.optimizer_state, restored.state.optimizer_state
        )
        restored = dataclasses.replace(
            restored, state=restored.state.replace(optimizer_state=optimizer_state)
        )
    return restored, source


def _lineage(plan: ResumePlan, restored: Restored) -> Lineage:
    """Which run this is, and what it comes from."""
    before = dict(restored.contract.get("run", {}))
    # With the weights alone, nothing that happened to the other run concerns this one.
    changes = [] if plan.weights_only else list(before.get("changes", []))
    if plan.is_own_run:
        # A state that was saved by hand names no run; the steps before it do.
        known = None if plan.checkpoints is None else plan.checkpoints.run_id
        own = before.get("id") or known or uuid.uuid4().hex
        return Lineage(own, before.get("origin"), restored.step, changes)
    origin = None
    if plan.checkpoints is not None:
        origin = {
            "directory": str(plan.checkpoints.directory),
            "step": restored.step,
            "weights_only": plan.weights_only,
            "id": before.get("id"),
        }
    return Lineage(uuid.uuid4().hex, origin, None, changes)


def _with_streams_of(state: TrainState, other: TrainState) -> TrainState:
    """With `on_change="warn"`, the streams of this call replace those of the checkpoint."""
    return state.replace(
        rng_key=other.rng_key, sampling_key=other.sampling_key, balancer_key=other.balancer_key
    )


def _streams(state: TrainState) -> tuple[str, str]:
    return keys.fingerprint(state.sampling_key), keys.fingerprint(state.balancer_key)
