"""What a user supplies: losses of a model, and the data they are taken on.

A `LossModule` is a record of plain functions. The trainer calls `init` once with the model stream
and `losses` once per step with that step's runtime key:

    init(key) -> model_state
    losses(model_state, batches, key) -> {name: scalar or (sum, weight)}

A function that names a parameter `mask` is also told which rows of the batches count; see `masks`.

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
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Batches, KeyScalar, ModelState
from phijax_rng.devices import row_masks
from phijax_rng.state import rebuilt
from phijax_rng.training.user_errors import explained

_OFFERED = {"key": "runtime key of each step", "mask": "mask of rows that count"}
"""What functions of a module are given if they ask for it by name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What `losses` may return instead of a dict, when a step produces more than losses.

    Attributes:
        losses: loss name -> scalar, or a pair `(sum, weight)`; see `LossModule`.
        model_state: the model state with updated variables, of unchanged structure; `None` when
            there are none. Leaves handed back as they came are trained. Leaves that were replaced
            are variables (batch statistics, counters): they are carried as returned, and the
            optimizer does not move them. Which is which is decided when the step is traced, so
            return the parameters themselves, for example `{**model_state, "batch_stats": new}`. A model
            that `losses` change in place (Flax NNX) is returned too; changes that are not returned raise.
        diagnostics: name -> scalar, recorded beside the losses, without influence.
    """

    losses: Mapping[str, Any]
    model_state: Any = None
    diagnostics: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LossModule:
    """A model and its named losses, as plain functions.

    Gradients are taken for leaves of `model_state` that are floating or complex arrays of JAX or NumPy. All
    else is carried: arrays of integers, booleans and keys, functions, text, fields of modules. Of Flax NNX
    Variables `nnx.Param` alone is trained, of an `eqx.nn.State` nothing. A Python float in a dict, list or
    tuple could be a parameter or a constant, and raises.

    Attributes:
        init: `init(key) -> model_state`, the model factory.
        losses: `losses(model_state, batches, key) -> {name: scalar}` or a `StepOutput`. A function without
            a parameter named `key` is called without it. One with a parameter named `mask` receives
            `{batch name: bool of shape (rows,)}`, true for the rows that count: all of them, unless a trainer
            pads batches (`uneven="pad"`). Traced once; must be pure. A loss may also be a pair
            `(sum, weight)` of scalars, whose value is `sum / weight` and which adds up over micro-batches;
            `(0, 0)`, a batch without rows that count, is a loss of 0 without gradient.
        batch_keys: names of the batches that the losses read, in the order they are drawn.
        loss_names: names of the losses, in the order they are summed; taken from the first trace if left
            out.
        residuals: `residuals(model_state, batches, key) -> {loss name: rows}`, one row for each point, for
            balancing and adaptive sampling. The parameters named `key` and `mask` are optional; its batches
            are never padded.
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
        validation.takes(self.init, "init", "key")
        # A bound argument would hide the parameter, and the key would silently never reach the losses.
        for name in _OFFERED:
            _require_free(self.losses, name)
        arguments, offered = ("model_state", "batches"), tuple(_OFFERED)
        require_parameters(self.losses, "losses", *arguments, offered=offered)
        if self.residuals is not None:
            require_parameters(self.residuals, "residuals", *arguments, offered=offered)
        if self.predict is not None:
            validation.takes(self.predict, "predict", "model_state", "inputs")
        assign(self, batch_keys=validation.names(self.batch_keys, "batch_keys"))
        if self.loss_names is not None:
            assign(self, loss_names=validation.names(self.loss_names, "loss_names"))

    @property
    def wants_key(self) -> bool:
        """Whether `losses` has a parameter named `key`."""
        return takes_key(self.losses)

    @property
    def wants_mask(self) -> bool:
        """Whether `losses` has a parameter named `mask`."""
        return names_mask(self.losses)

    def evaluate(
        self, model_state: ModelState, batches: Batches, key: KeyScalar, mask: Mapping[str, Any] | None = None
    ) -> StepOutput:
        """`losses` called with the parameters it has, its result as a `StepOutput` of scalars.

        What `losses` change in place they change in a copy.

        Args:
            model_state: of the model.
            batches: by name.
            key: the runtime key of the step.
            mask: which rows count, by name; all of them for `None`.

        Raises:
            ValueError: there is a mask, and the losses have no parameter for it.
        """
        return self.evaluate_in_place(rebuilt(model_state), batches, key, mask)

    def evaluate_in_place(
        self, model_state: ModelState, batches: Batches, key: KeyScalar, mask: Mapping[str, Any] | None = None
    ) -> StepOutput:
        """The same on this very object."""
        output = self.evaluate_terms(model_state, batches, key, mask)
        losses = {
            name: ratio(*term) if isinstance(term, tuple) else term for name, term in output.losses.items()
        }
        return dataclasses.replace(output, losses=losses)

    def evaluate_terms(
        self, model_state: ModelState, batches: Batches, key: KeyScalar, mask: Mapping[str, Any] | None = None
    ) -> StepOutput:
        """The same on this very object, with losses that are given as `(sum, weight)` as these pairs."""
        if mask is not None:
            require_mask(self.losses, f"the losses of module {self.name!r} take")
        # A function with a `mask` parameter gets one in every run, so that it needs no second code path.
        mask = _every_row(self.losses, batches) if mask is None else mask
        with explained("losses", {"batches": batches, "model_state": model_state}):
            output = called(self.losses, model_state, batches, key=key, mask=mask)
        if not isinstance(output, StepOutput):
            output = StepOutput(losses=output)
        return StepOutput(
            _terms(output.losses),
            output.model_state,
            scalars(output.diagnostics, "diagnostics") if output.diagnostics else {},
        )

    def residual_rows(
        self, model_state: ModelState, batches: Batches, key: KeyScalar
    ) -> Mapping[str, jax.Array]:
        """`residuals` called with the parameters it has; what they change in place is discarded.

        Raises:
            ValueError: the module has none.
        """
        if self.residuals is None:
            raise ValueError(f"module {self.name!r} has no residuals. Pass LossModule(..., residuals=...).")
        mask = _every_row(self.residuals, batches)
        with explained("residuals", {"batches": batches, "model_state": model_state}):
            rows = called(self.residuals, rebuilt(model_state), batches, key=key, mask=mask)
        return validation.mapping(rows, "residuals")


def _every_row(fn: Callable[..., Any], batches: Batches) -> Mapping[str, Any] | None:
    """The mask of batches without padding, for a function that has the parameter."""
    return row_masks.every_row(batches) if names_mask(fn) else None


def called(
    fn: Callable[..., Any], *arguments: Any, key: KeyScalar, mask: Mapping[str, Any] | None = None
) -> Any:
    """What `fn` returns, called with the key and the mask if it has parameters for them."""
    positional, by_name = _accepted(fn, {"key": key} if mask is None else {"key": key, "mask": mask})
    return fn(*arguments, *positional, **by_name)


def _accepted(fn: Callable[..., Any], offered: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The offered arguments that `fn` accepts: positional-only ones, and by name."""
    # Positional-only parameters cannot be passed by name.
    placed = [p.name for p in _parameters(fn) if p.kind is p.POSITIONAL_ONLY and p.name in offered]
    named = {name: value for name, value in offered.items() if name not in placed and _accepts(fn, name)}
    return [offered[name] for name in placed], named


def require_parameters(
    fn: Callable[..., object], name: str, *arguments: str, offered: tuple[str, ...] = ("key",)
) -> None:
    """Raises unless `called` can call it with arguments of these names and with the offered ones."""
    validation.function(fn, name)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables of compiled code have no signature
        return
    positional, by_name = _accepted(fn, dict.fromkeys(offered))
    try:
        signature.bind(*arguments, *positional, **by_name)
    except TypeError:
        raise TypeError(
            f"{name} must take ({', '.join(arguments)}), and may take {' and '.join(offered)} by that name, "
            f"got {signature}. Fix its parameters."
        ) from None


def require_mask(fn: Callable[..., Any], what: str) -> None:
    """Raises unless `fn` takes the mask of padded batches.

    Raises:
        ValueError: it has no parameter of this name.
    """
    if not names_mask(fn):
        raise ValueError(
            f"uneven='pad' pads batches with rows that must not count, and {what} no mask. "
            "Add a parameter named mask, {batch name: bool of shape (rows,)}, and average with "
            "masked_mean(values, mask[name]); or pass another `uneven`."
        )


def _require_free(losses: Callable[..., object], name: str) -> None:
    if isinstance(losses, functools.partial) and name in losses.keywords:
        raise ValueError(
            f"losses is a functools.partial that binds {name}, which the {_OFFERED[name]} would replace. "
            f"Leave {name} unbound, or rename the parameter."
        )


def takes_key(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has a parameter named `key`, or takes any name."""
    return _accepts(fn, "key")


def names_mask(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has a parameter named `mask`; accepting any name does not mean that it uses the mask."""
    # `**kwargs` would swallow the mask, and padded rows would count.
    return any(p.name == "mask" for p in _parameters(fn))


def _accepts(fn: Callable[..., Any], name: str) -> bool:
    """Whether `fn` has a parameter of this name, or takes any name."""
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in _parameters(fn))


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some callables of compiled code have no signature
        return []


def scalars(values: Any, name: str) -> Mapping[str, jax.Array]:
    """`values`, if they are real scalars by name; traced or not."""
    validation.mapping(values, name)
    for key, value in values.items():
        if not is_array(value):
            raise TypeError(
                f"{name}[{key!r}] must be a real scalar, got {validation.formatted(value)}. Return a number."
            )
        if jnp.shape(value) != ():
            raise ValueError(
                f"{name}[{key!r}] must be a scalar, got shape {jnp.shape(value)}. "
                "Reduce it, for example with jnp.mean."
            )
        if not _is_real(value):
            raise ValueError(
                f"{name}[{key!r}] must be a real scalar, got {array_type(value)}. "
                "Take its real part, or its modulus."
            )
    return values


def _terms(losses: Any) -> Mapping[str, Any]:
    """`losses`, if each is a real scalar or a pair of them."""
    if not isinstance(losses, Mapping):
        fix = "Add the return statement." if losses is None else "Return {'name': loss}."
        raise TypeError(f"losses must return scalars by name, got {validation.formatted(losses)}. {fix}")
    validation.mapping(losses, "losses")
    for name, term in losses.items():
        if not isinstance(term, tuple):
            scalars({name: term}, "losses")
        elif len(term) == 2:
            scalars(dict(zip(("sum", "weight"), term, strict=True)), f"losses[{name!r}]")
        else:
            raise ValueError(
                f"losses[{name!r}] must be a scalar or a pair (sum, weight), got a tuple of {len(term)}. "
                "Return a number, or a sum over rows and their number."
            )
    return losses


def ratio(total: jax.typing.ArrayLike, weight: jax.typing.ArrayLike) -> jax.Array:
    """`total / weight` in the dtype of the sum; 0 without gradient where both are 0. May be traced."""
    total, weight = jnp.asarray(total), jnp.asarray(weight)
    dtype = total.dtype if jnp.issubdtype(total.dtype, jnp.floating) else jnp.result_type(float)
    total, weight = total.astype(dtype), weight.astype(dtype)
    # A sum over no weight is infinite, hence an event, unless it is the sum over no rows.
    empty = (total == 0) & (weight == 0)
    return jnp.where(empty, 0, total / jnp.where(empty, 1, weight))


def is_array(value: object) -> bool:
    """Whether it is a number or an array of numbers, booleans or keys, traced or not."""
    if isinstance(value, (bool, int, float, complex)):
        return True
    dtype = getattr(value, "dtype", None)
    # NumPy also has arrays of text, objects and dates, which JAX cannot hold.
    return dtype is not None and hasattr(value, "shape") and getattr(dtype, "kind", "V") not in "OSUmM"


def array_type(value: Any) -> str:
    """`float32[3]`, or the repr of a value that is no array."""
    if not is_array(value):
        return repr(value)
    dtype = value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    return f"{dtype}{list(jnp.shape(value))}"


def _is_real(value: Any) -> bool:
    dtype = jnp.result_type(value) if not hasattr(value, "dtype") else value.dtype
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))


@runtime_checkable
class DataModule(Protocol):
    """Where the training batches come from.

    Optional methods, called in this order when present: `prepare_data()`, `setup(stage)`,
    `train_batch_source(batch_keys, key)`, and `teardown(stage)` when training has ended; `stage` is `"fit"`.
    """

    def train_batch_source(self, batch_keys: tuple[str, ...], key: KeyScalar) -> Any:
        """A source of batches with these names, drawing from the sampling stream `key`."""
        ...
