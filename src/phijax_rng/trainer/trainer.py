"""`Trainer`: a whole run from a seed, and its resume.

    seed --> four streams --> module.init, data, optimizer, balancer --> TrainState          `run_spec`
    plan --> restore --> compare --> compile --> compare --> commit                          `resume`
    one compiled loop, and after each chunk: history, display, callbacks, save               `session`

The trainer decides where a run starts and when the host does its part. Neither can change a number: all
numbers come from the train state, the source and one compiled program.
"""

import contextlib
import dataclasses
import datetime
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.background import LeaveNow
from phijax_rng._base.frozen import assign
from phijax_rng._base.tracebacks import door
from phijax_rng._base.types import Seed, Step
from phijax_rng.auditing.audit_report import AuditReport
from phijax_rng.callbacks.evaluate import require_distinct
from phijax_rng.callbacks.progress import make_progress
from phijax_rng.callbacks.protocol import Callback, adapt_callbacks
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.devices.placement import require_devices, resolve
from phijax_rng.devices.row_sharding import UNEVEN
from phijax_rng.resume.plan import Resume, ResumedRun, locked_plan, resume_run
from phijax_rng.state import TrainState
from phijax_rng.trainer import predict
from phijax_rng.trainer.best import BestState, restoring
from phijax_rng.trainer.limits import check_limits, last_step
from phijax_rng.trainer.predict import FitResult
from phijax_rng.trainer.run_spec import FromSeed, RunSpec, require_batches, require_inside
from phijax_rng.trainer.session import TrainingSession
from phijax_rng.trainer.signals import StopSignals, checked_seconds, checked_signals
from phijax_rng.training.balancing.protocol import LossBalancer
from phijax_rng.training.balancing.weights import fraction
from phijax_rng.training.loop import POLICIES, Pace, TrainLoop
from phijax_rng.training.module import DataModule, LossModule
from phijax_rng.training.prefetch import InProgramSource, Prefetcher, open_source
from phijax_rng.training.slice_check import require_equal_slices
from phijax_rng.training.source_checks import check_source
from phijax_rng.training.step import TOTAL, LossTrainStep, Optimizer, TrainStep

_log = logging.getLogger("phijax_rng")


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains to a global step, and continues where a run was left.

    Attributes:
        max_steps: the global step at which training ends, whatever a call starts from.
        max_epochs: the same in passes over a finite pool; `{name: epochs}` where the epochs of several
            samplers differ. With both, the lower step ends the run.
        max_time: seconds or a `timedelta` after which a call saves and returns with `interrupted=True`, to be
            resumed. It counts from the call of `fit`, with what is prepared and compiled.
        checkpoints: where the run is saved; `None` to save nothing.
        callbacks: called every so many steps; see `callbacks`.
        log_every_n_steps: how many updates between two entries of the history.
        progress: whether to show a bar (on a terminal) or lines (elsewhere) on standard error.
        on_nonfinite: what to do when a loss is not finite, or an update turns a finite entry of the model's
            or the optimizer's state into one that is not: `"raise"` keeps the state before the update and
            raises `NonFiniteError`, `"skip"` skips the update, `"ignore"` continues.
        max_skipped_in_a_row: with `"skip"`, the last of so many non-finite updates in a row raises
            `NonFiniteError`; those before a resume count.
        signals: those that mean "save and stop", by name or as `signal.Signals`.
        on_sigterm: after saving, `"exit"` leaves the process with status 143 (128 plus the number of any
            other signal), `"return"` returns the result with `interrupted=True`, as a SIGINT always does.
        grace_period: seconds or a `timedelta` after a signal at which the run leaves unsaved and names the
            step on disk, before a scheduler kills it without a word; `None` to wait for the save.
        chunk_size: updates between two host steps; chosen by the clock for `None`.
        devices: where to run: 1 for JAX's default device, a number for the first so many, `"auto"` for
            all, a device, a sequence of devices, or a mesh; see `placement`.
        shardings: `state -> shardings` for a state that is split over several devices, a pytree (or a
            prefix of one) of `PartitionSpec`s; a copy on every device for `None`.
        uneven: a batch whose rows cannot be split equally over the devices is an error (`"refuse"`),
            replicated on every device (`"whole"`), or padded to the next number of rows that can be split
            (`"pad"`): then the losses have a parameter named `mask`, which says which rows count.
        microbatches: into how many slices each batch is cut, one evaluated after the other, so that only
            the activations of one slice are in memory; see `LossTrainStep`. It changes no row.
        check_microbatches: whether the losses of the first batch are evaluated as a whole too, without
            gradients, and a difference beyond rounding is an error. `False` for losses of which each slice
            counts for itself, or a batch that does not fit in memory.
        ema_decay: averages the model state over the updates, see `LossTrainStep`: the average is what
            `Evaluate` and `predict` take. In [0, 1); `None` keeps none.
        gradient_norm: whether rows of the history have `gradient_norm`, the 2-norm of the gradient of the
            update that completed them. A program of its own evaluates that gradient once more, so no bit of
            the run moves; at most every 100th update has a row with one.
    """

    max_steps: int | None = None
    _: dataclasses.KW_ONLY
    max_epochs: int | Mapping[str, int] | None = None
    max_time: float | datetime.timedelta | None = None
    checkpoints: Checkpoints | None = None
    callbacks: tuple[Callback, ...] = ()
    log_every_n_steps: int = 100
    progress: bool = True
    on_nonfinite: str = "raise"
    max_skipped_in_a_row: int = 100
    signals: tuple[str | signal.Signals, ...] = ("SIGTERM", "SIGINT")
    on_sigterm: str = "exit"
    grace_period: float | datetime.timedelta | None = None
    chunk_size: int | None = None
    devices: int | str | jax.Device | Sequence[jax.Device] | Mesh = 1
    shardings: Callable[[TrainState], Any] | None = None
    uneven: str = "refuse"
    microbatches: int = 1
    check_microbatches: bool = True
    ema_decay: float | None = None
    gradient_norm: bool = False

    def __post_init__(self) -> None:
        check_limits(self.max_steps, self.max_epochs)
        checked_seconds(self.max_time, "max_time")
        checked_seconds(self.grace_period, "grace_period")
        assign(self, signals=checked_signals(self.signals))
        validation.positive(self.log_every_n_steps, "log_every_n_steps")
        validation.positive(self.microbatches, "microbatches")
        validation.flag(self.check_microbatches, "check_microbatches")
        if self.ema_decay is not None:
            fraction(self.ema_decay, "ema_decay")
        validation.flag(self.gradient_norm, "gradient_norm")
        validation.flag(self.progress, "progress")
        validation.one_of(self.on_nonfinite, "on_nonfinite", POLICIES)
        validation.positive(self.max_skipped_in_a_row, "max_skipped_in_a_row")
        validation.one_of(self.on_sigterm, "on_sigterm", ("exit", "return"))
        assign(self, callbacks=tuple(one.callback for one in adapt_callbacks(self.callbacks)))
        Pace(self.chunk_size)
        require_devices(self.devices)
        if self.shardings is not None:
            validation.function(self.shardings, "shardings")
        validation.one_of(self.uneven, "uneven", UNEVEN)
        if self.checkpoints is not None and not isinstance(self.checkpoints, Checkpoints):
            raise TypeError(
                f"checkpoints must be a Checkpoints or None, got {validation.formatted(self.checkpoints)}. "
                "Pass Checkpoints(directory)."
            )
        require_distinct(self.callbacks)
        restoring(self.callbacks, self.checkpoints)

    @door
    def fit(
        self,
        module: LossModule,
        *,
        datamodule: DataModule,
        optimizer: Optimizer,
        seed: Seed,
        balancer: LossBalancer | None = None,
        resume: bool | str = False,
        ckpt_path: str | os.PathLike[str] | None = None,
        ckpt_step: int | str | None = None,
        weights_only: bool = False,
        on_change: str = "error",
    ) -> FitResult:
        """Trains a module from one seed; every random number of the run follows from it.

        Args:
            module: the losses and the model factory.
            datamodule: where the batches come from.
            optimizer: an Optax `GradientTransformation`.
            seed: what `keys.root_key` takes. `None` draws one, or takes the checkpoint's on a resume.
            balancer: how the losses are combined; their plain sum for `None`.
            resume: `True` continues this trainer's own run, `"auto"` does so if there is one, `"best"` goes
                back to its best step; see `resume.plan`.
            ckpt_path: the root of another run to start from, or `"last"`.
            ckpt_step: which of its steps, a number or `"best"`; the newest for `None`.
            weights_only: take `model_state` alone from `ckpt_path`, and start at step 0.
            on_change: `"error"` raises if the keys or batches of the run would change; `"warn"` continues
                with those of this call and records the change in the next checkpoints.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            RunExistsError: a fresh run in a directory that has a run.
            RunChangedError: the run would not draw what the saved run would have drawn.
            NonFiniteError: an update is not finite, with `on_nonfinite="raise"`, or too many are with
                `"skip"`; the state before it is saved.
        """
        spec = self._spec(
            module, FromSeed(seed), datamodule=datamodule, optimizer=optimizer, balancer=balancer
        )
        return self._fit(spec, Resume(resume, ckpt_path, ckpt_step, weights_only, on_change))

    @door
    def fit_state(
        self,
        module: object,
        state: TrainState,
        *,
        optimizer: Optimizer | None = None,
        train_step: TrainStep | None = None,
        datamodule: DataModule | None = None,
        source: Callable[[Step], Any] | Iterable[Any] | None = None,
        balancer: LossBalancer | None = None,
        resume: bool | str = False,
        ckpt_path: str | os.PathLike[str] | None = None,
        ckpt_step: int | str | None = None,
        weights_only: bool = False,
        on_change: str = "error",
    ) -> FitResult:
        """Trains a state that the caller made; see `fit` for the arguments it shares.

        Args:
            module: a `LossModule`; with `train_step`, whatever the result should carry.
            state: from `initialize_train_state`; its arrays are not donated, so a large state exists twice
                while the caller keeps it. Training starts at its step.
            optimizer: the transformation the state was initialized with; or else
            train_step: a custom update, see `TrainStep`.
            datamodule: makes the source from `state.sampling_key`; or else
            source: the batches, `step -> batches`; or an iterable of them, see `IterableSource`.

        Raises:
            TypeError: both or neither of `optimizer` and `train_step`, or of `datamodule` and `source`.
        """
        spec = self._spec(
            module,
            state,
            optimizer=optimizer,
            train_step=train_step,
            datamodule=datamodule,
            source=source,
            balancer=balancer,
        )
        return self._fit(spec, Resume(resume, ckpt_path, ckpt_step, weights_only, on_change))

    @door
    def predict(
        self,
        trained: FitResult | Checkpoints | str | os.PathLike[str],
        inputs: predict.Inputs,
        *,
        module: LossModule | None = None,
        step: int | str | None = None,
        batch_size: int = 1024,
    ) -> Any:
        """The module's predictions for rows of inputs, in their order; see `predict.predict`.

        They are those of the parameters to evaluate, see `training.evaluation_params`, for a checkpoint too.

        Args:
            trained: a `FitResult`, a `Checkpoints`, or the root of a run.
            inputs: an array `(rows, ...)`, or a pytree of arrays with one number of rows.
            module: whose `predict` to use; needed for a checkpoint, that of the result for `None`.
            step: which step of a checkpoint, a number or `"best"`; the newest intact one for `None`.
            batch_size: rows of each call of the compiled program.

        Returns:
            What `module.predict` returns, as NumPy arrays with all rows.

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """
        function, model_state = predict.trained_model(trained, module, step)
        return predict.predict(function, model_state, inputs, batch_size, resolve(self.devices).host_device)

    @door
    def audit(
        self,
        module: LossModule,
        *,
        datamodule: DataModule,
        optimizer: Optimizer,
        seed: Seed = 42,
        balancer: LossBalancer | None = None,
        steps: int = 3,
        allow: Iterable[str] = (),
    ) -> AuditReport:
        """Audits a dry run, initialization and the first `steps` updates: what is drawn from which key.

        The arguments are those of `fit` for a fresh run, and they and the names of the batches are checked as
        in `fit`; whether the source is pure, and what shows only in the compiled loop, is not checked.
        Callbacks are not called, so their draws are not audited. Nothing is saved. The run is executed op by
        op, so keep `steps` small; see `auditing.audit` for `allow` and for the errors.
        """
        # Imported here: training never needs the hooks into JAX that an audit installs.
        from phijax_rng.trainer.dry_run import dry_run  # noqa: PLC0415

        spec = self._spec(
            module, FromSeed(seed), datamodule=datamodule, optimizer=optimizer, balancer=balancer
        )
        with spec.prepared_data():
            return dry_run(spec, steps=validation.positive(steps, "steps"), allow=allow)

    def _spec(self, module: object, initial: TrainState | FromSeed, **inputs: Any) -> RunSpec:
        """The inputs of a run, checked, with the options of this trainer that decide its numbers."""
        return RunSpec(
            module=module,
            initial=initial,
            placement=resolve(self.devices, shardings=self.shardings, uneven=self.uneven),
            on_nonfinite=self.on_nonfinite,
            microbatches=self.microbatches,
            ema_decay=self.ema_decay,
            gradient_norm=self.gradient_norm,
            **inputs,
        )

    def _fit(self, spec: RunSpec, options: Resume) -> FitResult:
        """Plans where to start, restores, and trains, with the directory locked until the run has ended."""
        signals = StopSignals(
            checked_signals(self.signals),
            max_time=checked_seconds(self.max_time, "max_time"),
            grace=checked_seconds(self.grace_period, "grace_period"),
        )
        try:
            with (
                processes.translate_runtime_errors(),
                signals,
                locked_plan(self.checkpoints, options) as plan,
            ):
                # Before the data is prepared: a seed that the checkpoint does not record costs no download.
                root = spec.root(plan)
                with spec.prepared_data():
                    run = resume_run(plan, spec, spec.fresh_state(root), root)
                    result = self._train(spec, run, signals, None if root is None else keys.seed_of(root))
        except LeaveNow as error:
            if signals.grace_over:
                _log.error("%s", error)
                signals.end(self.on_sigterm)
            raise KeyboardInterrupt(str(error)).with_traceback(error.__traceback__) from None
        # Not before the caller's handlers are back: a signal after the last poll ends the process too.
        signals.end(self.on_sigterm)
        return result

    def _train(self, spec: RunSpec, run: ResumedRun, signals: StopSignals, seed: int | None) -> FitResult:
        """Trains up to the last step, saving on the way and on every way out."""
        max_steps = last_step(self.max_steps, self.max_epochs, run.source)
        display = make_progress(self.progress and processes.is_primary(), int(run.state.step), max_steps)
        stopping = restoring(self.callbacks, self.checkpoints)
        session = TrainingSession(
            run,
            checkpoints=self.checkpoints,
            display=display,
            log_every_n_steps=self.log_every_n_steps,
            max_steps=max_steps,
            gradient_norm=self.gradient_norm,
            skips_nonfinite=self.on_nonfinite == "skip",
            callbacks=adapt_callbacks(self.callbacks),
            best=None if stopping is None else BestState(stopping, self.checkpoints),
            held=signals.held,
        )
        signals.describe_save = session.describe_save
        if run.plan.continues and session.step < max_steps:
            display.log(f"continuing from step {session.step}")
        try:
            try:
                # Once more inside: `abandon` then sees a lost process by its own error.
                with processes.translate_runtime_errors():
                    self._compile_and_run(spec, run, session, signals)
            except BaseException as error:
                session.abandon(error)
                raise
            session.finish()
        except Exception as error:
            if error is session.callback_error:
                # An error of any type, which may refuse attributes.
                with contextlib.suppress(Exception):
                    vars(error)["result"] = self._result(spec, session, signals, seed)
            raise
        return self._result(spec, session, signals, seed)

    def _compile_and_run(
        self, spec: RunSpec, run: ResumedRun, session: TrainingSession, signals: StopSignals
    ) -> None:
        """Compiles the loop, commits the run, and trains."""
        if session.is_over:
            run.commit(program=None)
            session.catch_up()
            session.end_at_once()
            return
        if signals.received is not None:
            return
        session.phase("compiling")
        require_inside(run.source)
        refresh = spec.make_refresh(run.source, run.state)
        check_source(run.source, session.step, session.max_steps, run.state.sampler_state, spec.batch_keys)
        prefetcher = open_source(run.source, session.step, session.max_steps, spec.placement)
        try:
            require_batches(prefetcher.source.names, spec.batch_keys)
            update, source = spec.make_update(), prefetcher.source

            def while_compiling() -> None:
                session.while_compiling(signals.received is not None)

            if self.check_microbatches and isinstance(update, LossTrainStep) and update.microbatches > 1:
                require_equal_slices(update, run.state, source, spec.placement, while_compiling)
            loop = TrainLoop(
                update,
                run.state,
                source,
                refresh=refresh,
                on_nonfinite=self.on_nonfinite,
                max_skipped_in_a_row=self.max_skipped_in_a_row,
                placement=spec.placement,
                while_compiling=while_compiling,
            )
            session.check_recorded(loop.names, loop.loss_names)
            run.commit(loop.program, tuple(name for name in loop.loss_names if name != TOTAL))
            session.catch_up()
            del run.state  # the session has it, and gives it away: a large one must exist once
            self._run_chunks(loop, prefetcher, session, signals)
        finally:
            # Who leaves at once does not wait for a source that hangs.
            prefetcher.close(wait=not isinstance(sys.exception(), LeaveNow))

    def _run_chunks(
        self,
        loop: TrainLoop,
        prefetcher: InProgramSource | Prefetcher,
        session: TrainingSession,
        signals: StopSignals,
    ) -> None:
        """Runs the compiled loop chunk by chunk, with a host step after each."""
        pace = Pace(self.chunk_size)
        state = session.state = loop.owned(session.give_state)
        while not session.is_over and not signals.poll():
            source, end = prefetcher.at(session.step)
            if session.log.wants_gradient_norm(session.step):
                session.log.gradient_norm = loop.gradient_norm(state, source)
            bounds = (session.max_steps, end, session.next_host_step())
            bound = min(bound for bound in bounds if bound is not None)
            began = time.perf_counter()
            # The first process decides: clocks differ, and all must call the program for the same steps.
            (stop,) = processes.broadcast(session.step + pace.next_count(bound - session.step))
            in_a_row = session.skipped_in_a_row
            chunk = loop.run(state, stop, source, skipped_in_a_row=in_a_row, donate=True)
            pace.measured(chunk.step - session.step, time.perf_counter() - began)
            state = chunk.state
            session.on_chunk(chunk)

    def _result(
        self, spec: RunSpec, session: TrainingSession, signals: StopSignals, seed: int | None
    ) -> FitResult:
        unfinished = session.step < session.max_steps
        signalled = signals.received is not None or signals.timed_out
        state, metrics = session.outcome
        return FitResult(
            module=spec.module,
            state=state,
            metrics=metrics,
            history=tuple(session.log.rows),
            timing=tuple(session.log.timing),
            iterations=session.iterations,
            skipped_updates=session.skipped_updates,
            stopped_early=unfinished and not signalled,
            interrupted=unfinished and signalled,
            seed=seed,
        )
