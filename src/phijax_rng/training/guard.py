"""Finds updates that turn finite numbers non-finite: in a loss, the model or the optimizer's state.

Constants that were never finite (a mask of -inf) and the initial values of an optimizer (the infinite best
value of a plateau schedule) are no event. A call of the compiled loop therefore starts with the pattern of
non-finite entries, and each update is compared with it. A call ends where the pattern changes: so it is
always the pattern before the update, wherever a call began, and no update needs the state before it.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from phijax_rng._base.model_leaves import is_trainable
from phijax_rng.state import TrainState

# The balancer's state has a rule of its own: see `balancing.adapter.stays_finite`. Samplers' states change
# before an update, not by it.
_WATCHED = ("model_state", "optimizer_state")


def nonfinite_pattern(state: TrainState, together: int) -> list[jax.Array]:
    """Which watched entries of a state are non-finite.

    Args:
        state: before an update.
        together: arrays of at most so many elements are tested as one, since in a small step starting a
            kernel for each costs more than its work.
    """
    return [zeros != 0 for zeros in _rows(state, together)]


def change_of_pattern(state: TrainState, pattern: list[jax.Array], together: int) -> jax.Array:
    """How a state differs from a pattern, float32 of shape `()`.

    Returns:
        0 if it has the pattern, NaN if a number became non-finite, else how many became finite.
    """
    # One sum for both answers: `x * 0` is 0 only for finite x, and its sum is faster than `isfinite`.
    sums = [
        jnp.sum(jnp.where(before, (zeros == 0).astype(jnp.float32), zeros))
        for zeros, before in zip(_rows(state, together), pattern, strict=True)
    ]
    return sum(sums, jnp.float32(0))


def all_finite(scalars: Iterable[jax.Array]) -> jax.Array:
    """Whether every one of these scalars is finite."""
    return sum(map(_zeros, scalars), jnp.float32(0)) == 0


def turned(before: TrainState, after: TrainState) -> jax.Array:
    """In which watched leaves a finite entry became non-finite; bool of shape `(leaves,)`, traceable."""
    pairs = zip(_watched(before), _watched(after), strict=True)
    found = [jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new)) for old, new in pairs if is_trainable(old)]
    return jnp.stack(found) if found else jnp.zeros(0, bool)


def watched_paths(state: TrainState) -> tuple[str, ...]:
    """The paths of the leaves that `turned` looks at, in its order."""
    return tuple(
        name + keystr(path)
        for name in _WATCHED
        for path, leaf in tree_leaves_with_path(getattr(state, name))
        if is_trainable(leaf)
    )


def turned_leaves(before: TrainState, after: TrainState) -> tuple[str, ...]:
    """Paths of the watched leaves in which a finite entry became non-finite."""
    paths = []
    for name in _WATCHED:
        new = jax.tree.leaves(getattr(after, name))
        for (path, old), leaf in zip(tree_leaves_with_path(getattr(before, name)), new, strict=True):
            if is_trainable(old) and bool(_turned(old, leaf)):
                paths.append(name + keystr(path))
    return tuple(paths)


@jax.jit
def _turned(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new))


def _watched(state: TrainState) -> list[jax.Array]:
    return [leaf for name in _WATCHED for leaf in jax.tree.leaves(getattr(state, name))]


def _rows(state: TrainState, together: int) -> list[jax.Array]:
    """`x * 0` of every watched entry: the small arrays in one row, then each other array."""
    arrays = [leaf for leaf in _watched(state) if is_trainable(leaf)]
    small = [jnp.ravel(_zeros(array)) for array in arrays if array.size <= together]
    rows = [jnp.concatenate(small)] if small else []
    return rows + [_zeros(array) for array in arrays if array.size > together]


def _zeros(array: jax.Array) -> jax.Array:
    """`x * 0` of every element, as float32."""
    zeros = array * 0
    return (jnp.abs(zeros) if jnp.iscomplexobj(zeros) else zeros).astype(jnp.float32)
