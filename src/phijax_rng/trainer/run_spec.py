"""The parts of one run, put together by the trainer, and what they promise."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng.devices import processes
from phijax_rng.devices.placement import Placement
from phijax_rng.resume import contract, environment, plan
from phijax_rng.sampling.adapters import AdaptedSource, adapt_source
from phijax_rng.state import TrainState
from phijax_rng.training.adaptive_refresh import adaptive_refresh, chained, with_sampler_state
from phijax_rng.training.balancing.adapter import adapt_balancer
from phijax_rng.training.balancing.schedule import make_refresh
from phijax_rng.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run: `streams` holds the keys that this call asked for."""

    module: Any
    train_step: TrainStep
    streams: TrainState
    state: TrainState
    source: AdaptedSource
    balancer: Any
    training: Mapping[str, Any]
    root: Any
    placement: Placement

    def prepared(self) -> "Run":
        """With the source prepared for the first device; the loop puts its own copy on every other one."""
        return dataclasses.replace(self, source=self.source.prepare(self.placement.home))

    def refresh(self) -> Any:
        """What renews parts of the state inside the loop: samplers, then the balancer; or `None`."""
        # Drawn once, on the host; of the state only keys and what samplers keep are read.
        state = self.state.replace(
            sampling_key=processes.local(self.state.sampling_key),
            balancer_key=processes.local(self.state.balancer_key),
        )
        return refresh_of(self.module, self.balancer, self.source, state)

    def contract(self, on_nonfinite: str, microbatches: int) -> dict[str, Any]:
        """What this run promises, as far as it is known before it compiles."""
        told = environment.describe(self.placement.home)
        told["machine"] = {**told["machine"], **self.placement.describe_state(self.state)}
        return contract.build(
            root=self.root,
            sampling_key=self.streams.sampling_key,
            balancer_key=self.streams.balancer_key,
            source=self.source,
            training={**self.training, "on_nonfinite": on_nonfinite, **_cut(microbatches)},
            environment=told,
        )


def refresh_of(module: Any, balancer: Any, source: AdaptedSource, state: TrainState) -> Any:
    """`(state, source) -> state` before each batch: the samplers, then the balancer; or `None`."""
    batch_keys = getattr(module, "batch_keys", ())
    # Diagnostic batches are the same wherever a run starts, so they come from the first states.
    first = with_sampler_state(state.replace(sampler_state={}), source).sampler_state
    balancing = make_refresh(
        adapt_balancer(balancer), module, source, state.balancer_key, batch_keys, sampler_state=first
    )
    return chained(adaptive_refresh(module, source), balancing)


def _cut(microbatches: int) -> dict[str, int]:
    """What the contract says of micro-batches: nothing where a batch is taken whole."""
    return {} if microbatches == 1 else {"microbatches": microbatches}


def described_training(module: Any, optimizer: Any, balancer: Any, state: TrainState) -> dict[str, Any]:
    """What decides the update, for the contract."""
    names = getattr(module, "loss_names", None) or getattr(balancer, "loss_names", None)
    return {
        "module": getattr(module, "name", type(module).__qualname__),
        "losses": None if names is None else list(names),
        "balancer": None if balancer is None else contract.describe_part(balancer),
        "optimizer": _kinds(state.optimizer_state),
    }


def _kinds(optimizer_state: Any) -> list[str]:
    """The names of the records in an optimizer's state, from the outside in."""
    if isinstance(optimizer_state, Mapping):
        return [kind for entry in optimizer_state.values() for kind in _kinds(entry)]
    if not isinstance(optimizer_state, (tuple, list)):
        return []
    own = [type(optimizer_state).__name__] if hasattr(optimizer_state, "_fields") else []
    # Below the records lie the user's parameters, which the restore compares leaf by leaf.
    return own or [kind for entry in optimizer_state for kind in _kinds(entry)]


def restored_with_source(
    start: plan.Start,
    fresh: TrainState,
    on_change: str,
    *,
    place: Placement,
    module: Any,
    datamodule: Any,
    source: Any = None,
) -> tuple[plan.Restored, AdaptedSource]:
    """The state to start from, and the source that draws from its sampling key."""
    batch_keys = getattr(module, "batch_keys", ())
    if datamodule is not None:
        source = datamodule.train_batch_source(batch_keys, processes.local(fresh.sampling_key))
    adapted = adapt_source(source)
    # What adaptive samplers keep is part of what a checkpoint must fit.
    fresh = place.ready(with_sampler_state(fresh, adapted))
    restored = _on_own_streams(start.restore(fresh), fresh, on_change)
    if datamodule is not None and _streams(restored.state) != _streams(fresh):
        again = datamodule.train_batch_source(batch_keys, processes.local(restored.state.sampling_key))
        adapted = adapt_source(again)
    return restored, adapted


def _on_own_streams(restored: plan.Restored, fresh: TrainState, on_change: str) -> plan.Restored:
    """With `on_change="warn"`, the streams of this call win over other ones in the checkpoint."""
    if on_change == "error" or _streams(restored.state) == _streams(fresh):
        return restored
    state = restored.state.replace(
        rng_key=fresh.rng_key, sampling_key=fresh.sampling_key, balancer_key=fresh.balancer_key
    )
    return dataclasses.replace(restored, state=state)


def _streams(state: TrainState) -> tuple[str, str]:
    return keys.fingerprint(state.sampling_key), keys.fingerprint(state.balancer_key)


def require_batches(source_names: tuple[str, ...] | None, batch_keys: tuple[str, ...]) -> None:
    """Raises unless the source has every batch that the module reads."""
    names = source_names or batch_keys
    missing = [name for name in batch_keys if name not in names]
    if missing:
        raise ValueError(
            f"the source has no batch {missing[0]!r}; it has {validation.shown(names)}, and the "
            "module's batch_keys are "
            f"{validation.shown(batch_keys)}. Make them agree."
        )


def require_inside(source: AdaptedSource) -> None:
    """Raises if a sampler follows residuals and is asked on the host, ahead of them."""
    _, inside = source.host_and_device_parts()
    drawn = {} if inside is None else inside.adaptive_samplers
    for name in source.adaptive_samplers:
        if name not in drawn:
            raise ValueError(
                f"samplers[{name!r}] follows residuals, and its source is asked on the host, ahead of the "
                "residuals. Draw it inside the loop: from a NamedBatchSource, or a traceable source."
            )
