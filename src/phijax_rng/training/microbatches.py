"""One batch in slices of equal size, evaluated one after the other.

Row i of a batch of b rows belongs to slice `i // (b / count)`. The activations of one slice are in memory at
a time, in the gradient too: the backward pass evaluates each slice again.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from phijax_rng._base import pytrees
from phijax_rng._base.types import KeyScalar, ModelState, Rows
from phijax_rng.training.variables import is_none, none_of


@pytrees.record(data=("values",), meta=("names",))
class Pairs:
    """A mapping that keeps its order through JAX's transformations."""

    def __init__(self, named: Mapping[str, Any]):
        self.names = tuple(named)
        self.values = tuple(named.values())

    def named(self) -> dict[str, Any]:
        """The mapping."""
        return dict(zip(self.names, self.values, strict=True))


Evaluated: TypeAlias = tuple[Any, Pairs, Pairs]


def one_by_one(
    evaluate: Callable[..., Evaluated], model_state: ModelState, slices: Pairs, keys: jax.Array
) -> Evaluated:
    """`evaluate` over the micro-batches, in order, with averaged losses and carried variables."""

    def turn(variables: ModelState, inputs: tuple[Pairs, KeyScalar]) -> Any:
        rows, own_key = inputs
        replaced, losses, diagnostics = evaluate(variables, rows.named(), own_key)
        return replaced, (losses, diagnostics)

    # The first trace shows which leaves the losses replace; a scan must know them before it starts.
    # Shapes are enough here; nothing is computed twice.
    first = jax.tree.map(lambda leaf: leaf[0], (slices, keys))
    carried = jax.eval_shape(turn, none_of(model_state), first)[0]
    start = jax.tree.map(
        lambda new, old: None if new is None else jnp.asarray(old), carried, model_state, is_leaf=is_none
    )
    # `checkpoint` recomputes a slice in the backward pass, so that the activations of one slice are kept.
    variables, outputs = jax.lax.scan(jax.checkpoint(turn), start, (slices, keys))
    losses, diagnostics = jax.tree.map(_summary, outputs)
    return variables, losses, diagnostics


def sliced(rows: Rows, name: str, count: int) -> Any:
    """Every array of a batch with a leading axis of micro-batches."""

    def cut(path: Any, array: jax.Array) -> jax.Array:
        if not jnp.ndim(array) or jnp.shape(array)[0] % count:
            where = f"batches[{name!r}]{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"microbatches={count} must divide every batch, and {where} has shape {jnp.shape(array)}. "
                "Pick sizes that it divides."
            )
        return jnp.reshape(array, (count, -1, *jnp.shape(array)[1:]))

    return jax.tree_util.tree_map_with_path(cut, rows)


def _summary(values: jax.Array) -> jax.Array:
    """The mean of a number over the micro-batches; the last value if it is not floating."""
    return jnp.mean(values, axis=0) if jnp.issubdtype(values.dtype, jnp.inexact) else values[-1]
