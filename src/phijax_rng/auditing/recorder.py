"""What a run did with its keys, event by event, with the line that asked for it.

An `Observer` takes the reports of `_internals` and adds who asked: the line of the user's code, the
library in between, the call of `jax.random` that the primitive belongs to, and under which
transformations it ran. It judges nothing; `_examination` does.
"""

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from phijax_rng.auditing import jax_hooks
from phijax_rng.auditing.call_sites import NOWHERE, Place, frames_of, is_audit, place_of, read_frames, room_of
from phijax_rng.auditing.events import Call, Event, Unseen, Words
from phijax_rng.auditing.reachable_arrays import digest_of

# Functions of this package whose frames say more than the primitive does.
_SPEAKING = {
    ("keys.py", "stream"): ("stream", ("names",)),
    ("keys.py", "root_key"): ("root_key", ()),
    ("keys.py", "host_rng"): ("host_rng", ()),
    ("shuffle.py", "permute_index"): ("permute_index", ("index", "n")),
    ("shuffle.py", "invert_index"): ("invert_index", ("index", "n")),
}


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
                "asks",
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
            with jax_hooks.watching(self):
                yield
        finally:
            self._call = None
            self._loops.clear()
            told = any(event.kind == "host" and "numpy" in event.data for event in self.events)
            if not told and _numpy_state() != before:
                # By a name imported before. Python's generator is not compared: type checkers draw from it.
                call = Call(next(self._numbers), "the global generator of NumPy")
                self.events.append(Event("host", None, None, NOWHERE, call, data=call.function))

    @contextlib.contextmanager
    def enter(self, stack: str, entry: Any) -> Iterator[None]:
        """For a `with` block, `entry` is on top of the stack of this name."""
        if stack == "differentiations":
            entry = (next(self._numbers), digest_of(entry))
        elif stack == "asks":
            entry = (next(self._numbers), entry)
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
            with jax_hooks.beside():
                yield
        finally:
            self.blind = before

    def record(self, kind: str, keys: Words | None, out: Words | None, **details: Any) -> None:
        """See `jax_hooks.Watcher`."""
        keys, out, details = self._unmasked(keys, out, details)
        place, call, speaking, loops, code = self._look(kind)
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
                ask=stacks["asks"][-1] if stacks["asks"] else None,
                code=code,
                **details,
            )
        )

    def unseen(self, what: str) -> None:
        """See `jax_hooks.Watcher`."""
        self.not_seen.append(Unseen(what, self._look("unseen")[0]))

    def foreign(self, kind: str) -> None:
        """See `jax_hooks.Watcher`."""
        name = threading.current_thread().name
        self.not_seen.append(Unseen(f"{kind} in thread {name!r}", NOWHERE))

    def mark(self) -> int:
        """A point to which `discard_since` can go back."""
        return len(self.events)

    def discard_since(self, mark: int) -> None:
        """Forgets what was recorded since, because it will happen again."""
        del self.events[mark:]

    def discard_loop(self) -> None:
        """See `jax_hooks.Watcher`."""
        frame: Any = sys._getframe(1)
        while room_of(frame.f_code.co_filename) in ("hidden", "transparent"):
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

    def _look(self, kind: str) -> tuple[Place, Call, Any, tuple[int, ...], Any]:
        """Who asked: place, call, speaking function, loops, code of the user's function."""
        through = outermost_random = speaking = None
        users: list[Any] = []
        evaluated = audited = False
        loops = []
        frame: Any = sys._getframe(2)
        while frame is not None and not (audited and users):
            code = frame.f_code
            room = room_of(code.co_filename)
            if room == "hidden":
                evaluated = evaluated or (code.co_name == "eval_jaxpr" and through is None)
                audited = audited or is_audit(code)
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
            place, call, code = written
            return place, call, None, tuple(loops), code
        code = users[0][0] if users else None
        return place_of(users, through), self._called(kind, outermost_random), speaking, tuple(loops), code

    def _called(self, kind: str, frame: Any) -> Call:
        if frame is None:
            return Call(next(self._numbers), kind)
        if self._call is None or self._call[0] is not frame:
            given = frame.f_locals
            shape, dtype = _asked_shape(given.get("shape")), _asked_dtype(given.get("dtype"))
            seed = given.get("seed")
            seed = int(seed) if isinstance(seed, (int, np.integer)) else None
            self._call = (frame, Call(next(self._numbers), frame.f_code.co_name, shape, dtype, seed))
        elif self._call[1].dtype is None and (dtype := _asked_dtype(frame.f_locals.get("dtype"))):
            # A legacy key is wrapped before `jax.random` settles what dtype None means.
            self._call = (frame, dataclasses.replace(self._call[1], dtype=dtype))
        return self._call[1]

    def _written(self, kind: str) -> tuple[Place, Call, Any] | None:
        """Who wrote the equation that is evaluated, from its traceback: place, call, code."""
        evaluations = self.stacks["evaluations"]
        frames: list[Any] = []
        written = None
        for evaluation in evaluations:
            # The traceback of an equation ends where its jit began; that of the equation around it goes on.
            frames = [*frames_of(evaluation.equation), *frames]
            written = read_frames(frames)
            if written is not None and written[1] is not None:
                # All that lies inside an equation of jax.random belongs to it; JAX shares jaxprs among
                # calls, so the lines further in may be those of another.
                place, function, through = written
                token = (evaluation.number, through)
                if self._call is None or self._call[0] != token:
                    self._call = (token, Call(next(self._numbers), str(function)))
                return place, self._call[1], through[0] if place.through is None else None
        return None if written is None else (written[0], Call(next(self._numbers), kind), None)


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


def _numpy_state() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state()
    return kind, np.asarray(words).tobytes(), *rest
