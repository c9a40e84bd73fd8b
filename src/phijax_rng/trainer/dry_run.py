"""The first steps of a run, one by one under the recorder of an audit.

What `Trainer.fit` compiles into one program happens here op by op: the model is initialized, the source is
called for each step, the runtime key advances, the update is made, by the same functions on the same
keys. Every key has the name that the documentation gives it: `root.sampling.step[3].pde`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from phijax_rng import keys
from phijax_rng._base.types import Step
from phijax_rng.auditing.audit_report import AuditReport
from phijax_rng.auditing.session import Session
from phijax_rng.sampling.adapters import AdaptedSource, adapt_source
from phijax_rng.state import TrainState, advance
from phijax_rng.trainer.run_spec import FromSeed, RunSpec, require_batches, require_inside
from phijax_rng.training.adaptive_refresh import with_sampler_state

REUSABLE = ("root.sampling.stream('sampler', *)",)
"""Keys that are used at every step: a sampler that follows the step (`StepSampler`) has one for all steps."""

Refresh = Callable[[TrainState, Any], TrainState]
"""What a run calls before it draws the batch of a step: it updates a balancer or refreshes a sampler."""


def dry_run(
    spec: RunSpec,
    *,
    steps: int = 3,
    allow: Iterable[str] = (),
    make_refresh: Callable[[Any, TrainState], Refresh | None] | None = None,
) -> AuditReport:
    """The report of a run's initialization and first updates; its `result` is the train state after them.

    Args:
        spec: the inputs of the run, whose state is made from a seed.
        steps: how many updates.
        allow: see `auditing.audit`.
        make_refresh: `(source, state) -> refresh`, for tests; that of the spec for `None`.
    """
    assert isinstance(spec.initial, FromSeed)
    root = keys.root_key(spec.initial.seed)
    session = Session(names={"root": root}, allow=allow, reusable=REUSABLE)
    with session.observing():
        state = _initial_state(session, spec, root)
        source = spec.make_source(state.sampling_key)
        with session.request("what samplers start from"):
            state = with_sampler_state(state, source)
        source = source.prepare(spec.placement.host_device)
        require_inside(source)
        require_batches(source.names, spec.batch_keys)
        recorded = _RecordedSource(source.source, session)
        source = adapt_source(recorded)
        # Diagnostics draw from the first states of samplers, and make these again.
        with session.request("what samplers start from"):
            refresh = (make_refresh or spec.make_refresh)(source, state)
        update = spec.make_update()
        for step in range(steps):
            _name_step(session, source, state, step)
            recorded.step = step
            state = state if refresh is None else refresh(state, source)
            batches = source(step, state.sampler_state)
            state, key = advance(state)
            state, _ = update(state, batches, key)
    return session.report(state)


def _initial_state(session: Session, spec: RunSpec, root: jax.Array) -> TrainState:
    """The fresh state, with its four streams named before they are used."""
    streams = keys.split_root(root)
    for name in ("model", "runtime", "sampling", "balancer"):
        session.name(f"root.{name}", getattr(streams, name))
    return spec.initialize(streams)


class _RecordedSource:
    """A source whose calls the audit attributes to their step: a refresh may draw the batch of the step too.

    A call for another step than the current one is recorded like any other draw of the user's code.
    """

    def __init__(self, source: Callable[..., Any], session: Session):
        self.step = 0
        self._source = source
        self._session = session

    def __call__(self, step: Step, *states: Mapping[str, Any]) -> Any:
        if isinstance(step, jax.core.Tracer) or int(step) != self.step:
            return self._source(step, *states)
        with self._session.request(f"the batch of step {self.step}"):
            return self._source(step, *states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _name_step(session: Session, source: AdaptedSource, state: TrainState, step: int) -> None:
    """Names the keys of a step before they are used."""
    # Blinded: the recorder would take these derivations for draws of the run.
    with session.unobserved():
        session.name(f"root.sampling.step[{step}]", keys.step_key(state.sampling_key, step))
        for name, key in source.sampler_keys(step).items():
            session.name(f"root.sampling.step[{step}].{name}", key)
        following, key = advance(state)
        session.name(f"root.runtime.step[{step}]", key)
        session.name(f"root.runtime[{step + 1}]", following.rng_key)
