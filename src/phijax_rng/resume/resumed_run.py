"""From a resume plan to a run that may train: restore, compare, commit.

    plan --> restore --> compare what is known --> compile --> compare program and canary --> commit

A fresh run goes the same way; it restores nothing, and nothing is compared.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

from phijax_rng import keys
from phijax_rng._base.types import KeyScalar
from phijax_rng.devices import processes
from phijax_rng.devices.placement import Placement
from phijax_rng.resume import run_contract
from phijax_rng.resume.plan import Restored, ResumePlan
from phijax_rng.resume.run_contract import RunContract
from phijax_rng.sampling.adapters import AdaptedSource
from phijax_rng.state import TrainState
from phijax_rng.training.adaptive_refresh import with_sampler_state


class RunInputs(Protocol):
    """What a resume needs to know of the inputs of a run."""

    @property
    def placement(self) -> Placement:
        """Where the run trains."""
        ...

    def make_source(self, sampling_key: KeyScalar) -> AdaptedSource:
        """The source that draws from this key; always the same one where the user passed a source."""
        ...

    def describe_training(self, state: TrainState) -> Mapping[str, Any]:
        """What decides the update, as plain data for the contract."""
        ...


@dataclasses.dataclass(frozen=True)
class ResumedRun:
    """A run that is restored and may train once it is committed.

    Attributes:
        state: the state it starts from.
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
        plan: from `plan.locked_plan`, while the directory is locked.
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
    contract = RunContract(base, source, plan, restored)
    contract.compare_before_compiling()
    return ResumedRun(restored.state, source, contract, restored.memory, plan)


def _restore(plan: ResumePlan, inputs: RunInputs, fresh: TrainState) -> tuple[Restored, AdaptedSource]:
    """What the run starts from, and the source that draws from its sampling key."""
    source = inputs.make_source(processes.to_local(fresh.sampling_key))
    # The states of adaptive samplers are part of what a checkpoint must fit.
    like = inputs.placement.place_if_distributed(with_sampler_state(fresh, source))
    restored = plan.restore(like)
    if _streams(restored.state) != _streams(like):
        if plan.on_change == "warn":
            restored = dataclasses.replace(restored, state=_with_streams_of(restored.state, like))
        else:
            # The source is made again, from the saved key: the contract then names every change, and with
            # `fit_state` a state of another seed continues a run of this one.
            source = inputs.make_source(processes.to_local(restored.state.sampling_key))
    return restored, source


def _with_streams_of(state: TrainState, other: TrainState) -> TrainState:
    """With `on_change="warn"`, the streams of this call replace those of the checkpoint."""
    return state.replace(
        rng_key=other.rng_key, sampling_key=other.sampling_key, balancer_key=other.balancer_key
    )


def _streams(state: TrainState) -> tuple[str, str]:
    return keys.fingerprint(state.sampling_key), keys.fingerprint(state.balancer_key)
