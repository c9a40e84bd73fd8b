"""Attributes that are replaced for the length of an audit, and put back."""

from collections.abc import Callable

import jax

# JAX's own function: `compiled` replaces `jax.disable_jit` while an audit runs.
disable_jit = jax.disable_jit


class Swaps:
    """Attributes replaced for a while; `restore` puts all of them back, newest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """`owner.name` is `value` from now on."""
        attributes = vars(owner)
        if name in attributes:
            before = attributes[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            # An instance hides the attribute of its class; to delete it shows the class's again.
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Every attribute is what it was."""
        while self._undo:
            self._undo.pop()()
