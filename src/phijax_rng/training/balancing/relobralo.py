"""Weights from how far each loss has come, with an occasional look back at the start.

    balance_i(t, s) = m * softmax_i(loss_i(t) / (temperature * loss_i(s)))        m losses
    history_i(t)    = weight_i(t-1) with probability `lookback`, else balance_i(t, 0)
    weight_i(t)     = alpha * history_i(t) + (1 - alpha) * balance_i(t, t-1)

A loss that has fallen less than the others gets a larger weight (Bischof and Kraus, "Multi-Objective
Loss Balancing for Physics-Informed Deep Learning", arXiv:2110.09813, equations of ReLoBRaLo). It reads the
losses that the step computes anyway, so it costs next to nothing.

A loss of exactly 0 (no row of the batch counts, or a term that has not begun) has made no progress to
compare: it keeps its weight, and the others share theirs. Its first value other than 0 is its start.
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
from phijax_rng.training.balancing.weights import WeightedSum, fraction

# Keep the quotient of two losses finite, and put a loss that is left out below all others.
_LEAST = np.finfo(np.float32).tiny
_MOST = np.float32(1e30)
_LEFT_OUT = np.float32(-1e38)


@dataclasses.dataclass(frozen=True, eq=False)
class ReLoBRaLoBalancer(WeightedSum):
    """Relative loss balancing with random lookback.

    The first step of a run has no step before it, and keeps the weights of 1. The random choice of each
    step is drawn from a stream of its own, so batches and dropout are those of a run without balancing.

    Attributes:
        loss_names: the losses, in the order they are summed.
        alpha: how much of the history is kept, in [0, 1).
        lookback: the probability that the history is the weight before, and not the balance with the
            losses of the first step; in [0, 1].
        temperature: large values make the weights alike.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """

    kind: ClassVar[str] = "ReLoBRaLoBalancer"

    loss_names: tuple[str, ...]
    _: dataclasses.KW_ONLY
    alpha: float = 0.999
    lookback: float = 0.999
    temperature: float = 1.0

    def __post_init__(self) -> None:
        assign(self, loss_names=validation.names(self.loss_names, "loss_names"))
        fraction(self.alpha, "alpha")
        validation.finite_number(self.lookback, "lookback")
        if not 0 <= self.lookback <= 1:
            raise ValueError(f"lookback must be in [0, 1], got {self.lookback!r}. Pick a probability.")
        validation.above_zero(self.temperature, "temperature")

    def initialize(self) -> dict[str, jax.Array]:
        """Weights of 1, and no losses seen; float32, in the order of `loss_names`."""
        ones = jnp.ones(len(self.loss_names), jnp.float32)
        zeros = jnp.zeros_like(ones)
        return {"first": zeros, "previous": zeros, "seen": jnp.asarray(False), "weights": ones}

    def observe(
        self, losses: Mapping[str, jax.Array], key: KeyScalar, state: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The state with the losses of this step taken in; see `ObservingBalancer`."""
        now = jnp.stack([jnp.asarray(losses[name], jnp.float32) for name in self.loss_names])
        first, previous = state["first"], state["previous"]
        counts = (now != 0) & (first != 0)  # then `previous` is not 0 either
        stays = jax.random.bernoulli(key, jnp.float32(self.lookback))
        history = jnp.where(stays, state["weights"], self._balance(now, first, counts))
        recent = self._balance(now, previous, counts)
        weights = np.float32(self.alpha) * history + np.float32(1 - self.alpha) * recent
        return {
            "first": jnp.where(first == 0, now, first),
            "previous": jnp.where(now == 0, previous, now),
            "seen": jnp.asarray(True),
            "weights": jnp.where(state["seen"] & counts, weights, state["weights"]),
        }

    def _balance(self, now: jax.Array, then: jax.Array, counts: jax.Array) -> jax.Array:
        quotient = now / jnp.maximum(np.float32(self.temperature) * jnp.where(counts, then, 1), _LEAST)
        compared = jnp.where(counts, jnp.minimum(quotient, _MOST), _LEFT_OUT)
        return jnp.sum(counts).astype(jnp.float32) * jax.nn.softmax(compared)
