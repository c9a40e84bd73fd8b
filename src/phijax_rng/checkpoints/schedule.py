"""When a save is due: by the number of the step, and by the clock."""

import time

import numpy as np

from phijax_rng._base import validation


class Schedule:
    """Saves at multiples of a step, and so many minutes after the last save.

    Attributes:
        every_n_steps: at multiples of this step; `None` for no such saves.
        every_minutes: when this long has passed; `None` for no such saves.
    """

    def __init__(self, every_n_steps: int | None, every_minutes: float | None):
        self.every_n_steps = (
            None if every_n_steps is None else validation.positive(every_n_steps, "every_n_steps")
        )
        self.every_minutes = _minutes_or_none(every_minutes)
        self.start()

    def start(self) -> None:
        """Counts the minutes from now."""
        self._last_save = time.monotonic()

    def following(self, step: int) -> int | None:
        """The next step after `step` at which `every_n_steps` makes a save due."""
        if self.every_n_steps is None:
            return None
        return (step // self.every_n_steps + 1) * self.every_n_steps

    def is_due(self, step: int) -> bool:
        """Whether a save is due at `step`."""
        by_step = self.every_n_steps is not None and step % self.every_n_steps == 0
        minutes = (time.monotonic() - self._last_save) / 60
        return by_step or (self.every_minutes is not None and minutes >= self.every_minutes)


def _minutes_or_none(value: float | None) -> float | None:
    """`every_minutes` as a positive float, or `None`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(
            f"every_minutes must be a number, got {validation.described(value)}. Pass minutes, or None."
        )
    if not value > 0:
        raise ValueError(f"every_minutes must be positive, got {value!r}. Pass minutes, or None.")
    return float(value)
