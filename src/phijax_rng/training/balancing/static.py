"""Fixed weights.

>>> balancer = StaticLossBalancer(("pde", "bc"), weights={"bc": 10.0})
>>> float(balancer.combine({"bc": 0.5, "pde": 2.0}, balancer.initialize()))
7.0
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng.training.balancing.weights import checked_weight, checked_weights, weighted_sum


@dataclasses.dataclass(frozen=True, eq=False)
class StaticLossBalancer:
    """Fixed weights: the dot product of weights and losses, in the order of `loss_names`.

    It has no state, so new weights take effect on a resume, which reports the change.

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
        checked_weight(self.default_weight, "default_weight")
        names = self.loss_names
        if names is not None:
            names = validation.names(names, "loss_names")
        weights = checked_weights(self.weights, names, "weights")
        # Without names the plain sum is meant; a weight for all of them would only scale the learning rate.
        if names is None and self.default_weight != 1:
            raise ValueError(
                f"default_weight is {self.default_weight!r} but there are no loss_names that it could be "
                "for. Pass loss_names too."
            )
        assign(self, loss_names=names, weights=weights)
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
        # NumPy, so that fixed weights are constants of the program and cost nothing in the loop.
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
