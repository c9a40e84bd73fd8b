"""What a user supplies: losses of a model, and the data they are taken on.

A `LossModule` is a record of plain functions. The trainer calls `init` once with the model stream
and `losses` once per step with that step's runtime key:

    init(key) -> model_state
    losses(model_state, batches, key) -> {name: scalar}

>>> import jax.numpy as jnp
>>> module = LossModule(
...     init=lambda key: {"w": jnp.zeros(3)},
...     losses=lambda model_state, batches: {"fit": jnp.sum(model_state["w"] ** 2)},
...     batch_keys=("pde",),
... )
>>> module.wants_key
False
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from phijax_rng import _checks
from phijax_rng._types import Batches, KeyScalar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What `losses` may return instead of a dict, when a step produces more than losses.

    Attributes:
        losses: loss name -> scalar.
        model_state: the model state with its variables renewed, of unchanged structure; `None` when
            there are none. Leaves handed back as they came are trained. Leaves that were replaced
            are variables (batch statistics, counters): they are carried as returned, and the
            optimizer does not move them. Which is which is decided when the step is traced, so
            return the parameters themselves, for example `{**model_state, "batch_stats": new}`.
        diagnostics: name -> scalar, recorded beside the losses, without influence.
    """

    losses: Mapping[str, jax.Array]
    model_state: Any = None
    diagnostics: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LossModule:
    """A model and its named losses, as plain functions.

    Gradients are taken for leaves of `model_state` that are floating or complex arrays; integers,
    booleans and keys are carried.

    Attributes:
        init: `init(key) -> model_state`, the model factory.
        losses: `losses(model_state, batches, key) -> {name: scalar}` or a `StepOutput`. A function without
            a parameter named `key` is called without it. Traced once; must be pure.
        batch_keys: names of the batches that the losses read, in the order they are drawn.
        loss_names: names of the losses, in the order they are summed; read off the first
            trace when left out.
        residuals: `residuals(model_state, batches, key) -> {loss name: rows}`, one row for each point, for
            balancing and adaptive sampling. May leave out the parameter named `key`.
        predict: `predict(model_state, inputs) -> outputs`.
        name: for messages and records.

    Raises:
        TypeError: something that should be a function or a sequence of names is not; a function takes other
            arguments.
        ValueError: a name is repeated, or there is none.
    """

    init: Callable[[KeyScalar], Any]
    losses: Callable[..., Mapping[str, jax.Array] | StepOutput]
    _: dataclasses.KW_ONLY
    batch_keys: tuple[str, ...]
    loss_names: tuple[str, ...] | None = None
    residuals: Callable[..., Mapping[str, jax.Array]] | None = None
    predict: Callable[[Any, Any], Any] | None = None
    name: str = "module"

    def __post_init__(self) -> None:
        _checks.takes(self.init, "init", "key")
        _require_free_key(self.losses)
        require_parameters(self.losses, "losses", "model_state", "batches")
        if self.residuals is not None:
            require_parameters(self.residuals, "residuals", "model_state", "batches")
        if self.predict is not None:
            _checks.takes(self.predict, "predict", "model_state", "inputs")
        object.__setattr__(self, "batch_keys", _checks.names(self.batch_keys, "batch_keys"))
        if self.loss_names is not None:
            object.__setattr__(self, "loss_names", _checks.names(self.loss_names, "loss_names"))

    @property
    def wants_key(self) -> bool:
        """Whether `losses` has a parameter named `key`."""
        return takes_key(self.losses)

    def evaluate(self, model_state: Any, batches: Batches, key: KeyScalar) -> StepOutput:
        """`losses` called with what it asks for, its answer as a `StepOutput`."""
        output = called(self.losses, model_state, batches, key=key)
        if not isinstance(output, StepOutput):
            output = StepOutput(losses=output)
        return StepOutput(
            scalars(output.losses, "losses"),
            output.model_state,
            scalars(output.diagnostics, "diagnostics") if output.diagnostics else {},
        )

    def residual_rows(self, model_state: Any, batches: Batches, key: KeyScalar) -> Mapping[str, jax.Array]:
        """`residuals` called with what it asks for.

        Raises:
            ValueError: the module has none.
        """
        if self.residuals is None:
            raise ValueError(f"module {self.name!r} has no residuals. Pass LossModule(..., residuals=...).")
        return _checks.mapping(called(self.residuals, model_state, batches, key=key), "residuals")


def called(fn: Callable[..., Any], *arguments: Any, key: KeyScalar) -> Any:
    """What `fn` returns, with the key if it asks for one."""
    if _takes_key_by_place(fn):
        return fn(*arguments, key)
    return fn(*arguments, **({"key": key} if takes_key(fn) else {}))


def require_parameters(fn: Any, name: str, *arguments: str) -> None:
    """Raises unless `called` can call it with arguments of these names."""
    _checks.function(fn, name)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables of compiled code do not tell
        return
    by_place = _takes_key_by_place(fn)
    keyword = {"key": None} if takes_key(fn) and not by_place else {}
    try:
        signature.bind(*arguments, *(["key"] if by_place else []), **keyword)
    except TypeError:
        wanted = ", ".join(arguments)
        raise TypeError(
            f"{name} must take ({wanted}), or ({wanted}, key), got {signature}. Mend its parameters."
        ) from None


def _require_free_key(losses: Any) -> None:
    if isinstance(losses, functools.partial) and "key" in losses.keywords:
        raise ValueError(
            "losses is a functools.partial that binds key, which the runtime key of each step would replace. "
            "Leave key unbound, or rename the parameter."
        )


def takes_key(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has a parameter named `key`, or takes any name."""
    return any(p.name == "key" or p.kind is p.VAR_KEYWORD for p in _parameters(fn))


def _takes_key_by_place(fn: Callable[..., Any]) -> bool:
    return any(p.name == "key" and p.kind is p.POSITIONAL_ONLY for p in _parameters(fn))


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some callables of compiled code do not tell
        return []


def scalars(values: Any, name: str) -> Mapping[str, jax.Array]:
    """`values`, if they are real scalars by name; traced or not."""
    _checks.mapping(values, name)
    for key, value in values.items():
        if not is_array(value):
            raise TypeError(f"{name}[{key!r}] must be a real scalar, got {value!r}. Return a number.")
        if jax.numpy.shape(value) != ():
            raise ValueError(
                f"{name}[{key!r}] must be a scalar, got shape {jax.numpy.shape(value)}. "
                "Reduce it, for example with jnp.mean."
            )
        if not _is_real(value):
            raise ValueError(
                f"{name}[{key!r}] must be a real scalar, got {array_type(value)}. "
                "Take its real part, or its modulus."
            )
    return values


def is_array(value: Any) -> bool:
    """Whether it is a number or an array of numbers, booleans or keys, traced or not."""
    if isinstance(value, (bool, int, float, complex)):
        return True
    dtype = getattr(value, "dtype", None)
    # Text and objects are NumPy arrays too.
    return dtype is not None and hasattr(value, "shape") and getattr(dtype, "kind", "V") not in "OSUmM"


def array_type(value: Any) -> str:
    """`float32[3]`, or the value itself where it is no array."""
    if not is_array(value):
        return repr(value)
    dtype = value.dtype if hasattr(value, "dtype") else jax.numpy.result_type(value)
    return f"{dtype}{list(jax.numpy.shape(value))}"


def _is_real(value: Any) -> bool:
    dtype = jax.numpy.result_type(value) if not hasattr(value, "dtype") else value.dtype
    return any(jax.numpy.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))


@runtime_checkable
class DataModule(Protocol):
    """Where the training batches come from.

    Optional methods, called in this order when present: `prepare_data()`, `setup(stage)`,
    `train_batch_source(batch_keys, key)`, and `teardown(stage)` when training has ended; `stage` is `"fit"`.
    """

    def train_batch_source(self, batch_keys: tuple[str, ...], key: KeyScalar) -> Any:
        """A source of batches with these names, drawing from the sampling stream `key`."""
        ...
