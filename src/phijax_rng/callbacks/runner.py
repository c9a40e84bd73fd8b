"""Calls the callbacks of one `fit`, and keeps what each of them remembers."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from phijax_rng._base import validation
from phijax_rng.callbacks.protocol import AdaptedCallback, Event, Memory


class CallbackRunner:
    """The callbacks of one call of `fit`, and what each of them remembers.

    Attributes:
        had_stopped: whether one of them had stopped the run that is resumed.
    """

    def __init__(self, callbacks: tuple[AdaptedCallback, ...], memories: Mapping[str, Memory]):
        """Runs the check of each callback.

        Args:
            callbacks: in the order they are called.
            memories: by name, from `memories()` of the run that is resumed; empty for a fresh one.
        """
        self._callbacks = callbacks
        self._memories = {c.name: copy.deepcopy(memories.get(c.name, {})) for c in callbacks}
        for callback in callbacks:
            try:
                callback.check(copy.deepcopy(self._memories[callback.name]))
            except Exception as error:
                error.add_note(f"raised by the callback {callback.name!r} before the first update")
                raise
        self.had_stopped = any(bool(c.is_over(self._memories[c.name])) for c in callbacks)

    def require_followed(self, names: tuple[str, ...]) -> None:
        """Raises if a callback follows a number that nothing records and no callback before it may report.

        Args:
            names: the numbers that the train step records.
        """
        for index, callback in enumerate(self._callbacks):
            wanted = callback.follows
            if (
                wanted is None
                or wanted in names
                or any(c.may_report(wanted) for c in self._callbacks[:index])
            ):
                continue
            raise ValueError(
                f"{callback.kind} follows {wanted!r}, and the run records {validation.shown(names)}. "
                "Follow one of them, or put the callback that reports it first."
            )

    def may_report(self, name: str) -> bool:
        """Whether one of the callbacks may report a number of this name."""
        return any(callback.may_report(name) for callback in self._callbacks)

    def next_step(self, step: int) -> int | None:
        """The next step after `step` at which a callback is called."""
        following = ((step // c.every_n_steps + 1) * c.every_n_steps for c in self._callbacks)
        return min(following, default=None)

    def call(self, event: Event) -> bool:
        """Calls the callbacks that are due at this step, and returns whether one of them stops the run.

        An error of one callback does not skip the others. After the last one, a single error is raised as it
        is, and several are raised as an `ExceptionGroup`.
        """
        stop, errors = False, []
        for callback in self._callbacks:
            if event.step % callback.every_n_steps:
                continue
            # A copy, so that a callback that fails half-way keeps the memory of its last complete call.
            memory = copy.deepcopy(self._memories[callback.name])
            try:
                stop = _stops(callback.callback(dataclasses.replace(event, memory=memory))) or stop
                _require_plain(memory, "memory")
            except Exception as error:
                error.add_note(f"raised by the callback {callback.name!r} at step {event.step}")
                errors.append(error)
            else:
                self._memories[callback.name] = memory
        _raise(errors)
        return stop

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
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a number, got {validation.described(value)}. Reduce it first."
        ) from error


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
