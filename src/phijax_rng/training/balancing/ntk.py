"""Weights from the neural tangent kernel, so that every loss term is learned at the same rate.

The diagonal of a term's kernel at point x is `|| d residual(x) / d parameters ||**2`, summed over the
components of the residual. It is computed exactly, one point at a time, and averaged over the diagnostic
points:

    trace_i = mean over points of the diagonal         target_i = mean(traces) / trace_i

The weights follow the targets as a moving average (Wang, Yu and Perdikaris, "When and why PINNs fail to
train: A neural tangent kernel perspective", J. Comput. Phys. 449, 2022, with the mean of the diagonal in
place of its sum, as PhiJAX has it).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
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
class NTKBalancer(WeightedSum):
    """A term that is learned slowly gets a large weight; needs the module's `residuals`.

    Point i of every batch makes a batch of one row, and the residuals of a term are differentiated there:
    `residuals` is called with one row of each batch. An update costs one Jacobian for each row and term;
    `kernel_chunk_size` of them are in memory at a time.

    A term whose trace is at most `eps` keeps its weight, and has no part in the mean.

    Attributes:
        loss_names: the losses, in the order they are summed; each has rows of residuals.
        update_every_n_steps: steps between two updates.
        diagnostic_batch_sizes: points of each batch, by name, or one number for all; see
            `AdaptiveBalancer`.
        kernel_chunk_size: points whose Jacobians are computed at once.
        update_start_step: the step of the first update; `update_every_n_steps` for `None`.
        eps: traces up to this count as zero.
        moving_average_coefficient: how much of the old weight is kept, in [0, 1).
        initial_weights: loss name -> weight before the first update; 1 for the others.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range, or a weight is for an unknown loss.
    """

    kind: ClassVar[str] = "NTKBalancer"

    loss_names: tuple[str, ...]
    _: dataclasses.KW_ONLY
    update_every_n_steps: int
    diagnostic_batch_sizes: BatchSizes | int
    kernel_chunk_size: int = 16
    update_start_step: int | None = None
    eps: float = 1e-10
    moving_average_coefficient: float = 0.9
    initial_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        validation.positive(self.kernel_chunk_size, "kernel_chunk_size")

    def initialize(self) -> dict[str, jax.Array]:
        """The initial weights, and traces of 0; float32, in the order of `loss_names`."""
        weights = initial_vector(self.loss_names, self.initial_weights)
        return {"traces": jnp.zeros_like(weights), "weights": weights}

    def check_module(self, module: LossModule) -> None:
        """Raises if the module has no residuals to differentiate."""
        if module.residuals is None:
            raise ValueError(
                "NTKBalancer needs the rows of residuals of each loss, and the module has no `residuals`. "
                "Pass LossModule(..., residuals=...), or balance with GradNormBalancer."
            )

    def update(
        self,
        module: LossModule,
        model_state: ModelState,
        batches: Batches,
        key: KeyScalar,
        state: Mapping[str, jax.Array],
    ) -> dict[str, jax.Array]:
        """The state after the kernel at these points; see `AdaptiveBalancer`."""
        # Row counts must be known before the loop over rows is built; nothing is computed.
        shapes = jax.eval_shape(lambda: module.residual_rows(model_state, batches, key))
        _require_residuals(shapes, self.loss_names)

        def row(name: str, index: jax.Array, parameters: ModelState) -> jax.Array:
            """The residual of one point, which `_trace` differentiates."""
            merged = merge(parameters, model_state)
            return module.residual_rows(merged, _row(batches, index), key)[name]

        traces = jnp.stack(
            [
                self._trace(
                    functools.partial(row, name), trainable(model_state), _num_rows(shapes[name], name)
                )
                for name in self.loss_names
            ]
        )
        weights, counts = state["weights"], traces > np.float32(self.eps)
        target = mean_of(traces, counts) / jnp.where(counts, traces, 1)
        renewed = moving_average(self.moving_average_coefficient, weights, target)
        # Selected after averaging: the average of a weight with itself would round it at every update.
        return {"traces": traces, "weights": jnp.where(counts, renewed, weights)}

    def _trace(self, residual: Callable[..., jax.Array], parameters: ModelState, num_rows: int) -> jax.Array:
        """The mean of the kernel's diagonal over the rows of one term."""

        def diagonal(index: jax.Array) -> jax.Array:
            return sum_of_squares(jax.jacrev(functools.partial(residual, index))(parameters))

        rows = jnp.arange(num_rows, dtype=jnp.int32)
        # Chunks bound the memory: all rows at once would hold one Jacobian for each.
        return jnp.mean(jax.lax.map(diagonal, rows, batch_size=min(self.kernel_chunk_size, num_rows)))


def _row(batches: Mapping[str, Any], index: jax.Array) -> dict[str, Any]:
    """Row `index` of every batch, as batches of one."""

    def pick(leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        # The modulo only acts on batches with fewer rows than this term has, which it does not depend on.
        return jax.lax.dynamic_slice_in_dim(leaf, index % leaf.shape[0], 1)

    return {name: jax.tree.map(pick, rows) for name, rows in batches.items()}


def _require_residuals(shapes: Mapping[str, jax.ShapeDtypeStruct], names: tuple[str, ...]) -> None:
    validation.mapping(shapes, "the residuals of the module")
    missing = [name for name in names if name not in shapes]
    if missing:
        raise ValueError(
            f"the module's residuals have {validation.shown(shapes)}, and the balancer's loss_names "
            f"{validation.shown(missing)} too. Return the rows of every loss that is balanced."
        )


def _num_rows(shape: jax.ShapeDtypeStruct, name: str) -> int:
    if not shape.shape or shape.shape[0] == 0:
        raise ValueError(
            f"residuals[{name!r}] must have one row for each point, got shape {shape.shape}. "
            "Return them before they are reduced to a loss."
        )
    return int(shape.shape[0])
