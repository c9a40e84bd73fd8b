"""Who is told of the random primitives that run, and what.

One watcher at a time, for one thread: the primitives are the process's.
"""

import contextlib
import dataclasses
import threading
from typing import Any, Protocol

import numpy as np


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


@dataclasses.dataclass(frozen=True)
class Words:
    """The bits of an array of keys: one row of uint32 words for each key, and the shape of the array."""

    implementation: str
    rows: np.ndarray[Any, Any]
    shape: tuple[int, ...]


@dataclasses.dataclass
class Evaluation:
    """One walk over the equations of a jaxpr."""

    number: int
    equation: Any = None


@dataclasses.dataclass(eq=False)
class Push:
    """One forward derivative: the maps that its tangents vary over, and those that its values vary over.

    Where a map reaches the tangents alone, as in `jacfwd`, all its rows differentiate one computation, and
    rightly share what it draws. A map is known by the id of its tag, which lives as long as the map.
    """

    tangents: set[int]
    values: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped:
    """One `vmap` around a draw."""

    size: int
    name: Any
    mapped: bool  # whether the key is
    tag: Any
    pushes: tuple[Push, ...]

    @property
    def shared(self) -> bool:
        """Whether all rows draw from one key; known when the outermost derivative is done."""
        return not self.mapped and self.size > 1 and not self.excused

    @property
    def excused(self) -> bool:
        """Whether the rows are tangents of one computation."""
        return any(id(self.tag) not in push.values for push in self.pushes)


def words_of(keys: Any) -> Words:
    """The bits of typed keys that are known."""
    base = np.asarray(keys._base_array)
    return Words(keys._impl.name, base.reshape(-1, base.shape[-1]), tuple(keys.shape))


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
