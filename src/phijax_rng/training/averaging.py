"""An exponential moving average of the model state, kept beside the optimizer's state.

    weight_t = decay * weight_(t-1) + 1              the sum of 1, decay, decay**2, ... over t updates
    average_t = average_(t-1) + (model_t - average_(t-1)) / weight_t

This is the mean of the states after each update, the newest with weight 1, the one before with `decay`, and
so on. The initial parameters have no part in it (the "debiased" average), so it is ready after one update.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base.types import ModelState
from phijax_rng.state import TrainState, floating, merge


class AveragedState(NamedTuple):
    """`TrainState.optimizer_state` of a run that averages its parameters.

    Attributes:
        optimizer_state: what the optimizer keeps.
        average: the average of the floating and complex leaves of the model state, batch statistics among
            them, `None` in place of the others; the initial values before the first update. Half-precision
            leaves are averaged in float32: their own precision would lose small steps.
        weight: float32 of shape `()`, the sum of the weights so far; 0 before the first update.
    """

    optimizer_state: Any
    average: Any
    weight: jax.Array


def with_average(state: TrainState) -> TrainState:
    """`state` with an average that starts here, for a `LossTrainStep` with `ema_decay`."""
    average = jax.tree.map(lambda leaf: jnp.array(leaf, _precise(leaf)), floating(state.model_state))
    # NumPy, since a Python float would have a weak type, and a second one would compile a second program.
    kept = AveragedState(state.optimizer_state, average, jnp.asarray(np.float32(0)))
    return state.replace(optimizer_state=kept)


def averaged(
    before: AveragedState, optimizer_state: object, model: ModelState, decay: float
) -> AveragedState:
    """The state after an update that led to this model and optimizer state. May be traced."""
    weight = np.float32(decay) * before.weight + np.float32(1)
    share = 1 / weight

    def mixed(old: jax.Array, new: jax.Array) -> jax.Array:
        new = _widened(jnp.asarray(new), old.dtype)
        moved = old + share.astype(jnp.finfo(old.dtype).dtype) * (new - old)
        # The first update replaces the initial value, whatever it was. A leaf that was infinite (a constant
        # mask, a best value) has no mean, so the newest value stands.
        return jnp.where((share < 1) & jnp.isfinite(old), moved, new)

    return AveragedState(optimizer_state, jax.tree.map(mixed, before.average, floating(model)), weight)


def averaged_model(state: TrainState) -> ModelState:
    """The model state with the average in place of what was averaged, in the dtypes of the model.

    Raises:
        TypeError: the state has no average.
    """
    kept = state.optimizer_state
    if not isinstance(kept, AveragedState):
        raise TypeError("the state has no average of its parameters. Train it with ema_decay.")

    def chosen(average: jax.Array, leaf: jax.Array) -> jax.Array:
        # Before the first update the model may be another one than it was when the average was made: weights
        # that were restored alone.
        return jnp.where(kept.weight > 0, average.astype(jnp.result_type(leaf)), leaf)

    return merge(jax.tree.map(chosen, kept.average, floating(state.model_state)), state.model_state)


def optimizer_part(optimizer_state: Any, ema_decay: float | None) -> Any:
    """The optimizer's own part of a state, which has an average if and only if there is a decay.

    Raises:
        ValueError: it has one without a decay, or none with one.
    """
    if isinstance(optimizer_state, AveragedState):
        if ema_decay is None:
            raise ValueError(
                "the state has an average of its parameters, and ema_decay is None. Pass the decay of the "
                "run, or drop the average: optimizer_state=state.optimizer_state.optimizer_state."
            )
        return optimizer_state.optimizer_state
    if ema_decay is not None:
        raise ValueError(
            f"ema_decay={ema_decay} averages the parameters, and the state has no average. "
            "Pass training.with_average(state)."
        )
    return optimizer_state


def _widened(leaf: jax.Array, dtype: Any) -> jax.Array:
    """`leaf` in the dtype of its average."""
    if leaf.dtype == dtype:
        return leaf
    # XLA may drop the rounding of a new parameter to half precision, and average a number that no state has.
    bits = jnp.finfo(leaf.dtype)
    return jax.lax.reduce_precision(leaf.astype(dtype), exponent_bits=bits.nexp, mantissa_bits=bits.nmant)


def _precise(leaf: jax.Array) -> Any:
    dtype = jnp.result_type(leaf)
    return jnp.float32 if dtype.itemsize < np.dtype(np.float32).itemsize else dtype
