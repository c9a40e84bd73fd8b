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
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from phijax_rng import _checks, contract, keys, starts
from phijax_rng.balancers import LossBalancer
from phijax_rng.checkpoints import Checkpoints
from phijax_rng.errors import NonFiniteError, RunChangedError
from phijax_rng.feeds import make_feed
from phijax_rng.looks import Looks
from phijax_rng.loop import POLICIES, Pace, TrainLoop, default_device
from phijax_rng.module import DataModule, LossModule
from phijax_rng.progress import make_progress
from phijax_rng.signals import StopSignals
from phijax_rng.state import TrainState, initialize_train_state
from phijax_rng.step import LossTrainStep, TrainStep

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
        log_every_n_steps: how many updates between two entries of the history.
        progress: whether to show a bar (on a terminal) or lines (elsewhere) on standard error.
        on_nonfinite: what to do when a loss or an updated leaf is not finite: `"raise"` keeps the last
            good state and raises `NonFiniteError`, `"skip"` leaves the update out, `"ignore"` goes on.
        on_sigterm: after saving, `"exit"` leaves the process with status 143, `"return"` returns the
            result with `interrupted=True`, as a SIGINT always does.
        chunk_size: updates between two looks of the host; chosen by the clock for `None`.
        device: where to run; JAX's default device for `None`.

    Raises:
        TypeError: a count is not a whole number, or `checkpoints` is not a `Checkpoints`.
        ValueError: a count is not positive, or an option is unknown.
    """

    max_steps: int
    _: dataclasses.KW_ONLY
    checkpoints: Checkpoints | None = None
    log_every_n_steps: int = 100
    progress: bool = True
    on_nonfinite: str = "raise"
    on_sigterm: str = "exit"
    chunk_size: int | None = None
    device: Any = None

    def __post_init__(self) -> None:
        _checks.step_number(self.max_steps, "max_steps")
        _checks.positive(self.log_every_n_steps, "log_every_n_steps")
        _checks.flag(self.progress, "progress")
        _checks.one_of(self.on_nonfinite, "on_nonfinite", POLICIES)
        _checks.one_of(self.on_sigterm, "on_sigterm", ("exit", "return"))
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
        start = self._start(resume, ckpt_path, ckpt_step, weights_only)
        saved = _saved_contract(start)
        root = _root(seed, saved)
        streams = keys.split_root(root)
        with StopSignals() as signals, _prepared(datamodule):
            balancer_state = {} if balancer is None else balancer.initialize()
            fresh = initialize_train_state(module.init(streams.model), optimizer, balancer_state, streams)
            state = _restored(start, fresh, on_change)
            run = _Run(
                module=module,
                train_step=LossTrainStep(module, optimizer, balancer),
                given=fresh,
                state=state,
                source=datamodule.train_batch_source(module.batch_keys, state.sampling_key),
                batch_keys=module.batch_keys,
                loss_names=_loss_names(module, balancer),
                root=root,
            )
            return self._train(run, start, saved, on_change, signals)

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
            source: the batches, `step -> batches`.

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
        if source is None:
            _require_datamodule(datamodule)
        _checks.one_of(on_change, "on_change", _ON_CHANGE)
        start = self._start(resume, ckpt_path, ckpt_step, weights_only)
        saved = _saved_contract(start)
        batch_keys = getattr(module, "batch_keys", ())
        with StopSignals() as signals, _prepared(datamodule):
            given, state = state, _restored(start, state, on_change)
            if datamodule is not None:
                source = datamodule.train_batch_source(batch_keys, state.sampling_key)
            run = _Run(
                module=module,
                train_step=train_step or LossTrainStep(module, optimizer, balancer),
                given=given,
                state=state,
                source=source,
                batch_keys=batch_keys,
                loss_names=None if train_step else _loss_names(module, balancer),
                root=None,
            )
            return self._train(run, start, saved, on_change, signals)

    def _start(self, resume: Any, ckpt_path: Any, ckpt_step: Any, weights_only: Any) -> starts.Start:
        return starts.decide(
            self.checkpoints,
            resume=resume,
            ckpt_path=ckpt_path,
            ckpt_step=ckpt_step,
            weights_only=weights_only,
        )

    def _train(
        self, run: "_Run", start: starts.Start, saved: Any, on_change: str, signals: StopSignals
    ) -> FitResult:
        """Runs from the state's step to `max_steps`, saving on the way and on every way out."""
        first = int(run.state.step)
        run = run.placed(self.device)
        record = _contract_of(run, start, saved)
        _settle(contract.compare(saved, record) if saved else [], record, first, on_change)
        if start.own and self.checkpoints is not None:
            self.checkpoints.supersede_after(first)
        looks = Looks(
            run.state,
            record,
            checkpoints=self.checkpoints,
            display=make_progress(self.progress, first, self.max_steps),
            log_every_n_steps=self.log_every_n_steps,
        )
        signals.standing = looks.standing
        try:
            self._advance(run, looks, signals)
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

    def _advance(self, run: "_Run", looks: Looks, signals: StopSignals) -> None:
        """The compiled loop, one chunk after the other."""
        if looks.step >= self.max_steps or signals.received is not None:
            return
        feed = make_feed(run.source, looks.step, self.max_steps)
        try:
            _require_batches(feed.source, run.batch_keys)
            loop = TrainLoop(
                run.train_step,
                run.state,
                feed.source,
                on_nonfinite=self.on_nonfinite,
                device=self.device,
            )
            state, pace = loop.place(run.state), Pace(self.chunk_size)
            while looks.step < self.max_steps and signals.received is None:
                source, end = feed.at(looks.step)
                bounds = (self.max_steps, end, looks.next_save())
                bound = min(bound for bound in bounds if bound is not None)
                began = time.perf_counter()
                chunk = loop.run(state, looks.step + pace.next_count(bound - looks.step), source)
                pace.measured(chunk.step - looks.step, time.perf_counter() - began)
                state = chunk.state
                looks.take(chunk)
        finally:
            feed.close()


@dataclasses.dataclass(frozen=True)
class _Run:
    """The parts of a run that the loop needs."""

    module: Any
    train_step: TrainStep
    given: TrainState
    state: TrainState
    source: Any
    batch_keys: tuple[str, ...]
    loss_names: tuple[str, ...] | None
    root: Any

    def placed(self, device: Any) -> "_Run":
        """With the source as it wants to be asked on this device."""
        if not callable(getattr(self.source, "prepare", None)):
            return self
        return dataclasses.replace(self, source=self.source.prepare(device or default_device()))


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


def _root(seed: Any, saved: Mapping[str, Any] | None) -> Any:
    """The root key; a resume without a seed takes the checkpoint's."""
    if seed is None and saved is not None:
        known = saved["keys"]["root"]
        if known is None:
            raise ValueError(
                "seed=None takes the checkpoint's seed, and this checkpoint records none. Pass the seed."
            )
        return keys.from_fingerprint(known)
    return keys.root_key(seed)


def _saved_contract(start: starts.Start) -> dict[str, Any] | None:
    """The contract of the run that goes on, or `None`."""
    if not start.continues:
        return None
    assert start.checkpoints is not None
    return start.checkpoints.contract(start.step) or None


def _restored(start: starts.Start, fresh: TrainState, on_change: str) -> TrainState:
    """The state to start from. With `on_change="warn"` a run's own streams win over the checkpoint's."""
    if start.checkpoints is None:
        return fresh
    state = start.checkpoints.restore(fresh, start.step, weights_only=start.weights_only)
    if on_change == "warn" and _streams(state) != _streams(fresh):
        state = state.replace(
            rng_key=fresh.rng_key, sampling_key=fresh.sampling_key, balancer_key=fresh.balancer_key
        )
    return state


def _streams(state: TrainState) -> tuple[str, str]:
    return keys.fingerprint(state.sampling_key), keys.fingerprint(state.balancer_key)


def _contract_of(run: _Run, start: starts.Start, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    before = dict((saved or {}).get("run", {}))
    lineage = {
        "id": before["id"] if start.own and "id" in before else uuid.uuid4().hex,
        "parent_step": start.step if start.own else None,
        "origin": before.get("origin") if start.own else _origin(start, before),
        "changes": list(before.get("changes", [])),
    }
    return contract.build(
        root=run.root,
        sampling_key=run.given.sampling_key,
        balancer_key=run.given.balancer_key,
        source=run.source,
        loss_names=run.loss_names,
        run=lineage,
    )


def _origin(start: starts.Start, before: Mapping[str, Any]) -> dict[str, Any] | None:
    if start.checkpoints is None:
        return None
    return {
        "directory": str(start.checkpoints.directory),
        "step": start.step,
        "weights_only": start.weights_only,
        "id": before.get("id"),
    }


def _settle(
    differences: list[contract.Difference], record: dict[str, Any], step: int, on_change: str
) -> None:
    """Refuses, warns of, or passes over what changed since the save; records what it lets pass."""
    if not differences:
        return
    level = contract.surviving(differences)
    text = f"resuming at step {step} changes the run:\n{contract.report(differences)}"
    if level in contract.REFUSED_LEVELS and on_change == "error":
        raise RunChangedError(
            f"{text}\nUndo the change, pass on_change='warn' to go on with it, or start a fresh run."
        )
    record["run"]["changes"].append(
        {"step": step, "survives": level, "settings": [dataclasses.asdict(d) for d in differences]}
    )
    warnings.warn(text, UserWarning, stacklevel=4)


def _loss_names(module: Any, balancer: Any) -> tuple[str, ...] | None:
    return module.loss_names or (balancer.loss_names if balancer is not None else None)


def _require_batches(source: Any, batch_keys: tuple[str, ...]) -> None:
    names = getattr(source, "names", None) or batch_keys
    missing = [name for name in batch_keys if name not in names]
    if missing:
        raise ValueError(
            f"the source has no batch {missing[0]!r}; it has {_checks.shown(names)}, and the "
            "module's batch_keys are "
            f"{_checks.shown(batch_keys)}. Make them agree."
        )


def _require_module(module: Any, balancer: Any) -> None:
    if not isinstance(module, LossModule):
        raise TypeError(f"module must be a LossModule, got {module!r}. Build one from init and losses.")
    if balancer is not None and not isinstance(balancer, LossBalancer):
        raise TypeError(f"balancer must be a LossBalancer, got {balancer!r}. Use StaticLossBalancer.")


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
