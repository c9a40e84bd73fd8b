"""Which leaves of the model state are variables: those that `losses` replaced.

A trainable leaf that comes back as another array keeps that array; the optimizer does not move it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from phijax_rng._base.types import ModelState
from phijax_rng.state import is_trainable, trainable


def none_of(model_state: ModelState) -> Any:
    """`model_state` with `None` in place of every leaf."""
    return jax.tree.map(lambda leaf: None, model_state)


def is_none(leaf: object) -> bool:
    """Whether the leaf is `None`; for `is_leaf`."""
    return leaf is None


def replaced_leaves(returned: ModelState | None, given: ModelState) -> Any:
    """The leaves of `returned` that differ in identity from those of `given`; `None` in place of the others.

    Identity is decided while tracing, so a `jit` or `checkpoint` around `losses` would replace every leaf.
    """
    if returned is None:
        return none_of(given)
    _require_same_structure(returned, given)

    def replaced(new: jax.Array, old: jax.Array) -> Any:
        return None if new is old else jax.lax.stop_gradient(jnp.asarray(new)) if is_trainable(old) else new

    variables = jax.tree.map(replaced, returned, given)
    num_trainable = len(jax.tree.leaves(trainable(given)))
    if num_trainable and num_trainable == len(jax.tree.leaves(trainable(variables))):
        raise ValueError(
            "losses returned a model_state in which every floating leaf was replaced, so nothing would be "
            "trained. Return the parameters unchanged, for example "
            "{**model_state, 'batch_stats': new}, "
            "with no jit or checkpoint around `losses`."
        )
    return variables


def _require_same_structure(returned: ModelState | None, given: ModelState) -> None:
    before, after = (str(jax.tree.structure(tree)) for tree in (given, returned))
    if before != after:
        raise ValueError(
            "losses returned a model_state of another structure\n"
            f"  given:    {before}\n"
            f"  returned: {after}\n"
            "Return the whole model state, with updated variables."
        )
