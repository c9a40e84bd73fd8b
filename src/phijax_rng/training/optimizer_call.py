"""The call of an Optax transformation, with the extra arguments that it may want."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from phijax_rng._base.types import ModelState


def optimizer_update(
    optimizer: Any,
    grads: Any,
    optimizer_state: Any,
    params: ModelState,
    *,
    value: jax.Array,
    value_fn: Callable[[ModelState], jax.Array],
) -> tuple[Any, Any]:
    """The new parameters and the new optimizer state.

    Args:
        optimizer: an Optax `GradientTransformation`.
        grads: the direction of steepest ascent, `None` where a leaf of the model state is not trainable.
        optimizer_state: from `optimizer.init(params)` or an earlier update.
        params: the trainable leaves of the model state.
        value: the objective at `params`.
        value_fn: the objective as a function of the parameters, on the batch and the key of this step.
    """
    # A plain transformation ignores the extra arguments; line searches evaluate `value_fn` themselves.
    updates, optimizer_state = optax.with_extra_args_support(optimizer).update(
        grads, optimizer_state, params, value=value, grad=grads, value_fn=value_fn
    )
    return optax.apply_updates(params, updates), optimizer_state
