"""Refresh of the samplers that follow residuals, inside the compiled loop.

    before the batch of a step:  sampler.due(step, state)?  --yes-->  sampler.refresh(key, state, residuals)

The absolute step and the sampler's state decide whether a step refreshes. All randomness comes from
`fold_in(keys.stream(sampling_key, "adaptive", name), step)`. No step key and no runtime key is used, so a
refresh changes no other draw, and a resumed run refreshes at the steps of the uninterrupted one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from phijax_rng import keys
from phijax_rng._base import pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Rows, SamplerState
from phijax_rng.sampling.adapters import AdaptedSource, adapt_source
from phijax_rng.sampling.protocols import TrainingBatchSource
from phijax_rng.state import TrainState
from phijax_rng.training.module import LossModule

# Steps are below 2**31, so the key of `init` is never the key of a refresh.
_INIT = 2**31


@runtime_checkable
class Refresh(Protocol):
    """Replaces parts of the state before a batch is drawn; pure and traceable."""

    def __call__(self, state: TrainState, source: TrainingBatchSource) -> TrainState:
        """The state to draw the batch of `state.step` with."""
        ...


@runtime_checkable
class CheckedRefresh(Refresh, Protocol):
    """A refresh that also reports whether its new values are finite; one that is not is left out."""

    def checked(self, state: TrainState, source: TrainingBatchSource) -> tuple[TrainState, jax.Array]:
        """The state, and a bool of shape `()`."""
        ...


def with_sampler_state(state: TrainState, source: object) -> TrainState:
    """`state` with the initial state of every adaptive sampler of `source` that has none in it yet."""
    missing = {
        name: sampler.init(keys.fold_in(keys.stream(state.sampling_key, "adaptive", name), _INIT))
        for name, sampler in adapt_source(source).adaptive_samplers.items()
        if name not in state.sampler_state
    }
    if not missing:
        return state
    # `jax.tree.map` sorts the keys, as every compiled program does with a dict; the structures then agree.
    return state.replace(sampler_state=jax.tree.map(jnp.asarray, {**state.sampler_state, **missing}))


def adaptive_refresh(module: object, source: object) -> "AdaptiveRefresh | None":
    """The refresh of all adaptive samplers of a source; `None` without one."""
    names = tuple(adapt_source(source).adaptive_samplers)
    return AdaptiveRefresh(module, names) if names else None  # type: ignore[arg-type]  # checked there


def chained(*refreshes: Refresh | None) -> Refresh | None:
    """One refresh that runs these in order, without those that are `None`; `None` if all are."""
    # Without parts there is no refresh in the program at all, and its text is that of a plain run.
    parts = tuple(refresh for refresh in refreshes if refresh is not None)
    return _Chain(parts) if len(parts) > 1 else next(iter(parts), None)


@pytrees.record(data=("parts",))
@dataclasses.dataclass(frozen=True)
class _Chain:
    parts: tuple[Refresh, ...]

    def __call__(self, state: TrainState, source: TrainingBatchSource) -> TrainState:
        return self.checked(state, source)[0]

    def checked(self, state: TrainState, source: TrainingBatchSource) -> tuple[TrainState, jax.Array]:
        """The state, and whether the parts that check found their new values finite."""
        # Refreshes that check nothing count as finite, so the record has one entry however many there are.
        finite = jnp.asarray(True)
        for part in self.parts:
            if isinstance(part, CheckedRefresh):
                state, own = part.checked(state, source)
                finite = finite & own
            else:
                state = part(state, source)
        return state, finite


@pytrees.record(data=(), meta=("module", "names"))
@dataclasses.dataclass(frozen=True)
class AdaptiveRefresh:
    """`(state, source) -> state` with the sampler states that are due refreshed; may be traced.

    The residuals are `module.residuals` on the batches of this step, with the sampler's candidates in place
    of its own batch. The named residuals are put side by side; XLA drops the others.

    Attributes:
        module: its `residuals` are evaluated.
        names: the adaptive samplers to refresh, by name, each before the next.

    Raises:
        ValueError: the module has no residuals.
    """

    module: LossModule
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        assign(self, names=validation.names(self.names, "names"))
        if not isinstance(self.module, LossModule) or self.module.residuals is None:
            raise ValueError(
                f"samplers[{self.names[0]!r}] follows residuals, and the module has none. "
                "Pass LossModule(..., residuals=...)."
            )

    def __call__(self, state: TrainState, source: TrainingBatchSource) -> TrainState:
        """The state before the batch of `state.step` is drawn.

        Args:
            state: before the update of `state.step`.
            source: draws the batches; has the samplers of these names.
        """
        adapted = adapt_source(source)
        # One after the other, since the batches that residuals are taken on come from refreshed samplers.
        for name in self.names:
            state = self._refreshed(name, state, adapted)
        return state

    def _refreshed(self, name: str, state: TrainState, source: AdaptedSource) -> TrainState:
        if name not in state.sampler_state:
            raise ValueError(
                f"samplers[{name!r}] has a state, and state.sampler_state has "
                f"{validation.shown(state.sampler_state)}. "
                "Begin with refresh.with_sampler_state(state, source)."
            )
        sampler, own = source.adaptive_samplers[name], state.sampler_state[name]

        def refresh(own: SamplerState) -> Any:
            # From the absolute step, so that a resume at any step refreshes with the same key.
            key = keys.fold_in(keys.stream(state.sampling_key, "adaptive", name), state.step)
            sampler_key, residual_key = jax.random.split(key)
            batches = source(state.step, state.sampler_state)

            def residuals(rows: Rows) -> jax.Array:
                found = self.module.residual_rows(state.model_state, {**batches, name: rows}, residual_key)
                return _together(found, sampler.residual_names(name), rows)

            return sampler.refresh(sampler_key, own, residuals)

        # A `cond` and not a `where`: the residuals of the candidates are only computed at refresh steps.
        refreshed = jax.lax.cond(sampler.due(state.step, own), refresh, lambda own: own, own)
        return state.replace(sampler_state={**state.sampler_state, name: refreshed})


def _together(found: Mapping[str, jax.Array], names: tuple[str, ...], rows: Rows) -> jax.Array:
    """The named residuals side by side, shape `(rows, components)`."""
    count = jax.tree.leaves(rows)[0].shape[0]
    columns = []
    for name in names:
        if name not in found:
            raise ValueError(
                f"residuals returned {validation.shown(found)}, and {name!r} is wanted. "
                "Set the sampler's residual_names."
            )
        if jnp.ndim(found[name]) == 0 or jnp.shape(found[name])[0] != count:
            raise ValueError(
                f"residuals[{name!r}] must have one row for each of {count} points, got shape "
                f"{jnp.shape(found[name])}. Return it unreduced."
            )
        columns.append(jnp.reshape(found[name], (count, -1)))
    return jnp.concatenate(columns, axis=1)
