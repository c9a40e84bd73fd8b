"""When an adaptive balancer updates its state: at absolute steps, inside the compiled loop.

    step -->  due?  --> batches (of the step, or fixed diagnostics) --> balancer.update --> balancer_state

The schedule and the diagnostic batches are arguments of the program, not constants: another schedule uses the
same program and changes no bit before the first step at which it differs. Which steps are due depends on
`state.step` alone, so a resumed run updates at the steps of the uninterrupted one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import keys
from phijax_rng._base import pytrees
from phijax_rng._base.types import KeyScalar, Rows, Step
from phijax_rng.sampling.adapters import adapt_source
from phijax_rng.sampling.protocols import TrainingBatchSource
from phijax_rng.state import TrainState
from phijax_rng.training.balancing.adapter import AdaptedBalancer, stays_finite
from phijax_rng.training.module import LossModule


class _Static:
    """Compares by identity, so that a balancer and a module with any `==` can be static metadata."""

    def __init__(self, balancer: AdaptedBalancer, module: LossModule):
        self.balancer = balancer
        self.module = module


@pytrees.record(data=("update_every_n_steps", "update_start_step", "batches"), meta=("names", "parts"))
class BalancerRefresh:
    """`(state, source) -> state`, with the balancer's state updated if an update is due.

    Attributes:
        update_every_n_steps: int32 of shape `()`.
        update_start_step: int32 of shape `()`.
        batches: the diagnostic batches, one entry for each of `names`; `None` for the batch of the step.
        names: their names in declaration order, which a dict would lose in JAX.
        parts: the balancer and the module.
    """

    def __init__(
        self,
        balancer: AdaptedBalancer,
        module: LossModule,
        batches: Mapping[str, Rows] | None = None,
    ):
        schedule = balancer.schedule
        assert schedule is not None, "a balancer without update has no refresh"
        # Arrays, hence arguments of the program: as Python ints they would be constants in its text.
        self.update_every_n_steps: Any = np.int32(schedule.every_n_steps)
        self.update_start_step: Any = np.int32(schedule.start_step)
        self.names = None if batches is None else tuple(batches)
        self.batches = None if batches is None else tuple(batches.values())
        self.parts = _Static(balancer, module)

    def is_due(self, step: Step) -> jax.Array:
        """Whether the balancer is updated before the update from this step; may be traced."""
        since = jnp.asarray(step, jnp.int32) - self.update_start_step
        return (since >= 0) & (since % self.update_every_n_steps == 0)

    def __call__(self, state: TrainState, source: TrainingBatchSource) -> TrainState:
        """The state that the update from `state.step` starts with. May be traced."""
        return self.checked(state, source)[0]

    def checked(self, state: TrainState, source: TrainingBatchSource) -> tuple[TrainState, jax.Array]:
        """The same, and whether the update was finite or not due: bool of shape `()`.

        A non-finite update is left out.
        """
        # A `cond`, so that steps without an update cost nothing.
        updated, finite = jax.lax.cond(
            self.is_due(state.step),
            lambda: self._updated(state, source),
            lambda: (state.balancer_state, jnp.asarray(True)),
        )
        return state.replace(balancer_state=updated), finite

    def _updated(self, state: TrainState, source: TrainingBatchSource) -> tuple[Any, jax.Array]:
        if self.batches is None:
            batches = adapt_source(source)(state.step, state.sampler_state)
        else:
            batches = dict(zip(self.names or (), self.batches, strict=True))
        # Training draws nothing from this stream, so an update moves no other random number.
        key = keys.fold_in(keys.stream(state.balancer_key, "balancer", "update"), state.step)
        old = state.balancer_state
        parts = self.parts
        new = parts.balancer.updated(parts.module, state.model_state, batches, key=key, state=old)
        finite = stays_finite(new, old)
        # Both branches exist already; selecting costs less than another `cond`.
        return jax.tree.map(lambda fresh, stale: jnp.where(finite, fresh, stale), new, old), finite


def make_refresh(
    balancer: AdaptedBalancer,
    module: LossModule,
    source: TrainingBatchSource,
    balancer_key: KeyScalar,
    batch_keys: tuple[str, ...],
    *,
    sampler_state: Mapping[str, Any] | None = None,
) -> BalancerRefresh | None:
    """The refresh of a balancer with `update`, with its diagnostic batches; `None` for another balancer.

    The batches are `source.sample(fold_in(balancer_key, 0), sizes)` at every step a run may start from.
    Adaptive samplers draw them from `sampler_state`.

    Raises:
        TypeError: sizes that are no numbers.
        ValueError: a source that cannot draw diagnostics, a size it cannot serve, a missing member.
    """
    if balancer.schedule is None:
        return None
    balancer.require_module(module)
    wanted = balancer.schedule.diagnostic_batch_sizes
    if wanted is None:
        return BalancerRefresh(balancer, module)
    sizes = wanted if isinstance(wanted, Mapping) else dict.fromkeys(batch_keys, wanted)
    source = adapt_source(source)
    if not source.can_sample:
        raise ValueError(
            f"the balancer needs diagnostic batches, and the source has no sample(key, batch_sizes), got "
            f"{source!r}. Give it one, or balance on the batches of the steps (diagnostic_batch_sizes=None)."
        )
    # 0 is part of the derivation that PhiJAX uses too; see the golden values.
    key = keys.fold_in(balancer_key, 0)
    return BalancerRefresh(balancer, module, source.sample(key, sizes, sampler_state))
