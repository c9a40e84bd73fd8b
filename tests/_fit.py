"""One call of `Trainer.fit`, as most tests want it, and a data module that is made of samplers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from phijax_rng import Checkpoints, NamedBatchSource, Trainer


def fit(
    problem: Any,
    stop: int,
    folder: Any = None,
    *,
    saves: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    source: Any = None,
    state: Any = None,
    **options: Any,
) -> Any:
    """The result of a silent fit of `problem` up to step `stop`.

    Args:
        problem: what has `module`, `optimizer` and `arguments`, as the problems of `_problems` have.
        stop: `max_steps`.
        folder: where checkpoints are kept; every step that is saved stays.
        saves: options of `Checkpoints`.
        trainer: options of `Trainer`.
        source: trains on it with `fit_state`, from `state` or the state of the problem.
        state: see `source`.
        **options: of `fit` or `fit_state`.
    """
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(folder, **{"asynchronous": False, "max_to_keep": None, **(saves or {})})
    host = Trainer(stop, **{"checkpoints": checkpoints, "progress": False, **(trainer or {})})
    if source is None:
        return host.fit(problem.module, **{"seed": 0, **problem.arguments, **options})
    state = problem.state() if state is None else state
    return host.fit_state(problem.module, state, optimizer=problem.optimizer, source=source, **options)


def resumed(problem: Any, stop: int, folder: Any = None, **options: Any) -> Any:
    """The same; where a folder is given, the run that is kept there goes on."""
    return fit(problem, stop, folder, **{"resume": False if folder is None else "auto", **options})


@dataclasses.dataclass(frozen=True)
class Samplers:
    """A data module whose batches these samplers draw."""

    samplers: Mapping[str, Any]
    sizes: Mapping[str, Any]

    def train_batch_source(self, batch_keys: tuple[str, ...], key: jax.Array) -> NamedBatchSource:
        return NamedBatchSource(self.samplers, self.sizes, key)
