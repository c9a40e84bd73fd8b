"""Registering checked, frozen dataclasses as pytrees.

`jax.tree_util.register_dataclass` rebuilds through `__init__`, so a constructor that checks its
arguments would run on tracers, abstract shapes and the placeholders JAX unflattens with.
`record` rebuilds without it: what was checked once at construction is carried, not checked again.
"""

from collections.abc import Callable
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
