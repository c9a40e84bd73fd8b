"""The model state to evaluate: an average, where the run keeps one, in place of the point it trains at.

    optimizer                               evaluated
    LossTrainStep(ema_decay=...)            the exponential moving average
    optax.contrib.schedule_free*            the averaged sequence x; training is at y
    optax.lookahead                         the slow parameters, where the model state holds both
    anything else                           the model state itself

An average of gradients or updates (`optax.ema`, the moments of Adam) is none of these.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from phijax_rng._base.types import ModelState
from phijax_rng.state import TrainState, floating, merge, trainable
from phijax_rng.training.averaging import AveragedState, averaged_model

# Where these averages are among the arrays of a checkpoint, which outlives the classes.
_AVERAGE, _WEIGHT_SUM = "optimizer_state.average", ".weight_sum"


def evaluation_params(state: TrainState) -> ModelState:
    """The model state to evaluate and to use, with the structure and dtypes of `state.model_state`.

    It is what `Evaluate` and `Trainer.predict` take. Leaves without an average are those of the state;
    without any average it is `state.model_state` itself, the same object. The state of the optimizer is
    searched through chains, masks, partitions and other wrappers. May be traced.

    Args:
        state: of a run, with the state of its optimizer.

    Raises:
        ValueError: an average does not have the structure of the model state.
    """
    if isinstance(state.optimizer_state, AveragedState):
        # The average is of the points that were trained at, whatever the optimizer below keeps.
        return averaged_model(state)
    model_state = state.model_state
    for found in _schedule_free_states(state.optimizer_state):
        model_state = merge(_evaluated(found, trainable(model_state)), model_state)
    pairs = [node for node in jax.tree.leaves(model_state, is_leaf=_is_pair) if _is_pair(node)]
    return jax.tree.map(_slow, model_state, is_leaf=_is_pair) if pairs else model_state


def keeps_average(paths: Iterable[str]) -> bool:
    """Whether one of these arrays of a checkpoint is an average, so that `stored_averages` finds it."""
    return any(path.startswith(_AVERAGE) or path.endswith(_WEIGHT_SUM) for path in paths)


def stored_averages(arrays: Mapping[str, jax.Array], model_state: ModelState) -> Any:
    """The averages of an optimizer's state, out of the arrays of a checkpoint by path.

    Args:
        arrays: from `Checkpoints.arrays`.
        model_state: of the same step.

    Returns:
        A state of an optimizer that has them, and nothing else, for `evaluation_params`.
    """

    def tree_at(prefix: str) -> Any:
        def stored(path: Any, leaf: jax.Array) -> Any:
            where = prefix + jax.tree_util.keystr(path)
            if f"{where}.imaginary" in arrays:
                return arrays[f"{where}.real"] + 1j * arrays[f"{where}.imaginary"]
            return arrays.get(where, optax.MaskedNode())

        return jax.tree_util.tree_map_with_path(stored, floating(model_state))

    if any(path.startswith(_AVERAGE) for path in arrays):
        return AveragedState(None, tree_at(_AVERAGE), arrays["optimizer_state.weight"])
    states = [path.removesuffix(_WEIGHT_SUM) for path in arrays if path.endswith(_WEIGHT_SUM)]
    nothing = dict.fromkeys(optax.contrib.ScheduleFreeState._fields)
    return [
        optax.contrib.ScheduleFreeState(**{**nothing, "b1": arrays[f"{at}.b1"], "z": tree_at(f"{at}.z")})
        for at in states
    ]


def _schedule_free_states(optimizer_state: object) -> list[optax.contrib.ScheduleFreeState]:
    """Every schedule-free state, wherever other transformations wrap it."""
    nodes = jax.tree.leaves(optimizer_state, is_leaf=_is_schedule_free)
    return [node for node in nodes if _is_schedule_free(node)]


def _evaluated(found: optax.contrib.ScheduleFreeState, params: Any) -> Any:
    """The trainable leaves to evaluate, those that a mask hides from this state as they are."""
    try:
        z = jax.tree.map(_joined, found.z, is_leaf=_is_split)
        seen = jax.tree.map(lambda z, leaf: z if _is_masked(z) else leaf, z, params, is_leaf=_is_masked)
        averaged = optax.contrib.schedule_free_eval_params(found._replace(z=z), seen)
        return jax.tree.map(_in_place, averaged, params, is_leaf=_is_masked)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "the state of optax.contrib.schedule_free does not have the structure of model_state, so the "
            "parameters to evaluate are unknown. Use the optimizer that the state was initialized with."
        ) from error


def _in_place(averaged: Any, leaf: Any) -> Any:
    return leaf if _is_masked(averaged) else averaged.astype(jnp.result_type(leaf))


def _joined(node: Any) -> Any:
    return node.real + 1j * node.imaginary if _is_split(node) else node


def _slow(node: Any) -> Any:
    # Both of them: a module that reads `fast` for its losses is evaluated at the slow parameters.
    return optax.LookaheadParams(fast=node.slow, slow=node.slow) if _is_pair(node) else node


def _is_schedule_free(node: object) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_pair(node: object) -> bool:
    return isinstance(node, optax.LookaheadParams)


def _is_split(node: object) -> bool:
    # By its name: Optax does not export the class that `split_real_and_imaginary` makes of complex leaves.
    return type(node).__name__ == "SplitRealAndImaginaryArrays"
