"""Registering checked, frozen dataclasses as pytrees.

`jax.tree_util.register_dataclass` rebuilds through `__init__`, so a constructor that checks its
arguments would run on tracers, abstract shapes and the placeholders JAX unflattens with.
`record` rebuilds without it: what was checked once at construction is carried, not checked again.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")


@jax.tree_util.register_static
class Static(Generic[T]):
    """Identity-compared wrapper, so that any object can be static pytree metadata.

    It is a pytree without leaves. A program that depends on the value is found again for the same object,
    whatever the object's own `==` and `hash` do.
    """

    def __init__(self, value: T):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Carried:
    """Leaves that are no arrays, taken out of a pytree so that they can be static metadata of one.

    Plain values are compared by value, all else by identity.

    Attributes:
        structure: of the whole pytree.
        leaves: their number among all leaves, and the leaf.
    """

    def __init__(self, structure: Any, leaves: tuple[tuple[int, Any], ...]):
        self.structure = structure
        self.leaves = leaves

    def joined(self, arrays: Any) -> Any:
        """The whole pytree: these leaves, and the arrays of a tree that has `None` in their place."""
        leaves = self.structure.flatten_up_to(arrays)
        for index, leaf in self.leaves:
            leaves[index] = leaf
        return jax.tree.unflatten(self.structure, leaves)

    def taken_from(self, whole: Any) -> "tuple[Any, Carried] | None":
        """`whole` without its leaves at these places, and those; `None` if it has another structure."""
        leaves, structure = jax.tree.flatten(whole)
        if structure != self.structure:
            return None
        taken = tuple((index, leaves[index]) for index, _ in self.leaves)
        for index, _ in taken:
            leaves[index] = None
        return jax.tree.unflatten(structure, leaves), Carried(structure, taken)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Carried) or len(self.leaves) != len(other.leaves):
            return False
        pairs = zip(self.leaves, other.leaves, strict=True)
        return self.structure == other.structure and all(
            i == j and same_value(a, b) for (i, a), (j, b) in pairs
        )

    def __hash__(self) -> int:
        return hash(tuple((i, type(leaf), leaf if type(leaf) is str else None) for i, leaf in self.leaves))

    def __repr__(self) -> str:
        return f"Carried({', '.join(repr(leaf) for _, leaf in self.leaves)})"


def same_value(new: object, old: object) -> bool:
    """Whether two constants are the same object, or equal plain values (0.0 is not -0.0, nor 1 True)."""
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    # Bound methods are made anew at each access.
    plain = isinstance(new, (bool, int, float, complex, str, bytes))
    return repr(new) == repr(old) if plain else isinstance(new, MethodType) and new == old


def record(data: tuple[str, ...], meta: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """A class decorator: `data` attributes are children, `meta` attributes static and hashable."""

    def register(cls: type[T]) -> type[T]:
        def flatten_with_keys(node: T) -> tuple[Any, Any]:
            children = tuple((jax.tree_util.GetAttrKey(n), getattr(node, n)) for n in data)
            return children, tuple(getattr(node, n) for n in meta)

        def flatten(node: T) -> tuple[Any, Any]:
            return tuple(getattr(node, n) for n in data), tuple(getattr(node, n) for n in meta)

        def unflatten(static: Any, children: Any) -> T:
            node = object.__new__(cls)
            for name, value in zip((*data, *meta), (*children, *static), strict=True):
                object.__setattr__(node, name, value)
            return node

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return register
