"""Weights that are learned beside the model: each loss with a noise level of its own.

    total = sum over losses of  exp(-s_i) * loss_i / 2 + s_i / 2           s_i = log of the variance

The logarithms s are trained by Adam together with the parameters, on the same total (Kendall, Gal and
Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene Geometry and Semantics", CVPR 2018;
for PINNs, Xiang, Peng, Liu and Yao, "Self-adaptive loss balanced Physics-informed neural networks",
Neurocomputing 496, 2022). A loss that stays large gets a small weight, and the second term keeps the weights
from vanishing. It reads the losses that the step computes anyway, so it costs next to nothing.

A loss of exactly 0 would pull its s down at every step, without end. It keeps its weight instead.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import KeyScalar
from phijax_rng.training.balancing.weights import by_name, weighted_sum

_LARGEST_LOG = 80  # exp of it and of its negative are normal numbers in float32

# Adam as in Kingma and Ba, ICLR 2015, with the constants proposed there. Not optax.scale_by_adam, which
# rounds differently: a run saved before would end in other bits.
_BETA1, _BETA2, _EPS = np.float32(0.9), np.float32(0.999), np.float32(1e-8)


@dataclasses.dataclass(frozen=True, eq=False)
class UncertaintyBalancer:
    """Self-adaptive weights `exp(-s_i) / 2`, learned by Adam on the total loss.

    `total_loss` is the sum above, which may be negative; the losses themselves are recorded as they are.

    Attributes:
        loss_names: the losses, in the order they are summed.
        learning_rate: Adam's, for the logarithms s.
        initial_log_variance: s before the first step; the default gives weights of 1.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """

    kind: ClassVar[str] = "UncertaintyBalancer"

    loss_names: tuple[str, ...]
    _: dataclasses.KW_ONLY
    learning_rate: float = 1e-3
    initial_log_variance: float = -float(np.log(2))

    def __post_init__(self) -> None:
        assign(self, loss_names=validation.names(self.loss_names, "loss_names"))
        validation.above_zero(self.learning_rate, "learning_rate")
        validation.finite_number(self.initial_log_variance, "initial_log_variance")
        if abs(self.initial_log_variance) > _LARGEST_LOG:
            raise ValueError(
                f"initial_log_variance must be in [-{_LARGEST_LOG}, {_LARGEST_LOG}], got "
                f"{self.initial_log_variance!r}. Pick the logarithm of a variance that float32 holds."
            )

    def initialize(self) -> dict[str, jax.Array]:
        """The logarithms, those in use, and Adam's moments and count."""
        start = jnp.full(len(self.loss_names), self.initial_log_variance, jnp.float32)
        zeros = jnp.zeros_like(start)
        return {"count": jnp.int32(0), "first": zeros, "next": start, "second": zeros, "used": start}

    def combine(self, losses: Mapping[str, jax.Array], state: Mapping[str, jax.Array]) -> jax.Array:
        """The total of this step, as above."""
        weighted = weighted_sum(self.loss_names, losses, _weights(state))
        return weighted + (np.float32(0.5) * jnp.sum(state["used"])).astype(weighted.dtype)

    def diagnostics(self, state: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The weights, by loss name."""
        return by_name(self.loss_names, _weights(state))

    def observe(
        self, losses: Mapping[str, jax.Array], key: KeyScalar, state: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """One step of Adam on the logarithms; see `ObservingBalancer`.

        This step's losses are combined with the logarithms before it, as in a joint update of all
        parameters.
        """
        now = jnp.stack([jnp.asarray(losses[name], jnp.float32) for name in self.loss_names])
        used, count = state["next"], state["count"] + 1
        gradient = np.float32(0.5) - np.float32(0.5) * jnp.exp(-used) * now
        first = _BETA1 * state["first"] + (1 - _BETA1) * gradient
        second = _BETA2 * state["second"] + (1 - _BETA2) * gradient**2
        counts = now != 0
        first, second = jnp.where(counts, first, state["first"]), jnp.where(counts, second, state["second"])
        steps = count.astype(jnp.float32)
        mean, square = first / (1 - _BETA1**steps), second / (1 - _BETA2**steps)
        moved = used - np.float32(self.learning_rate) * mean / (jnp.sqrt(square) + _EPS)
        return {
            "count": count,
            "first": first,
            "next": jnp.where(counts, moved, used),
            "second": second,
            "used": used,
        }


def _weights(state: Mapping[str, jax.Array]) -> jax.Array:
    return np.float32(0.5) * jnp.exp(-state["used"])
