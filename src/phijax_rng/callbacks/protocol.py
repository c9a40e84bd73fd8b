"""Who looks in while a run goes on.

A callback is anything with a number `every_n_steps` that can be called with an `Event`. It is called
when that many updates are complete, and may ask to stop by returning `True`. What it is given are
copies, and what it draws comes from a stream of its own, so nothing it does can move a number of
the run.

    class Show:
        every_n_steps = 100
        def __call__(self, event):
            print(event.step, event.metrics["total_loss"])

What it must remember from one call to the next goes into `event.memory`, which is saved with the run and
is empty when another run begins.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar
from phijax_rng.callbacks.history import History
from phijax_rng.devices import processes
from phijax_rng.state import TrainState


@dataclasses.dataclass(frozen=True)
class Event:
    """A moment at which a callback looks in.

    Attributes:
        step: completed updates.
        metrics: the losses of the last update by name, and what was reported at this step.
        history: the rows so far, those before a resume among them; not to be changed.
        start: the step at which this call of `fit` began.
        memory: a dict of this callback's own, saved with the run: names, numbers, text, lists and
            dicts of them.
    """

    step: int
    metrics: Mapping[str, float]
    history: History
    start: int
    memory: dict[str, Any]
    _state: TrainState
    _report: Callable[[Mapping[str, float]], None]

    @property
    def state(self) -> TrainState:
        """A copy of the train state, the caller's to keep, to write into or to donate.

        With several processes its arrays are those of all: what is computed from them is computed by every
        process, as callbacks are called in each.
        """
        return jax.tree.map(processes.copied, self._state)

    def key(self, *names: str) -> KeyScalar:
        """A key of a named stream at this step, apart from every stream that training draws from.

        Callbacks that ask for the same names get the same key.
        """
        own = keys.stream(self._state.balancer_key, "callback", *names)
        return keys.fold_in(own, self.step)

    def report(self, numbers: Mapping[str, float]) -> None:
        """Adds numbers to `metrics` and the history, for the callbacks behind this one and for `keep_best`.

        Raises:
            TypeError: not a mapping by name, or a value that is not a number.
            ValueError: a name that is taken, by a loss or by another report at this step.
        """
        self._report(numbers)


@runtime_checkable
class Callback(Protocol):
    """Called with an `Event` whenever a multiple of `every_n_steps` updates is complete.

    Optional members:

    `name`: what its memory is saved under; the name of its class where it is absent.
    `check(memory)`: called when a fit begins, before anything is compiled; raises what would make its first
    look fail, as a file that cannot be written.
    `finish(event)`: called once when the run ends, however it ends, to let go of what it holds.
    `is_over(memory)`: asked when a run is resumed; `True` if it had asked this run to stop.
    `follows`: the name of a number it cannot do without; a run in which nothing gives it is refused before
    the first update.
    `may_report(name)`: whether it may report a number of this name; any where it is absent.
    """

    every_n_steps: int

    def __call__(self, event: Event) -> bool | None:
        """Looks at the event; `True` asks the run to stop here."""
        ...


_OPTIONAL = {"check": "memory", "finish": "event", "is_over": "memory", "may_report": "name"}


def checked(callbacks: Any) -> tuple[Callback, ...]:
    """`callbacks` as a tuple, if each one is a `Callback`."""
    unordered = isinstance(callbacks, (str, bytes, Mapping, set, frozenset))
    if unordered or not validation.is_iterable(callbacks):
        raise TypeError(
            f"callbacks must be a sequence of callbacks, got {callbacks!r}. Pass a tuple of them."
        )
    listed = tuple(callbacks)
    for index, callback in enumerate(listed):
        _require_callback(callback, f"callbacks[{index}]")
    return listed


def _require_callback(callback: Any, name: str) -> None:
    validation.instance(callback, name)
    if not isinstance(callback, Callback):
        raise TypeError(
            f"{name} must be callable and have every_n_steps, got {callback!r}. Add what is missing."
        )
    validation.positive(callback.every_n_steps, f"{name}.every_n_steps")
    validation.takes(callback, name, "event")
    for member, argument in _OPTIONAL.items():
        if getattr(callback, member, None) is not None:
            validation.takes(getattr(callback, member), f"{name}.{member}", argument)
    for member in ("name", "follows"):
        given = getattr(callback, member, None)
        if given is not None and not isinstance(given, str):
            raise TypeError(f"{name}.{member} must be text, got {given!r}. Name it.")


def require_followed(callbacks: tuple[Callback, ...], names: tuple[str, ...]) -> None:
    """Raises if a callback follows a number that is not recorded, and that none before it may report.

    Args:
        callbacks: in the order they are called.
        names: what the train step records.
    """
    for index, callback in enumerate(callbacks):
        wanted = getattr(callback, "follows", None)
        if wanted is None or wanted in names or may_be_reported(wanted, callbacks[:index]):
            continue
        raise ValueError(
            f"{type(callback).__name__} follows {wanted!r}, and there is {validation.shown(names)}. "
            "Follow one of them, or put the callback that reports it before."
        )


def may_be_reported(name: str, callbacks: tuple[Callback, ...]) -> bool:
    """Whether one of these callbacks may report a number of this name."""
    return any(getattr(callback, "may_report", _may_always)(name) for callback in callbacks)


def _may_always(name: str) -> bool:
    return True


class Watchers:
    """The callbacks of one call of `fit`, and what each of them remembers.

    Attributes:
        over: whether one of them had asked the resumed run to stop.
    """

    def __init__(self, callbacks: tuple[Callback, ...], remembered: Mapping[str, Any]):
        """Each callback finds what was remembered under its name; a new one begins with nothing.

        Args:
            callbacks: in the order they are called.
            remembered: from `remembered()` of the run that goes on; empty for a fresh one.
        """
        self._named = dict(zip(_names(callbacks), callbacks, strict=True))
        self._memories = {name: copy.deepcopy(remembered.get(name, {})) for name in self._named}
        for name, callback in self._named.items():
            _check(name, callback, self._memories[name])
        self.over = any(_is_over(callback, self._memories[name]) for name, callback in self._named.items())

    def next_step(self, step: int) -> int | None:
        """The next step after `step` at which one of them wants to be called."""
        wanted = ((step // c.every_n_steps + 1) * c.every_n_steps for c in self._named.values())
        return min(wanted, default=None)

    def call(self, event: Event) -> bool:
        """Calls those whose step it is; whether one of them asks to stop.

        Every one is called. Then the error of one is raised as it is, and those of several as a group.
        """
        due = {n: c for n, c in self._named.items() if event.step % c.every_n_steps == 0}
        asked, errors = False, []
        for name, callback in due.items():
            memory = copy.deepcopy(self._memories[name])
            try:
                answer = callback(dataclasses.replace(event, memory=memory))
                asked = _is_yes(answer) or asked
                _require_plain(memory, "memory")
            except Exception as error:
                error.add_note(f"raised by the callback {name!r} at step {event.step}")
                errors.append(error)
            else:
                self._memories[name] = memory
        _raise(errors)
        return asked

    def finish(self, event: Event) -> None:
        """Calls the `finish` of each; errors as in `call`. What they remember now is not saved."""
        errors = []
        for name, callback in self._named.items():
            if not callable(getattr(callback, "finish", None)):
                continue
            try:
                memory = copy.deepcopy(self._memories[name])
                callback.finish(dataclasses.replace(event, memory=memory))  # type: ignore[attr-defined]
            except Exception as error:
                error.add_note(f"raised by the callback {name!r} when the run ended at step {event.step}")
                errors.append(error)
        _raise(errors)

    def remembered(self) -> dict[str, Any]:
        """What each remembers, by name, as JSON holds it."""
        return {name: copy.deepcopy(memory) for name, memory in self._memories.items() if memory}


def reported(numbers: Any, taken: Mapping[str, float]) -> dict[str, float]:
    """What `Event.report` was given, as floats by name."""
    validation.mapping(numbers, "report")
    for name in numbers:
        if name in taken or name == "step":
            raise ValueError(
                f"report has {name!r}, and there is one already at this step. Give it a name of its own."
            )
    try:
        return {name: float(value) for name, value in numbers.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"report must hold numbers by name, got {numbers!r}. Reduce them first.") from error


def _names(callbacks: tuple[Callback, ...]) -> list[str]:
    """A name for each; those of a kind are numbered from the second on."""
    names: list[str] = []
    for callback in callbacks:
        kind = getattr(callback, "__qualname__", type(callback).__qualname__)
        own = str(getattr(callback, "name", None) or kind)
        count, free = 1, own
        while free in names:
            count, free = count + 1, f"{own}#{count + 1}"
        names.append(free)
    return names


def _check(name: str, callback: Any, memory: dict[str, Any]) -> None:
    if getattr(callback, "check", None) is None:
        return
    try:
        callback.check(copy.deepcopy(memory))
    except Exception as error:
        error.add_note(f"raised by the callback {name!r} before the first update")
        raise


def _is_over(callback: Any, memory: dict[str, Any]) -> bool:
    return callable(getattr(callback, "is_over", None)) and bool(callback.is_over(memory))


def _raise(errors: list[Exception]) -> None:
    if len(errors) > 1:
        raise ExceptionGroup(f"{len(errors)} callbacks failed", errors)
    if errors:
        raise errors[0]


def _require_plain(value: Any, path: str) -> None:
    """Raises unless the value comes back equal from JSON."""
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
        f"{path} must be plain data, got {value!r}. "
        "Keep Python numbers, text, and lists and dicts (with names for keys) of them."
    )


def _is_yes(answer: Any) -> bool:
    if answer is not None and not isinstance(answer, (bool, np.bool_)):
        raise TypeError(
            f"a callback must return True to stop, False or None to go on, got {answer!r}. "
            "Wrap a comparison of arrays in bool(...)."
        )
    return bool(answer)
