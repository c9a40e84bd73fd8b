"""What calls of the compiled loop gave back, and how such pieces of a run are joined and cut."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from phijax_rng.errors import NonFiniteError
from phijax_rng.state import TrainState
from phijax_rng.step import TOTAL


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one call of the compiled loop gave back.

    Attributes:
        state: the state after the last update, on the device.
        step: `state.step` as an int.
        start: the step before the first of these updates.
        records: recorded name -> array of shape `(step - start,)`, one value per update.
        nonfinite: bool array of shape `(step - start,)`: steps whose losses or updated model were
            not finite. With `on_nonfinite="raise"` such a step is not part of the chunk.
    """

    state: TrainState
    step: int
    start: int
    records: Mapping[str, np.ndarray[Any, Any]]
    nonfinite: np.ndarray[Any, Any]


def joined(chunks: list[Chunk]) -> Chunk:
    """One chunk for chunks that follow each other."""
    if len(chunks) == 1:
        return chunks[0]
    records = {name: np.concatenate([chunk.records[name] for chunk in chunks]) for name in chunks[0].records}
    nonfinite = np.concatenate([chunk.nonfinite for chunk in chunks])
    return Chunk(chunks[-1].state, chunks[-1].step, chunks[0].start, records, nonfinite)


def part(chunk: Chunk, updates: slice, state: TrainState) -> Chunk:
    """Some updates of a chunk, which end in this state."""
    first, stop, _ = updates.indices(chunk.step - chunk.start)
    records = {name: values[updates] for name, values in chunk.records.items()}
    return Chunk(state, chunk.start + stop, chunk.start + first, records, chunk.nonfinite[updates])


def nonfinite_error(last: Chunk, loss_names: tuple[str, ...], chunk: Chunk) -> NonFiniteError:
    """The error of an update that is not finite: `last` is that update, `chunk` the good ones before it."""
    bad = {name: float(last.records[name][0]) for name in loss_names}
    bad = {name: value for name, value in bad.items() if not np.isfinite(value)}
    terms = tuple(name for name in bad if name != TOTAL) or tuple(bad) or ("model_state",)
    if bad:
        found = ", ".join(f"{name!r} is {bad[name]}" for name in terms)
    else:
        found = "every loss is finite but the updated model_state is not"
    message = (
        f"training became non-finite at step {chunk.step}: {found}. The state before that update is kept; "
        f"draw its batch again with source({chunk.step}), or pass on_nonfinite='skip'."
    )
    return NonFiniteError(message, step=chunk.step, terms=terms, chunk=chunk)
