"""Weights from the gradient norms of the losses, so that every loss moves the parameters alike.

    norm_i = || d loss_i / d parameters ||        target_i = mean(norms) / (norm_i + eps * mean(norms))

The weights follow the targets as a moving average. This is the weighting of PINNs by gradient norms (Wang,
Sankaran, Wang and Perdikaris, "An Expert's Guide to Training Physics-informed Neural Networks",
arXiv:2308.08468, section 5.2), in the normalization of PhiJAX; it is not the GradNorm of multi-task
learning (Chen et al., ICML 2018), which also looks at the rates of training.

A loss without gradient (a norm of exactly 0) is no part of the mean and keeps its weight: PhiJAX lets that
weight climb towards `1 / eps`, and the step at which the loss gets a gradient is then far too large.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base.types import Batches, BatchSizes, KeyScalar, ModelState
from phijax_rng.state import merge, trainable
from phijax_rng.training.balancing.weights import (
    WeightedSum,
    check_settings,
    initial_vector,
    mean_of,
    moving_average,
    sum_of_squares,
)
from phijax_rng.training.module import LossModule


@dataclasses.dataclass(frozen=True, eq=False)
class GradNormBalancer(WeightedSum):
    """A loss whose gradient is small gets a large weight.

    An update costs one gradient of the losses, taken one loss after the other. A loss whose gradient is zero
    keeps its weight.

    Attributes:
        loss_names: the losses, in the order they are summed.
        update_every_n_steps: steps between two updates.
        update_start_step: the step of the first; `update_every_n_steps` for `None`.
        eps: bounds a target by `1 / eps`.
        moving_average_coefficient: how much of the old weight is kept, in [0, 1).
        initial_weights: loss name -> weight before the first update; 1 for the others.
        diagnostic_batch_sizes: sizes of fixed diagnostic batches, see `AdaptiveBalancer`; the batch of
            the step for `None`.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range, or a weight is for an unknown loss.
    """

    kind: ClassVar[str] = "GradNormBalancer"

    loss_names: tuple[str, ...]
    _: dataclasses.KW_ONLY
    update_every_n_steps: int
    update_start_step: int | None = None
    eps: float = 1e-5
    moving_average_coefficient: float = 0.9
    initial_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    diagnostic_batch_sizes: BatchSizes | int | None = None

    def __post_init__(self) -> None:
        check_settings(self)

    def initialize(self) -> dict[str, jax.Array]:
        """The initial weights, and norms of 0; float32, in the order of `loss_names`."""
        weights = initial_vector(self.loss_names, self.initial_weights)
        return {"norms": jnp.zeros_like(weights), "weights": weights}

    def update(
        self,
        module: LossModule,
        model_state: ModelState,
        batches: Batches,
        key: KeyScalar,
        state: Mapping[str, jax.Array],
    ) -> dict[str, jax.Array]:
        """The state after these gradients; see `AdaptiveBalancer`."""
        parameters = trainable(model_state)

        # One loss after the other: XLA then drops from each pass what only the other losses need.
        def norm(name: str) -> jax.Array:
            def loss(parameters: ModelState) -> jax.Array:
                return module.evaluate(merge(parameters, model_state), batches, key).losses[name]

            value, gradient = jax.value_and_grad(loss)(parameters)
            # A non-finite loss can have a finite gradient (through `where`), and must not count as small.
            return jnp.sqrt(sum_of_squares(gradient)) + 0 * value.astype(jnp.float32)

        norms = jnp.stack([norm(name) for name in self.loss_names])
        counts = norms > 0  # a norm of NaN is in the state, so the update is discarded anyway
        # The mean keeps the targets near 1, so that the learning rate keeps its meaning.
        mean = mean_of(norms, counts)
        # No division by 0, not even where it is not used: `jax_debug_nans` looks at every operation.
        target = mean / jnp.where(counts, norms + np.float32(self.eps) * mean, 1)
        renewed = moving_average(self.moving_average_coefficient, state["weights"], target)
        return {"norms": norms, "weights": jnp.where(counts, renewed, state["weights"])}
