"""What a callback is, and what it is called with.

A callback is any object with a number `every_n_steps` that can be called with an `Event`. It is called
whenever that many more updates are complete, and stops the run by returning `True`. An event carries copies
of the state, and its keys come from a separate stream, so a callback cannot change a number of the run.

    class Show:
        every_n_steps = 100
        def __call__(self, event):
            print(event.step, event.metrics["total_loss"])

A callback keeps what it must remember from one call to the next in `event.memory`, which is saved with the
run and is empty when another run begins.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar
from phijax_rng.callbacks.history import History
from phijax_rng.devices import processes
from phijax_rng.state import TrainState
from phijax_rng.training.evaluation import evaluation_params

Memory: TypeAlias = dict[str, Any]
"""What a callback remembers, as JSON can store it: numbers, strings, and lists and dicts of them."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What a callback is called with.

    Attributes:
        step: completed updates.
        metrics: the losses of the last update by name, and the numbers reported at this step.
        history: the rows so far, with those from before a resume; do not change it.
        start: the step at which this call of `fit` began.
        memory: a dict of this callback alone, saved with the run: numbers, strings, and lists and dicts of
            them.
        timing: rows with `seconds` and `steps_per_second`, at the steps of the history.
    """

    step: int
    metrics: Mapping[str, float]
    history: History
    start: int
    memory: Memory
    _state: TrainState = dataclasses.field(repr=False)
    _report: Callable[[Mapping[str, float]], None] = dataclasses.field(repr=False)
    timing: History = dataclasses.field(default_factory=History)

    @property
    def state(self) -> TrainState:
        """The train state, apart from the run's own: the callback may keep it, or donate it to JAX.

        It is a copy, except for large arrays on CPU: those are the memory of the run, which leaves it alone
        for as long as one of them is alive. Write into copies of them.

        With several processes its arrays are global. Every process calls the callback, so each of them takes
        part in what is computed from these arrays.
        """
        return jax.tree.map(processes.lent, self._state)

    @property
    def evaluation_params(self) -> Any:
        """The model state to evaluate, see `training.evaluation_params`: apart from the run, as `state` is.

        Where `state` is a copy, this copies no state of the optimizer.
        """
        rest = dict.fromkeys(("optimizer_state", "balancer_state", "sampler_state"))
        alone = self._state.replace(model_state=evaluation_params(self._state), **rest)
        return jax.tree.map(processes.lent, alone).model_state

    def key(self, *names: str) -> KeyScalar:
        """The key of a named stream at this step, distinct from every key that training uses.

        Callbacks that use the same names get the same key.
        """
        # The first name keeps these streams apart from those of the balancer, which have the same parent.
        stream = keys.stream(self._state.balancer_key, "callback", *names)
        return keys.fold_in(stream, self.step)

    def report(self, numbers: Mapping[str, float]) -> None:
        """Adds numbers to `metrics` and the history, for the callbacks after this one and for `keep_best`.

        Raises:
            TypeError: `numbers` is not a mapping by name, or a value is not a number.
            ValueError: a loss or another report at this step already has one of the names.
        """
        self._report(numbers)


@runtime_checkable
class Callback(Protocol):
    """Called with an `Event` whenever a multiple of `every_n_steps` updates is complete.

    Where a callback `follows` a number, it is called only at steps that have it. With `at_end` a callback is
    called when the run ends too (at its last step, or where a callback stops it), unless it was called at
    this step; then `every_n_steps` may be `None`, or absent. What it reports there is in the result, its
    history and the last checkpoint, until the run goes on: then the run is as if it had not ended, and so are
    all memories.

    Optional members:

        member            what it is for                                          where it is absent
        name              a str: the name  its memory is saved under                the name of its class
        check(memory)     runs before anything is compiled and raises what        nothing is checked
                          would make the first call fail: a file that cannot
                          be written
        check_fresh()     runs before a run that continues no other, and raises   nothing is checked
                          if it would overwrite what another run wrote; not
                          with resume="auto", which may restart a killed run
        finish(event)     runs once when the run ends, however it ends, and       nothing is called
                          closes what the callback holds open
        is_over(memory)   whether the callback had stopped the run that is        it had not
                          resumed
        follows           a str: a number that it needs; a run in which nothing    no number is needed
                          provides it fails before the first update
        at_end            a bool: whether it is called when the run ends           it is not
        may_report(name)  whether it may report a number of this name             it may, for every name

    """

    @property
    def every_n_steps(self) -> int | None:
        """Updates between two calls; `None` for a call `at_end` alone."""
        ...

    def __call__(self, event: Event) -> bool | None:
        """Handles the event; `True` stops the run here."""
        ...


@dataclasses.dataclass(frozen=True)
class AdaptedCallback:
    """A callback with every optional member in place.

    Attributes:
        callback: the user's object.
        name: what its memory is saved under, different for each callback of a run.
        every_n_steps: updates between two calls; `None` for a call at the end alone.
        at_end: whether it is called when the run ends.
        follows: the name of the number it needs; `None` for none.
        check: raises what would make the first call fail.
        check_fresh: raises what a run that is not resumed would overwrite.
        finish: releases what the callback holds open.
        is_over: whether a run with this memory had been stopped by the callback.
        may_report: whether a number of this name may be reported.
    """

    callback: Callback
    name: str
    every_n_steps: int | None
    at_end: bool
    follows: str | None
    check: Callable[[Memory], object]
    check_fresh: Callable[[], object]
    finish: Callable[[Event], object]
    is_over: Callable[[Memory], object]
    may_report: Callable[[str], object]

    @property
    def kind(self) -> str:
        """The name of its class, for messages."""
        return type(self.callback).__name__

    @property
    def has_finish(self) -> bool:
        """Whether it does something when the run ends, besides its calls."""
        return self.finish is not _ignore

    def is_due(self, step: int) -> bool:
        """Whether `step` is a multiple of `every_n_steps`."""
        return self.every_n_steps is not None and step % self.every_n_steps == 0


def adapt_callbacks(callbacks: Any) -> tuple[AdaptedCallback, ...]:
    """The callbacks that a user passed, each one adapted, with distinct names.

    Of several callbacks with one name, the second and later ones are numbered.
    """
    unordered = isinstance(callbacks, (str, bytes, Mapping, set, frozenset))
    if unordered or not validation.is_iterable(callbacks):
        raise TypeError(
            f"callbacks must be a sequence of callbacks, got {validation.described(callbacks)}. "
            "Pass a tuple of them."
        )
    adapted: dict[str, AdaptedCallback] = {}
    for index, callback in enumerate(callbacks):
        one = adapt_callback(callback, f"callbacks[{index}]")
        count, free = 1, one.name
        while free in adapted:
            count, free = count + 1, f"{one.name}#{count + 1}"
        adapted[free] = dataclasses.replace(one, name=free)
    return tuple(adapted.values())


def adapt_callback(callback: Any, argument: str) -> AdaptedCallback:
    """A user's callback with every optional member in place.

    Args:
        callback: the user's object.
        argument: its name in messages, `callbacks[0]`.

    Raises:
        TypeError: it cannot be called with an event, or a member is of the wrong type.
        ValueError: `every_n_steps` is not positive.
    """
    validation.instance(callback, argument)
    at_end = validation.flag(getattr(callback, "at_end", False), f"{argument}.at_end")
    if not isinstance(callback, Callback) and not (at_end and callable(callback)):
        raise TypeError(
            f"{argument} must be callable and have every_n_steps, got {validation.described(callback)}. "
            "Add what is missing."
        )
    # A function has a name of its own; the class of all functions would not tell two of them apart.
    kind = getattr(callback, "__qualname__", type(callback).__qualname__)
    every_n_steps = getattr(callback, "every_n_steps", None)
    if every_n_steps is not None or not at_end:
        every_n_steps = validation.positive(every_n_steps, f"{argument}.every_n_steps")
    validation.takes(callback, argument, "event")

    def function(member: str, parameter: str, default: Callable[..., object]) -> Callable[..., object]:
        found = getattr(callback, member, None)
        if found is None:
            return default
        return validation.takes(found, f"{argument}.{member}", parameter)

    def text(member: str) -> str | None:
        found = getattr(callback, member, None)
        if found is not None and not isinstance(found, str):
            raise TypeError(
                f"{argument}.{member} must be a str, got {validation.described(found)}. Pass a name."
            )
        return found

    fresh = getattr(callback, "check_fresh", None)
    return AdaptedCallback(
        callback,
        every_n_steps=every_n_steps,
        at_end=at_end,
        check=function("check", "memory", _ignore),
        check_fresh=_do_nothing if fresh is None else validation.function(fresh, f"{argument}.check_fresh"),
        finish=function("finish", "event", _ignore),
        is_over=function("is_over", "memory", _no),
        may_report=function("may_report", "name", _yes),
        name=text("name") or kind,
        follows=text("follows"),
    )


def _do_nothing() -> None:
    """The default of `check_fresh`."""


def _ignore(argument: object) -> None:
    """The default of `check` and `finish`."""


def _no(memory: Memory) -> bool:
    return False


def _yes(name: str) -> bool:
    return True
