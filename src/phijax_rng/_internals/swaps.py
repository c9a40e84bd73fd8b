"""Attributes that are replaced for the length of an audit, and put back."""

from collections.abc import Callable
from typing import Any

import jax

disable_jit = jax.disable_jit
"""JAX's own, whatever stands in its place while an audit is open."""

Internals = dict[str, Any]
"""The modules of `jax._src` by name."""


class Swaps:
    """Attributes replaced for a while; `restore` puts all of them back, newest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` is `value` from now on."""
        own = vars(owner)
        if name in own:
            before = own[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Every attribute is what it was."""
        while self._undo:
            self._undo.pop()()
