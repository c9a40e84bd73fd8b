"""The compiled program of a run: many updates in one loop, with the batch drawn inside it.

Two programs make the same updates. The usual one leaves its input state alone. The one for large states,
`in_place`, writes each update over the state before it, and so needs half the memory: there the guard decides
before it writes, which costs a second look at every leaf.

    usual      update -> state, and whether it changed what is finite            until that happens
    in place   update -> is it finite? -> the same update again, over the state  or nothing is written

In place, the gradient is computed once and the optimizer twice, first for the test alone, where XLA keeps no
array of it. An optimizer that evaluates the losses itself, and a custom train step, are called once: their
new state stands beside the old one until the guard has decided.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from phijax_rng._base.types import Tree
from phijax_rng.sampling.adapters import AdaptedSource
from phijax_rng.state import TrainState, advance
from phijax_rng.training import guard
from phijax_rng.training.adaptive_refresh import CheckedRefresh, Refresh
from phijax_rng.training.balancing.adapter import stays_finite
from phijax_rng.training.donation import Donation, with_cloned_keys
from phijax_rng.training.module import StepOutput
from phijax_rng.training.prefetch import TracedSource, in_program
from phijax_rng.training.recorded_step import RecordedStep

# Rows of the device buffer that records each step, and so the most steps in one call. A constant:
# the buffer's size is part of the program.
CAPACITY = 4096


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an update is made of.

    Attributes:
        train_step: the user's, checked.
        rebuild: `leaves -> [source, refresh]`.
        split: shards the rows of a batch over the devices, and returns the mask of padded batches.
        constrain: keeps the shardings of a state inside the loop.
        together: the most elements of an array that is tested together with others.
    """

    train_step: RecordedStep
    rebuild: Callable[[Any], Any]
    split: Callable[..., tuple[Any, Any]]
    constrain: Callable[[TrainState], TrainState]
    together: int


class Policy(NamedTuple):
    """What halts a program that writes in place.

    Attributes:
        halting: bool of shape `()`, whether an update that is not finite does.
        strict: bool of shape `()`, whether a balancer that is not finite does.
    """

    halting: Any
    strict: Any


class Event(NamedTuple):
    """What a program that writes in place found.

    Attributes:
        halted: bool of shape `()`, whether it ended before an update that it did not make.
        seen: bool of shape `()`, whether any update was not finite.
        turned: bool of shape `(leaves,)`, which watched leaves the first such update turned non-finite.
    """

    halted: jax.Array
    seen: jax.Array
    turned: jax.Array


def usual(parts: Parts) -> Callable[..., Any]:
    """`(state, leaves, stop, halting) -> (state, step reached, records)`."""
    return functools.partial(_program, parts)


def in_place(parts: Parts, donation: Donation) -> Callable[..., Any]:
    """`(donated, kept, leaves, stop, policy) -> (donated, kept, step reached, event, records)`."""
    return functools.partial(_in_place, parts, donation)


def left_out(parts: Parts) -> Any:
    """`(state, leaves) -> state` after an update that is left out, jitted."""
    return jax.jit(functools.partial(_left_out, parts))


def gradient_norm(parts: Parts) -> Any:
    """`(state, leaves) -> norm` of the gradient of the next update, jitted."""
    return jax.jit(functools.partial(_gradient_norm, parts))


def arguments(source: object, refresh: Refresh | None) -> tuple[Callable[[Any], Any], tuple[Any, ...]]:
    """How to rebuild source and refresh inside the program, and their arrays."""
    rebuilds, leaves = zip(*map(_split, (in_program(source), refresh)), strict=True)
    return functools.partial(_rebuilt, rebuilds), leaves


def _program(
    parts: Parts, state: TrainState, leaves: Tree, stop: jax.Array, halting: jax.Array
) -> tuple[TrainState, jax.Array, list[jax.Array]]:
    """Updates from `state.step` up to `stop`, the step reached, and the record of each update.

    It ends early after an update that changed which entries are non-finite, and if `halting` after one whose
    record says that it was not finite.
    """
    # Jitted so that `eval_shape` and the loop body share one trace.
    update = jax.jit(functools.partial(_update, parts))
    pattern = guard.nonfinite_pattern(state, parts.together)
    record = jax.eval_shape(update, state, leaves, pattern)[1]
    # One buffer for each recorded number: stacking them into rows made a small step 1.8 times slower
    # on JAX 0.12 (CPU), which recomputed the losses for the row.
    buffers = [jnp.zeros((CAPACITY,), scalar.dtype) for scalar in record]

    def unfinished(carry: Any) -> jax.Array:
        _, step, halted, _ = carry
        return (step < stop) & ~halted

    def body(carry: Any) -> Any:
        state, step, _, buffers = carry
        state, record, changed = update(state, leaves, pattern)
        row = step % CAPACITY
        buffers = [
            jax.lax.dynamic_update_index_in_dim(buffer, scalar, row, 0)
            for buffer, scalar in zip(buffers, record, strict=True)
        ]
        return state, step + 1, changed | (halting & ~record[-1]), buffers

    # The loop has its own counter, since a train step that does not raise `step` would never end.
    start = (state, state.step, jnp.asarray(False), buffers)
    state, reached, _, buffers = jax.lax.while_loop(unfinished, body, start)
    return state, reached, buffers


def _update(
    parts: Parts, state: TrainState, leaves: Tree, pattern: list[jax.Array]
) -> tuple[TrainState, list[jax.Array], jax.Array]:
    """One update, its record, and whether it changed which entries are non-finite.

    The last entry of the record is whether the update is finite.
    """
    refreshed, advanced, balanced, *drawn = _drawn(parts, state, leaves)
    updated, output = parts.train_step(advanced, *drawn)
    losses, diagnostics = _numbers(output)
    change = guard.change_of_pattern(updated, pattern, parts.together)
    finite, balanced = _tested(losses, change, refreshed, updated, balanced)
    return parts.constrain(updated), [*losses, *diagnostics, *balanced, finite], change != 0


def _drawn(parts: Parts, state: TrainState, leaves: Tree) -> tuple[Any, ...]:
    """The refreshed state, the state to update, whether the refresh was finite, batches, key and mask."""
    source, state, balanced = _refreshed(parts, state, leaves)
    batches, mask = parts.split(*source.filled(state.step, state.sampler_state))
    advanced, key = advance(state)
    return state, advanced, balanced, batches, key, mask


def _numbers(output: StepOutput) -> tuple[list[jax.Array], list[jax.Array]]:
    losses, diagnostics = output.losses.values(), output.diagnostics.values()
    return [jnp.asarray(value) for value in losses], [jnp.asarray(value) for value in diagnostics]


def _tested(
    losses: list[jax.Array],
    change: jax.Array,
    before: TrainState,
    updated: TrainState,
    balanced: list[jax.Array],
) -> tuple[jax.Array, list[jax.Array]]:
    """Whether an update is finite, and whether its balancer is, if that has a test."""
    finite = guard.all_finite(losses) & ~jnp.isnan(change)
    new, old = updated.balancer_state, before.balancer_state
    # Compared by identity while tracing: a step that does not observe passes the same tracers on, and then
    # the test is not part of the program.
    if any(a is not b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)):
        kept = stays_finite(new, old)
        finite, balanced = finite & kept, [kept & entry for entry in balanced] or [kept]
    return finite, balanced


def _in_place(  # noqa: PLR0917 - the arguments of the compiled program
    parts: Parts,
    donation: Donation,
    donated: list[jax.Array],
    kept: list[jax.Array],
    leaves: Tree,
    stop: jax.Array,
    policy: Policy,
) -> tuple[list[jax.Array], list[jax.Array], jax.Array, Event, list[jax.Array]]:
    """The same as `_program`, written over the arrays of `donated`, which come first in the result.

    A halting program ends before an update that is not finite, whose record follows those of the others.
    """
    state = donation.joined(donated, kept)
    update = jax.jit(functools.partial(_guarded, parts))
    _, record, turned, _ = jax.eval_shape(update, state, leaves, policy)
    buffers = [jnp.zeros((CAPACITY,), scalar.dtype) for scalar in record]
    none = Event(jnp.asarray(False), jnp.asarray(False), jnp.zeros(turned.shape, turned.dtype))

    def unfinished(carry: Any) -> jax.Array:
        _, step, event, _ = carry
        return (step < stop) & ~event.halted

    def body(carry: Any) -> Any:
        state, step, event, buffers = carry
        state, record, turned, halted = update(state, leaves, policy)
        row = step % CAPACITY
        buffers = [
            jax.lax.dynamic_update_index_in_dim(buffer, scalar, row, 0)
            for buffer, scalar in zip(buffers, record, strict=True)
        ]
        first = jnp.where(event.seen, event.turned, turned)
        return (
            state,
            jnp.where(halted, step, step + 1),
            Event(halted, event.seen | ~record[-1], first),
            buffers,
        )

    start = (state, state.step, none, buffers)
    state, reached, event, buffers = jax.lax.while_loop(unfinished, body, start)
    return *donation.split(state), reached, event, buffers


def _guarded(
    parts: Parts, state: TrainState, leaves: Tree, policy: Policy
) -> tuple[TrainState, list[jax.Array], jax.Array, jax.Array]:
    """The state after an update, its record, which leaves it turned non-finite, and whether it halts.

    The state is that before the update if it halts.
    """
    refreshed, advanced, balanced, *drawn = _drawn(parts, state, leaves)
    update = parts.train_step.in_two(advanced, *drawn)
    updated, output = update()
    losses, diagnostics = _numbers(output)
    turned = guard.turned(state, updated)
    change = jnp.where(jnp.any(turned), jnp.nan, 0.0)
    finite, balanced = _tested(losses, change, refreshed, updated, balanced)
    good = finite if not balanced else finite & (balanced[0] | ~policy.strict)
    halts = policy.halting & ~good
    # In a branch, which XLA does not merge with the update above, so that one is never an array. The branch
    # that keeps the state is the first by number and decides the order of the operands; XLA writes over them
    # only where that is the order of the results (measured: otherwise it copies the state).
    following = jax.lax.cond(~halts, lambda: parts.constrain(update()[0]), lambda: state)
    return with_cloned_keys(following), [*losses, *diagnostics, *balanced, finite], turned, halts


def _left_out(parts: Parts, state: TrainState, leaves: Tree) -> TrainState:
    """An update that is left out: step and runtime key advance, nothing else changes."""
    _, state, _ = _refreshed(parts, state, leaves)
    advanced, _ = advance(state)
    return parts.constrain(advanced.replace(step=state.step + 1))


def _gradient_norm(parts: Parts, state: TrainState, leaves: Tree) -> jax.Array:
    """The norm of the gradient of an update that is not made."""
    _, advanced, _, *drawn = _drawn(parts, state, leaves)
    return parts.train_step.gradient_norm(advanced, *drawn)


def _refreshed(
    parts: Parts, state: TrainState, leaves: Tree
) -> tuple[TracedSource, TrainState, list[jax.Array]]:
    """The source, the state to draw with, and whether refreshed values are finite if the refresh checks."""
    source, refresh = parts.rebuild(leaves)
    if refresh is None:
        return source, state, []
    # A user's refresh may use methods of the user's source that the adapter does not have.
    given = source.source if isinstance(source, AdaptedSource) else source
    if not isinstance(refresh, CheckedRefresh):
        return source, refresh(state, given), []
    state, finite = refresh.checked(state, given)
    return source, state, [finite]


def _split(part: object) -> tuple[Callable[[Any], Any], list[Any]]:
    """How to rebuild a pytree from its leaves, and the leaves; an object that is no pytree has none."""
    if jax.tree_util.all_leaves([part]):
        return lambda leaves: part, []
    leaves, structure = jax.tree.flatten(part)
    return functools.partial(jax.tree.unflatten, structure), leaves


def _rebuilt(rebuilds: Sequence[Callable[[Any], Any]], leaves: Sequence[Any]) -> list[Any]:
    return [rebuild(own) for rebuild, own in zip(rebuilds, leaves, strict=True)]
