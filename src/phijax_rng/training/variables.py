"""Which leaves of the model state are variables: those that `losses` replaced.

A trainable leaf that comes back as another array keeps that array; the optimizer does not move it. What
`losses` change in place (Flax NNX modules, dicts, lists) counts as replaced if it is returned, and is an
error if it is not. An `nnx.Param` trains in any case, as in a loop written with NNX: `nnx.jit` and
`nnx.remat` put new arrays into every Variable that they touch.
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


def separated(tree: ModelState) -> tuple[Any, Any]:
    """A tree like the model state in two: what is in an `nnx.Param`, and the rest; `None` elsewhere."""

    def pick(parameters: bool) -> Any:
        def select(node: Any) -> Any:
            return node if is_parameter_node(node) is parameters else jax.tree.map(lambda leaf: None, node)

        return jax.tree.map(select, tree, is_leaf=is_parameter_node)

    return pick(parameters=True), pick(parameters=False)


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

        Identity is decided while tracing: a `jit` or `checkpoint` around `losses` would replace every leaf.

        Raises:
            ValueError: a change in place is not returned, a constant or the structure changed, or every
                floating leaf is replaced.
        """
        self._require_same_structure(self.given, in_place=True)
        changed = self._changed(self.given)
        if returned is None:
            self._require_none_lost(changed)
            return jax.tree.unflatten(self.structure, [None] * len(self.leaves))
        self._require_same_structure(returned)
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
        trained = frozenset(jax.tree.leaves(separated(own)[0]))

        def kept(index: int) -> Any:
            if index not in replaced:
                return None
            # A parameter passes its gradient on: the next micro-batch is evaluated at the returned array.
            if index in trained or not is_trainable(self.leaves[index]):
                return new[index]
            return jax.lax.stop_gradient(jnp.asarray(new[index]))

        return jax.tree.unflatten(self.structure, [kept(index) for index in range(len(new))])

    def _paths(self, indices: Sequence[int]) -> str:
        paths = _leaf_paths(self.structure)
        return _shown([paths[index] for index in indices])

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
        num_replaced = len(jax.tree.leaves(trainable(separated(variables)[1])))
        if num_replaced and num_replaced == len(jax.tree.leaves(trainable(given))):
            raise ValueError(
                "losses returned a model_state in which every floating leaf was replaced, so nothing would "
                "be trained. Return the parameters unchanged, for example "
                "{**model_state, 'batch_stats': new}, "
                "with no jit or checkpoint around `losses`."
            )

    def _require_same_structure(self, tree: ModelState, *, in_place: bool = False) -> None:
        structure = jax.tree.structure(tree)
        # The text first: it ignores functions made anew. Only equality ignores the order of NNX's metadata.
        if str(structure) == str(self.structure) or structure == self.structure:
            return
        before, after = _leaf_paths(self.structure), _leaf_paths(structure)
        missing = [path for path in before if path not in after]
        added = [path for path in after if path not in before]
        if missing or added:
            found = f"{_shown(missing)} is missing, {_shown(added)} is new"
        else:
            found = "its containers, or fields that are no leaves (a mode, a name), are others"
        if in_place:
            raise ValueError(
                f"losses changed the structure of the model state in place: {found}. "
                "Change a copy, and set modes such as that of model.eval() in init."
            )
        raise ValueError(
            f"losses returned a model_state of another structure: {found}. "
            "Return the whole model state, with updated variables."
        )


def _leaf_paths(structure: Any) -> list[str]:
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [
        f"model_state{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _shown(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MOST_SHOWN} more" if len(paths) > _MOST_SHOWN else ""
    return (", ".join(paths[:_MOST_SHOWN]) or "nothing") + more


# Enough to recognize the layers.
_MOST_SHOWN = 6
