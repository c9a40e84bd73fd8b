"""The inputs of a run as one value, checked in one place before anything is traced.

RunSpec(module, optimizer, datamodule, balancer, initial=FromSeed(42), ...)     `Trainer.fit`
RunSpec(module, train_step, source, initial=state, ...)                         `Trainer.fit_state`
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jax

from phijax_rng import keys
from phijax_rng._base import model_leaves, validation
from phijax_rng._base.types import KeyScalar, Seed, Step
from phijax_rng.devices import processes
from phijax_rng.devices.placement import Placement
from phijax_rng.resume import contract, run_contract
from phijax_rng.resume.plan import ResumePlan
from phijax_rng.sampling.adapters import AdaptedSource, adapt_source
from phijax_rng.state import TrainState, initialize_train_state, trainable
from phijax_rng.training.adaptive_refresh import (
    adaptive_refresh,
    chained,
    with_sampler_state,
)
from phijax_rng.training.averaging import AveragedState, with_average
from phijax_rng.training.balancing.adapter import adapt_balancer
from phijax_rng.training.balancing.protocol import LossBalancer
from phijax_rng.training.balancing.schedule import make_refresh
from phijax_rng.training.module import DataModule, LossModule, require_mask
from phijax_rng.training.optimizer_call import require_fitting_optimizer, require_optimizer
from phijax_rng.training.step import LossTrainStep, Optimizer, TrainStep


@dataclasses.dataclass(frozen=True)
class FromSeed:
    """An initial state that the module's `init` makes from a seed.

    Attributes:
        seed: what `keys.root_key` takes. `None` draws one, or takes the checkpoint's on a resume.
    """

    seed: Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The inputs of a run.

    Attributes:
        module: a `LossModule`; with `train_step`, any object that the result should carry.
        initial: the initial state, or the seed to make it from.
        placement: where the run trains.
        optimizer: an Optax transformation; or else
        train_step: a custom update.
        datamodule: makes the source from the sampling key; or else
        source: the batches, `step -> batches`, or an iterable of them.
        balancer: how the losses are combined; their plain sum for `None`.
        on_nonfinite: see `Trainer`.
        microbatches: see `Trainer`.
        gradient_norm: see `Trainer`.
        ema_decay: see `Trainer`.

    Raises:
        TypeError, ValueError: an input is not what it should be, or two contradict each other.
    """

    module: object
    initial: TrainState | FromSeed
    placement: Placement
    optimizer: Optimizer | None = None
    train_step: TrainStep | None = None
    datamodule: DataModule | None = None
    source: Callable[[Step], Any] | Iterable[Any] | None = None
    balancer: LossBalancer | None = None
    on_nonfinite: str = "raise"
    microbatches: int = 1
    gradient_norm: bool = False
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        # In the order that a user fixes things: first what is missing, then what does not fit together.
        if not isinstance(self.initial, FromSeed):
            _require_one("optimizer", self.optimizer, "train_step", self.train_step)
            _require_one("datamodule", self.datamodule, "source", self.source)
            if not isinstance(self.initial, TrainState):
                raise TypeError(
                    f"state must be a TrainState, got {validation.formatted(self.initial)}. "
                    "Use initialize_train_state."
                )
            model_leaves.require_arrays(self.initial.model_state)
        if self.train_step is None:
            _require_module(self.module, self.balancer)
            require_optimizer(self.optimizer, self.module)
        else:
            self._check_train_step()
        balancer = adapt_balancer(self.balancer)
        if isinstance(self.initial, TrainState) and (
            self.train_step is None or balancer.schedule is not None
        ):
            balancer.require_fitting_state(self.initial.balancer_state)
        self._check_mask()
        _require_finite_tests(self.on_nonfinite, self.placement.host_device)
        validation.instance(self.datamodule, "datamodule")
        if self.source is None and not isinstance(self.datamodule, DataModule):
            raise TypeError(
                f"datamodule must offer train_batch_source(batch_keys, key), got "
                f"{validation.formatted(self.datamodule)}. "
                "Use PoolDataModule."
            )

    def _check_train_step(self) -> None:
        """Raises for a balancer that would do nothing: a custom train step combines the losses itself."""
        if adapt_balancer(self.balancer).schedule is not None:
            _require_module(self.module, self.balancer, combines=False)
        elif self.balancer is not None:
            raise ValueError(
                "train_step combines the losses itself, and the balancer has nothing to update, got "
                f"{validation.formatted(self.balancer)}. Drop the balancer, or pass an optimizer."
            )
        if self.microbatches != 1:
            raise ValueError(
                f"microbatches={self.microbatches} cuts the batches of an optimizer's update, and train_step "
                "is another update. Cut them there, or pass an optimizer."
            )
        if self.ema_decay is not None:
            raise ValueError(
                f"ema_decay={self.ema_decay} averages after an optimizer's update, and train_step is another "
                "update. Pass LossTrainStep(..., ema_decay=...) as train_step, or an optimizer."
            )
        if self.gradient_norm:
            raise ValueError(
                "gradient_norm=True records the gradient of an optimizer's update, and train_step is another "
                "update. Return the norm there as a diagnostic of a StepOutput, or pass an optimizer."
            )

    def _check_mask(self) -> None:
        """Where batches are padded, the function that computes the losses takes a mask."""
        if self.placement.uneven != "pad":
            return
        if self.train_step is not None:
            require_mask(self.train_step, "train_step takes")
        elif isinstance(self.module, LossModule):
            require_mask(self.module.losses, f"the losses of module {self.module.name!r} take")

    @property
    def batch_keys(self) -> tuple[str, ...]:
        """Names of the batches that the module reads; none where a custom train step has another module."""
        return adapt_module(self.module).batch_keys

    def root(self, plan: ResumePlan) -> KeyScalar | None:
        """The root key of the run; `None` where the caller made the state."""
        if not isinstance(self.initial, FromSeed):
            return None
        if self.initial.seed is None and plan.continues:
            return plan.root()
        return keys.root_key(processes.agreed_seed(self.initial.seed))

    def fresh_state(self, root: KeyScalar | None) -> TrainState:
        """The state of a fresh run; made from the root where the caller made none."""
        if isinstance(self.initial, TrainState):
            return self._averaging(self.initial)
        assert root is not None
        return self.initialize(keys.split_root(root))

    def initialize(self, streams: keys.StreamKeys) -> TrainState:
        """The state that the module's `init`, the optimizer and the balancer make from these streams."""
        assert isinstance(self.module, LossModule)
        balancer_state = adapt_balancer(self.balancer).initial_state()
        try:
            model_state = self.module.init(streams.model)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise TypeError(
                    f"init must work as init(key), and that call says: {error} Wrap it: lambda key: ..."
                ) from None
            raise
        _require_parameters(model_state)
        return self._averaging(initialize_train_state(model_state, self.optimizer, balancer_state, streams))

    def begin_at_weights(self, state: TrainState) -> TrainState:
        """`state`, a fresh one that took its model from another run, with an optimizer that begins there."""
        if self.optimizer is None or int(state.step):
            return state
        # Schedule-free and Lookahead keep a copy of the parameters, and it was made from those of `init`.
        begun = initialize_train_state(
            state.model_state,
            self.optimizer,
            state.balancer_state,
            state.rng_key,
            sampling_key=state.sampling_key,
            balancer_key=state.balancer_key,
        )
        begun = self._averaging(state.replace(optimizer_state=begun.optimizer_state))
        return self.placement.place_if_distributed(begun)

    def _averaging(self, state: TrainState) -> TrainState:
        """`state` with an average if the run keeps one; that of the caller's state continues."""
        if self.train_step is None:
            require_fitting_optimizer(state.optimizer_state, trainable(state.model_state))
        begun = isinstance(state.optimizer_state, AveragedState)
        return state if self.ema_decay is None or begun else with_average(state)

    @contextlib.contextmanager
    def prepared_data(self) -> Iterator[None]:
        """A `with` block around everything that uses the data module: its optional hooks."""
        hooks = adapt_datamodule(self.datamodule)
        # Once for all processes: it may download or unpack what all of them read.
        processes.run_on_primary(hooks.prepare_data)
        hooks.setup("fit")
        try:
            yield
        finally:
            hooks.teardown("fit")

    def make_source(self, sampling_key: KeyScalar) -> AdaptedSource:
        """The source that draws from this key, or the one that the user passed."""
        if self.datamodule is None:
            return adapt_source(self.source)
        source = self.datamodule.train_batch_source(self.batch_keys, sampling_key)
        return adapt_source(source, "the source that train_batch_source returns")

    def complete_state(self, state: TrainState, source: AdaptedSource) -> TrainState:
        """`state` with the first state of every adaptive sampler, and on the devices of the run."""
        return self.placement.place_if_distributed(with_sampler_state(state, source))

    def make_update(self) -> TrainStep:
        """The train step: the user's, or the gradient step of the optimizer."""
        if self.train_step is not None:
            return self.train_step
        assert isinstance(self.module, LossModule)
        return LossTrainStep(
            self.module, self.optimizer, self.balancer, self.microbatches, ema_decay=self.ema_decay
        )

    def make_refresh(self, source: AdaptedSource, state: TrainState) -> Any:
        """`(state, source) -> state` before each batch: samplers, then the balancer; `None` without them."""
        # Diagnostic batches are drawn here, once, on the host: from keys that it can read, and from the
        # first states of samplers, so that they are the same wherever a run starts.
        local = state.replace(
            sampling_key=processes.to_local(state.sampling_key),
            balancer_key=processes.to_local(state.balancer_key),
            sampler_state={},
        )
        first = with_sampler_state(local, source).sampler_state
        # A custom train step may come with any object; a refresh checks what it needs of it.
        module = cast(LossModule, self.module)
        balancing = make_refresh(
            adapt_balancer(self.balancer),
            module,
            source,
            local.balancer_key,
            self.batch_keys,
            sampler_state=first,
        )
        return chained(adaptive_refresh(module, source), balancing)

    def describe_training(self, state: TrainState) -> dict[str, Any]:
        """What decides the update, as plain data for the contract."""
        module = adapt_module(self.module)
        names = module.loss_names or (None if self.balancer is None else self.balancer.loss_names)
        described = {
            "module": module.name,
            "losses": None if names is None else list(names),
            "balancer": None if self.balancer is None else contract.describe_part(self.balancer),
            "optimizer": run_contract.optimizer_kinds(state.optimizer_state),
            "on_nonfinite": self.on_nonfinite,
        }
        # Only where it is used: contracts of runs without it do not change.
        used = {"microbatches": self.microbatches != 1, "ema_decay": self.ema_decay is not None}
        return described | {name: getattr(self, name) for name, is_used in used.items() if is_used}


@dataclasses.dataclass(frozen=True)
class AdaptedModule:
    """What a run reads of a module that need not be a `LossModule`."""

    name: str
    batch_keys: tuple[str, ...]
    loss_names: tuple[str, ...] | None


def adapt_module(module: object) -> AdaptedModule:
    """The name, batches and losses of a module, for any object that a custom train step comes with."""
    return AdaptedModule(
        getattr(module, "name", type(module).__qualname__),
        getattr(module, "batch_keys", ()),
        getattr(module, "loss_names", None),
    )


@dataclasses.dataclass(frozen=True)
class DataHooks:
    """The optional methods of a data module; each does nothing where the user's has none."""

    prepare_data: Callable[[], object]
    setup: Callable[[str], object]
    teardown: Callable[[str], object]


def adapt_datamodule(datamodule: DataModule | None) -> DataHooks:
    """The optional hooks of a data module, complete."""
    found = (getattr(datamodule, name, None) for name in ("prepare_data", "setup", "teardown"))
    return DataHooks(*(hook if callable(hook) else _do_nothing for hook in found))


def _require_finite_tests(on_nonfinite: str, device: jax.Device) -> None:
    """Raises where XLA would remove the tests for non-finite numbers from the program."""
    flags = contract.canonical_flags(os.environ.get("XLA_FLAGS", "")).lower().split()
    fast = [
        flag for flag in flags if flag in ("--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=1")
    ]
    if fast and on_nonfinite != "ignore" and device.platform == "cpu":
        raise ValueError(
            f"XLA_FLAGS has {fast[0]}, with which XLA removes tests for NaN and infinity, and "
            f"on_nonfinite={on_nonfinite!r} needs them. Remove the flag, or pass on_nonfinite='ignore'."
        )


def _do_nothing(*_: object) -> None:
    return None


def _require_parameters(model_state: object) -> None:
    """Raises unless there is something to train."""
    if model_state is None or not jax.tree.leaves(trainable(model_state)):
        fix = "Add the return statement." if model_state is None else "Give its parameters a floating dtype."
        raise TypeError(
            f"init must return a model state with floating or complex arrays to train, got "
            f"{validation.formatted(model_state)}. {fix}"
        )


def _require_one(name: str, value: object, other_name: str, other: object) -> None:
    if (value is None) == (other is None):
        given = "both" if value is not None else "neither"
        raise TypeError(f"pass one of {name} and {other_name}, got {given}.")


def _require_module(module: object, balancer: LossBalancer | None, *, combines: bool = True) -> None:
    """Raises unless there is a module, and a balancer or none that suits it."""
    if not isinstance(module, LossModule):
        raise TypeError(
            f"module must be a LossModule, got {validation.described(module)}. "
            "Build one: LossModule(init, losses, batch_keys=...)."
        )
    if balancer is not None:
        adapt_balancer(balancer).require_consistent(module.loss_names, alone=combines)


def require_batches(source_names: tuple[str, ...] | None, batch_keys: tuple[str, ...]) -> None:
    """Raises unless the source has every batch that the module reads; a source may not name its batches."""
    names = source_names or batch_keys
    missing = [name for name in batch_keys if name not in names]
    if missing:
        raise ValueError(
            f"the source has no batch {missing[0]!r}; it has {validation.shown(names)}, and the "
            f"module's batch_keys are {validation.shown(batch_keys)}. Make them agree."
        )


def require_inside(source: AdaptedSource) -> None:
    """Raises if a sampler follows residuals and is called on the host, ahead of them."""
    _, inside = source.host_and_device_parts()
    drawn = {} if inside is None else inside.adaptive_samplers
    for name in source.adaptive_samplers:
        if name not in drawn:
            raise ValueError(
                f"samplers[{name!r}] follows residuals, and its source is called on the host, ahead of the "
                "residuals. Draw it inside the loop: from a NamedBatchSource, or a traceable source."
            )
