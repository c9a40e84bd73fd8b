"""The first steps of a run, taken one by one under the eyes of an audit.

What `Trainer.fit` compiles into one program is done here in the open: the model is initialized, the
source asked for each step, the runtime key advanced, the update made, by the same functions on the same
keys. Every key has the name that the documentation gives it: `root.sampling.step[3].pde`.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from phijax_rng import keys
from phijax_rng.auditing.audit import AuditReport
from phijax_rng.auditing.session import Session
from phijax_rng.devices.placement import Placement, resolve
from phijax_rng.sampling.adapters import AdaptedSource, adapt_source
from phijax_rng.state import TrainState, advance, initialize_train_state
from phijax_rng.trainer.run_spec import refresh_of, require_batches, require_inside
from phijax_rng.training.adaptive_refresh import with_sampler_state
from phijax_rng.training.balancing.adapter import adapt_balancer
from phijax_rng.training.step import LossTrainStep

KEPT = ("root.sampling.stream('sampler', *)",)
"""Keys that serve every step: a sampler that follows the step (`StepSampler`) has one for all of them."""

Refresh = Callable[[TrainState, Any], TrainState]
"""What a run does before it draws the batch of a step: update a balancer, refresh a sampler."""


def rehearse(
    module: Any,
    *,
    datamodule: Any,
    optimizer: Any,
    seed: Any = 42,
    balancer: Any = None,
    microbatches: int = 1,
    steps: int = 3,
    make_refresh: Callable[[Any, TrainState], Refresh | None] | None = None,
    allow: Iterable[str] = (),
    placement: Placement | None = None,
) -> AuditReport:
    """The report of a run's initialization and first updates; its `result` is the train state after them."""
    root = keys.root_key(seed)
    home = (placement or resolve()).home
    session = Session(names={"root": root}, allow=allow, kept=KEPT)
    with session.observing():
        streams = keys.split_root(root)
        for name in ("model", "runtime", "sampling", "balancer"):
            session.name(f"root.{name}", getattr(streams, name))
        balancer_state = adapt_balancer(balancer).initial_state()
        model_state = module.init(streams.model)
        state = initialize_train_state(model_state, optimizer, balancer_state, streams)
        source = adapt_source(datamodule.train_batch_source(module.batch_keys, state.sampling_key))
        with session.asked("what samplers start from"):
            state = with_sampler_state(state, source)
        watched = _Asked(_admitted(source, module.batch_keys, home).source, session)
        source = adapt_source(watched)
        # Diagnostics draw from what samplers start from, and draw that anew.
        with session.asked("what samplers start from"):
            refresh = (make_refresh or functools.partial(refresh_of, module, balancer))(source, state)
        update = LossTrainStep(module, optimizer, balancer, microbatches)
        for step in range(steps):
            _name_step(session, source, state, step)
            watched.step = step
            state = state if refresh is None else refresh(state, source)
            batches = source(step, state.sampler_state)
            state, key = advance(state)
            state, _ = update(state, batches, key)
    return session.report(state)


class _Asked:
    """A source that tells the audit what it is asked for: a refresh asks for the batch of its step as well.

    Only the step that is rehearsed counts; a request for another one is the user's own affair.
    """

    def __init__(self, source: Any, session: Session):
        self.step = 0
        self._source = source
        self._session = session

    def __call__(self, step: Any, *states: Any) -> Any:
        if isinstance(step, jax.core.Tracer) or int(step) != self.step:
            return self._source(step, *states)
        with self._session.asked(f"the batch of step {self.step}"):
            return self._source(step, *states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _admitted(source: AdaptedSource, batch_keys: tuple[str, ...], home: Any) -> AdaptedSource:
    """The source by the door of `fit`: prepared, or refused with the same words."""
    source = source.prepare(home)
    require_inside(source)
    require_batches(source.names, batch_keys)
    return source


def _name_step(session: Session, source: AdaptedSource, state: TrainState, step: int) -> None:
    """Names the keys of a step before they are used."""
    with session.unobserved():
        session.name(f"root.sampling.step[{step}]", keys.step_key(state.sampling_key, step))
        for name, key in source.sampler_keys(step).items():
            session.name(f"root.sampling.step[{step}].{name}", key)
        following, key = advance(state)
        session.name(f"root.runtime.step[{step}]", key)
        session.name(f"root.runtime[{step + 1}]", following.rng_key)
