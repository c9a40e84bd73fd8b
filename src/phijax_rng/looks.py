"""What the host does between two chunks of the compiled loop: note, show, save, stop.

A look reads what a chunk gave and never changes it, so when the host looks in is free: after one
update or after a thousand, the run ends in the same bits.
"""

import logging
from typing import Any

import numpy as np

from phijax_rng.callbacks import Callback, Event, call, next_step
from phijax_rng.checkpoints import Checkpoints
from phijax_rng.errors import SaveError
from phijax_rng.loop import Chunk
from phijax_rng.record import Record
from phijax_rng.state import TrainState

_log = logging.getLogger("phijax_rng")


class Looks:
    """Takes every chunk in turn, and brings the run to an orderly end.

    Attributes:
        state: the state after the last update that was taken.
        step: its step.
        metrics: the losses of the last update, by name.
        history: the losses of each update that completed a multiple of `log_every_n_steps`.
        asked_to_stop: whether a callback asked for the run to stop.
    """

    def __init__(
        self,
        state: TrainState,
        record: Record,
        *,
        checkpoints: Checkpoints | None,
        display: Any,
        log_every_n_steps: int,
        callbacks: tuple[Callback, ...] = (),
    ):
        self.state = state
        self.step = self._first = int(state.step)
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.asked_to_stop = False
        self._record = record
        self._checkpoints = checkpoints
        self._display = display
        self._every = log_every_n_steps
        self._callbacks = callbacks
        self._told_of_nonfinite = False
        if checkpoints is not None:
            checkpoints.start_clock()

    def next_look(self) -> int | None:
        """The next step at which a save or a callback is asked for by its number."""
        save = None if self._checkpoints is None else self._checkpoints.next_save(self.step)
        wanted = (save, next_step(self._callbacks, self.step))
        return min((step for step in wanted if step is not None), default=None)

    def take(self, chunk: Chunk) -> None:
        """Notes and shows what a chunk gave, calls whose step it is, and saves if a save is due."""
        self.state, self.step = chunk.state, chunk.step
        if chunk.step == chunk.start:
            return
        self.metrics = _at(chunk, -1)
        self.history += _logged(chunk, self._every)
        self._tell_of_nonfinite(chunk)
        self._display.show(self.step, self.metrics)
        if self._callbacks:
            event = Event.of(self.state, self.metrics)
            self.asked_to_stop = call(self._callbacks, event) or self.asked_to_stop
        if self._checkpoints is not None and self._checkpoints.is_due(self.step):
            self.save()

    def finish(self) -> None:
        """The last save, waited for, and the end of the display."""
        self._end(save=True)

    def abandon(self) -> None:
        """After an error: saves what the updates before it reached."""
        self._end(save=self.step > self._first)

    def _end(self, *, save: bool) -> None:
        try:
            if self._checkpoints is not None:
                if save:
                    self.save()
                self._checkpoints.wait()
                if save:
                    self._display.tell(f"step {self.step} is saved in {self._checkpoints.directory}")
        except SaveError as error:
            error.state = self.state
            raise
        finally:
            self._display.close()

    def standing(self) -> str:
        """Which save stands, for whoever interrupts a second time."""
        step = None if self._checkpoints is None else self._checkpoints.latest_step
        if self._checkpoints is None or step is None:
            return "no checkpoint was saved"
        return f"the checkpoint at step {step} in {self._checkpoints.directory} stands"

    def save(self) -> None:
        """Saves the state as it stands, unless it is on disk already or came from another save as it is."""
        if self._checkpoints is None or not self._record.may_save:
            return
        try:
            self._checkpoints.wait()
            if self.step not in self._checkpoints.steps:
                self._checkpoints.save(self.state, self._record.at(self.state))
        except SaveError as error:
            error.state = self.state
            raise

    def _tell_of_nonfinite(self, chunk: Chunk) -> None:
        if chunk.nonfinite.any() and not self._told_of_nonfinite:
            step = chunk.start + int(np.argmax(chunk.nonfinite))
            _log.warning("training became non-finite at step %d and goes on as on_nonfinite asks", step)
            self._told_of_nonfinite = True


def _logged(chunk: Chunk, every: int) -> list[dict[str, float]]:
    """One entry for each update that completed a multiple of `every`."""
    first = every - chunk.start % every - 1
    return [
        {"step": chunk.start + index + 1, **_at(chunk, index)}
        for index in range(first, chunk.step - chunk.start, every)
    ]


def _at(chunk: Chunk, index: int) -> dict[str, float]:
    return {name: float(values[index]) for name, values in chunk.records.items()}
