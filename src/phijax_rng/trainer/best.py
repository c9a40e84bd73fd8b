"""The best state of a run as its result, where an `EarlyStopping` has `restore_best`.

With checkpoints, what is on disk decides, so a run that was killed and resumed has the result of one that was
not. Without, nothing can be resumed, and a copy in memory serves.
"""

import logging
import math
from collections.abc import Mapping
from typing import TypeAlias

import jax

from phijax_rng.callbacks.early_stopping import EarlyStopping
from phijax_rng.callbacks.protocol import Callback
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.state import TrainState

_log = logging.getLogger("phijax_rng")

Best: TypeAlias = tuple[TrainState, Mapping[str, float]]
"""A state and the numbers of its step."""


def restoring(callbacks: tuple[Callback, ...], checkpoints: Checkpoints | None) -> EarlyStopping | None:
    """The callback with `restore_best`, if there is one.

    Raises:
        ValueError: there are two, or `keep_best` of the checkpoints does not keep what it restores.
    """
    found = [one for one in callbacks if isinstance(one, EarlyStopping) and one.restore_best]
    if len(found) > 1:
        raise ValueError(
            f"restore_best is set for {found[0].metric!r} and for {found[1].metric!r}, and a result has one "
            "state. Pass it to one EarlyStopping."
        )
    if found and checkpoints is not None:
        rule, wanted = checkpoints.best_rule, (found[0].metric, found[0].mode)
        if rule is None or (rule.metric, rule.mode) != wanted:
            raise ValueError(
                f"restore_best takes the best step from the checkpoints, and keep_best is "
                f"{checkpoints.keep_best!r}. Pass Checkpoints(..., keep_best={(wanted[0], 1, wanted[1])!r})."
            )
    return found[0] if found else None


class BestState:
    """Finds the best state of one call of `fit`."""

    def __init__(self, stopping: EarlyStopping, checkpoints: Checkpoints | None):
        self._stopping = stopping
        self._checkpoints = checkpoints
        self._value = math.nan
        self._kept: Best | None = None

    def look(self, state: TrainState, step: int, metrics: Mapping[str, float], *, is_over: bool) -> None:
        """Keeps a copy of this state if it is the best so far and nothing else keeps it."""
        stopping = self._stopping
        value = metrics.get(stopping.metric, math.nan)
        wanted = is_over or step % stopping.every_n_steps == 0
        if self._checkpoints is not None or not wanted or not math.isfinite(value):
            return
        better = value < self._value if stopping.mode == "min" else value > self._value
        if self._kept is None or better:
            self._value = value
            # A copy on the same devices, since the compiled loop may reuse the arrays of the state.
            self._kept = jax.tree.map(processes.copied, state), dict(metrics)

    def of(self, state: TrainState, metrics: Mapping[str, float]) -> Best:
        """The best state and its numbers, when a run has ended in this state with these."""
        if self._checkpoints is None:
            found = self._kept
        else:
            step = self._checkpoints.best_step
            memory = {} if step is None else self._checkpoints.memory(step, whole_history=False)
            kept = {**memory.get("metrics", {}), **memory.get("end", {}).get("metrics", {})}
            found = None if step is None else (self._checkpoints.restore(state, step), kept)
        if found is None and processes.is_primary():
            _log.warning("no step has a finite %r, so the state is the last one", self._stopping.metric)
        return (state, metrics) if found is None else found
