"""Combine named losses into the one number whose gradient is taken.

A balancer is a few pure functions over a state that training carries and checkpoints save:

    initialize() -> state      combine(losses, state) -> scalar      diagnostics(state) -> {name: scalar}

One that adapts offers one of two more, or both:

    observe(losses, key, state) -> state                          at every step, from its losses
    update(module, model_state, batches, key, state) -> state     at scheduled steps, from what it likes

Losses are summed in the order of `loss_names`, so the sum rounds the same way in every run. All that a
balancer learns is in its state, so a resumed run goes on with the same weights.

>>> balancer = StaticLossBalancer(("pde", "bc"), weights={"bc": 10.0})
>>> float(balancer.combine({"bc": 0.5, "pde": 2.0}, balancer.initialize()))
7.0
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar


@runtime_checkable
class LossBalancer(Protocol):
    """Combines named losses, and may adapt how; see `AdaptiveBalancer` and `ObservingBalancer`."""

    @property
    def loss_names(self) -> tuple[str, ...] | None:
        """The losses it combines, in the order they are summed; `None` for any."""
        ...

    def initialize(self) -> Any:
        """The state before the first step, a pytree of arrays."""
        ...

    def combine(self, losses: Mapping[str, jax.Array], state: Any) -> jax.Array:
        """One scalar; its gradient trains the model. May be traced."""
        ...

    def diagnostics(self, state: Any) -> Mapping[str, jax.Array]:
        """The weights in use, by loss name; recorded as `weight/<name>` if the balancer adapts."""
        ...


@runtime_checkable
class AdaptiveBalancer(LossBalancer, Protocol):
    """Renews its state at scheduled steps, inside the compiled loop.

    Before the update from step t, `update` is called if t is `update_start_step` or a multiple of
    `update_every_n_steps` behind it. Optional members:

    `update_start_step`: the first such step; `update_every_n_steps` where it is absent or `None`.
    `diagnostic_batch_sizes`: name -> size (or one size for every batch) of diagnostic batches that are drawn
    from `fold_in(balancer_key, 0)`, the same ones at every update and behind every resume; the batch of the
    step where it is absent or `None`.
    """

    update_every_n_steps: int

    def update(self, module: Any, model_state: Any, batches: Any, key: KeyScalar, state: Any) -> Any:
        """The next state, of the same structure, shapes and dtypes. Traced.

        A state in which a finite number became one that is not is never taken over. `on_nonfinite="raise"`
        then stops the run before the step, and the other policies go on with the state as it was.

        Args:
            module: the `LossModule`; `module.evaluate(model_state, batches, key)` gives its losses.
            model_state: before the update from this step.
            batches: the diagnostic batches, or those of the step.
            key: a key of this step, apart from every stream that training draws from.
            state: the balancer's.
        """
        ...


@runtime_checkable
class ObservingBalancer(LossBalancer, Protocol):
    """Renews its state at every step, from the losses of that step."""

    def observe(self, losses: Mapping[str, jax.Array], key: KeyScalar, state: Any) -> Any:
        """The next state, with which these losses are then combined. Traced.

        Args:
            losses: by name; no gradient is taken through them.
            key: a key of this step, apart from every stream that training draws from.
            state: the balancer's.
        """
        ...


def is_scheduled(balancer: Any) -> bool:
    """Whether its state is renewed at steps of a schedule."""
    return callable(getattr(balancer, "update", None))


def adapts(balancer: Any) -> bool:
    """Whether its weights move."""
    return is_scheduled(balancer) or callable(getattr(balancer, "observe", None))


@dataclasses.dataclass(frozen=True, eq=False)
class StaticLossBalancer:
    """Fixed weights: the dot product of weights and losses, in the order of `loss_names`.

    It keeps no state, so new weights take effect on a resume, which tells of the change.

    Attributes:
        loss_names: the losses, in the order they are summed; `None` for whatever losses the module
            returns, in its order, each with weight 1.
        weights: loss name -> finite, non-negative weight.
        default_weight: the weight of a loss that `weights` leaves out.

    Raises:
        TypeError: a weight is not a number.
        ValueError: a weight is negative, NaN or infinite, or for an unknown loss; or all are 0; or there is a
            default without `loss_names`.
    """

    kind: ClassVar[str] = "StaticLossBalancer"

    loss_names: tuple[str, ...] | None = None
    _: dataclasses.KW_ONLY
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    default_weight: float = 1.0

    def __post_init__(self) -> None:
        _weight(self.default_weight, "default_weight")
        names = self.loss_names
        if names is not None:
            names = validation.names(names, "loss_names")
        weights = _checked_weights(self.weights, names, "weights")
        if names is None and self.default_weight != 1:
            raise ValueError(
                f"default_weight is {self.default_weight!r} but there are no loss_names that it could be "
                "for. Pass loss_names too."
            )
        object.__setattr__(self, "loss_names", names)
        object.__setattr__(self, "weights", weights)
        if names is not None and not any(self._vector() > 0):
            raise ValueError(
                f"weights must have a positive entry, got {weights!r}. Nothing would be trained."
            )

    def initialize(self) -> dict[str, Any]:
        """No state."""
        return {}

    def combine(self, losses: Mapping[str, jax.Array], state: Mapping[str, Any]) -> jax.Array:
        """The weighted sum, float32 (float64 when a loss is)."""
        names = tuple(losses) if self.loss_names is None else self.loss_names
        weights = np.ones(len(names), np.float32) if self.loss_names is None else self._vector()
        return weighted_sum(names, losses, weights)

    def diagnostics(self, state: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The weights, by loss name."""
        return {
            name: jnp.asarray(weight)
            for name, weight in zip(self.loss_names or (), self._vector(), strict=True)
        }

    def _vector(self) -> np.ndarray[Any, Any]:
        weights = [self.weights.get(name, self.default_weight) for name in self.loss_names or ()]
        return np.asarray(weights, dtype=np.float32)


class WeightedSum:
    """What balancers share whose state holds `weights`, float32 in the order of `loss_names`."""

    loss_names: tuple[str, ...]

    def combine(self, losses: Mapping[str, jax.Array], state: Mapping[str, jax.Array]) -> jax.Array:
        """The sum with the weights in the state, float32 (float64 when a loss is)."""
        return weighted_sum(self.loss_names, losses, state["weights"])

    def diagnostics(self, state: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The weights, by loss name."""
        return by_name(self.loss_names, state["weights"])


def weighted_sum(names: tuple[str, ...], losses: Mapping[str, jax.Array], weights: Any) -> jax.Array:
    """The dot product of weights and losses in the order of `names`, float32 (float64 when a loss is)."""
    values = jnp.stack([jnp.asarray(losses[name]) for name in names])
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.vdot(jnp.asarray(weights, dtype), values.astype(dtype))


def by_name(names: tuple[str, ...], vector: jax.Array) -> dict[str, jax.Array]:
    """The entries of a vector, by loss name."""
    return {name: vector[index] for index, name in enumerate(names)}


def initial_vector(names: tuple[str, ...], weights: Mapping[str, float]) -> jax.Array:
    """Weights in the order of `names`, 1 where there is none; float32."""
    return jnp.asarray(np.asarray([weights.get(name, 1.0) for name in names], np.float32))


def moving_average(coefficient: float, old: jax.Array, new: jax.Array) -> jax.Array:
    """`coefficient * old + (1 - coefficient) * new` in float32."""
    return np.float32(coefficient) * old + np.float32(1 - coefficient) * new


def sum_of_squares(tree: Any) -> jax.Array:
    """The squared Euclidean norm of all leaves together, float32."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    return sum((jnp.sum(jnp.abs(leaf) ** 2).astype(jnp.float32) for leaf in leaves), jnp.float32(0))


def check_settings(balancer: Any) -> None:
    """The settings that adaptive balancers share, checked and in the form they are used in.

    Raises:
        TypeError: a name, number or size is of the wrong type.
        ValueError: one is out of range, or a weight is for an unknown loss.
    """
    names = validation.names(balancer.loss_names, "loss_names")
    weights = _checked_weights(balancer.initial_weights, names, "initial_weights")
    validation.positive(balancer.update_every_n_steps, "update_every_n_steps")
    if balancer.update_start_step is not None:
        validation.step_number(balancer.update_start_step, "update_start_step")
    fraction(balancer.moving_average_coefficient, "moving_average_coefficient")
    validation.at_least_zero(balancer.eps, "eps")
    object.__setattr__(balancer, "loss_names", names)
    object.__setattr__(balancer, "initial_weights", weights)
    object.__setattr__(balancer, "diagnostic_batch_sizes", checked_sizes(balancer.diagnostic_batch_sizes))


def checked_sizes(sizes: Any) -> Any:
    """`diagnostic_batch_sizes` as a dict by name, one positive int, or `None`."""
    if sizes is None:
        return None
    if not isinstance(sizes, Mapping):
        return validation.positive(sizes, "diagnostic_batch_sizes")
    validation.mapping(sizes, "diagnostic_batch_sizes")
    return {
        name: validation.batch_size(size, f"diagnostic_batch_sizes[{name!r}]") for name, size in sizes.items()
    }


def fraction(value: Any, name: str) -> float:
    """`value` as a float in [0, 1)."""
    validation.finite_number(value, name)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}. Pick a number in that range.")
    return float(value)


def _checked_weights(weights: Any, names: tuple[str, ...] | None, label: str) -> dict[str, float]:
    """The weights by name, each one finite, not negative and for one of `names`."""
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise TypeError(f"{label} must be a mapping, got {weights!r}. Pass a dict: loss name -> weight.")
    for name, weight in weights.items():
        _weight(weight, f"{label}[{name!r}]")
    unknown = [name for name in weights if name not in (names or ())]
    if unknown:
        raise ValueError(
            f"{label} has {validation.shown(unknown)}; loss_names has {validation.shown(names or ())}. "
            "Name the losses that the weights are for."
        )
    return dict(weights)


def _weight(weight: Any, name: str) -> float:
    return validation.at_least_zero(weight, name, mend="Pick a weight of at least 0.")
