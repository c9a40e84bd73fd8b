"""Which leaves of the model state are variables: those that `losses` replaced.

A trainable leaf that comes back as another array keeps that array; the optimizer does not move it. What
`losses` change in place (Flax NNX modules, dicts, lists) counts as replaced if it is returned, and is an error
if it is not. An `nnx.Param` trains in any case, as in a loop written with NNX: `nnx.jit` and `nnx.remat` put
new arrays into every Variable that they touch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phijax_rng._base.model_leaves import is_array, is_parameter_node, is_trainable, unchanged
from phijax_rng._base.types import ModelState
from phijax_rng.state import trainable


def none_of(model_state: ModelState) -> Any:
    """`model_state` with `None` in place of every leaf."""
    return jax.tree.map(lambda leaf: None, model_state)


def is_none(leaf: object) -> bool:
    """Whether the leaf is `None`; for `is_leaf`."""
    return leaf is None


def parameters_of(model_state: ModelState) -> Any:
    """`model_state` with `None` for every leaf that is not in an `nnx.Param`."""
    return jax.tree.map(
        lambda node: node if is_parameter_node(node) else None, model_state, is_leaf=is_parameter_node
    )


@dataclasses.dataclass(frozen=True)
class Before:
    """The leaves of a model state before `losses` got it.

    Attributes:
        given: the object that `losses` get.
        leaves: of it, before the call.
        structure: of it, before the call.
    """

    given: ModelState
    leaves: Sequence[Any]
    structure: Any

    @classmethod
    def of(cls, given: ModelState) -> "Before":
        """What `losses` will be given."""
        return cls(given, *jax.tree.flatten(given))

    def replaced(self, returned: ModelState | None) -> Any:
        """The leaves that `losses` replaced; `None` in place of the others.

        Identity is decided while tracing, so a `jit` or `checkpoint` around `losses` would replace every leaf.

        Raises:
            ValueError: a change in place is not returned, a constant or the structure changed, or every
                floating leaf is replaced.
        """
        self._require_same_structure(self.given, "changed the model state in place, into one")
        changed = self._changed(self.given)
        if returned is None:
            self._require_none_lost(changed)
            return jax.tree.unflatten(self.structure, [None] * len(self.leaves))
        self._require_same_structure(returned, "returned a model_state")
        new = jax.tree.leaves(returned)
        self._require_none_lost([i for i in changed if unchanged(new[i], self.leaves[i])])
        replaced = self._changed(returned)
        self._require_arrays(replaced)
        variables = self._variables(new, frozenset(replaced))
        self._require_parameters(variables)
        return variables

    def _changed(self, tree: ModelState) -> list[int]:
        pairs = zip(jax.tree.leaves(tree), self.leaves, strict=True)
        return [i for i, (new, old) in enumerate(pairs) if not unchanged(new, old)]

    def _variables(self, new: Sequence[Any], replaced: frozenset[int]) -> Any:
        own = jax.tree.unflatten(self.structure, range(len(new)))
        trained = frozenset(jax.tree.leaves(parameters_of(own)))

        def kept(index: int) -> Any:
            if index not in replaced:
                return None
            # A parameter passes its gradient on: the next micro-batch is evaluated at the returned array.
            if index in trained or not is_trainable(self.leaves[index]):
                return new[index]
            return jax.lax.stop_gradient(jnp.asarray(new[index]))

        return jax.tree.unflatten(self.structure, [kept(index) for index in range(len(new))])

    def _paths(self, indices: Sequence[int]) -> str:
        tree = jax.tree.unflatten(self.structure, self.leaves)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        shown = ", ".join(f"model_state{paths[i]}" for i in indices[:_MOST_SHOWN])
        return shown + (f" and {len(indices) - _MOST_SHOWN} more" if len(indices) > _MOST_SHOWN else "")

    def _require_none_lost(self, changed: Sequence[int]) -> None:
        if changed:
            raise ValueError(
                f"losses changed leaves of the model state in place and did not return them: "
                f"{self._paths(changed)}. Return StepOutput(losses, model_state=...) with the changed model, "
                "or change a copy."
            )

    def _require_arrays(self, replaced: Sequence[int]) -> None:
        constants = [i for i in replaced if not is_array(self.leaves[i])]
        if constants:
            raise ValueError(
                f"losses replaced leaves of the model state that are no arrays: {self._paths(constants)}. "
                "A compiled step keeps them as they are; make them arrays, for example with jnp.asarray."
            )

    def _require_parameters(self, variables: Any) -> None:
        given = jax.tree.unflatten(self.structure, self.leaves)
        num_trainable = len(jax.tree.leaves(trainable(given)))
        num_replaced = len(jax.tree.leaves(trainable(variables)))
        if num_trainable == num_replaced > len(jax.tree.leaves(trainable(parameters_of(variables)))):
            raise ValueError(
                "losses returned a model_state in which every floating leaf was replaced, so nothing would be "
                "trained. Return the parameters unchanged, for example "
                "{**model_state, 'batch_stats': new}, "
                "with no jit or checkpoint around `losses`."
            )

    def _require_same_structure(self, tree: ModelState, what: str) -> None:
        before, after = str(self.structure), str(jax.tree.structure(tree))
        if before != after:
            raise ValueError(
                f"losses {what} of another structure\n"
                f"  given:    {before}\n"
                f"  returned: {after}\n"
                "Return the whole model state, with updated variables."
            )


# Enough to recognize the layers.
_MOST_SHOWN = 6
