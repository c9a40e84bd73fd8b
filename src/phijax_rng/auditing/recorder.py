"""Records what a run does with its keys, event by event, with the line of the user's code.

An `Observer` receives the reports of `jax_hooks` and adds where each came from: the line of the user's code,
the library in between, the call of `jax.random` that the primitive belongs to, and the transformations around
it. It does not judge; `analysis` does.
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
from phijax_rng.auditing.call_sites import (
    NOWHERE,
    Place,
    frames_of,
    is_audit,
    owner_of,
    place_of,
    read_frames,
)
from phijax_rng.auditing.events import Call, Event, Unseen, Words
from phijax_rng.auditing.reachable_arrays import digest_of

# Functions of this package, with the arguments that a report shows in place of their primitives.
_HELPERS = {
    ("keys.py", "stream"): ("stream", ("names",)),
    ("keys.py", "root_key"): ("root_key", ()),
    ("keys.py", "host_rng"): ("host_rng", ()),
    ("shuffle.py", "permute_index"): ("permute_index", ("index", "n")),
    ("shuffle.py", "invert_index"): ("invert_index", ("index", "n")),
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a primitive came from; the fields are those of `Event`."""

    place: Place
    call: Call
    helper: tuple[str, Any] | None
    loops: tuple[int, ...]
    code: CodeType | None


_STACKS = ("maps", "rows", "masks", "differentiations", "forward", "backward", "requests")


class Observer:
    """Collects the events of one thread inside `with observer.observing():`."""

    def __init__(self) -> None:
        # Primitives belong to the process; other threads must neither be recorded nor slowed down.
        self.thread = threading.get_ident()
        self.events: list[Event] = []
        self.not_seen: list[Unseen] = []
        self.blind = False
        self.stacks: dict[str, list[Any]] = {name: [] for name in _STACKS}
        self._numbers = itertools.count()
        # Frame, line and call of the last event. The frame must stay alive: Python would give its id to
        # the next call of jax.random, and two calls would count as one.
        self._call: tuple[object, object, Call] | None = None
        self._loops: dict[int, FrameType] = {}

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Records events inside the block."""
        jax.devices()  # the first search for devices starts a thread of JAX
        generators, threads = _global_generators(), set(threading.enumerate())
        try:
            with jax_hooks.watching(self):
                yield
        finally:
            self._call = None
            self._loops.clear()
            self._compare(generators, threads)

    def _compare(self, generators: dict[str, object], threads: set[threading.Thread]) -> None:
        """Records which global generators changed, and which threads started and still run."""
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
        # A number for each block: two equal requests are two blocks, and that makes a replay.
        elif stack == "requests":
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
        origin = self._locate(kind)
        # Every row of the loop has finished: JAX runs the body once more and discards it.
        if keys is not None and not keys.rows.size:
            return
        stacks = self.stacks
        self.events.append(
            Event(
                kind,
                keys,
                out,
                origin.place,
                origin.call,
                helper=origin.helper,
                maps=tuple(stacks["maps"]),
                rows=tuple(stacks["rows"]),
                differentiations=tuple(stacks["differentiations"]),
                forward=bool(stacks["forward"]),
                backward=bool(stacks["backward"]),
                loops=origin.loops,
                request=stacks["requests"][-1] if stacks["requests"] else None,
                code=origin.code,
                **details,
            )
        )

    def unseen(self, what: str) -> None:
        """See `jax_hooks.Watcher`."""
        self.not_seen.append(Unseen(what, self._locate("unseen").place))

    def foreign(self, kind: str) -> None:
        """See `jax_hooks.Watcher`."""
        name = threading.current_thread().name
        self.not_seen.append(Unseen(f"{kind} in thread {name!r}", NOWHERE))

    def discard_loop(self) -> None:
        """See `jax_hooks.Watcher`."""
        # Frames of this package and of type checkers are between the loop and this method.
        frame: Any = sys._getframe(1)
        while owner_of(frame.f_code.co_filename) in ("hidden", "transparent"):
            frame = frame.f_back
        if frame.f_code.co_name != "while_loop":
            return
        number = id(frame)
        self.events = [event for event in self.events if number not in event.loops]

    def _unmasked(self, keys: Words | None, out: Words | None, details: dict[str, Any]) -> Any:
        """Removes the rows of a batched loop that have already finished."""
        # A key without the axis of the rows serves all of them and stays.
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

    def _locate(self, kind: str) -> Origin:
        """Walks the stack, from the inside out."""
        through = in_random = helper = None
        users: list[tuple[CodeType, int]] = []
        evaluations: list[FrameType] = []
        loops = []
        # Depth 2 skips this method and its caller.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not (users and is_audit(frame.f_code)):
            code = frame.f_code
            owner = owner_of(code.co_filename)
            if owner == "jax" and code.co_name == "while_loop":
                loops.append(id(frame))
                self._loops[id(frame)] = frame  # kept alive, so that no other frame gets its id
            elif owner == "jax" and code.co_name == "eval_jaxpr" and through is None:
                evaluations.append(frame)
            elif owner == "random" and through is None:
                in_random = frame
            elif owner in ("own", "installed", "user"):
                through = through or (code, frame.f_lineno)
                helper = helper or (_helper_of(frame) if owner == "own" else None)
                if owner == "user":
                    users.append((code, frame.f_lineno))
            frame = frame.f_back
        if in_random is None and (written := self._from_traceback(kind, evaluations)):
            place, call, where = written
            return Origin(place, call, None, tuple(loops), where)
        where = users[0][0] if users else None
        return Origin(place_of(users, through), self._called(kind, in_random), helper, tuple(loops), where)

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

    def _from_traceback(
        self, kind: str, evaluations: list[FrameType]
    ) -> tuple[Place, Call, CodeType | None] | None:
        """Place, call and code of the equations that run now, from their tracebacks."""
        frames: list[tuple[CodeType, int]] = []
        written = None
        for evaluation in reversed(evaluations):
            # The traceback of an equation ends where its jit began; that of the outer equation has the rest.
            frames = [*frames_of(evaluation.f_locals.get("eqn")), *frames]  # a local variable of JAX
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


def _helper_of(frame: Any) -> tuple[str, Any] | None:
    found = _HELPERS.get((os.path.basename(frame.f_code.co_filename), frame.f_code.co_name))
    if found is None:
        return None
    word, names = found
    if word == "stream":
        return word, frame.f_locals["names"]
    if not names:
        return word, None
    index, n = (frame.f_locals.get(name) for name in names)
    # As an array, because a digest ignores Python numbers.
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
    # beartype draws from Python's generator to choose the item of a list that it checks.
    if "beartype" not in sys.modules:
        states["Python"] = random.getstate()
    return states
