"""Who receives reports of the random primitives that run.

There is one watcher at a time, and it watches one thread: the primitives belong to the process.
"""

import contextlib
import threading
from typing import Any, Protocol

from phijax_rng.auditing.events import Words


class Watcher(Protocol):
    """What receives the reports. All calls come from the watched thread, except `foreign`."""

    thread: int
    blind: bool

    def record(self, kind: str, keys: Words | None, out: Words | None, **details: Any) -> None:
        """A random primitive ran."""

    def unseen(self, what: str) -> None:
        """Something that may draw runs where the audit cannot see it."""

    def foreign(self, kind: str) -> None:
        """Another thread ran a random primitive."""

    def enter(self, stack: str, entry: object) -> contextlib.AbstractContextManager[None]:
        """For a `with` block, `entry` is on top of the stack of this name."""

    def blinded(self) -> contextlib.AbstractContextManager[None]:
        """For a `with` block, nothing is recorded."""

    def discard_loop(self) -> None:
        """The Python loop of `lax.while_loop` gave up and runs again from its start."""


_active: Watcher | None = None


def mine() -> Watcher | None:
    """The watcher, if it watches this thread and is not blind now."""
    watcher = _active
    if watcher is None or watcher.blind or watcher.thread != threading.get_ident():
        return None
    return watcher


def active() -> Watcher | None:
    """The watcher of this process, whatever thread it watches."""
    return _active


def activate(watcher: Watcher | None) -> None:
    """Sets the watcher of this process; `None` for nobody."""
    global _active  # noqa: PLW0603 - the primitives belong to the process, so the watcher does too
    _active = watcher
