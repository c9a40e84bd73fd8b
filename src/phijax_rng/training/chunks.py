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
        nonfinite: bool array of shape `(step - start,)`: updates of which a loss is non-finite, or that
            turned a finite entry of the model's or the optimizer's state into a non-finite one. With
            `on_nonfinite="raise"` the chunk ends before such an update; with `"skip"` these are left out.
        unbalanced: bool array of the same shape: steps after which the balancer's state has a non-finite
            number. The update of the balancer is then discarded; with `"raise"` the chunk ends before it.
        turned: paths of the leaves that the first non-finite update of the loop turned non-finite, such as
            `optimizer_state[0].nu['w']`; empty in later chunks.
    """

    state: TrainState
    step: int
    start: int
    records: Mapping[str, Values]
    nonfinite: Values
    unbalanced: Values
    turned: tuple[str, ...] = ()

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
    turned = next((chunk.turned for chunk in chunks if chunk.turned), ())
    return Chunk(last.state, last.step, first.start, records, nonfinite, unbalanced, turned)


def part(chunk: Chunk, updates: slice, state: TrainState) -> Chunk:
    """Some consecutive updates of a chunk; `state` is the state after the last of them."""
    first, stop, _ = updates.indices(chunk.step - chunk.start)
    records = {name: values[updates] for name, values in chunk.records.items()}
    bad = (chunk.nonfinite[updates], chunk.unbalanced[updates])
    return Chunk(state, chunk.start + stop, chunk.start + first, records, *bad)


def terms_of(chunk: Chunk, index: int, loss_names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the non-finite losses of an update; without any, of the field of the state that turned."""
    # The total alone is not named beside them: it is non-finite because they are.
    bad = tuple(name for name in loss_names if not np.isfinite(chunk.records[name][index]))
    losses = tuple(name for name in bad if name != TOTAL)
    if losses or chunk.unbalanced[index]:
        return losses or ("balancer_state",)
    # Paths begin with the field; a model that turned comes first, and took the optimizer's state with it.
    turned = chunk.turned[0] if chunk.turned else "model_state"
    return bad or ("optimizer_state" if turned.startswith("optimizer_state") else "model_state",)


def nonfinite_error(
    last: Chunk, loss_names: tuple[str, ...], chunk: Chunk, in_a_row: int = 1
) -> NonFiniteError:
    """The error for the non-finite update `last`.

    Args:
        last: that update alone.
        loss_names: which of its records are losses.
        chunk: the updates before it, which are finite or were skipped.
        in_a_row: how many non-finite updates it is the last of; more than 1 only if the others were skipped.
    """
    terms = terms_of(last, 0, loss_names)
    if in_a_row == 1:
        when, remedy = f"at step {chunk.step}", "on_nonfinite='skip'"
    else:
        when = f"at every step from {last.start - in_a_row + 1} to {last.start}, {in_a_row} in a row"
        remedy = "a larger max_skipped_in_a_row"
    message = (
        f"training became non-finite {when}: {_found(last, terms)}. The state before that update is kept; "
        f"draw its batch again with source({last.start}), or pass {remedy}."
    )
    return NonFiniteError(
        message,
        step=last.start,
        first_step=last.start - in_a_row + 1,
        terms=terms,
        leaves=last.turned,
        chunk=chunk,
    )


def _found(last: Chunk, terms: tuple[str, ...]) -> str:
    """What is non-finite in an update, in words."""
    if terms == ("balancer_state",):
        return "every loss is finite but the new state of the balancer is not"
    leaves = named_leaves(last.turned)
    # The values are shown although messages show no numbers of arrays: only NaN or an infinity gets here.
    named = (name for name in terms if name in last.records)
    losses = ", ".join(f"{name!r} is {float(last.records[name][0])}" for name in named)
    if not losses:
        return f"every loss is finite but the update turns {leaves} non-finite"
    return f"{losses}, and the update turns {leaves} non-finite" if last.turned else losses


def named_leaves(paths: tuple[str, ...], most: int = 3) -> str:
    """A few paths, and how many there are besides."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
