"""Attributes that are replaced for the length of an audit, and put back."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

disable_jit = jax.disable_jit
"""JAX's own, whatever stands in its place while an audit is open."""

WATCHED, BESIDE = -20, -21
"""Versions of XLA's profile that nobody has; below one they mean nothing to the compiler.

JAX's C++ code keeps the programs it has seen by a key that holds the version. So what runs watched, what
runs beside it unwatched, and what runs after it never find each other's programs.
"""


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """What is compiled in the block is not found by what is watched."""
    with importlib.import_module("jax._src.config").jax_xla_profile_version(BESIDE):
        yield


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
