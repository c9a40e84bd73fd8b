"""The host of a run: seed, restore, run, look, save, stop.

    seed --> four streams --> module.init, data, optimizer, balancer --> TrainState
    restore, if the run goes on --> one compiled loop --> looks: history, display, saves, signals

The trainer decides where a run starts and when the host looks in. Neither can change a number: all
numbers come from the train state, the source and one compiled program.
"""

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng.auditing.audit import AuditReport
from phijax_rng.callbacks.progress import make_progress
from phijax_rng.callbacks.protocol import Callback, adapt_callbacks
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.devices.placement import Placement, require_devices, resolve
from phijax_rng.devices.row_sharding import UNEVEN
from phijax_rng.resume import plan
from phijax_rng.resume.run_contract import Record
from phijax_rng.state import TrainState, initialize_train_state
from phijax_rng.trainer import predict
from phijax_rng.trainer.arguments import (
    require_datamodule,
    require_masked,
    require_module,
    require_one,
    require_optimizer,
    require_update,
)
from phijax_rng.trainer.dry_run import rehearse
from phijax_rng.trainer.results import FitResult
from phijax_rng.trainer.run_spec import (
    Run,
    described_training,
    require_batches,
    require_inside,
    restored_with_source,
)
from phijax_rng.trainer.session import Looks
from phijax_rng.trainer.signals import StopSignals
from phijax_rng.training.balancing.adapter import adapt_balancer
from phijax_rng.training.balancing.protocol import LossBalancer
from phijax_rng.training.loop import POLICIES, Pace, TrainLoop
from phijax_rng.training.module import DataModule, LossModule
from phijax_rng.training.prefetch import make_feed
from phijax_rng.training.source_checks import check_source
from phijax_rng.training.step import TOTAL, LossTrainStep, TrainStep

_ON_CHANGE = ("error", "warn")


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains to a global step, and continues where a run was left.

    Attributes:
        max_steps: the global step at which training ends, whatever a call starts from.
        checkpoints: where the run is kept; `None` to keep nothing.
        callbacks: who looks in at the steps they ask for; see `callbacks`.
        log_every_n_steps: how many updates between two entries of the history.
        progress: whether to show a bar (on a terminal) or lines (elsewhere) on standard error.
        on_nonfinite: what to do when a loss or an updated leaf is not finite: `"raise"` keeps the last
            good state and raises `NonFiniteError`, `"skip"` leaves the update out, `"ignore"` goes on.
        on_sigterm: after saving, `"exit"` leaves the process with status 143, `"return"` returns the
            result with `interrupted=True`, as a SIGINT always does.
        chunk_size: updates between two looks of the host; chosen by the clock for `None`.
        devices: where to run: 1 for JAX's default device, a number for the first so many, `"auto"` for
            all, a device, a sequence of devices, or a mesh; see `placement`.
        shardings: `state -> shardings` for a state that is split over several devices, a pytree (or a
            prefix of one) of `PartitionSpec`s; a copy on every device for `None`.
        uneven: a batch whose rows the devices cannot share equally is refused (`"refuse"`), drawn
            whole on every device (`"whole"`), or filled up to the next number of rows that they can share
            (`"pad"`): then the losses have a parameter named `mask`, which says which rows count.
        microbatches: into how many slices each batch is cut, one evaluated after the other, so that the
            activations of one slice are held at a time; see `LossTrainStep`. It moves no row.

    Raises:
        TypeError: a count is not a whole number, or `checkpoints` is not a `Checkpoints`.
        ValueError: a count is not positive, or an option is unknown.
    """

    max_steps: int
    _: dataclasses.KW_ONLY
    checkpoints: Checkpoints | None = None
    callbacks: tuple[Callback, ...] = ()
    log_every_n_steps: int = 100
    progress: bool = True
    on_nonfinite: str = "raise"
    on_sigterm: str = "exit"
    chunk_size: int | None = None
    devices: Any = 1
    shardings: Callable[[TrainState], Any] | None = None
    uneven: str = "refuse"
    microbatches: int = 1

    def __post_init__(self) -> None:
        validation.step_number(self.max_steps, "max_steps")
        validation.positive(self.log_every_n_steps, "log_every_n_steps")
        validation.positive(self.microbatches, "microbatches")
        validation.flag(self.progress, "progress")
        validation.one_of(self.on_nonfinite, "on_nonfinite", POLICIES)
        validation.one_of(self.on_sigterm, "on_sigterm", ("exit", "return"))
        assign(self, callbacks=tuple(one.callback for one in adapt_callbacks(self.callbacks)))
        Pace(self.chunk_size)
        require_devices(self.devices)
        if self.shardings is not None:
            validation.function(self.shardings, "shardings")
        validation.one_of(self.uneven, "uneven", UNEVEN)
        if self.uneven == "pad" and self.microbatches != 1:
            raise ValueError(
                f"microbatches={self.microbatches} averages over slices of a batch, and with uneven='pad' "
                "these do not have equally many rows that count. Pass one of the two."
            )
        if self.checkpoints is not None and not isinstance(self.checkpoints, Checkpoints):
            raise TypeError(
                f"checkpoints must be a Checkpoints or None, got {self.checkpoints!r}. "
                "Pass Checkpoints(directory)."
            )

    def fit(
        self,
        module: LossModule,
        *,
        datamodule: DataModule,
        optimizer: Any,
        seed: Any,
        balancer: LossBalancer | None = None,
        resume: bool | str = False,
        ckpt_path: Any = None,
        ckpt_step: int | None = None,
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
            resume: `True` continues this trainer's own run, `"auto"` does so if there is one; see `starts`.
            ckpt_path: the root of another run to start from, or `"last"`.
            ckpt_step: which of its steps; the newest for `None`.
            weights_only: take `model_state` alone from `ckpt_path`, and start at step 0.
            on_change: `"error"` refuses to continue a run whose keys or batches would change; `"warn"`
                goes on with this run's own and records the change in the next checkpoints.

        Raises:
            TypeError, ValueError: an argument is not what it should be; before anything is traced.
            FileNotFoundError: there is no such checkpoint.
            RunExistsError: a fresh run into a directory that holds a run.
            RunChangedError: the run would not draw what the saved run would have drawn.
            NonFiniteError: a loss or an updated leaf is not finite, with `on_nonfinite="raise"`.
        """
        require_module(module, balancer)
        require_datamodule(datamodule)
        require_optimizer(optimizer)
        require_masked(self.uneven, module)
        validation.one_of(on_change, "on_change", _ON_CHANGE)
        with (
            processes.watched(),
            StopSignals() as signals,
            self._begun(resume, ckpt_path, ckpt_step, weights_only) as start,
        ):
            known = seed is None and start.continues
            root = start.root() if known else keys.root_key(processes.agreed_seed(seed))
            streams = keys.split_root(root)
            with _prepared(datamodule):
                balancer_state = adapt_balancer(balancer).initial_state()
                fresh = initialize_train_state(module.init(streams.model), optimizer, balancer_state, streams)
                return self._continued(
                    fresh,
                    start,
                    signals,
                    on_change,
                    module=module,
                    optimizer=optimizer,
                    datamodule=datamodule,
                    balancer=balancer,
                    root=root,
                )

    def fit_state(
        self,
        module: Any,
        state: TrainState,
        *,
        optimizer: Any = None,
        train_step: TrainStep | None = None,
        datamodule: DataModule | None = None,
        source: Any = None,
        balancer: LossBalancer | None = None,
        resume: bool | str = False,
        ckpt_path: Any = None,
        ckpt_step: int | None = None,
        weights_only: bool = False,
        on_change: str = "error",
    ) -> FitResult:
        """Trains a state that the caller made; see `fit` for the arguments it shares.

        Args:
            module: a `LossModule`; with `train_step`, whatever the result should carry.
            state: from `initialize_train_state`; its arrays stay alive. Training goes on from its step.
            optimizer: the transformation the state was initialized with; or else
            train_step: a custom update, see `TrainStep`.
            datamodule: makes the source from `state.sampling_key`; or else
            source: the batches, `step -> batches`; or an iterable of them, see `IterableSource`.

        Raises:
            TypeError: both or neither of `optimizer` and `train_step`, or of `datamodule` and `source`.
        """
        require_one("optimizer", optimizer, "train_step", train_step)
        require_one("datamodule", datamodule, "source", source)
        if not isinstance(state, TrainState):
            raise TypeError(f"state must be a TrainState, got {state!r}. Use initialize_train_state.")
        require_update(module, optimizer, train_step, balancer, self.microbatches)
        adapted = adapt_balancer(balancer)
        if train_step is None or adapted.schedule is not None:
            adapted.require_fitting_state(state.balancer_state)
        require_masked(self.uneven, module, train_step)
        if source is None:
            require_datamodule(datamodule)
        validation.one_of(on_change, "on_change", _ON_CHANGE)
        with (
            processes.watched(),
            StopSignals() as signals,
            self._begun(resume, ckpt_path, ckpt_step, weights_only) as start,
            _prepared(datamodule),
        ):
            return self._continued(
                state,
                start,
                signals,
                on_change,
                module=module,
                optimizer=optimizer,
                train_step=train_step,
                datamodule=datamodule,
                source=source,
                balancer=balancer,
            )

    def predict(
        self,
        trained: Any,
        inputs: Any,
        *,
        module: LossModule | None = None,
        step: int | None = None,
        batch_size: int = 1024,
    ) -> Any:
        """The module's predictions for rows of inputs, in their order; see `predict.predict`.

        Args:
            trained: a `FitResult`, a `Checkpoints`, or the root of a run.
            inputs: an array `(rows, ...)`, or a pytree of arrays with one number of rows.
            module: whose `predict` to use; needed for a checkpoint, that of the result for `None`.
            step: which step of a checkpoint; the newest intact one for `None`.
            batch_size: rows of each call of the compiled program.

        Returns:
            What `module.predict` returns, as NumPy arrays with all rows.

        Raises:
            TypeError, ValueError: an argument is not what it should be; before anything is traced.
            FileNotFoundError: there is no such checkpoint.
        """
        module, model_state = predict.trained_model(trained, module, step)
        return predict.predict(module, model_state, inputs, batch_size, self._placement().home)

    def audit(
        self,
        module: LossModule,
        *,
        datamodule: DataModule,
        optimizer: Any,
        seed: Any = 42,
        balancer: LossBalancer | None = None,
        steps: int = 3,
        allow: Iterable[str] = (),
    ) -> AuditReport:
        """Who draws what from which key when this run starts: initialization and the first `steps` updates.

        The arguments are those of `fit` for a fresh run, and they and the names of the batches are checked as
        `fit` checks them; whether the source is pure, and what shows only in the compiled loop, is not.
        Callbacks are not called, so what they draw is not audited. Nothing is saved, and nothing that
        training needs is changed. It runs op by op, so keep `steps` small; see `auditing.audit` for `allow`
        and for what it raises.
        """
        require_module(module, balancer)
        require_datamodule(datamodule)
        require_optimizer(optimizer)
        require_masked(self.uneven, module)
        with _prepared(datamodule):
            return rehearse(
                module,
                datamodule=datamodule,
                optimizer=optimizer,
                seed=seed,
                balancer=balancer,
                microbatches=self.microbatches,
                steps=validation.positive(steps, "steps"),
                allow=allow,
                placement=self._placement(),
            )

    def _placement(self) -> Placement:
        return resolve(self.devices, shardings=self.shardings, uneven=self.uneven)

    @contextlib.contextmanager
    def _begun(self, resume: Any, ckpt_path: Any, ckpt_step: Any, weights_only: Any) -> Iterator[plan.Start]:
        """Where to start, with the trainer's directory locked until the run has ended."""
        words = {
            "resume": resume,
            "ckpt_path": ckpt_path,
            "ckpt_step": ckpt_step,
            "weights_only": weights_only,
        }
        start = plan.decide(self.checkpoints, **words)
        if self.checkpoints is None:
            yield start
            return
        self.checkpoints.lock()
        with self.checkpoints:
            # Again, now that no other job can change what is there.
            yield plan.decide(self.checkpoints, **words)

    def _continued(
        self,
        state: TrainState,
        start: plan.Start,
        signals: StopSignals,
        on_change: str,
        *,
        module: Any,
        optimizer: Any,
        datamodule: Any,
        balancer: Any,
        train_step: Any = None,
        source: Any = None,
        root: Any = None,
    ) -> FitResult:
        """Restores what the run starts from, if it goes on, and trains; `state` is what a fresh run has."""
        place = self._placement()
        restored, source = restored_with_source(
            start, state, on_change, place=place, module=module, datamodule=datamodule, source=source
        )
        run = Run(
            module=module,
            train_step=train_step or LossTrainStep(module, optimizer, balancer, self.microbatches),
            streams=state,
            state=restored.state,
            source=source,
            balancer=balancer,
            training=described_training(module, optimizer or train_step, balancer, state),
            root=root,
            placement=place,
        )
        return self._train(run, start, restored, on_change, signals)

    def _train(
        self,
        run: Run,
        start: plan.Start,
        restored: plan.Restored,
        on_change: str,
        signals: StopSignals,
    ) -> FitResult:
        """Runs from the state's step to `max_steps`, saving on the way and on every way out."""
        first = int(run.state.step)
        run = run.prepared()
        record = Record(
            run.contract(self.on_nonfinite, self.microbatches), run.source, start, restored, on_change
        )
        record.refuse_early()
        display = make_progress(self.progress and processes.is_first(), first, self.max_steps)
        looks = Looks(
            run.state,
            record,
            checkpoints=self.checkpoints,
            display=display,
            log_every_n_steps=self.log_every_n_steps,
            callbacks=adapt_callbacks(self.callbacks),
            remembered=restored.memory,
        )
        signals.standing = looks.standing
        if start.continues:
            display.log(f"going on from step {first}")
        try:
            try:
                with processes.watched():
                    self._advance(run, looks, record, signals)
            except BaseException as error:
                looks.abandon(error)
                raise
            looks.finish()
        except Exception as error:
            if error is looks.callback_error:
                _carry(error, _result(run, looks, first, self.max_steps, signals.received is not None))
            raise
        if signals.received == signal.SIGTERM and self.on_sigterm == "exit":
            raise SystemExit(128 + signal.SIGTERM)
        return _result(run, looks, first, self.max_steps, signals.received is not None)

    def _advance(self, run: Run, looks: Looks, record: Record, signals: StopSignals) -> None:
        """Compiles, settles what changed, and runs the loop, one chunk after the other."""
        if looks.step >= self.max_steps or looks.asked_to_stop:
            record.settle(run.state, None)
            return
        if signals.received is not None:
            return
        require_inside(run.source)
        refresh = run.refresh()
        check_source(run.source, looks.step, self.max_steps, run.state.sampler_state)
        feed = make_feed(run.source, looks.step, self.max_steps, run.placement)
        try:
            require_batches(feed.source.names, getattr(run.module, "batch_keys", ()))
            loop = TrainLoop(
                run.train_step,
                run.state,
                feed.source,
                refresh=refresh,
                on_nonfinite=self.on_nonfinite,
                placement=run.placement,
                while_compiling=lambda: looks.save() if signals.received is not None else None,
            )
            looks.expect(loop.names, loop.loss_names)
            record.settle(run.state, loop.program, tuple(n for n in loop.loss_names if n != TOTAL))
            if record.own and self.checkpoints is not None:
                processes.first_does(functools.partial(self.checkpoints.supersede_after, looks.step))
            self._loop(loop, feed, looks, loop.place(run.state), signals)
        finally:
            feed.close()

    def _loop(
        self, loop: TrainLoop, feed: Any, looks: Looks, state: TrainState, signals: StopSignals
    ) -> None:
        pace = Pace(self.chunk_size)
        while looks.step < self.max_steps and not looks.asked_to_stop and not signals.poll():
            source, end = feed.at(looks.step)
            bounds = (self.max_steps, end, looks.next_look())
            bound = min(bound for bound in bounds if bound is not None)
            began = time.perf_counter()
            (stop,) = processes.agree(looks.step + pace.next_count(bound - looks.step))
            chunk = loop.run(state, stop, source)
            pace.measured(chunk.step - looks.step, time.perf_counter() - began)
            state = chunk.state
            looks.take(chunk)


def _result(run: Run, looks: Looks, first: int, max_steps: int, signalled: bool) -> FitResult:
    unfinished = looks.step < max_steps
    return FitResult(
        module=run.module,
        state=looks.state,
        metrics=looks.metrics,
        history=tuple(looks.history),
        iterations=looks.step - first,
        stopped_early=unfinished and not signalled,
        interrupted=unfinished and signalled,
        seed=None if run.root is None else keys.seed_of(run.root),
    )


def _carry(error: Any, result: FitResult) -> None:
    """Hands over what training reached with the error of a callback, which may be of any type."""
    with contextlib.suppress(Exception):
        error.result = result


@contextlib.contextmanager
def _prepared(datamodule: Any) -> Iterator[None]:
    """The optional hooks of a data module, around everything that uses it."""
    _hook(datamodule, "prepare_data")
    _hook(datamodule, "setup", "fit")
    try:
        yield
    finally:
        _hook(datamodule, "teardown", "fit")


def _hook(datamodule: Any, name: str, *arguments: str) -> None:
    hook = getattr(datamodule, name, None)
    if callable(hook):
        hook(*arguments)
