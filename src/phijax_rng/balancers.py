"""Combine named losses into the one number whose gradient is taken.

A balancer is a few pure functions over a state that training carries and checkpoints save:

    initialize() -> state      combine(losses, state) -> scalar      diagnostics(state) -> {name: scalar}

Losses are summed in the order of `loss_names`, so the sum rounds the same way in every run.

>>> balancer = StaticLossBalancer(("pde", "bc"), weights={"bc": 10.0})
>>> float(balancer.combine({"bc": 0.5, "pde": 2.0}, balancer.initialize()))
7.0
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import _checks


@runtime_checkable
class LossBalancer(Protocol):
    """Combines named losses, and may adapt how.

    Its state never changes: the trainer of this version calls no `update` and refuses a balancer that
    offers one.
    """

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
        """Numbers to show, by name. May be traced."""
        ...


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

    loss_names: tuple[str, ...] | None = None
    _: dataclasses.KW_ONLY
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    default_weight: float = 1.0

    def __post_init__(self) -> None:
        weights = dict(self.weights or {})
        _check_weight(self.default_weight, "default_weight")
        for name, weight in weights.items():
            _check_weight(weight, f"weights[{name!r}]")
        names = self.loss_names
        if names is not None:
            names = _checks.names(names, "loss_names")
        unknown = [name for name in weights if name not in (names or ())]
        if unknown:
            raise ValueError(
                f"weights has {_checks.shown(unknown)}; loss_names has {_checks.shown(names or ())}. "
                "Name the losses that the weights are for."
            )
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
        values = jnp.stack([jnp.asarray(losses[name]) for name in names])
        dtype = jnp.promote_types(values.dtype, jnp.float32)
        weights = np.ones(len(names), np.float32) if self.loss_names is None else self._vector()
        return jnp.vdot(jnp.asarray(weights, dtype), values.astype(dtype))

    def diagnostics(self, state: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The weights, by loss name."""
        return {
            name: jnp.asarray(weight)
            for name, weight in zip(self.loss_names or (), self._vector(), strict=True)
        }

    def _vector(self) -> np.ndarray[Any, Any]:
        weights = [self.weights.get(name, self.default_weight) for name in self.loss_names or ()]
        return np.asarray(weights, dtype=np.float32)


def _check_weight(weight: Any, name: str) -> None:
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {weight!r}. Pass a float.")
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(
            f"{name} must be finite and not negative, got {weight!r}. Pick a weight of at least 0."
        )
