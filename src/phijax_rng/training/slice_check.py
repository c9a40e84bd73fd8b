"""Whether losses in micro-batches are those of the whole batch: both are evaluated once, before training.

    whole    losses(first batch)                     once more with another key: does it draw?
    sliced   the same in micro-batches               once more with nudged parameters: is it rounding?

A loss that is a mean over rows, or is given as `(sum, weight)`, has one value either way. A maximum, a root
of a mean, a sum, or a mean over the labeled rows alone has another in slices, and so has its gradient. One
batch and the values alone are compared: losses that agree there by chance pass.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base.types import Batches, KeyScalar, Mask
from phijax_rng.devices.placement import Placement
from phijax_rng.state import TrainState, merge, trainable
from phijax_rng.training.loop import TrainLoop
from phijax_rng.training.microbatches import evaluated
from phijax_rng.training.step import LossTrainStep

_log = logging.getLogger("phijax_rng")

# How many times the effect of one rounding of every parameter two values may differ by.
_ROUNDINGS = 32


class _Probe:
    """A train step that evaluates the losses of a batch as a whole and in slices, and updates nothing.

    Attributes:
        replaces: whether the losses replace leaves of the model state, known once it is traced.
    """

    def __init__(self, step: LossTrainStep):
        self._step = step
        self.replaces = False

    def __call__(
        self, state: TrainState, batches: Batches, key: KeyScalar, mask: Mask | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        found: dict[str, jax.Array] = {}
        for kind, count in (("whole", 1), ("sliced", self._step.microbatches)):
            # A clone, since `jax_debug_key_reuse` allows one use of a key.
            own = jax.random.clone(key)
            replaced, losses, _ = evaluated(
                self._step.module, state.model_state, batches, own, mask, count=count
            )
            self.replaces |= bool(jax.tree.leaves(replaced))
            found |= {f"{kind}/{name}": loss for name, loss in losses.named().items()}
        return state.replace(step=state.step + 1), found


def require_equal_slices(
    step: LossTrainStep,
    state: TrainState,
    source: Any,
    placement: Placement,
    while_compiling: Callable[[], None] = lambda: None,
) -> None:
    """Raises if a loss of the next batch in micro-batches differs beyond rounding from that of the batch.

    It costs one compilation and two evaluations without gradients, of which one is in memory as a whole. Not
    compared: losses that draw from their key, that replace leaves of the model state (batch statistics), or
    that are not finite; and a batch that does not fit in memory as a whole.

    Args:
        step: with several micro-batches.
        state: what the run starts from.
        source: the compiled source, of the batch of `state.step`.
        placement: where the run trains.
        while_compiling: see `TrainLoop`.

    Raises:
        ValueError: there is such a loss.
    """
    probe = _Probe(step)
    try:
        loop = TrainLoop(
            probe,
            state,
            source,
            on_nonfinite="ignore",
            placement=placement,
            while_compiling=while_compiling,
        )
        _compare(probe, loop, state, step.microbatches)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _log.warning(
            "the first batch does not fit in memory as a whole, so its losses in %d micro-batches were not "
            "compared with it; check_microbatches=False leaves the comparison out",
            step.microbatches,
        )


def _compare(probe: _Probe, loop: TrainLoop, state: TrainState, count: int) -> None:
    whole, sliced = _losses(loop, state)
    differing = [name for name in whole if _differ(whole[name], sliced[name])]
    if not differing:
        return
    if probe.replaces:
        _log.info("losses replace leaves of the model state: micro-batches are not compared with the batch")
        return
    other_key = jax.random.key(1, impl=jax.random.key_impl(state.rng_key))
    redrawn, _ = _losses(loop, state.replace(rng_key=other_key))
    nudged = [_losses(loop, _nudged(state, sign))[0] for sign in (1, -1)]
    for name in differing:
        if float(redrawn[name]) != float(whole[name]):
            continue
        # Near the end of a training a loss may consist of rounding, which another shape of a batch changes.
        noise = max(abs(float(other[name]) - float(whole[name])) for other in nudged)
        if not abs(float(whole[name]) - float(sliced[name])) <= _ROUNDINGS * noise:
            raise ValueError(
                f"losses[{name!r}] of the first batch is {float(whole[name]):.6g}, and "
                f"{float(sliced[name]):.6g} in microbatches={count}. Return it as (sum, weight), both of "
                "them sums over rows, such as masked_sum(values, mask) or (jnp.sum(errors), len(errors)).\n"
                "Where each slice is meant to count for itself, pass Trainer(..., check_microbatches=False)."
            )


def _losses(loop: TrainLoop, state: TrainState) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The losses of the next batch, as a whole and in slices."""
    chunk = loop.run(loop.place(state), int(state.step) + 1)
    named = {name: values[0] for name, values in chunk.records.items()}

    def of(kind: str) -> dict[str, Any]:
        return {name.removeprefix(kind): value for name, value in named.items() if name.startswith(kind)}

    return of("whole/"), of("sliced/")


def _differ(whole: Any, sliced: Any) -> bool:
    """Whether two values differ by more than half of their digits; nothing compares with a loss of NaN."""
    if not math.isfinite(float(whole)):
        return False
    dtype = whole.dtype if jnp.issubdtype(whole.dtype, jnp.floating) else np.float32
    tolerance = math.sqrt(float(jnp.finfo(dtype).eps)) * abs(float(whole))
    return not abs(float(whole) - float(sliced)) <= tolerance


def _nudged(state: TrainState, sign: int) -> TrainState:
    """The state with every parameter one rounding away."""

    def nudge(leaf: jax.Array) -> jax.Array:
        eps = float(jnp.finfo(jnp.result_type(leaf)).eps)
        return leaf * jnp.asarray(1 + sign * eps, jnp.result_type(leaf))

    params = jax.tree.map(nudge, trainable(state.model_state))
    return state.replace(model_state=merge(params, state.model_state))
