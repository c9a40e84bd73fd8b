"""What calls of the compiled loop gave back, and how such pieces of a run are joined and cut."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from phijax_rng.errors import NonFiniteError
from phijax_rng.state import TrainState
from phijax_rng.training.step import TOTAL


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
        unbalanced: bool array of the same shape: steps at which a number of the balancer's state was no
            longer finite. What a scheduled update gave is then left out; with `"raise"` the step is.
    """

    state: TrainState
    step: int
    start: int
    records: Mapping[str, np.ndarray[Any, Any]]
    nonfinite: np.ndarray[Any, Any]
    unbalanced: np.ndarray[Any, Any]


def joined(chunks: list[Chunk]) -> Chunk:
    """One chunk for chunks that follow each other."""
    if len(chunks) == 1:
        return chunks[0]
    records = {name: np.concatenate([chunk.records[name] for chunk in chunks]) for name in chunks[0].records}
    bad = (np.concatenate([getattr(c, name) for c in chunks]) for name in ("nonfinite", "unbalanced"))
    return Chunk(chunks[-1].state, chunks[-1].step, chunks[0].start, records, *bad)


def part(chunk: Chunk, updates: slice, state: TrainState) -> Chunk:
    """Some updates of a chunk, which end in this state."""
    first, stop, _ = updates.indices(chunk.step - chunk.start)
    records = {name: values[updates] for name, values in chunk.records.items()}
    bad = (chunk.nonfinite[updates], chunk.unbalanced[updates])
    return Chunk(state, chunk.start + stop, chunk.start + first, records, *bad)


def terms_of(chunk: Chunk, index: int, loss_names: tuple[str, ...]) -> tuple[str, ...]:
    """What is not finite in an update of a chunk: the losses, or else what follows from them."""
    bad = tuple(name for name in loss_names if not np.isfinite(chunk.records[name][index]))
    losses = tuple(name for name in bad if name != TOTAL)
    return losses or (("balancer_state",) if chunk.unbalanced[index] else bad or ("model_state",))


def nonfinite_error(last: Chunk, loss_names: tuple[str, ...], chunk: Chunk) -> NonFiniteError:
    """The error of an update that is not finite: `last` is that update, `chunk` the good ones before it."""
    terms = terms_of(last, 0, loss_names)
    if terms == ("balancer_state",):
        found = "every loss is finite but the new state of the balancer is not"
    elif terms == ("model_state",):
        found = "every loss is finite but the updated model_state is not"
    else:
        found = ", ".join(f"{name!r} is {float(last.records[name][0])}" for name in terms)
    message = (
        f"training became non-finite at step {chunk.step}: {found}. The state before that update is kept; "
        f"draw its batch again with source({chunk.step}), or pass on_nonfinite='skip'."
    )
    return NonFiniteError(message, step=chunk.step, terms=terms, chunk=chunk)
