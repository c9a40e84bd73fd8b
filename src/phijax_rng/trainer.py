"""The host of a run: seed, restore, run, look, save, stop.

    seed --> four streams --> module.init, data, optimizer, balancer --> TrainState
    restore, if the run goes on --> one compiled loop --> looks: history, display, saves, signals

The trainer decides where a run starts and when the host looks in. Neither can change a number: all
numbers come from the train state, the source and one compiled program.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from phijax_rng import _checks, contract, environment, keys, starts
from phijax_rng.auditing import AuditReport
from phijax_rng.balancers import LossBalancer
from phijax_rng.callbacks import Callback, checked
from phijax_rng.checkpoints import Checkpoints
from phijax_rng.errors import NonFiniteError
from phijax_rng.feeds import make_feed
from phijax_rng.iterables import IterableSource
from phijax_rng.looks import Looks
from phijax_rng.loop import POLICIES, Pace, TrainLoop, default_device
from phijax_rng.module import DataModule, LossModule
from phijax_rng.progress import make_progress
from phijax_rng.purity import check_source
from phijax_rng.record import Record
from phijax_rng.rehearsal import rehearse
from phijax_rng.samplers import AdaptiveSampler
from phijax_rng.signals import StopSignals
from phijax_rng.sources import HostSource
from phijax_rng.state import TrainState, initialize_train_state
from phijax_rng.step import TOTAL, LossTrainStep, TrainStep

_ON_CHANGE = ("error", "warn")


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a call of `fit` or `fit_state` ended with.

    Attributes:
        module: the module that was trained.
        state: the state after the last update.
        metrics: the losses of the last update, by name; empty when there was none.
        history: one dict for every `log_every_n_steps` updates: `step` (completed updates) and the
            losses of the update that completed it.
        iterations: updates of this call.
        stopped_early: whether training ended before `max_steps` without a signal.
        interrupted: whether a signal ended it.
        seed: the integer that repeats the run; `None` where the root is not a Threefry key, or unknown.
    """

    module: Any
    state: TrainState
    metrics: Mapping[str, float]
    history: tuple[Mapping[str, float], ...]
    iterations: int
    stopped_early: bool
    interrupted: bool
    seed: int | None


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
        device: where to run; JAX's default device for `None`.
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
    device: Any = None
    microbatches: int = 1

    def __post_init__(self) -> None:
        _checks.step_number(self.max_steps, "max_steps")
        _checks.positive(self.log_every_n_steps, "log_every_n_steps")
        _checks.positive(self.microbatches, "microbatches")
        _checks.flag(self.progress, "progress")
        _checks.one_of(self.on_nonfinite, "on_nonfinite", POLICIES)
        _checks.one_of(self.on_sigterm, "on_sigterm", ("exit", "return"))
        object.__setattr__(self, "callbacks", checked(self.callbacks))
        Pace(self.chunk_size)
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
        _require_module(module, balancer)
        _require_datamodule(datamodule)
        _require_optimizer(optimizer)
        _checks.one_of(on_change, "on_change", _ON_CHANGE)
        with StopSignals() as signals, self._begun(resume, ckpt_path, ckpt_step, weights_only) as start:
            root = start.root() if seed is None and start.continues else keys.root_key(seed)
            streams = keys.split_root(root)
            with _prepared(datamodule):
                balancer_state = {} if balancer is None else balancer.initialize()
                model_state = module.init(streams.model)
                fresh = initialize_train_state(model_state, optimizer, balancer_state, streams)
                restored = _on_own_streams(start.restore(fresh), fresh, on_change)
                run = _Run(
                    module=module,
                    train_step=LossTrainStep(module, optimizer, balancer, self.microbatches),
                    streams=fresh,
                    state=restored.state,
                    source=datamodule.train_batch_source(module.batch_keys, restored.state.sampling_key),
                    training=_described_training(module, optimizer, balancer, fresh),
                    root=root,
                )
                return self._train(run, start, restored, on_change, signals)

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
            optimizer: the transformation the state was initialised with; or else
            train_step: a custom update, see `TrainStep`.
            datamodule: makes the source from `state.sampling_key`; or else
            source: the batches, `step -> batches`; or an iterable of them, see `IterableSource`.

        Raises:
            TypeError: both or neither of `optimizer` and `train_step`, or of `datamodule` and `source`.
        """
        _require_one("optimizer", optimizer, "train_step", train_step)
        _require_one("datamodule", datamodule, "source", source)
        if not isinstance(state, TrainState):
            raise TypeError(f"state must be a TrainState, got {state!r}. Use initialize_train_state.")
        if train_step is None:
            _require_module(module, balancer)
            _require_optimizer(optimizer)
        elif self.microbatches != 1:
            raise ValueError(
                f"microbatches={self.microbatches} cuts the batches of an optimizer's update, and train_step "
                "is another update. Cut them there, or pass an optimizer."
            )
        if source is None:
            _require_datamodule(datamodule)
        _checks.one_of(on_change, "on_change", _ON_CHANGE)
        with (
            StopSignals() as signals,
            self._begun(resume, ckpt_path, ckpt_step, weights_only) as start,
            _prepared(datamodule),
        ):
            restored = _on_own_streams(start.restore(state), state, on_change)
            if datamodule is not None:
                batch_keys = getattr(module, "batch_keys", ())
                source = datamodule.train_batch_source(batch_keys, restored.state.sampling_key)
            run = _Run(
                module=module,
                train_step=train_step or LossTrainStep(module, optimizer, balancer, self.microbatches),
                streams=state,
                state=restored.state,
                source=source,
                training=_described_training(module, optimizer or train_step, balancer, state),
                root=None,
            )
            return self._train(run, start, restored, on_change, signals)

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
        """Who draws what from which key when this run starts: initialisation and the first `steps` updates.

        The arguments are those of `fit`. Nothing is saved, and nothing that training needs is changed. It
        runs op by op, so keep `steps` small; see `auditing.audit` for `allow` and for what it raises.
        """
        _require_module(module, balancer)
        _require_datamodule(datamodule)
        _require_optimizer(optimizer)
        with _prepared(datamodule):
            return rehearse(
                module,
                datamodule=datamodule,
                optimizer=optimizer,
                seed=seed,
                balancer=balancer,
                microbatches=self.microbatches,
                steps=_checks.positive(steps, "steps"),
                allow=allow,
            )

    @contextlib.contextmanager
    def _begun(
        self, resume: Any, ckpt_path: Any, ckpt_step: Any, weights_only: Any
    ) -> Iterator[starts.Start]:
        """Where to start, with the trainer's directory locked until the run has ended."""
        words = {
            "resume": resume,
            "ckpt_path": ckpt_path,
            "ckpt_step": ckpt_step,
            "weights_only": weights_only,
        }
        start = starts.decide(self.checkpoints, **words)
        if self.checkpoints is None:
            yield start
            return
        self.checkpoints.lock()
        with self.checkpoints:
            # Again, now that no other job can change what is there.
            yield starts.decide(self.checkpoints, **words)

    def _train(
        self,
        run: "_Run",
        start: starts.Start,
        restored: starts.Restored,
        on_change: str,
        signals: StopSignals,
    ) -> FitResult:
        """Runs from the state's step to `max_steps`, saving on the way and on every way out."""
        first = int(run.state.step)
        run = run.placed(self.device)
        record = Record(run.contract(self), run.source, start, restored, on_change)
        record.refuse_early()
        display = make_progress(self.progress, first, self.max_steps)
        looks = Looks(
            run.state,
            record,
            checkpoints=self.checkpoints,
            display=display,
            log_every_n_steps=self.log_every_n_steps,
            callbacks=self.callbacks,
        )
        signals.standing = looks.standing
        if start.continues:
            display.tell(f"going on from step {first}")
        try:
            self._advance(run, looks, record, signals)
        except NonFiniteError as error:
            looks.take(error.chunk)
            looks.finish()
            raise
        except BaseException:
            looks.abandon()
            raise
        looks.finish()
        if signals.received == signal.SIGTERM and self.on_sigterm == "exit":
            raise SystemExit(128 + signal.SIGTERM)
        return _result(run, looks, first, self.max_steps, signals.received is not None)

    def _advance(self, run: "_Run", looks: Looks, record: Record, signals: StopSignals) -> None:
        """Compiles, settles what changed, and runs the loop, one chunk after the other."""
        if looks.step >= self.max_steps:
            record.settle(run.state, None)
            return
        if signals.received is not None:
            return
        check_source(run.source, looks.step, self.max_steps, run.state.sampler_state)
        feed = make_feed(run.source, looks.step, self.max_steps, self.device or default_device())
        try:
            _require_batches(feed.source, getattr(run.module, "batch_keys", ()))
            _require_no_adaptive(run.source)
            loop = TrainLoop(
                run.train_step,
                run.state,
                feed.source,
                on_nonfinite=self.on_nonfinite,
                device=self.device,
                while_compiling=lambda: looks.save() if signals.received is not None else None,
            )
            record.settle(run.state, loop.program, tuple(n for n in loop.loss_names if n != TOTAL))
            if record.own and self.checkpoints is not None:
                self.checkpoints.supersede_after(looks.step)
            self._loop(loop, feed, looks, loop.place(run.state), signals)
        finally:
            feed.close()

    def _loop(
        self, loop: TrainLoop, feed: Any, looks: Looks, state: TrainState, signals: StopSignals
    ) -> None:
        pace = Pace(self.chunk_size)
        while looks.step < self.max_steps and not looks.asked_to_stop and signals.received is None:
            source, end = feed.at(looks.step)
            bounds = (self.max_steps, end, looks.next_look())
            bound = min(bound for bound in bounds if bound is not None)
            began = time.perf_counter()
            chunk = loop.run(state, looks.step + pace.next_count(bound - looks.step), source)
            pace.measured(chunk.step - looks.step, time.perf_counter() - began)
            state = chunk.state
            looks.take(chunk)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The parts of a run: `streams` holds the keys that this call asked for."""

    module: Any
    train_step: TrainStep
    streams: TrainState
    state: TrainState
    source: Any
    training: Mapping[str, Any]
    root: Any

    def placed(self, device: Any) -> "_Run":
        """With the source as it wants to be asked on this device."""
        source = self.source
        if not callable(source) and isinstance(source, Iterable):
            source = IterableSource(source)
        if callable(getattr(source, "prepare", None)):
            source = source.prepare(device or default_device())
        if not getattr(source, "traceable", False):
            source = HostSource(source)
        return dataclasses.replace(self, source=source)

    def contract(self, trainer: Trainer) -> dict[str, Any]:
        """What this run promises, as far as it is known before it compiles."""
        return contract.build(
            root=self.root,
            sampling_key=self.streams.sampling_key,
            balancer_key=self.streams.balancer_key,
            source=self.source,
            training={**self.training, "on_nonfinite": trainer.on_nonfinite, **_cut(trainer.microbatches)},
            environment=environment.describe(trainer.device or default_device()),
        )


def _cut(microbatches: int) -> dict[str, int]:
    """What the contract says of micro-batches: nothing where a batch is taken whole."""
    return {} if microbatches == 1 else {"microbatches": microbatches}


def _result(run: _Run, looks: Looks, first: int, max_steps: int, signalled: bool) -> FitResult:
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


def _on_own_streams(restored: starts.Restored, fresh: TrainState, on_change: str) -> starts.Restored:
    """With `on_change="warn"`, the streams of this call win over other ones in the checkpoint."""
    if on_change == "error" or _streams(restored.state) == _streams(fresh):
        return restored
    state = restored.state.replace(
        rng_key=fresh.rng_key, sampling_key=fresh.sampling_key, balancer_key=fresh.balancer_key
    )
    return dataclasses.replace(restored, state=state)


def _streams(state: TrainState) -> tuple[str, str]:
    return keys.fingerprint(state.sampling_key), keys.fingerprint(state.balancer_key)


def _described_training(module: Any, optimizer: Any, balancer: Any, state: TrainState) -> dict[str, Any]:
    names = getattr(module, "loss_names", None) or getattr(balancer, "loss_names", None)
    return {
        "module": getattr(module, "name", type(module).__qualname__),
        "losses": None if names is None else list(names),
        "balancer": None if balancer is None else contract.describe_part(balancer),
        "optimizer": _kinds(state.optimizer_state),
    }


def _kinds(optimizer_state: Any) -> list[str]:
    """The names of the records in an optimizer's state, from the outside in."""
    if isinstance(optimizer_state, Mapping):
        return [kind for entry in optimizer_state.values() for kind in _kinds(entry)]
    if not isinstance(optimizer_state, (tuple, list)):
        return []
    own = [type(optimizer_state).__name__] if hasattr(optimizer_state, "_fields") else []
    # Below the records lie the user's parameters, which the restore compares leaf by leaf.
    return own or [kind for entry in optimizer_state for kind in _kinds(entry)]


def _require_batches(source: Any, batch_keys: tuple[str, ...]) -> None:
    names = getattr(source, "names", None) or batch_keys
    missing = [name for name in batch_keys if name not in names]
    if missing:
        raise ValueError(
            f"the source has no batch {missing[0]!r}; it has {_checks.shown(names)}, and the "
            "module's batch_keys are "
            f"{_checks.shown(batch_keys)}. Make them agree."
        )


def _require_no_adaptive(source: Any) -> None:
    samplers = getattr(source, "samplers", {})
    adaptive = [name for name, sampler in samplers.items() if isinstance(sampler, AdaptiveSampler)]
    if adaptive:
        raise ValueError(
            f"samplers[{adaptive[0]!r}] follows residuals, which this trainer does not refresh. "
            "Draw from it in a loop of your own."
        )


def _require_module(module: Any, balancer: Any) -> None:
    if not isinstance(module, LossModule):
        raise TypeError(f"module must be a LossModule, got {module!r}. Build one from init and losses.")
    if balancer is not None and not isinstance(balancer, LossBalancer):
        raise TypeError(f"balancer must be a LossBalancer, got {balancer!r}. Use StaticLossBalancer.")
    if callable(getattr(balancer, "update", None)):
        raise ValueError(
            f"balancer must not offer update, which this version does not call, got {balancer!r}. "
            "Use StaticLossBalancer, or adapt the weights in a train_step of your own."
        )


def _require_optimizer(optimizer: Any) -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer must offer init and update, got {optimizer!r}. Pass an Optax optimizer.")


def _require_datamodule(datamodule: Any) -> None:
    if not isinstance(datamodule, DataModule):
        raise TypeError(
            f"datamodule must offer train_batch_source(batch_keys, key), got {datamodule!r}. "
            "Use PoolDataModule."
        )


def _require_one(name: str, value: Any, other_name: str, other: Any) -> None:
    if (value is None) == (other is None):
        given = "both" if value is not None else "neither"
        raise TypeError(f"pass one of {name} and {other_name}, got {given}.")
