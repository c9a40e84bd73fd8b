"""What training ended with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from phijax_rng.state import TrainState


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a call of `fit` or `fit_state` ended with.

    Attributes:
        module: the module that was trained.
        state: the state after the last update.
        metrics: the losses of the last update by name, and what callbacks reported at that step; empty
            when there was no update.
        history: one dict for every `log_every_n_steps` updates and for every step that callbacks reported
            on: `step` (completed updates), the losses of the update that completed it, and the reports. A
            run that went on from a checkpoint has the rows before it too.
        iterations: updates of this call.
        stopped_early: whether training ended before `max_steps` without a signal.
        interrupted: whether a signal ended it.
        seed: the integer that repeats the run; `None` where the root is not a Threefry key, or unknown.
    """

    module: Any
    state: TrainState
    metrics: Mapping[str, float]
    history: tuple[Mapping[str, float], ...]
    iterations: int
    stopped_early: bool
    interrupted: bool
    seed: int | None
