"""Who is told of the random primitives that run, and what.

One watcher at a time, for one thread: the primitives are the process's.
"""

import contextlib
import dataclasses
import threading
from typing import Any, Protocol


class Watcher(Protocol):
    """What is told of the run. All calls come from the thread that is watched."""

    thread: int
    blind: bool

    def record(self, kind: str, keys: Any, out: Any, **details: Any) -> None:
        """A random primitive has run: `keys` and `out` are `Words` or `None`."""

    def unseen(self, what: str) -> None:
        """Something that may hold a draw runs where it cannot be seen."""

    def foreign(self, kind: str) -> None:
        """Another thread ran a random primitive."""

    def enter(self, stack: str, entry: Any) -> contextlib.AbstractContextManager[Any]:
        """For a `with` block, `entry` is on top of the stack of this name."""

    def blinded(self) -> contextlib.AbstractContextManager[None]:
        """For a `with` block, nothing is reported."""

    def discard_loop(self) -> None:
        """If the caller is `lax.while_loop`: its Python loop gave up, and will run again from its start."""


@dataclasses.dataclass
class Evaluation:
    """One walk over the equations of a jaxpr."""

    number: int
    equation: Any = None


_active: Watcher | None = None


def mine() -> Any:
    """The watcher, if it watches this thread and is not blind to what runs now."""
    watcher: Any = _active
    if watcher is None or watcher.blind or watcher.thread != threading.get_ident():
        return None
    return watcher


def active() -> Watcher | None:
    """The watcher of this process, whatever thread it watches."""
    return _active


def activate(watcher: Watcher | None) -> None:
    """From now on this one is told; nobody for `None`."""
    global _active  # noqa: PLW0603 - the primitives are the process's, so the watcher is
    _active = watcher
