"""Calls the callbacks of one `fit`, and keeps what each of them remembers."""

import copy
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng.callbacks.memories import assigned, settings_of
from phijax_rng.callbacks.protocol import AdaptedCallback, Event, Memory
from phijax_rng.devices import processes
from phijax_rng.training.module import is_array

_log = logging.getLogger("phijax_rng")


@dataclasses.dataclass(frozen=True)
class _Progress:
    """What callbacks have done; replaced as a whole, so that an interrupt leaves each one done or not done.

    Attributes:
        memories: by name.
        pending: the names that are still to be called at this step; `None` outside of a round of calls.
        names: the numbers that were there before the callback in progress; `None` outside of a round.
        called_at_end: the names that were called for the end of the run.
    """

    memories: dict[str, Memory]
    pending: tuple[str, ...] | None = None
    names: frozenset[str] | None = None
    called_at_end: tuple[str, ...] = ()


class CallbackRunner:
    """The callbacks of one call of `fit`, and what each of them remembers.

    Attributes:
        had_stopped: whether one of them had stopped the run that is resumed.
    """

    def __init__(
        self,
        callbacks: tuple[AdaptedCallback, ...],
        memories: Mapping[str, Memory],
        pending: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        *,
        is_fresh: bool = False,
    ):
        """Runs the check of each callback.

        Args:
            callbacks: in the order they are called.
            memories: by name, from `memories()` of the run that is resumed; empty for a fresh one.
            pending: from `pending` of the run that is resumed.
            settings: from `settings()` of the run that is resumed.
            is_fresh: whether another run begins, and not one that may have been killed before its first save.
        """
        self._callbacks = callbacks
        self._settings = {callback.name: settings_of(callback) for callback in callbacks}
        found = assigned(callbacks, memories, settings or {})
        known = {c.name: copy.deepcopy(found.get(c.name, {})) for c in callbacks}
        self._progress = _Progress(known, tuple(pending) or None)
        for callback in callbacks:
            try:
                callback.check(copy.deepcopy(self._memories[callback.name]))
                if is_fresh:
                    callback.check_fresh()
            except Exception as error:
                error.add_note(f"raised by the callback {callback.name!r} before the first update")
                raise
        self.had_stopped = any(bool(c.is_over(self._memories[c.name])) for c in callbacks)

    @property
    def _memories(self) -> dict[str, Memory]:
        return self._progress.memories

    @property
    def pending(self) -> tuple[str, ...]:
        """The names that are still to be called at the step of `begin`."""
        return self._progress.pending or ()

    @property
    def called_at_end(self) -> tuple[str, ...]:
        """The names that were called for the end of the run."""
        return self._progress.called_at_end

    def _advance(self, **changes: Any) -> None:
        self._progress = dataclasses.replace(self._progress, **changes)

    def begin(self, step: int) -> None:
        """Makes the callbacks that are due at a step the pending ones."""
        self._advance(pending=tuple(c.name for c in self._callbacks if c.is_due(step)))

    def restore_end(self, called: Sequence[str]) -> None:
        """Of a run that had ended: who was called for its end."""
        self._advance(called_at_end=tuple(called))

    def kept(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The numbers without those of a callback that was interrupted: called again, it reports again."""
        names = self._progress.names
        return {name: value for name, value in metrics.items() if names is None or name in names}

    def require_followed(self, names: tuple[str, ...], max_steps: int) -> None:
        """Raises if a callback follows a number that is never there when it is called.

        Args:
            names: the numbers that the train step records.
            max_steps: where the run ends.
        """
        for index, callback in enumerate(self._callbacks):
            wanted = callback.follows
            if wanted is None or wanted in names:
                continue
            reporters = self._reporters(wanted, index)
            if not reporters:
                raise ValueError(
                    f"{callback.kind} follows {wanted!r}, and the run records {validation.shown(names)}. "
                    "Follow one of them, or put the callback that reports it first."
                )
            if callback.every_n_steps is not None and callback.every_n_steps <= max_steps:
                _require_meeting(
                    f"{callback.kind} follows {wanted!r}", callback.every_n_steps, reporters, max_steps
                )

    def require_reported(self, what: str, name: str, every_n_steps: int, max_steps: int) -> None:
        """Raises if a number is never there at multiples of `every_n_steps`, nor when the run ends.

        Args:
            what: who wants it, for the message.
            name: of the number.
            every_n_steps: when it is wanted.
            max_steps: where the run ends.
        """
        reporters = self._reporters(name)
        if not any(callback.at_end for callback in reporters):
            _require_meeting(what, every_n_steps, reporters, max_steps)

    def warn_of_idle(self, max_steps: int) -> None:
        """Logs a warning for each callback that is never called."""
        for callback in self._callbacks:
            every, used = callback.every_n_steps, callback.at_end or callback.has_finish
            if every is not None and every > max_steps and not used and processes.is_primary():
                _log.warning(
                    "%s is called every %d steps, and max_steps is %d: it is never called",
                    *(callback.name, every, max_steps),
                )

    def may_report(self, name: str) -> bool:
        """Whether one of the callbacks may report a number of this name."""
        return bool(self._reporters(name))

    def must_have(self, name: str, step: int, before: int | None = None, *, has_ended: bool = False) -> bool:
        """Whether a number that callbacks report is missing if it is not there at this step.

        Args:
            name: of the number.
            step: at which all callbacks that are due were called.
            before: the place of the callback that wants it; behind all of them for `None`.
            has_ended: whether those that are due when the run ends were called too.
        """
        # Of several that may report it, the one that does may not be due.
        reporters = self._reporters(name, before)
        return all(callback.is_due(step) or (has_ended and callback.at_end) for callback in reporters)

    def _reporters(self, name: str, before: int | None = None) -> list[AdaptedCallback]:
        return [callback for callback in self._callbacks[:before] if callback.may_report(name)]

    def next_step(self, step: int) -> int | None:
        """The next step after `step` at which a callback is called."""
        cadences = (c.every_n_steps for c in self._callbacks)
        following = ((step // every + 1) * every for every in cadences if every is not None)
        return min(following, default=None)

    def call(self, event: Event) -> bool:
        """Calls the callbacks that are pending, and returns whether one of them stops the run.

        An error of one callback does not skip the others, except those that follow a number that it would
        have reported. After the last one, a single error is raised as it is, and several are raised as an
        `ExceptionGroup`.
        """
        if self._progress.pending is None:
            self.begin(event.step)
        self._advance(names=frozenset(event.metrics))
        stop, errors = False, list[Exception]()
        for index, callback in enumerate(self._callbacks):
            wanted = callback.follows
            missing = wanted is not None and wanted not in event.metrics
            if callback.name not in self.pending or (
                missing and (errors or not self.must_have(str(wanted), event.step, index))
            ):
                continue
            memory = self._try(callback, event, f"at step {event.step}", errors)
            known = {} if memory is None else {callback.name: memory[1]}
            stop = stop or (memory is not None and memory[0])
            self._advance(
                memories={**self._memories, **known},
                pending=tuple(name for name in self.pending if name != callback.name),
                names=frozenset(event.metrics),
            )
        self._advance(pending=None, names=None)
        _raise(errors)
        return stop

    def call_at_end(self, event: Event) -> None:
        """Calls the callbacks that are due when the run ends and have not been called there yet.

        Errors as in `call`. No memory changes.
        """
        self._advance(names=frozenset(event.metrics))
        errors = list[Exception]()
        for callback in self._callbacks:
            is_over = (
                not callback.at_end or callback.is_due(event.step) or callback.name in self.called_at_end
            )
            if is_over or (callback.follows is not None and callback.follows not in event.metrics):
                continue
            answer = self._try(callback, event, f"when the run ended at step {event.step}", errors)
            done = () if answer is None else (callback.name,)
            self._advance(names=frozenset(event.metrics), called_at_end=(*self.called_at_end, *done))
        self._advance(names=None)
        _raise(errors)

    def _try(
        self, callback: AdaptedCallback, event: Event, when: str, errors: list[Exception]
    ) -> tuple[bool, Memory] | None:
        """Whether the callback stops the run, and its new memory; `None`, and an error more, if it raises."""
        # A copy, so that a callback that fails half-way keeps the memory of its last complete call.
        memory = copy.deepcopy(self._memories[callback.name])
        try:
            stop = _stops(callback.callback(dataclasses.replace(event, memory=memory)))
            _require_plain(memory, "memory")
        except Exception as error:
            error.add_note(f"raised by the callback {callback.name!r} {when}")
            errors.append(error)
            return None
        return stop, memory

    def finish(self, event: Event) -> None:
        """Calls `finish` of each callback; errors as in `call`. Changes of memory are not saved any more."""
        errors = []
        for callback in self._callbacks:
            memory = copy.deepcopy(self._memories[callback.name])
            try:
                callback.finish(dataclasses.replace(event, memory=memory))
            except Exception as error:
                error.add_note(
                    f"raised by the callback {callback.name!r} when the run ended at step {event.step}"
                )
                errors.append(error)
        _raise(errors)

    def memories(self) -> dict[str, Memory]:
        """The memory of each callback by name, without empty ones, as JSON can store it."""
        return {name: copy.deepcopy(memory) for name, memory in self._memories.items() if memory}

    def settings(self) -> dict[str, str]:
        """The settings of each callback, for `memories.assigned`."""
        return dict(self._settings)


def _require_meeting(what: str, every: int, reporters: list[AdaptedCallback], max_steps: int) -> None:
    """Raises unless a multiple of `every` up to `max_steps` has a number that one of these reports."""
    cadences = sorted({c.every_n_steps for c in reporters if c.every_n_steps is not None})
    first = min((math.lcm(every, cadence) for cadence in cadences), default=None)
    if first is not None and first <= max_steps:
        return
    when = f"every {' or '.join(map(str, cadences))} steps" if cadences else "when the run ends"
    at = "" if first is None else f": both first at step {first}, and max_steps is {max_steps}"
    raise ValueError(
        f"{what} every {every} steps, and {', '.join(c.kind for c in reporters)} may report it {when}{at}. "
        "Use the same every_n_steps."
    )


def checked_report(numbers: Mapping[str, Any], taken: Mapping[str, float]) -> dict[str, float]:
    """The argument of `Event.report`, as floats by name."""
    validation.mapping(numbers, "report")
    for name in numbers:
        if name in taken or name == "step":
            raise ValueError(
                f"report has {name!r}, which is already recorded at this step. Use another name."
            )
    return {name: _as_float(value, f"report[{name!r}]") for name, value in numbers.items()}


def _as_float(value: Any, name: str) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced value, which has no number outside the function that was traced. "
            "Return it from that function."
        )
    # `float` would also take text, an array of one element, and a complex number of NumPy.
    is_number = is_array(value) and not keys.is_typed_key(value) and not np.iscomplexobj(value)
    if not is_number or np.shape(value) != ():
        raise TypeError(f"{name} must be a number, got {validation.described(value)}. Reduce it first.")
    return float(value)


def _raise(errors: list[Exception]) -> None:
    if len(errors) > 1:
        raise ExceptionGroup(f"{len(errors)} callbacks failed", errors)
    if errors:
        raise errors[0]


def _require_plain(value: object, path: str) -> None:
    """Raises unless JSON gives the value back with the same types."""
    # Exact types: a subclass (np.float64 is a float) would come back as another type.
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for index, entry in enumerate(value):
            _require_plain(entry, f"{path}[{index}]")
        return
    if type(value) is dict and all(type(name) is str for name in value):
        for name, entry in value.items():
            _require_plain(entry, f"{path}[{name!r}]")
        return
    raise TypeError(
        f"{path} must be plain data, got {validation.described(value)}. "
        "Keep Python numbers, strings, and lists and dicts (with str keys) of them."
    )


def _stops(answer: object) -> bool:
    if answer is not None and not isinstance(answer, (bool, np.bool_)):
        raise TypeError(
            "a callback must return True to stop, False or None to continue, "
            f"got {validation.described(answer)}. Wrap a comparison of arrays in bool(...)."
        )
    return bool(answer)
