"""A balancer held to its protocol: at the door by shape, and wherever it is called.

    require_balancer    members, parameters, schedule; then every method that needs no model, on shapes
    initial_state, combined, shown_weights, observed, require_same_form
                        what its methods return, or an error that names balancer, method and what was wrong

What a method returns is checked where it is traced, so a wrong shape ends the fit before its first update
and never reaches a number of the run.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar
from phijax_rng.state import is_trainable
from phijax_rng.training.balancing.protocol import adapts, checked_sizes
from phijax_rng.training.module import array_type, is_array, scalars

_METHODS = {"initialize": (), "combine": ("losses", "state"), "diagnostics": ("state",)}
_OPTIONAL = {
    "observe": ("losses", "key", "state"),
    "update": ("module", "model_state", "batches", "key", "state"),
}


def require_balancer(balancer: Any, known: tuple[str, ...] | None = None, *, alone: bool = True) -> None:
    """Raises unless the balancer offers what `LossBalancer` asks for, and returns what it should.

    Args:
        balancer: one of the user's own, or one of ours.
        known: names of the losses, where they are known before the first trace.
        alone: whether the balancer combines all losses; with a custom train step it may know some.

    Raises:
        TypeError: a member is missing or of the wrong type, or a method returns what is no array.
        ValueError: a name, number or shape is wrong.
    """
    require_members(balancer)
    names = balancer.loss_names
    if names is not None:
        names = validation.names(names, "balancer.loss_names")
        _require_known(names, known, alone)
    schedule(balancer)
    state = initial_state(balancer)
    if adapts(balancer):
        jax.eval_shape(lambda state: shown_weights(balancer, state), state)
    if names or known:
        jax.eval_shape(lambda state: _first_total(balancer, names or known, state), state)


def require_members(balancer: Any) -> None:
    """Raises a TypeError unless it has the members of a `LossBalancer`, with the right parameters."""
    validation.instance(balancer, "balancer")
    missing = [name for name in ("loss_names", *_METHODS) if not hasattr(balancer, name)]
    if missing:
        raise TypeError(
            f"balancer must be a LossBalancer, got {balancer!r}, which has no {', no '.join(missing)}. "
            "Add what is missing, or use StaticLossBalancer."
        )
    for name, arguments in (_METHODS | _OPTIONAL).items():
        if name in _METHODS or getattr(balancer, name, None) is not None:
            validation.takes(getattr(balancer, name), f"balancer.{name}", *arguments)


def _require_known(names: tuple[str, ...], known: tuple[str, ...] | None, alone: bool) -> None:
    if known is None or set(names) == set(known) or (not alone and set(names) <= set(known)):
        return
    raise ValueError(
        f"the balancer's loss_names are {validation.shown(names)}, and the module's are "
        f"{validation.shown(known)}. "
        "Make them agree."
    )


def _first_total(balancer: Any, names: Any, state: Any) -> jax.Array:
    losses = dict.fromkeys(names, jnp.float32(1))
    if callable(getattr(balancer, "observe", None)):
        state = observed(balancer, losses, jax.random.key(0), state)
    return combined(balancer, losses, state)


def schedule(balancer: Any) -> tuple[int, int] | None:
    """`update_every_n_steps` and `update_start_step` of a balancer that offers `update`; else `None`.

    Raises:
        TypeError: a number is of the wrong type.
        ValueError: a number is out of range, or it does not say how often.
    """
    if not callable(getattr(balancer, "update", None)):
        return None
    if not hasattr(balancer, "update_every_n_steps"):
        raise ValueError(
            f"balancer offers update and must say how often, got {balancer!r}. Give it update_every_n_steps."
        )
    checked_sizes(getattr(balancer, "diagnostic_batch_sizes", None))
    every = validation.positive(balancer.update_every_n_steps, "balancer.update_every_n_steps")
    start = getattr(balancer, "update_start_step", None)
    return every, every if start is None else validation.step_number(start, "balancer.update_start_step")


def initial_state(balancer: Any) -> Any:
    """What a balancer keeps before the first step; nothing for `None`."""
    if balancer is None:
        return {}
    with _named(balancer, "initialize"):
        state = balancer.initialize()
    name = f"{_kind(balancer)}.initialize()"
    if state is None:
        raise TypeError(f"{name} must be a pytree of arrays, got None. Return {{}} to keep nothing.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not is_array(leaf):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise TypeError(f"{where} must be an array, got {leaf!r}. Return a pytree of arrays.")
    return state


def combined(balancer: Any, losses: Mapping[str, Any], state: Any) -> jax.Array:
    """The total of the losses, a real scalar."""
    with _named(balancer, "combine"):
        total = balancer.combine(losses, state)
    if is_array(total) and jnp.shape(total) == () and jnp.issubdtype(jnp.result_type(total), jnp.floating):
        return jnp.asarray(total)
    raise (ValueError if is_array(total) else TypeError)(
        f"{_kind(balancer)}.combine must return one real scalar, got {_shown(total)}. "
        "Mend it: its gradient is what trains the model."
    )


def shown_weights(balancer: Any, state: Any) -> dict[str, Any]:
    """What `diagnostics` tells of a state: real scalars by name, perhaps none."""
    with _named(balancer, "diagnostics"):
        shown = balancer.diagnostics(state)
    if isinstance(shown, Mapping) and not shown:
        return {}
    return dict(scalars(shown, f"{_kind(balancer)}.diagnostics"))


def observed(balancer: Any, losses: Mapping[str, Any], key: KeyScalar, state: Any) -> Any:
    """The state with the losses of a step taken in."""
    with _named(balancer, "observe"):
        new = balancer.observe(losses, key, state)
    require_same_form(new, state, f"{_kind(balancer)}.observe")
    return new


def updated(balancer: Any, module: Any, model_state: Any, batches: Any, *, key: KeyScalar, state: Any) -> Any:
    """The state that a scheduled update gives."""
    names = getattr(balancer, "loss_names", None)
    if names is not None and getattr(module, "loss_names", None) is None:
        found = jax.eval_shape(lambda: module.evaluate(model_state, batches, key).losses)
        _require_known(tuple(names), tuple(found), alone=False)
    with _named(balancer, "update"):
        new = balancer.update(module, model_state, batches, key, state)
    require_same_form(new, state, f"{_kind(balancer)}.update")
    return new


def require_same_form(new: Any, old: Any, method: str) -> None:
    """Raises unless a method gave back a state of the structure, shapes and dtypes it was given."""
    before, after = _outline(old), _outline(new)
    if before != after or str(jax.tree.structure(new)) != str(jax.tree.structure(old)):
        raise ValueError(
            f"{method} changed the form of the balancer's state\n"
            f"  given:    {before}\n"
            f"  returned: {after}\n"
            "Return every array that `initialize` gives, with its shape and dtype."
        )


def stays_finite(new: Any, old: Any) -> jax.Array:
    """Whether every number that is finite in `old` is finite in `new`; bool of shape `()`.

    What begins as infinite, as the best value so far may, is the balancer's own affair.
    """
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    kept = [jnp.all(jnp.isfinite(a) | ~jnp.isfinite(b)) for a, b in pairs if is_trainable(b)]
    return jnp.all(jnp.asarray(kept, bool))


def require_fitting_state(balancer: Any, state: Any) -> None:
    """Raises unless this is a state such as a balancer that adapts begins with."""
    if balancer is None or not adapts(balancer):
        return
    fresh = initial_state(balancer)
    wanted, given = _outline(fresh), _outline(state)
    if wanted != given or str(jax.tree.structure(fresh)) != str(jax.tree.structure(state)):
        raise ValueError(
            "state.balancer_state does not fit the balancer\n"
            f"  the balancer's: {wanted}\n"
            f"  given:          {given}\n"
            "Pass balancer.initialize() to initialize_train_state."
        )


@contextlib.contextmanager
def _named(balancer: Any, method: str) -> Iterator[None]:
    """A call of the user's code; its errors say whose they are."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {_kind(balancer)}.{method}")
        raise


def _kind(balancer: Any) -> str:
    return type(balancer).__name__


def _outline(tree: Any) -> str:
    """The arrays of a tree with their paths, for a message."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return repr(tree)
    return ", ".join(": ".join(filter(None, (jax.tree_util.keystr(p), array_type(v)))) for p, v in leaves)


def _shown(value: Any) -> str:
    """An array by its type, anything else as it is, unless it holds what is being traced."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    return (
        f"{_outline(value)} ({type(value).__name__})" if traced and not is_array(value) else array_type(value)
    )
