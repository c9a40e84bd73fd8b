"""The call of an optimizer, with the extra arguments that it wants and without those that it does not know.

    value                 the total loss at the parameters
    grad, grad_pt         its gradient
    value_fn, obj_fn      `params -> total loss`, on the batch and the key of this step
    grad_fn               `params -> gradient`
    residual_fn           `params -> {name: rows}`, where the module has residuals

An optimizer receives those that its `update` names, and all of them if `update` has `**extra_args`, as a
chain has, whose own transformations may want any of them. What one of these rejects is left out.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

from phijax_rng._base import validation
from phijax_rng._base.types import ModelState
from phijax_rng.training.module import LossModule

_OFFERED = ("value", "grad", "grad_pt", "value_fn", "obj_fn", "grad_fn")
_RESIDUALS = "residual_fn"

# As CPython words it; a chain passes everything on, and only the call shows what its parts reject.
_REJECTED = re.compile(r"got (?:an unexpected keyword argument|multiple values for keyword argument) '(\w+)'")
_MISSING = re.compile(r"missing \d+ required .*arguments?: (.*)")


def require_optimizer(optimizer: object, module: object) -> None:
    """Raises unless this object can be called as an optimizer with what is offered.

    Args:
        optimizer: what the user passed.
        module: a `LossModule`.

    Raises:
        TypeError: it is no optimizer, or its `update` requires other arguments.
    """
    has_residuals = isinstance(module, LossModule) and module.residuals is not None
    _extra_names(validation.optimizer(optimizer), has_residuals)


def require_fitting_optimizer(optimizer_state: object, params: ModelState) -> None:
    """Raises for optimizers that would need other parameters or other gradients.

    Args:
        optimizer_state: from `optimizer.init(params)`.
        params: the trainable leaves of the model state.

    Raises:
        TypeError: there is one, wherever chains and masks wrap it.
    """
    if _has(optimizer_state, optax.LookaheadState) and not isinstance(params, optax.LookaheadParams):
        raise TypeError(
            "optax.lookahead trains a pair of parameters, and the model state is no pair. Return "
            "optax.LookaheadParams.init_synced(params) from init, and use model_state.fast in losses."
        )
    if _has(optimizer_state, optax.contrib.DifferentiallyPrivateAggregateState):
        raise TypeError(
            "optax.contrib.differentially_private_aggregate needs a gradient for each row, and a LossModule "
            "has one for the batch. Pass a train_step of your own to fit_state."
        )


def optimizer_update(
    optimizer: Any,
    grads: Any,
    optimizer_state: Any,
    params: ModelState,
    *,
    value: jax.Array,
    value_fn: Callable[[ModelState], jax.Array],
    grad_fn: Callable[[ModelState], Any],
    residual_fn: Callable[[ModelState], Any] | None,
) -> tuple[Any, Any]:
    """The new parameters and the new optimizer state.

    Args:
        optimizer: an Optax `GradientTransformation`, or anything with its two functions.
        grads: the direction of steepest ascent, `None` where a leaf of the model state is not trainable.
        optimizer_state: from `optimizer.init(params)` or an earlier update.
        params: the trainable leaves of the model state.
        value: the objective at `params`.
        value_fn: the objective as a function of the parameters, on the batch and the key of this step.
        grad_fn: its gradient.
        residual_fn: the rows of the residuals; `None` where the module has none.

    Raises:
        TypeError: a part of the optimizer requires an argument that is not offered, or its state changes its
            structure.
    """
    offered = _offered(params, value, grads, value_fn, grad_fn)
    if residual_fn is not None:
        offered[_RESIDUALS] = lambda given: residual_fn(_filled(given, params))
    extra = {name: offered[name] for name in _extra_names(optimizer, _RESIDUALS in offered)}
    if _has(optimizer_state, optax.LookaheadState) and isinstance(grads, optax.LookaheadParams):
        grads = grads.fast  # the slow parameters follow the fast ones, and have no gradient
    # Optax promotes dtypes, which a user may forbid to code of their own.
    with jax.numpy_dtype_promotion("standard"):
        updates, following = _called(optimizer.update, (grads, optimizer_state, params), extra)
        params = optax.apply_updates(params, updates)
    # As text: JAX compares static metadata with the author's own `==`.
    if str(jax.tree.structure(following)) != str(jax.tree.structure(optimizer_state)):
        raise TypeError(
            "the optimizer's state has another structure after an update than before it, which a compiled "
            "loop cannot carry. Leave out the part that changes it; optax.monitor is one."
        )
    return params, following


def _offered(
    params: ModelState,
    value: jax.Array,
    grads: Any,
    value_fn: Callable[[ModelState], jax.Array],
    grad_fn: Callable[[ModelState], Any],
) -> dict[str, Any]:
    """The extra arguments of every update by name."""

    # Line searches pass arguments that they do not know to `value_fn`, and raise if it does not name them.
    def objective(
        given: ModelState,
        grad_pt: Any = None,
        obj_fn: Any = None,
        grad_fn: Any = None,
        residual_fn: Any = None,
    ) -> jax.Array:
        return value_fn(_filled(given, params))

    # `optax.contrib.sam` also passes the number of an inner step.
    def gradient(given: ModelState, *_: Any, **__: Any) -> Any:
        return _hidden(grad_fn(_filled(given, params)), given)

    both = {"grad": grads, "grad_pt": grads, "value_fn": objective, "obj_fn": objective}
    return {"value": value, **both, "grad_fn": gradient}


def _filled(given: ModelState, params: ModelState) -> ModelState:
    """What a mask hides from a transformation stays as it is."""
    return jax.tree.map(lambda new, old: old if _is_masked(new) else new, given, params, is_leaf=_is_masked)


def _hidden(grads: Any, given: ModelState) -> Any:
    return jax.tree.map(lambda new, grad: new if _is_masked(new) else grad, given, grads, is_leaf=_is_masked)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def _has(optimizer_state: object, kind: type) -> bool:
    nodes = jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def _extra_names(optimizer: Any, has_residuals: bool) -> list[str]:
    """The names of the extra arguments to pass.

    Raises:
        TypeError: `update` requires others, or does not take the usual three.
    """
    offered = (*_OFFERED, *((_RESIDUALS,) if has_residuals else ()))
    try:
        signature = inspect.signature(optimizer.update)
    except (TypeError, ValueError):  # some callables of compiled code have no signature
        return []
    parameters = list(signature.parameters.values())
    placed = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(placed) < 3 and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise TypeError(
            f"optimizer.update must take (gradients, optimizer_state, params), got {signature}. "
            "Fix its parameters."
        )
    named = [*placed[3:], *(one for one in parameters if one.kind is one.KEYWORD_ONLY)]
    missing = [one.name for one in named if one.default is one.empty and one.name not in offered]
    if missing:
        _refuse(validation.shown(missing), has_residuals)
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return list(offered)
    return [one.name for one in named if one.name in offered]


def _called(update: Callable[..., Any], arguments: tuple[Any, ...], extra: dict[str, Any]) -> Any:
    """`update` called with those of the extra arguments that it and its parts accept."""
    try:
        return update(*arguments, **extra)
    except TypeError as error:
        rejected = _REJECTED.search(str(error))
        if rejected and rejected[1] in extra:
            return _called(update, arguments, {name: extra[name] for name in extra if name != rejected[1]})
        missing = _MISSING.search(str(error))
        if missing:
            _refuse(missing[1], _RESIDUALS in extra)
        raise


def _refuse(missing: str, has_residuals: bool) -> None:
    if _RESIDUALS in missing and not has_residuals:
        raise TypeError(
            "the optimizer follows the rows of residuals, and the module has none. "
            "Pass LossModule(..., residuals=...)."
        )
    raise TypeError(
        f"the optimizer requires {missing}, and an update of a LossModule has "
        f"{validation.shown(_OFFERED)}. Call it in a train_step of your own, for fit_state."
    )
