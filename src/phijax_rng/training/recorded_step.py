"""A train step whose results are checked: the state keeps its form, and each record is a scalar."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.types import Batches, KeyScalar, Mask
from phijax_rng.state import TrainState
from phijax_rng.training.module import StepOutput, require_mask, require_parameters, scalars
from phijax_rng.training.step import LossTrainStep, TrainStep


def require_step(train_step: TrainStep, pads: bool) -> None:
    """Raises unless it can be called as a train step, with a mask where batches are padded."""
    arguments = ("state", "batches", "key")
    if pads:
        require_mask(train_step, "train_step takes")
        require_parameters(train_step, "train_step", *arguments, offered=("mask",))
    else:
        validation.takes(train_step, "train_step", *arguments)


class RecordedStep:
    """A train step whose results are checked, with the recorded names of its last trace."""

    def __init__(self, train_step: TrainStep):
        self._train_step = train_step
        self.names: tuple[str, ...] = ()
        self.loss_names: tuple[str, ...] = ()

    def __call__(
        self, state: TrainState, batches: Batches, key: KeyScalar, mask: Mask | None
    ) -> tuple[TrainState, StepOutput]:
        """See `TrainStep`."""
        options = {} if mask is None else {"mask": mask}
        following, output = self._train_step(state, batches, key, **options)
        return self._checked(state, following, output)

    def in_two(
        self, state: TrainState, batches: Batches, key: KeyScalar, mask: Mask | None
    ) -> Callable[[], tuple[TrainState, StepOutput]]:
        """The update as a function that may be called twice: the gradient is computed here, once."""
        if isinstance(self._train_step, LossTrainStep):
            update = self._train_step.in_two(state, batches, key, mask)
            return lambda: self._checked(state, *update())
        result = self(state, batches, key, mask)
        return lambda: result

    def _checked(self, state: TrainState, following: Any, output: Any) -> tuple[TrainState, StepOutput]:
        if not isinstance(output, StepOutput):
            output = StepOutput(losses=output)
        scalars(output.losses, "the losses of train_step")
        if output.diagnostics:
            scalars(output.diagnostics, "the diagnostics of train_step")
        self.names = validation.names((*output.losses, *output.diagnostics), "the records of train_step")
        if "step" in self.names:
            raise ValueError(
                f"the records of train_step must not be named 'step', got {validation.shown(self.names)}. "
                "Rename it: rows of the history have a step already."
            )
        self.loss_names = tuple(output.losses)
        _require_same_types(following, state)
        return following, output

    def gradient_norm(
        self, state: TrainState, batches: Batches, key: KeyScalar, mask: Mask | None
    ) -> jax.Array:
        """The norm of the gradient of the update with these arguments."""
        if not isinstance(self._train_step, LossTrainStep):
            raise TypeError(
                f"train_step must be a LossTrainStep, got {validation.formatted(self._train_step)}."
            )
        return self._train_step.gradient_norm(state, batches, key, mask)


def _require_same_types(following: TrainState, state: TrainState) -> None:
    if not isinstance(following, TrainState):
        raise TypeError(
            f"train_step must return a TrainState first, got {following!r}. Use state.replace(...)."
        )
    before, after = (str(jax.tree.structure(tree)) for tree in (state, following))
    if before != after:
        raise ValueError(
            "train_step changed the structure of the state\n"
            f"  given:    {before}\n"
            f"  returned: {after}\n"
            "Return state.replace(...) with leaves of the same structure."
        )
    new_leaves = jax.tree.leaves(following)
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(state), new_leaves, strict=True):
        if old.shape != jnp.shape(new) or old.dtype != _dtype(new):
            raise ValueError(
                f"train_step changed the type of state{jax.tree_util.keystr(path)}\n"
                f"  given:    {old.dtype}{list(old.shape)}\n"
                f"  returned: {_dtype(new)}{list(jnp.shape(new))}\n"
                "Return every leaf with its shape and dtype."
            )


def _dtype(leaf: jax.Array) -> Any:
    return leaf.dtype if keys.is_typed_key(leaf) else jnp.result_type(leaf)
