"""What a run did with its keys, event by event, with the line that asked for it.

An `Observer` takes the reports of `_internals` and adds who asked: the line of the user's code, the
library in between, the call of `jax.random` that the primitive belongs to, and under which
transformations it ran. It judges nothing; `_examination` does.

A line is the user's if its file lies neither in JAX, nor in the standard library, nor among installed
packages, nor in this package. Where there is no such line, the innermost one outside of JAX is taken.
"""

import contextlib
import dataclasses
import functools
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from phijax_rng import _internals
from phijax_rng._internals import Mapped, Words
from phijax_rng._reachable import digest_of

_JAX = os.path.dirname(jax.__file__) + os.sep
_JAX_RANDOM = os.path.join(_JAX, "_src", "random") + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = tuple(
    sorted({path + os.sep for path in (*site.getsitepackages(), sysconfig.get_path("stdlib"))})
)
# They wrap other functions, to check annotations; who asked lies further out.
_TRANSPARENT = tuple(f"{os.sep}{name}{os.sep}" for name in ("jaxtyping", "beartype"))
_HIDDEN = tuple(os.path.join(_OWN, name) for name in ("_internals", "_observe.py", "auditing.py"))

# Functions of this package whose frames say more than the primitive does.
_SPEAKING = {
    ("keys.py", "stream"): ("stream", ("names",)),
    ("keys.py", "root_key"): ("root_key", ()),
    ("keys.py", "host_rng"): ("host_rng", ()),
    ("shuffle.py", "permute_index"): ("permute_index", ("index", "n")),
    ("shuffle.py", "invert_index"): ("invert_index", ("index", "n")),
}


@dataclasses.dataclass(frozen=True, order=True)
class Line:
    """A line of code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.number}" if self.file else self.function


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """Where something was asked for.

    Attributes:
        line: the innermost line of the user's code.
        through: the library line that did it, if it is another.
        callers: the user's lines around it, from the inside out; without influence on equality.
    """

    line: Line
    through: Line | None = None
    callers: tuple[Line, ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        return str(self.line) if self.through is None else f"{self.line} (through {self.through})"


_NOWHERE = Place(Line("", 0, "an unknown line"))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function of `jax.random` (or, outside of those, one primitive)."""

    number: int
    function: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


Row = tuple[int, int, Mapped]
"""Group, place in the group, and the map whose rows they are."""


@dataclasses.dataclass
class Event:
    """One random primitive that ran, or one draw from a generator of the host.

    Attributes:
        kind: a word of `_internals.KINDS`, `"clone"`, or `"host"`.
        keys: what it was given; `None` for a seed or raw words.
        out: the keys that came out.
        data: the seeds, the shape of a split, the numbers folded in, or the name of a host generator.
        shape, bits: of a draw for one key.
        place: who asked.
        call: the call it belongs to.
        speaking: a function of this package around it, and what it was asked for.
        maps: every `vmap` around it.
        rows: `(group, row, map)` for every `vmap` around it that was taken row by row.
        differentiations: `(number, digest of what it was given)` for every differentiation around it.
        backward: whether it ran in a backward pass.
        meshes: names of the mesh axes around it.
        loops: Python loops of `lax.while_loop` around it.
    """

    kind: str
    keys: Words | None
    out: Words | None
    place: Place
    call: Call
    data: Any = None
    shape: tuple[int, ...] = ()
    bits: int = 32
    speaking: tuple[str, Any] | None = None
    maps: tuple[Mapped, ...] = ()
    rows: tuple[Row, ...] = ()
    differentiations: tuple[tuple[int, str], ...] = ()
    backward: bool = False
    meshes: tuple[str, ...] = ()
    loops: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, order=True)
class Unseen:
    """A region that may hold draws and could not be observed."""

    what: str
    place: Place


class Observer:
    """Collects the events of one thread; `with observer.observing():` opens its eyes."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.events: list[Event] = []
        self.not_seen: list[Unseen] = []
        self.blind = False
        self.differentiating: Any = None
        self.stacks: dict[str, list[Any]] = {
            name: []
            for name in (
                *("maps", "rows", "masks", "meshes", "evaluations", "differentiations", "pushes", "backward"),
            )
        }
        self._numbers = iter(range(sys.maxsize))
        self._call: tuple[Any, Call] | None = None
        self._loops: dict[int, Any] = {}

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Events are collected inside the block."""
        before = _numpy_state()
        try:
            with _internals.watching(self):
                yield
        finally:
            self._call = None
            self._loops.clear()
            told = any(event.kind == "host" and "numpy" in event.data for event in self.events)
            if not told and _numpy_state() != before:
                # By a name imported before. Python's generator is not compared: type checkers draw from it.
                call = Call(next(self._numbers), "the global generator of NumPy")
                self.events.append(Event("host", None, None, _NOWHERE, call, data=call.function))

    @contextlib.contextmanager
    def enter(self, stack: str, entry: Any) -> Iterator[None]:
        """For a `with` block, `entry` is on top of the stack of this name."""
        if stack == "differentiations":
            entry = (next(self._numbers), digest_of(entry))
        self.stacks[stack].append(entry)
        try:
            yield
        finally:
            self.stacks[stack].pop()

    @contextlib.contextmanager
    def blinded(self) -> Iterator[None]:
        """Nothing is recorded inside the block."""
        before, self.blind = self.blind, True
        try:
            yield
        finally:
            self.blind = before

    def record(self, kind: str, keys: Words | None, out: Words | None, **details: Any) -> None:
        """See `_internals.Watcher`."""
        keys, out, details = self._unmasked(keys, out, details)
        place, call, speaking, loops = self._look(kind)
        if keys is not None and not keys.rows.size:
            return
        stacks = self.stacks
        self.events.append(
            Event(
                kind,
                keys,
                out,
                place,
                call,
                speaking=speaking,
                maps=tuple(stacks["maps"]),
                rows=tuple(stacks["rows"]),
                differentiations=tuple(stacks["differentiations"]),
                backward=bool(stacks["backward"]),
                meshes=tuple(name for names in stacks["meshes"] for name in names),
                loops=loops,
                **details,
            )
        )

    def unseen(self, what: str) -> None:
        """See `_internals.Watcher`."""
        self.not_seen.append(Unseen(what, self._look("unseen")[0]))

    def foreign(self, kind: str) -> None:
        """See `_internals.Watcher`."""
        name = threading.current_thread().name
        self.not_seen.append(Unseen(f"{kind} in thread {name!r}", _NOWHERE))

    def mark(self) -> int:
        """A point to which `discard_since` can go back."""
        return len(self.events)

    def discard_since(self, mark: int) -> None:
        """Forgets what was recorded since, because it will happen again."""
        del self.events[mark:]

    def discard_loop(self) -> None:
        """See `_internals.Watcher`."""
        frame: Any = sys._getframe(1)
        while _room(frame.f_code.co_filename) in ("hidden", "transparent"):
            frame = frame.f_back
        if frame.f_code.co_name != "while_loop":
            return
        number = id(frame)
        self.events = [event for event in self.events if number not in event.loops]

    def _unmasked(self, keys: Words | None, out: Words | None, details: dict[str, Any]) -> Any:
        """Without the rows of a batched loop that have come to their end."""
        for mask in self.stacks["masks"]:
            if keys is None or keys.shape[: mask.ndim] != mask.shape:
                continue
            size = len(keys.rows)
            chosen = np.repeat(mask.reshape(-1), size // mask.size)
            keys = Words(keys.implementation, keys.rows[chosen], (int(chosen.sum()),))
            if out is not None:
                each = len(out.rows) // size
                out = Words(
                    out.implementation, out.rows[np.repeat(chosen, each)], (int(chosen.sum()) * each,)
                )
            if isinstance(details.get("data"), np.ndarray):
                details["data"] = details["data"][chosen]
        return keys, out, details

    def _look(self, kind: str) -> tuple[Place, Call, Any, tuple[int, ...]]:
        """Who asked: place, call, speaking function, loops."""
        through = outermost_random = speaking = None
        users: list[Any] = []
        evaluated = audited = False
        loops = []
        frame: Any = sys._getframe(2)
        while frame is not None and not (audited and users):
            code = frame.f_code
            room = _room(code.co_filename)
            if room == "hidden":
                evaluated = evaluated or (code.co_name == "eval_jaxpr" and through is None)
                audited = audited or code.co_filename.endswith("auditing.py")
            elif room == "jax" and code.co_name == "while_loop":
                loops.append(id(frame))
                self._loops[id(frame)] = frame  # alive, so that no other gets its id
            elif room == "random" and through is None:
                outermost_random = frame
            elif room in ("own", "installed", "user"):
                through = through or (code, frame.f_lineno)
                speaking = speaking or (_spoken(frame) if room == "own" else None)
                if room == "user":
                    users.append((code, frame.f_lineno))
            frame = frame.f_back
        if outermost_random is None and evaluated and (written := self._written(kind)):
            return (*written, None, tuple(loops))
        return _place(users, through), self._called(kind, outermost_random), speaking, tuple(loops)

    def _called(self, kind: str, frame: Any) -> Call:
        if frame is None:
            return Call(next(self._numbers), kind)
        if self._call is None or self._call[0] is not frame:
            given = frame.f_locals
            shape, dtype = _asked_shape(given.get("shape")), _asked_dtype(given.get("dtype"))
            self._call = (frame, Call(next(self._numbers), frame.f_code.co_name, shape, dtype))
        return self._call[1]

    def _written(self, kind: str) -> tuple[Place, Call] | None:
        """Who wrote the equation that is evaluated, from its traceback."""
        evaluations = self.stacks["evaluations"]
        frames: list[Any] = []
        written = None
        for evaluation in evaluations:
            # The traceback of an equation ends where its jit began; that of the equation around it goes on.
            frames = [*_frames(evaluation.equation), *frames]
            written = _read_frames(frames)
            if written is not None and written[1] is not None:
                # All that lies inside an equation of jax.random belongs to it; JAX shares jaxprs among
                # calls, so the lines further in may be those of another.
                place, function, through = written
                token = (evaluation.number, through)
                if self._call is None or self._call[0] != token:
                    self._call = (token, Call(next(self._numbers), str(function)))
                return place, self._call[1]
        return None if written is None else (written[0], Call(next(self._numbers), kind))


def _frames(equation: Any) -> list[tuple[Any, int]]:
    """Code and offset for each frame that was there when an equation was traced, from the inside out."""
    traceback = getattr(equation.source_info, "traceback", None)
    return [] if traceback is None else list(zip(*traceback.raw_frames(), strict=True))


def _read_frames(frames: list[tuple[Any, int]]) -> tuple[Place, str | None, Any] | None:
    """Who asked, the function of `jax.random` they called, and from where; `None` if all frames are JAX's."""
    through = function = None
    users: list[tuple[Any, int]] = []
    for code, offset in frames:
        room = _room(code.co_filename)
        if room == "hidden" and code.co_filename.endswith("auditing.py") and users:
            break
        if room == "random" and through is None:
            function = code.co_name
        elif room in ("own", "installed", "user"):
            through = through or (code, offset)
            if room == "user":
                users.append((code, _line_number(code, offset)))
    if through is None:
        return None
    return _place(users, (through[0], _line_number(*through))), function, through


def _line_number(code: Any, offset: int) -> int:
    positions = list(code.co_positions())
    line = positions[offset // 2][0] if offset // 2 < len(positions) else None
    return int(line or code.co_firstlineno)


def _place(users: list[Any], through: Any) -> Place:
    """The place of these `(code, line)`s, from the inside out."""
    if through is None:
        return _NOWHERE
    lines = [Line(code.co_filename, number, code.co_name) for code, number in users or [through]]
    if not users or through[0] is users[0][0]:
        return Place(lines[0], None, tuple(lines[1:]))
    library = Line(through[0].co_filename, through[1], through[0].co_name)
    return Place(lines[0], library, tuple(lines[1:]))


@functools.lru_cache(maxsize=4096)
def _room(file: str) -> str:
    """Whose code a file is: user, own, installed, jax, random, hidden or transparent."""
    path = os.path.abspath(file) if not file.startswith("<") else file
    if path.startswith(_HIDDEN):
        return "hidden"
    if path.startswith("<@beartype") or any(name in path for name in _TRANSPARENT):
        return "transparent"
    if path.startswith(_JAX):
        return "random" if path.startswith(_JAX_RANDOM) else "jax"
    if path.startswith(_OWN):
        return "own"
    if path.startswith(_INSTALLED) or path.startswith("<frozen"):
        return "installed"
    return "user"


def _spoken(frame: Any) -> tuple[str, Any] | None:
    found = _SPEAKING.get((os.path.basename(frame.f_code.co_filename), frame.f_code.co_name))
    if found is None:
        return None
    word, names = found
    if word == "stream":
        return word, frame.f_locals["names"]
    if not names:
        return word, None
    index, n = (frame.f_locals.get(name) for name in names)
    # As an array: numbers of Python are no part of a digest.
    return word, (digest_of([np.asarray(index) if isinstance(index, int) else index]), n)


def _asked_shape(shape: Any) -> tuple[int, ...] | None:
    if isinstance(shape, int):
        return (shape,)
    if isinstance(shape, (tuple, list)) and all(isinstance(length, int) for length in shape):
        return tuple(shape)
    return None


def _asked_dtype(dtype: Any) -> str | None:
    if dtype is None:
        return None
    try:
        return str(jax.dtypes.canonicalize_dtype(dtype))
    except (TypeError, ValueError):
        return None


def _short(file: str) -> str:
    relative = os.path.relpath(file) if file and not file.startswith("<") else file
    return file if relative.startswith("..") else relative


def _numpy_state() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state()
    return kind, np.asarray(words).tobytes(), *rest
