"""What training ended with, and the predictions of a trained model for many rows.

Predictions are computed in batches of one size, through one program, in the order of the rows. The last
batch is padded with copies of its last row, which are cut off again, so every batch has one shape and the
program is compiled once.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.types import ModelState
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.state import Model, TrainState, abstract_model
from phijax_rng.training.evaluation import evaluation_params, keeps_average, stored_averages
from phijax_rng.training.module import LossModule

Inputs: TypeAlias = Any
"""An array `(rows, ...)`, or a pytree of arrays with one number of rows."""

Outputs: TypeAlias = Any
"""What `module.predict` returns: an array, or a pytree of arrays, with one row for each row of inputs."""


@dataclasses.dataclass(frozen=True, repr=False)
class FitResult:
    """What a call of `fit` or `fit_state` ended with.

    Attributes:
        module: the module that was trained.
        state: the state after the last update; the best one with `restore_best` of an `EarlyStopping`.
        metrics: the losses of that update by name, and what callbacks reported at that step; empty
            when there was no update.
        history: one dict for every `log_every_n_steps` updates and for every step that callbacks reported
            on: `step` (completed updates), the losses of the update that completed it, their means since the
            row before (`mean/<loss>`), a learning rate if the optimizer's state shows one, and the reports. A
            run that continued from a checkpoint has the rows before it too, and the same as without a stop.
        timing: at the same steps, what no run repeats: `seconds` of training so far, with compiling, saves
            and callbacks, and the `steps_per_second` since the row before, without compiling.
        iterations: updates of this call.
        skipped_updates: how many updates `on_nonfinite="skip"` skipped, with those before a resume.
        stopped_early: whether a callback ended training before its last step.
        interrupted: whether a signal or `max_time` did, so that a resume continues.
        seed: the integer that repeats the run; `None` where the root is not a Threefry key, or unknown.
    """

    module: Any
    state: TrainState
    metrics: Mapping[str, float]
    history: tuple[Mapping[str, float], ...]
    timing: tuple[Mapping[str, float], ...]
    iterations: int
    skipped_updates: int
    stopped_early: bool
    interrupted: bool
    seed: int | None

    @property
    def evaluation_params(self) -> ModelState:
        """The model state to evaluate and to use; see `training.evaluation_params`."""
        return evaluation_params(self.state)

    def __repr__(self) -> str:
        # Without the numbers of arrays, of which a notebook would print pages.
        return (
            f"FitResult(step={int(self.state.step)}, iterations={self.iterations}, "
            f"{f'skipped_updates={self.skipped_updates}, ' if self.skipped_updates else ''}"
            f"stopped_early={self.stopped_early}, interrupted={self.interrupted}, seed={self.seed}, "
            f"metrics={list(self.metrics)}, history={len(self.history)} rows, "
            f"model_state={_summary(self.state.model_state)})"
        )


def trained_model(
    trained: object, module: LossModule | None, step: int | str | None
) -> tuple[Callable[..., Outputs], ModelState]:
    """The `predict` of the module, and the model state to evaluate.

    Raises:
        TypeError: neither a result nor checkpoints, or checkpoints without a module.
        ValueError: the module has no `predict`, or a step comes with a result.
        FileNotFoundError: there is no such checkpoint.
    """
    if isinstance(trained, FitResult):
        if step is not None:
            raise ValueError(f"step={step!r} names a checkpoint, and trained is a result. Drop the step.")
        return adapt_predict(trained.module if module is None else module), trained.evaluation_params
    if isinstance(trained, (str, os.PathLike)):
        trained = Checkpoints(trained)
    if not isinstance(trained, Checkpoints):
        raise TypeError(
            f"trained must be a FitResult, a Checkpoints or a path, got "
            f"{validation.formatted(trained)}. Pass one."
        )
    if module is None:
        raise TypeError("a checkpoint holds arrays and no functions. Pass module=... too.")
    return adapt_predict(module), _restored(trained, module, step)


def adapt_predict(module: object) -> Callable[..., Outputs]:
    """The `predict` of a module; one that was trained with a custom train step may be any object.

    Raises:
        ValueError: it has none.
    """
    function = getattr(module, "predict", None)
    if not callable(function):
        raise ValueError(
            f"module must have a predict function, got {validation.formatted(module)}. "
            "Pass LossModule(..., predict=...)."
        )
    return function


def predict(
    function: Callable[..., Outputs],
    model_state: ModelState,
    inputs: Inputs,
    batch_size: int,
    device: jax.Device,
) -> Outputs:
    """The outputs of a `predict` function for every row, as NumPy arrays.

    Args:
        function: `(model_state, inputs) -> outputs`, with one row of outputs for each row of inputs.
        model_state: as it was trained.
        inputs: a pytree of arrays with one number of rows.
        batch_size: rows of each call.
        device: where to compute.

    Raises:
        TypeError: the size is no whole number.
        ValueError: inputs of different lengths, or outputs that are not rows.
    """
    size = validation.positive(batch_size, "batch_size")
    inputs = jax.tree.map(np.asarray, inputs)
    count = _num_rows(inputs)
    # Local first: of a state that is split over processes each has a part alone.
    model = jax.device_put(processes.to_local(Model(model_state)), device)
    run = _compiled(function)
    batches: list[Any] = []
    for start in range(0, max(count, 1), size):
        rows = jax.device_put(_rows(inputs, start, size), device)
        batches.append(jax.tree.map(np.asarray, run(model, rows)))
        if not start:
            _require_rows(batches[0], size)
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *batches)


def _compiled(fn: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """`fn` compiled; a hashable one is compiled once in a process."""
    try:
        hash(fn)
    except TypeError:
        # `jit` needs a hash for its cache; a function of ours has one, by identity.
        return jax.jit(lambda model, inputs: fn(model.model_state, inputs))
    return functools.partial(_run, fn)


def _require_rows(outputs: Outputs, size: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if np.shape(leaf)[:1] != (size,):
            raise ValueError(
                f"predict must return one row for each row of inputs, got shape {np.shape(leaf)} at outputs"
                f"{jax.tree_util.keystr(path)} for {size} rows. Return arrays of shape (rows, ...)."
            )


def _summary(tree: ModelState, most: int = 4) -> str:
    """`3 arrays: float32[2, 16], float32[16], float32[]`; of a long tree the first few."""
    shapes = [validation.formatted(leaf) for leaf in jax.tree.leaves(Model(tree))]
    return f"{len(shapes)} arrays: {', '.join(shapes[:most])}{', ...' if len(shapes) > most else ''}"


@functools.partial(jax.jit, static_argnums=0)
def _run(fn: Callable[..., Outputs], model: Model, inputs: Inputs) -> Outputs:
    return fn(model.model_state, inputs)


def _num_rows(inputs: Inputs) -> int:
    shapes = [leaf.shape for leaf in jax.tree.leaves(inputs)]
    counts = {shape[0] if shape else None for shape in shapes}
    if len(counts) != 1 or None in counts:
        raise ValueError(
            f"inputs must be arrays with one number of rows, got shapes {validation.shown(shapes)}. "
            "Give each a leading axis of that length."
        )
    return int(counts.pop())  # type: ignore[arg-type]


def _rows(inputs: Inputs, start: int, size: int) -> Inputs:
    """`size` rows from `start` on, padded with copies of the last."""

    def pick(leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rows = leaf[start : start + size]
        if len(rows) == 0:
            # Without any input one batch of zeros runs all the same, for the shapes of the outputs.
            return np.zeros((size, *leaf.shape[1:]), leaf.dtype)
        return np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])

    return jax.tree.map(pick, inputs)


def _restored(checkpoints: Checkpoints, module: LossModule, step: int | str | None) -> ModelState:
    """The model state of a checkpoint that is to be evaluated."""
    # The shapes are those of a fresh model, which `eval_shape` does not compute. The other fields are never
    # read: `weights_only` compares the leaves of the model alone.
    key = keys.root_key(0)
    like = TrainState(
        model_state=abstract_model(module.init, key),
        optimizer_state={},
        balancer_state={},
        rng_key=key,
        sampling_key=key,
        balancer_key=key,
        step=np.int32(0),  # type: ignore[arg-type]
    )
    if step is None:
        state, step = checkpoints.restore_intact(like, weights_only=True)
    else:
        step = checkpoints.existing(step)
        state = checkpoints.restore(like, step, weights_only=True)
    if keeps_average(checkpoints.paths(step)):
        # The optimizer is not known here, so its averages are found by the paths of their arrays.
        found = stored_averages(checkpoints.arrays(step), state.model_state)
        state = state.replace(optimizer_state=found)
    return evaluation_params(state)
