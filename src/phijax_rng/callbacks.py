"""Who looks in while a run goes on.

A callback is anything with a number `every_n_steps` that can be called with an `Event`. It is called
when that many updates are complete, and may ask to stop by returning `True`. What it is given are
copies, and what it draws comes from a stream of its own, so nothing it does can move a number of
the run.

    class Show:
        every_n_steps = 100
        def __call__(self, event):
            print(event.step, event.metrics["total_loss"])
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from phijax_rng import _checks, keys
from phijax_rng._types import KeyScalar
from phijax_rng.state import TrainState


@dataclasses.dataclass(frozen=True)
class Event:
    """A moment at which a callback looks in.

    Attributes:
        step: completed updates.
        metrics: the losses of the last update, by name.
    """

    step: int
    metrics: Mapping[str, float]
    _state: TrainState

    @classmethod
    def of(cls, state: TrainState, metrics: Mapping[str, float]) -> "Event":
        """The event of a state."""
        return cls(int(state.step), dict(metrics), state)

    @property
    def state(self) -> TrainState:
        """A copy of the train state, the caller's to keep, to write into or to donate."""
        return jax.tree.map(_copy, self._state)

    def key(self, *names: str) -> KeyScalar:
        """A key of a named stream at this step, apart from every stream that training draws from."""
        own = keys.stream(self._state.balancer_key, "callback", *names)
        return keys.fold_in(own, self.step)


@runtime_checkable
class Callback(Protocol):
    """Called with an `Event` whenever a multiple of `every_n_steps` updates is complete."""

    every_n_steps: int

    def __call__(self, event: Event) -> bool | None:
        """Looks at the event; `True` asks the run to stop here."""
        ...


def checked(callbacks: Any) -> tuple[Callback, ...]:
    """`callbacks` as a tuple, if each one is a `Callback`."""
    listed = tuple(callbacks)
    for index, callback in enumerate(listed):
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks[{index}] must be callable and have every_n_steps, got {callback!r}. "
                "Add what is missing."
            )
        _checks.positive(callback.every_n_steps, f"callbacks[{index}].every_n_steps")
    return listed


def next_step(callbacks: tuple[Callback, ...], step: int) -> int | None:
    """The next step after `step` at which one of them wants to be called."""
    return min((_after(step, callback.every_n_steps) for callback in callbacks), default=None)


def call(callbacks: tuple[Callback, ...], event: Event) -> bool:
    """Calls those whose step it is; whether one of them asks to stop."""
    due = [callback for callback in callbacks if event.step % callback.every_n_steps == 0]
    asked = [callback(event) is True for callback in due]  # every one is called
    return any(asked)


def _copy(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _after(step: int, every: int) -> int:
    return (step // every + 1) * every
