"""What the host does between two chunks of the compiled loop: history, display, callbacks, save.

A host step reads a chunk and never changes it, so the run ends in the same bits whether there is one host
step after every update or one after a thousand.
"""

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from phijax_rng._base.background import LeaveNow
from phijax_rng.callbacks.history import RunHistory
from phijax_rng.callbacks.progress import Display
from phijax_rng.callbacks.protocol import AdaptedCallback, Event
from phijax_rng.callbacks.runner import CallbackRunner, checked_report
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.errors import NonFiniteError, SaveError
from phijax_rng.resume.plan import ResumedRun
from phijax_rng.state import TrainState
from phijax_rng.trainer.best import Best, BestState
from phijax_rng.training.chunks import Chunk, Values, named_leaves, terms_of

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
  # if it has update; with other batches if it has diagnostic_batch_sizes:
  # batches = source.sample(keys.fold_in(state.balancer_key, 0), balancer.diagnostic_batch_sizes)
  balancer.update(module, state.model_state, batches, key("update"), state.balancer_state)
  # if it has observe:
  losses = module.evaluate(state.model_state, batches, phijax_rng.advance(state)[1]).losses
  balancer.observe(losses, key("observe"), state.balancer_state)"""


class TrainingSession:
    """Handles every chunk in turn, and brings the run to an orderly end.

    Attributes:
        state: the state after the last update.
        step: its step.
        metrics: the losses of the last update by name, and the reports of callbacks at that step; after a
            resume those of the checkpoint, until there is another update.
        log: the rows of the history.
        max_steps: the step at which training ends.
        skipped_updates: how many updates `on_nonfinite="skip"` has skipped, with those before a resume.
        skipped_in_a_row: how many of them are the last updates.
        stop_requested: whether a callback stops the run, now or before it was resumed.
        callback_error: what a callback raised, or `None`.
    """

    def __init__(
        self,
        run: ResumedRun,
        *,
        checkpoints: Checkpoints | None,
        display: Display,
        log_every_n_steps: int,
        max_steps: int,
        gradient_norm: bool = False,
        skips_nonfinite: bool = False,
        callbacks: tuple[AdaptedCallback, ...] = (),
        best: BestState | None = None,
        held: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.state = run.state
        self.step = self._first = int(run.state.step)
        self.metrics: dict[str, float] = dict(run.memory.get("metrics", {}))
        self.log = RunHistory(
            run.memory,
            run.state,
            every=log_every_n_steps,
            has_norms=gradient_norm,
            leaves_out=skips_nonfinite,
        )
        self._reported: dict[str, float] = {}
        self._skips = skips_nonfinite
        self.skipped_updates, self.skipped_in_a_row = run.memory.get("skipped", (0, 0))
        self._was_saved = False
        self._held = held
        self.callback_error: Exception | None = None
        self._contract = run.contract
        self._checkpoints = checkpoints
        self._display = display
        self.max_steps = max_steps
        self._best = best
        self._restored: Best | None = None
        self._loss_names: tuple[str, ...] = ()
        try:
            self._callbacks = CallbackRunner(
                callbacks,
                run.memory.get("callbacks", {}),
                run.memory.get("pending", ()),
                run.memory.get("settings", {}),
                is_fresh=not run.plan.is_own_run and not run.plan.may_be_restart,
            )
        except BaseException:
            # The check of a callback may raise; a bar that stays open would garble the traceback.
            display.close()
            raise
        self.stop_requested = self._callbacks.had_stopped
        # Since the run ended: what it needs to go on as if it had not.
        self._before_end: dict[str, Any] | None = None
        if self.is_over and "end" in run.memory:
            self._restore_end(**run.memory["end"])
        self._warned_of_nonfinite = self._warned_of_balancer = False
        if checkpoints is not None:
            checkpoints.start_clock()

    def give_state(self) -> TrainState:
        """The state, of which no reference is kept; the next chunk brings one."""
        state = self.state
        del self.state
        return state

    @property
    def iterations(self) -> int:
        """Updates of this call."""
        return self.step - self._first

    def phase(self, name: str) -> None:
        """Shows what the run waits for; called again and again while it waits."""
        self._display.phase(name)

    def while_compiling(self, interrupted: bool) -> None:
        """Shows that the program is not ready, and saves if a signal asked for the end."""
        self.phase("compiling")
        if interrupted:
            # Compiling may take minutes, and whoever sends a signal may kill the process sooner.
            self.save()

    def end_at_once(self) -> None:
        """Says why there is nothing to train, and whether something is saved all the same."""
        if self.stop_requested:
            found, fix = f"a callback stopped this run at step {self.step}", "Change that callback"
        else:
            found = f"this run is finished: step {self.step}, max_steps={self.max_steps}"
            fix = "Raise max_steps"
        self._was_saved = self._checkpoints is not None and self.step in self._checkpoints.steps
        saved = " and nothing is saved" if self._was_saved else ""
        self._display.log(f"{found}. Nothing is trained{saved}. {fix} to continue it.")
        self.call_at_end()

    @property
    def outcome(self) -> Best:
        """State and numbers of the result: the last ones, or the best where they are restored at the end."""
        return self._restored or (self.state, self.metrics)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: at `max_steps`, or because a callback stops it."""
        return self.step >= self.max_steps or self.stop_requested

    def check_recorded(self, names: tuple[str, ...], loss_names: tuple[str, ...]) -> None:
        """Checks that callbacks and `keep_best` follow numbers that the program records.

        Args:
            names: what the program records.
            loss_names: which of them are losses.

        Raises:
            ValueError: a number is not recorded, and no callback may report it; or it is never there when
                it is looked for.
        """
        self._loss_names = loss_names
        self.log.start(self.step)
        self._display.phase("running")
        self._callbacks.require_followed(names, self.max_steps)
        self._callbacks.warn_of_idle(self.max_steps)
        if self._checkpoints is not None:
            self._checkpoints.require_recorded(names, self._callbacks.may_report)
            best = self._checkpoints.best_rule
            if best is not None and best.metric not in names:
                what = f"keep_best compares {best.metric!r} at saves"
                self._callbacks.require_reported(what, best.metric, best.every_n_steps, self.max_steps)

    def next_host_step(self) -> int | None:
        """The next step at which a save, a callback or a look at the state is due by its number."""
        save = None if self._checkpoints is None else self._checkpoints.next_save(self.step)
        wanted = (save, self._callbacks.next_step(self.step), self.log.next_step(self.step))
        return min((step for step in wanted if step is not None), default=None)

    def on_chunk(self, chunk: Chunk) -> None:
        """Takes a chunk over: history, display, callbacks, save."""
        # No handler raises in between: a run that is interrupted saves a state with its history, and the
        # callbacks that are still to be called for it.
        with self._held():
            self.state, self.step = chunk.state, chunk.step
            # A non-finite first update leaves a chunk without updates, whose metrics do not exist.
            if chunk.step == chunk.start:
                return
            # In this order: callbacks read the history, and a save stores what callbacks reported and keep. A
            # step is saved once, so the callbacks at the end come before the save.
            self._update_history(chunk)
            self._callbacks.begin(self.step)
        self._show(chunk)
        self._call_callbacks()
        due = self._is_save_due()
        if self.is_over:
            self.call_at_end()
        if self._best is not None:
            self._best.look(self.state, self.step, self.metrics, is_over=self.is_over)
        if due:
            self.save()
            self._require_best_metric()
        self.log.end_chunk(self.step)

    def catch_up(self) -> None:
        """Calls the callbacks that the resumed run was interrupted before."""
        if self._callbacks.pending:
            self._call_callbacks()

    def _update_history(self, chunk: Chunk) -> None:
        self.metrics = {name: float(values[-1]) for name, values in chunk.records.items()}
        self.log.add_chunk(chunk, self._loss_names, self.skipped_updates)
        if self._skips:
            self._count_skipped(chunk.nonfinite)

    def _count_skipped(self, nonfinite: Values) -> None:
        since_finite = nonfinite[::-1].argmin() if not nonfinite.all() else len(nonfinite)
        self.skipped_in_a_row = int(since_finite) + (self.skipped_in_a_row if nonfinite.all() else 0)
        self.skipped_updates += int(np.count_nonzero(nonfinite))

    def _show(self, chunk: Chunk) -> None:
        self._warn_of_nonfinite(chunk)
        self._show_numbers()

    def _show_numbers(self) -> None:
        """Shows the first loss, the newest reports, its newest mean, and what else the newest row says."""
        first = next(iter(self.metrics))
        others = {f"mean/{name}" for name in self._loss_names if name != first}
        newest = {name: value for name, value in self.log.newest.items() if name not in others}
        if self._skips:
            newest["skipped_updates"] = self.skipped_updates
        self._display.show(self.step, {first: self.metrics[first], **self._reported, **newest})

    def _call_callbacks(self) -> None:
        try:
            self.stop_requested = self._callbacks.call(self._event()) or self.stop_requested
        except Exception as error:
            self.callback_error = error
            raise

    def _is_save_due(self) -> bool:
        due = self._checkpoints is not None and self._checkpoints.is_due(self.step)
        # Clocks and callbacks of several processes may disagree; the first decides, or one process would
        # save or stop alone and the others would wait for it in the next collective.
        due, self.stop_requested = map(bool, processes.broadcast(due, self.stop_requested))
        return due

    def call_at_end(self) -> None:
        """Calls the callbacks that are due at the end of the run, and have not been called there yet."""
        if self._before_end is None:
            self._before_end = self._memory()
        try:
            self._callbacks.call_at_end(self._event())
        except Exception as error:
            self.callback_error = error
            raise

    def _restore_end(self, metrics: Mapping[str, float], called: list[str]) -> None:
        """Of a run that had ended: the numbers that were reported for its end."""
        self._before_end = self._memory()
        self._callbacks.restore_end(called)
        added = {name: number for name, number in metrics.items() if name not in self.metrics}
        if added:
            self._add_report(added)

    def _require_best_metric(self) -> None:
        """Raises if this save lacks the number that decides about best, and should have it."""
        # After the save: a missing number is an error, and no reason to lose the state.
        best = None if self._checkpoints is None else self._checkpoints.best_rule
        if best is None or not (self.is_over or self.step % best.every_n_steps == 0):
            return
        if self._callbacks.must_have(best.metric, self.step, has_ended=self.is_over):
            best.require(self.step, self.metrics)

    def finish(self) -> None:
        """Saves, waits for the save, and finishes display and callbacks."""
        try:
            self._end(save=True)
            if self.is_over and self.iterations:
                self._require_best_metric()
            if self._best is not None and self.is_over:
                self._restored = self._best.of(self.state, self.metrics)
        except LeaveNow:
            raise
        except BaseException as error:
            with _notes_on(error):
                self._finish_callbacks()
            raise
        self._finish_callbacks()

    def abandon(self, error: BaseException) -> None:
        """After an error: saves what the updates before it reached, and finishes the callbacks."""
        if isinstance(error, LeaveNow):
            self._display.close()
            return
        # Every process raises a non-finite loss at the same step, so it may save; other errors may not.
        nonfinite = isinstance(error, NonFiniteError)
        if isinstance(error, NonFiniteError):
            balancer = error.terms == ("balancer_state",)
            error.add_note((_REPLAY_BALANCER if balancer else _REPLAY).format(step=error.step))
            with _notes_on(error):
                self.on_chunk(error.chunk)
        try:
            if processes.is_multiprocess() and not nonfinite:
                # The others may not have raised, and a save waits for every process.
                self._display.close()
            else:
                # The error of a callback carries the result, so a save that fails too need not hide it.
                hidden = _notes_on(error) if error is self.callback_error else contextlib.nullcontext()
                if lost := self._is_lost():
                    error.add_note(f"the state was being updated in place; {self.describe_save()}")
                with hidden:
                    self._end(save=not lost and (nonfinite or self.step > self._first))
        finally:
            with _notes_on(error):
                self._finish_callbacks()

    def _is_lost(self) -> bool:
        """Whether an error came while a large state was written over, or before the session had one."""
        leaves = jax.tree.leaves(getattr(self, "state", None))
        return not leaves or any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)

    def _finish_callbacks(self) -> None:
        try:
            self._callbacks.finish(self._event())
        except Exception as error:
            self.callback_error = self.callback_error or error
            raise

    def _event(self) -> Event:
        return Event(
            step=self.step,
            metrics=types.MappingProxyType(self.metrics),
            history=self.log.rows,
            start=self._first,
            memory={},
            _state=self.state,
            _report=self._add_report,
            timing=self.log.timing,
        )

    def _add_report(self, numbers: Mapping[str, float]) -> None:
        added = checked_report(numbers, self.metrics)
        with self._held():
            self.log.add_report(self.step, {**self.metrics, **added})
            self.metrics.update(added)
            self._reported.update(added)
        self._show_numbers()

    def _memory(self) -> dict[str, Any]:
        """What a run that continues from here needs besides its state."""
        metrics = self._callbacks.kept(self.metrics)
        if self._before_end is not None:
            end = {"metrics": metrics, "called": list(self._callbacks.called_at_end)}
            return {**self._before_end, "end": end}
        pending = {"pending": list(self._callbacks.pending)} if self._callbacks.pending else {}
        return {
            **pending,
            "callbacks": self._callbacks.memories(),
            "settings": self._callbacks.settings(),
            **self.log.plain(),
            "metrics": metrics,
            "skipped": [self.skipped_updates, self.skipped_in_a_row],
        }

    def _end(self, *, save: bool) -> None:
        try:
            if self._checkpoints is not None:
                if save:
                    self.save()
                # A save in the background may still fail, and nobody would hear of it later.
                self._checkpoints.wait()
                if save and not self._was_saved and self._is_listed():
                    self._display.log(f"step {self.step} is saved in {self._checkpoints.directory}")
        except SaveError as error:
            error.state = self.state
            raise
        finally:
            self._display.close()

    def _is_listed(self) -> bool:
        """Whether this step is on disk; `False` where the directory cannot be read."""
        with contextlib.suppress(OSError):
            return self._checkpoints is not None and self.step in self._checkpoints.steps
        return False

    def describe_save(self) -> str:
        """Which save is on disk, for a message at a second interrupt."""
        step = None
        with contextlib.suppress(OSError):
            step = None if self._checkpoints is None else self._checkpoints.latest_step
        if self._checkpoints is None or step is None:
            return "no checkpoint was saved"
        return f"the newest checkpoint is step {step} in {self._checkpoints.directory}"

    def save(self) -> None:
        """Saves the state, unless its step is on disk or the run is not committed yet."""
        if self._checkpoints is None or not self._contract.may_save:
            return
        try:
            # First: a save in flight becomes visible under its step only when it has landed.
            self._checkpoints.wait()
            if not self._checkpoints.is_saved(self.step):
                self._checkpoints.save(self.state, self._contract.for_save(self.state), self._memory())
        except SaveError as error:
            error.state = self.state
            raise

    def _warn_of_nonfinite(self, chunk: Chunk) -> None:
        left_out = chunk.unbalanced & ~chunk.nonfinite
        if left_out.any() and not self._warned_of_balancer and processes.is_primary():
            _log.warning(
                "the update of the balancer before step %d is not finite and is skipped; its weights stay",
                chunk.start + int(np.argmax(left_out)),
            )
            self._warned_of_balancer = True
        if chunk.nonfinite.any() and not self._warned_of_nonfinite and processes.is_primary():
            index = int(np.argmax(chunk.nonfinite))
            terms = terms_of(chunk, index, self._loss_names)
            losses = [term for term in terms if term in chunk.records]
            leaves = [named_leaves(chunk.turned)] if chunk.turned else []
            _log.warning(
                "training became non-finite at step %d (%s) and continues, as on_nonfinite says; "
                "its batch is source(%d)",
                chunk.start + index,
                ", ".join(losses or leaves or terms),
                chunk.start + index,
            )
            self._warned_of_nonfinite = True


@contextlib.contextmanager
def _notes_on(error: BaseException) -> Iterator[None]:
    """A `with` block whose own errors become notes of one that is raised already."""
    try:
        yield
    except Exception as other:
        error.add_note(f"and then: {type(other).__name__}: {other}")
