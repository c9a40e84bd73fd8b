"""One batch in slices of equal size, evaluated one after the other.

Row i of a batch of b rows belongs to slice `i // (b / count)`. The activations of one slice are in memory at
a time, in the gradient too: the backward pass evaluates each slice again.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import pytrees
from phijax_rng._base.types import Batches, KeyScalar, Mask, ModelState, Rows
from phijax_rng.state import merge
from phijax_rng.training.module import LossModule, ratio
from phijax_rng.training.variables import Before, is_none, none_of


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
"""The replaced leaves of the model state, the losses and the diagnostics."""


def evaluated(
    module: LossModule,
    model_state: ModelState,
    batches: Batches,
    key: KeyScalar,
    mask: Mask | None,
    *,
    count: int,
) -> Evaluated:
    """What a module gives for batches that are cut into `count` slices; for 1 they stay whole.

    Each loss is the mean of its values over the slices, or the sum of its sums over the sum of its weights.
    The losses may change `model_state` in place; pass an object of their own.

    Raises:
        ValueError: `count` does not divide a batch, or a padded batch meets a loss without a weight.
    """
    if count == 1:
        # Taken before the call: `losses` may change this very object.
        before = Before.of(model_state)
        output = module.evaluate_in_place(model_state, batches, key, mask)
        # `Pairs`, since JAX sorts the keys of a dict and the sum must follow the module's order.
        return before.replaced(output.model_state), Pairs(output.losses), Pairs(output.diagnostics)

    def evaluate(
        variables: ModelState, batches: Batches, key: KeyScalar, mask: Mask | None
    ) -> tuple[Any, Pairs, Pairs]:
        given = merge(variables, model_state)
        before = Before.of(given)
        output = module.evaluate_terms(given, batches, key, mask)
        if mask is not None:
            _require_weights(output.losses, count)
        return before.replaced(output.model_state), Pairs(output.losses), Pairs(output.diagnostics)

    padded = mask is not None
    slices = Pairs(
        {name: _sliced(rows, f"batches[{name!r}]", count, padded) for name, rows in batches.items()}
    )
    masks = None if mask is None else _sliced_masks(mask, count)
    return _one_by_one(evaluate, model_state, (slices, jax.random.split(key, count), masks))


def _one_by_one(evaluate: Callable[..., Evaluated], model_state: ModelState, inputs: Any) -> Evaluated:
    """`evaluate` over the slices, in order, with combined losses and carried variables."""

    def turn(variables: ModelState, inputs: tuple[Pairs, KeyScalar, Mask | None]) -> Any:
        rows, own_key, mask = inputs
        replaced, losses, diagnostics = evaluate(variables, rows.named(), own_key, mask)
        return replaced, (losses, diagnostics)

    # The first trace shows which leaves the losses replace; a scan must know them before it starts.
    # From shapes, since a slice of the keys would count as a use of them under `jax_debug_key_reuse`.
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), inputs)
    carried = jax.eval_shape(turn, none_of(model_state), first)[0]
    start = jax.tree.map(
        lambda new, old: None if new is None else jnp.asarray(old), carried, model_state, is_leaf=is_none
    )
    # `checkpoint` recomputes a slice in the backward pass, so that the activations of one slice are kept.
    variables, (losses, diagnostics) = jax.lax.scan(jax.checkpoint(turn), start, inputs)
    combined = {name: _combined(term) for name, term in losses.named().items()}
    return variables, Pairs(combined), jax.tree.map(_summary, diagnostics)


def _combined(term: Any) -> jax.Array:
    """A loss from its values, or from its sums and weights, over the slices."""
    if isinstance(term, tuple):
        return ratio(*(jnp.sum(part, axis=0) for part in term))
    return jnp.mean(term, axis=0)


def _sliced(rows: Rows, where: str, count: int, padded: bool) -> Any:
    """Every array of a batch with a leading axis of micro-batches."""

    def cut(path: Any, array: jax.Array) -> jax.Array:
        size = jnp.shape(array)[0] if jnp.ndim(array) else 0
        if padded and size % count:
            # Padding repeats the last row, as for devices; its mask is false.
            array = jnp.asarray(array)[np.minimum(np.arange(_filled(size, count), dtype=np.int32), size - 1)]
        elif not size or size % count:
            raise ValueError(
                f"microbatches={count} must divide every batch, and {where}{jax.tree_util.keystr(path)} has "
                f"shape {jnp.shape(array)}. Pick sizes that it divides."
            )
        return jnp.reshape(array, (count, -1, *jnp.shape(array)[1:]))

    return jax.tree_util.tree_map_with_path(cut, rows)


def _sliced_masks(mask: Mask, count: int) -> dict[str, jax.Array]:
    """The mask of each batch, cut like its rows; false for the rows that fill up the last slices."""

    def cut(mask: jax.Array) -> jax.Array:
        missing = _filled(len(mask), count) - len(mask)
        return jnp.reshape(jnp.pad(mask, (0, missing)), (count, -1))

    return {name: cut(jnp.asarray(rows)) for name, rows in mask.items()}


def _filled(size: int, count: int) -> int:
    return -(-size // count) * count


def _require_weights(losses: Mapping[str, Any], count: int) -> None:
    for name, term in losses.items():
        if not isinstance(term, tuple):
            raise ValueError(
                f"microbatches={count} with uneven='pad' needs losses as (sum, weight), and "
                f"losses[{name!r}] is one number: slices of a padded batch differ in the rows that count. "
                "Return masked_sum(values, mask[name]) in place of masked_mean."
            )


def _summary(values: jax.Array) -> jax.Array:
    """The mean of a number over the micro-batches; the last value if it is not floating."""
    return jnp.mean(values, axis=0) if jnp.issubdtype(values.dtype, jnp.inexact) else values[-1]
