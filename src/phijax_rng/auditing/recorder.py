"""What a run did with its keys, event by event, with the line that asked for it.

An `Observer` takes the reports of `_internals` and adds who asked: the line of the user's code, the
library in between, the call of `jax.random` that the primitive belongs to, and under which
transformations it ran. It judges nothing; `_examination` does.
"""

import contextlib
import dataclasses
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
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


@dataclasses.dataclass(frozen=True)
class Asker:
    """Who asked for a primitive; the fields are those of `Event`."""

    place: Place
    call: Call
    speaking: tuple[str, Any] | None
    loops: tuple[int, ...]
    code: CodeType | None


_STACKS = ("maps", "rows", "masks", "differentiations", "forward", "backward", "asks")


class Observer:
    """Collects the events of one thread inside `with observer.observing():`."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.events: list[Event] = []
        self.not_seen: list[Unseen] = []
        self.blind = False
        self.stacks: dict[str, list[Any]] = {name: [] for name in _STACKS}
        self._numbers = itertools.count()
        # The call that the last event belongs to, by its frame. The frame stays alive with it, so that no
        # other frame gets its id.
        self._call: tuple[object, object, Call] | None = None
        self._loops: dict[int, FrameType] = {}

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Records events inside the block."""
        jax.devices()  # the first look for devices starts a thread of JAX
        generators, threads = _global_generators(), set(threading.enumerate())
        try:
            with jax_hooks.watching(self):
                yield
        finally:
            self._call = None
            self._loops.clear()
            self._compare(generators, threads)

    def _compare(self, generators: dict[str, object], threads: set[threading.Thread]) -> None:
        """Records which global generators moved, and which threads started and still run."""
        for name, state in _global_generators().items():
            if state != generators[name]:
                what = f"the global generator of {name}"
                self.events.append(
                    Event("host", None, None, NOWHERE, Call(next(self._numbers), what), data=name)
                )
        for thread in set(threading.enumerate()) - threads:
            self.not_seen.append(Unseen(f"thread {thread.name!r}", NOWHERE))

    @contextlib.contextmanager
    def enter(self, stack: str, entry: object) -> Iterator[None]:
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
        """Records nothing inside the block."""
        before, self.blind = self.blind, True
        try:
            yield
        finally:
            self.blind = before

    def record(self, kind: str, keys: Words | None, out: Words | None, **details: Any) -> None:
        """See `jax_hooks.Watcher`."""
        keys, out, details = self._unmasked(keys, out, details)
        asker = self._look(kind)
        if keys is not None and not keys.rows.size:
            return
        stacks = self.stacks
        self.events.append(
            Event(
                kind,
                keys,
                out,
                asker.place,
                asker.call,
                speaking=asker.speaking,
                maps=tuple(stacks["maps"]),
                rows=tuple(stacks["rows"]),
                differentiations=tuple(stacks["differentiations"]),
                forward=bool(stacks["forward"]),
                backward=bool(stacks["backward"]),
                loops=asker.loops,
                ask=stacks["asks"][-1] if stacks["asks"] else None,
                code=asker.code,
                **details,
            )
        )

    def unseen(self, what: str) -> None:
        """See `jax_hooks.Watcher`."""
        self.not_seen.append(Unseen(what, self._look("unseen").place))

    def foreign(self, kind: str) -> None:
        """See `jax_hooks.Watcher`."""
        name = threading.current_thread().name
        self.not_seen.append(Unseen(f"{kind} in thread {name!r}", NOWHERE))

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

    def _look(self, kind: str) -> Asker:
        """Walks the stack, from the inside out."""
        through = in_random = speaking = None
        users: list[tuple[CodeType, int]] = []
        evaluations: list[FrameType] = []
        loops = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not (users and is_audit(frame.f_code)):
            code = frame.f_code
            room = room_of(code.co_filename)
            if room == "jax" and code.co_name == "while_loop":
                loops.append(id(frame))
                self._loops[id(frame)] = frame  # alive, so that no other frame gets its id
            elif room == "jax" and code.co_name == "eval_jaxpr" and through is None:
                evaluations.append(frame)
            elif room == "random" and through is None:
                in_random = frame
            elif room in ("own", "installed", "user"):
                through = through or (code, frame.f_lineno)
                speaking = speaking or (_spoken(frame) if room == "own" else None)
                if room == "user":
                    users.append((code, frame.f_lineno))
            frame = frame.f_back
        if in_random is None and (written := self._written(kind, evaluations)):
            place, call, where = written
            return Asker(place, call, None, tuple(loops), where)
        where = users[0][0] if users else None
        return Asker(place_of(users, through), self._called(kind, in_random), speaking, tuple(loops), where)

    def _called(self, kind: str, frame: FrameType | None) -> Call:
        """The call of `jax.random` with this frame."""
        if frame is None:
            return Call(next(self._numbers), kind)
        options = frame.f_locals
        dtype = _asked_dtype(options.get("dtype"))
        call = self._known_call(frame)
        if call is None:
            seed = options.get("seed")
            seed = int(seed) if isinstance(seed, (int, np.integer)) else None
            shape = _asked_shape(options.get("shape"))
            call = Call(next(self._numbers), frame.f_code.co_name, shape, dtype, seed)
        elif call.dtype is None and dtype is not None:
            # `jax.random` wraps a legacy key before it settles what dtype None means.
            call = dataclasses.replace(call, dtype=dtype)
        self._call = (frame, None, call)
        return call

    def _known_call(self, frame: object, line: object = None) -> Call | None:
        if self._call is None or self._call[0] is not frame or self._call[1] != line:
            return None
        return self._call[2]

    def _written(self, kind: str, evaluations: list[FrameType]) -> tuple[Place, Call, CodeType | None] | None:
        """Who wrote the equations that run now, from their tracebacks: place, call, code."""
        frames: list[tuple[CodeType, int]] = []
        written = None
        for evaluation in reversed(evaluations):
            # The traceback of an equation ends where its jit began; that of the equation around it goes on.
            frames = [*frames_of(evaluation.f_locals.get("eqn")), *frames]
            written = read_frames(frames)
            if written is not None and written[1] is not None:
                # Everything inside an equation of jax.random belongs to it. JAX shares jaxprs among calls,
                # so the lines further in may be those of another call.
                place, function, through = written
                call = self._known_call(evaluation, through)
                call = call or Call(next(self._numbers), str(function))
                self._call = (evaluation, through, call)
                return place, call, through[0] if place.through is None else None
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


def _global_generators() -> dict[str, object]:
    """The states of the generators that every library of the process shares."""
    kind, words, *rest = np.random.get_state()
    states: dict[str, object] = {"NumPy": (kind, np.asarray(words).tobytes(), *rest)}
    # beartype draws from Python's generator to choose which item of a list it checks.
    if "beartype" not in sys.modules:
        states["Python"] = random.getstate()
    return states
