"""What the balancers of this package share: weighted sums, moving averages and checked settings."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Tree


class WeightedSum:
    """The part of a balancer whose state holds `weights`, float32 in the order of `loss_names`."""

    loss_names: tuple[str, ...]

    def combine(self, losses: Mapping[str, jax.Array], state: Mapping[str, jax.Array]) -> jax.Array:
        """The sum with the weights in the state, float32 (float64 when a loss is)."""
        return weighted_sum(self.loss_names, losses, state["weights"])

    def diagnostics(self, state: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The weights, by loss name."""
        return by_name(self.loss_names, state["weights"])


def weighted_sum(
    names: tuple[str, ...], losses: Mapping[str, jax.Array], weights: jax.typing.ArrayLike
) -> jax.Array:
    """The dot product of weights and losses in the order of `names`, float32 (float64 when a loss is)."""
    # float32 weights and losses of any float dtype meet here, whatever promotion a user forbids.
    with jax.numpy_dtype_promotion("standard"):
        # Stacked in the order of `names`: a dict that JAX returned has its keys sorted.
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
    # Each constant is rounded to float32 once, here, and not by the program.
    return np.float32(coefficient) * old + np.float32(1 - coefficient) * new


def mean_of(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean of the entries that count, for equal numbers that of all; 0 if none counts."""
    counted = jnp.sum(counts).astype(values.dtype)
    return jnp.sum(jnp.where(counts, values, 0)) / jnp.maximum(counted, 1)


def sum_of_squares(tree: Tree) -> jax.Array:
    """The squared Euclidean norm of all leaves together, float32."""
    # Empty leaves would add a kernel each and no number.
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    return sum((jnp.sum(jnp.abs(leaf) ** 2).astype(jnp.float32) for leaf in leaves), jnp.float32(0))


def check_settings(balancer: Any) -> None:
    """Checks the settings that scheduled balancers share, and stores them in the form they are used in.

    Raises:
        TypeError: a name, number or size is of the wrong type.
        ValueError: one is out of range, or a weight is for an unknown loss.
    """
    names = validation.names(balancer.loss_names, "loss_names")
    weights = checked_weights(balancer.initial_weights, names, "initial_weights")
    validation.positive(balancer.update_every_n_steps, "update_every_n_steps")
    if balancer.update_start_step is not None:
        validation.step_number(balancer.update_start_step, "update_start_step")
    fraction(balancer.moving_average_coefficient, "moving_average_coefficient")
    validation.at_least_zero(balancer.eps, "eps")
    sizes = checked_sizes(balancer.diagnostic_batch_sizes)
    assign(balancer, loss_names=names, initial_weights=weights, diagnostic_batch_sizes=sizes)


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


def fraction(value: float, name: str) -> float:
    """`value` as a float in [0, 1)."""
    validation.finite_number(value, name)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}. Pick a number in that range.")
    return float(value)


def checked_weights(weights: object, names: tuple[str, ...] | None, label: str) -> dict[str, float]:
    """The weights by name, each one finite, not negative and for one of `names`."""
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise TypeError(f"{label} must be a mapping, got {weights!r}. Pass a dict: loss name -> weight.")
    for name, weight in weights.items():
        checked_weight(weight, f"{label}[{name!r}]")
    unknown = [name for name in weights if name not in (names or ())]
    if unknown:
        raise ValueError(
            f"{label} has {validation.shown(unknown)}; loss_names has {validation.shown(names or ())}. "
            "Name the losses that the weights are for."
        )
    return dict(weights)


def checked_weight(weight: float, name: str) -> float:
    """A finite weight of at least 0."""
    return validation.at_least_zero(weight, name, fix="Pick a weight of at least 0.")
