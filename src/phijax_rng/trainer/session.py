"""What the host does between two chunks of the compiled loop: note, show, save, stop.

A look reads what a chunk gave and never changes it, so when the host looks in is free: after one
update or after a thousand, the run ends in the same bits.
"""

import contextlib
import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from phijax_rng.callbacks.history import History
from phijax_rng.callbacks.progress import Display
from phijax_rng.callbacks.protocol import AdaptedCallback, Event
from phijax_rng.callbacks.runner import CallbackRunner, checked_report
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.errors import NonFiniteError, SaveError
from phijax_rng.resume.run_contract import Record
from phijax_rng.state import TrainState
from phijax_rng.training.chunks import Chunk, terms_of

_log = logging.getLogger("phijax_rng")

_REPLAY = """to draw the batch of step {step} again, and its losses one by one:
  source = datamodule.train_batch_source(module.batch_keys, error.state.sampling_key)
  batches = source({step})
  output = module.evaluate(error.state.model_state, batches, phijax_rng.advance(error.state)[1])"""

_REPLAY_BALANCER = """to make the new state of the balancer at step {step} again:
  state = error.state
  source = datamodule.train_batch_source(module.batch_keys, state.sampling_key)
  batches = source({step})
  def key(use): return keys.fold_in(keys.stream(state.balancer_key, "balancer", use), {step})
  # where it offers update; with batches of its own where it names diagnostic_batch_sizes:
  # batches = source.sample(keys.fold_in(state.balancer_key, 0), balancer.diagnostic_batch_sizes)
  balancer.update(module, state.model_state, batches, key("update"), state.balancer_state)
  # where it offers observe:
  losses = module.evaluate(state.model_state, batches, phijax_rng.advance(state)[1]).losses
  balancer.observe(losses, key("observe"), state.balancer_state)"""


class Looks:
    """Takes every chunk in turn, and brings the run to an orderly end.

    Attributes:
        state: the state after the last update that was taken.
        step: its step.
        metrics: the losses of the last update by name, and what callbacks reported at that step; of the
            update before a resume until there is another.
        history: the losses of each update that completed a multiple of `log_every_n_steps`, and reports.
        asked_to_stop: whether a callback asked for the run to stop, now or before it was resumed.
        callback_error: what a callback raised, or `None`.
        loss_names: which of the recorded numbers are losses; from `expect`, when the program is known.
    """

    def __init__(
        self,
        state: TrainState,
        record: Record,
        *,
        checkpoints: Checkpoints | None,
        display: Display,
        log_every_n_steps: int,
        callbacks: tuple[AdaptedCallback, ...] = (),
        remembered: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        self.state = state
        self.step = self._first = int(state.step)
        self.metrics: dict[str, float] = dict(remembered.get("metrics", {}))
        self.history = History.from_plain(remembered.get("history", {}))
        self.callback_error: Exception | None = None
        self.loss_names: tuple[str, ...] = ()
        self._record = record
        self._checkpoints = checkpoints
        self._display = display
        self._every = log_every_n_steps
        try:
            self._callbacks = CallbackRunner(callbacks, remembered.get("callbacks", {}))
        except BaseException:
            display.close()
            raise
        self.asked_to_stop = self._callbacks.had_stopped
        self._told_of_nonfinite = self._told_of_unbalanced = False
        if checkpoints is not None:
            checkpoints.start_clock()

    def expect(self, names: tuple[str, ...], loss_names: tuple[str, ...]) -> None:
        """Takes note of what the program records, and holds callbacks and `keep_best` to it.

        Raises:
            ValueError: one of them wants a number that is not recorded, and that no callback may report.
        """
        self.loss_names = loss_names
        self._callbacks.require_followed(names)
        if self._checkpoints is not None:
            self._checkpoints.require_recorded(names, self._callbacks.may_report)

    def next_look(self) -> int | None:
        """The next step at which a save or a callback is asked for by its number."""
        save = None if self._checkpoints is None else self._checkpoints.next_save(self.step)
        wanted = (save, self._callbacks.next_step(self.step))
        return min((step for step in wanted if step is not None), default=None)

    def take(self, chunk: Chunk) -> None:
        """Notes and shows what a chunk gave, calls whose step it is, and saves if a save is due."""
        self.state, self.step = chunk.state, chunk.step
        if chunk.step == chunk.start:
            return
        self.metrics = _at(chunk, -1)
        for step, losses in _logged(chunk, self._every):
            self.history.add(step, losses)
        self._tell_of_nonfinite(chunk)
        self._display.show(self.step, self.metrics)
        try:
            self.asked_to_stop = self._callbacks.call(self._event()) or self.asked_to_stop
        except Exception as error:
            self.callback_error = error
            raise
        due = self._checkpoints is not None and self._checkpoints.is_due(self.step)
        # Clocks and callbacks of several processes may disagree; the first decides.
        due, self.asked_to_stop = map(bool, processes.agree(due, self.asked_to_stop))
        if due:
            self.save()

    def finish(self) -> None:
        """The last save, waited for, the end of the display, and of the callbacks."""
        try:
            self._end(save=True)
        except BaseException as error:
            with self._beside(error):
                self._dismiss()
            raise
        self._dismiss()

    def abandon(self, error: BaseException) -> None:
        """After an error: saves what the updates before it reached, and tells the callbacks."""
        nonfinite = isinstance(error, NonFiniteError)
        if isinstance(error, NonFiniteError):
            balancer = error.terms == ("balancer_state",)
            error.add_note((_REPLAY_BALANCER if balancer else _REPLAY).format(step=error.step))
            with self._beside(error):
                self.take(error.chunk)
        try:
            if processes.several() and not nonfinite:
                # What raised here need not have raised elsewhere, and a save waits for every process.
                self._display.close()
            else:
                self._end(save=nonfinite or self.step > self._first)
        finally:
            with self._beside(error):
                self._dismiss()

    def _dismiss(self) -> None:
        try:
            self._callbacks.finish(self._event())
        except Exception as error:
            self.callback_error = self.callback_error or error
            raise

    @contextlib.contextmanager
    def _beside(self, error: BaseException) -> Iterator[None]:
        """A block whose own errors become notes of one that is on its way already."""
        try:
            yield
        except Exception as other:
            error.add_note(f"and then: {type(other).__name__}: {other}")

    def _event(self) -> Event:
        return Event(
            step=self.step,
            metrics=types.MappingProxyType(self.metrics),
            history=self.history,
            start=self._first,
            memory={},
            _state=self.state,
            _report=self._take_report,
        )

    def _take_report(self, numbers: Mapping[str, float]) -> None:
        added = checked_report(numbers, self.metrics)
        self.history.add(self.step, {**self.metrics, **added})
        self.metrics.update(added)

    def _memory(self) -> dict[str, Any]:
        """What a run that goes on from here must know besides its state."""
        return {
            "callbacks": self._callbacks.memories(),
            "history": self.history.plain(),
            "metrics": dict(self.metrics),
        }

    def _end(self, *, save: bool) -> None:
        try:
            if self._checkpoints is not None:
                if save:
                    self.save()
                self._checkpoints.wait()
                if save:
                    self._display.log(f"step {self.step} is saved in {self._checkpoints.directory}")
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
            (held,) = processes.agree(self.step in self._checkpoints.steps)
            if not held:
                self._checkpoints.save(self.state, self._record.at(self.state), self._memory())
                self._checkpoints.require_metric(
                    self.step, self.metrics
                )  # when the save is made: it is no less
        except SaveError as error:
            error.state = self.state
            raise

    def _tell_of_nonfinite(self, chunk: Chunk) -> None:
        left_out = chunk.unbalanced & ~chunk.nonfinite
        if left_out.any() and not self._told_of_unbalanced and processes.is_first():
            _log.warning(
                "the update of the balancer before step %d is not finite and is left out; its weights stay",
                chunk.start + int(np.argmax(left_out)),
            )
            self._told_of_unbalanced = True
        if chunk.nonfinite.any() and not self._told_of_nonfinite and processes.is_first():
            index = int(np.argmax(chunk.nonfinite))
            terms = terms_of(chunk, index, self.loss_names)
            _log.warning(
                "training became non-finite at step %d (%s) and goes on as on_nonfinite asks; "
                "its batch is source(%d)",
                chunk.start + index,
                ", ".join(terms),
                chunk.start + index,
            )
            self._told_of_nonfinite = True


def _logged(chunk: Chunk, every: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and losses of each update that completed a multiple of `every`."""
    first = every - chunk.start % every - 1
    for index in range(first, chunk.step - chunk.start, every):
        yield chunk.start + index + 1, _at(chunk, index)


def _at(chunk: Chunk, index: int) -> dict[str, float]:
    return {name: float(values[index]) for name, values in chunk.records.items()}
