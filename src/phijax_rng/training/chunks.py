"""The result of one call of the compiled loop, and how results are joined and cut.

    run(state at 200, stop=4500)    ->  Chunk(200..4296), Chunk(4296..4500)  ->  joined: Chunk(200..4500)
    a bad update at step 260        ->  part: Chunk(200..260), which NonFiniteError carries

A chunk has the recorded numbers of every update, so the host can check and log any of them after the call.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from phijax_rng.errors import NonFiniteError
from phijax_rng.state import TrainState
from phijax_rng.training.step import TOTAL

Values: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]
"""One number per update."""


@dataclasses.dataclass(frozen=True, repr=False)
class Chunk:
    """The result of one call of the compiled loop.

    Attributes:
        state: the state after the last update, on the device.
        step: `state.step` as an int.
        start: the step before the first of these updates.
        records: recorded name -> array of shape `(step - start,)`, one value per update.
        nonfinite: bool array of shape `(step - start,)`: steps whose losses or updated model are
            non-finite. With `on_nonfinite="raise"` the chunk ends before such a step.
        unbalanced: bool array of the same shape: steps after which the balancer's state has a non-finite
            number. The update of the balancer is then discarded; with `"raise"` the chunk ends before it.
    """

    state: TrainState
    step: int
    start: int
    records: Mapping[str, Values]
    nonfinite: Values
    unbalanced: Values

    def __repr__(self) -> str:
        # No values: a repr ends up in logs, and those of the state would be copied from a device.
        arrays = (f"{name!r}: {values.dtype}[{len(values)}]" for name, values in self.records.items())
        return f"Chunk(start={self.start}, step={self.step}, records={{{', '.join(arrays)}}})"


# Calls hold at most CAPACITY updates, so a long run of the loop is several calls.
def joined(chunks: list[Chunk]) -> Chunk:
    """One chunk of several consecutive ones."""
    first, last = chunks[0], chunks[-1]
    if first is last:
        return first
    records = {name: np.concatenate([chunk.records[name] for chunk in chunks]) for name in first.records}
    nonfinite = np.concatenate([chunk.nonfinite for chunk in chunks])
    unbalanced = np.concatenate([chunk.unbalanced for chunk in chunks])
    return Chunk(last.state, last.step, first.start, records, nonfinite, unbalanced)


def part(chunk: Chunk, updates: slice, state: TrainState) -> Chunk:
    """Some consecutive updates of a chunk; `state` is the state after the last of them."""
    first, stop, _ = updates.indices(chunk.step - chunk.start)
    records = {name: values[updates] for name, values in chunk.records.items()}
    bad = (chunk.nonfinite[updates], chunk.unbalanced[updates])
    return Chunk(state, chunk.start + stop, chunk.start + first, records, *bad)


def terms_of(chunk: Chunk, index: int, loss_names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the non-finite losses of an update; without any, of the state that is non-finite."""
    # The total alone is not named beside them: it is non-finite because they are.
    bad = tuple(name for name in loss_names if not np.isfinite(chunk.records[name][index]))
    losses = tuple(name for name in bad if name != TOTAL)
    return losses or (("balancer_state",) if chunk.unbalanced[index] else bad or ("model_state",))


def nonfinite_error(last: Chunk, loss_names: tuple[str, ...], chunk: Chunk) -> NonFiniteError:
    """The error for the non-finite update `last`; `chunk` has the finite updates before it."""
    # The values are shown although messages show no numbers of arrays: only NaN or an infinity gets here.
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
