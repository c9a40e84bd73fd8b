"""How a source reaches the compiled loop: traced into it, or prefetched on the host in stacks.

A source with `traceable = True` is traced into the program. Any other callable is called on the host with a
Python int, step by step, ahead of time and in its own thread. Its batches are stacked, and the program picks
the slice of its step. A source that offers `stacked_batches(steps, count)` returns many steps at once.
Tracing is opt-in because a NumPy callable traces without an error and freezes its first batch.

Of a `NamedBatchSource` only the rows that live on the host are prefetched. Its other samplers are traced into
the program, so that adaptive samplers work beside rows on disk.

Every step gets the same batch for every stack size and every chunk length.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from phijax_rng._base import pytrees, validation
from phijax_rng._base.background import Worker
from phijax_rng._base.types import SamplerStates, Step, Tree
from phijax_rng.devices import row_masks
from phijax_rng.devices.placement import Placement
from phijax_rng.sampling.adapters import AdaptedSource, adapt_source

# A stack holds as many steps as fit into this many bytes, at least 1 and at most 64: enough to hide
# the host's work behind the loop's, and never a second pool on the device.
_STACK_BYTES = 64 * 2**20
_STACK_STEPS = 64


class InProgramSource:
    """A traceable source; the program draws its batches."""

    def __init__(self, source: AdaptedSource):
        self.source = source

    def at(self, step: int) -> tuple[Any, int | None]:
        """The compiled source serves every step, so there is no other and no bound."""
        return None, None

    def close(self, *, wait: bool = True) -> None:
        """There is nothing to release."""


class Prefetcher:
    """A source that is called on the host, in order, from `start` up to `stop`, one stack ahead of the loop.

    Attributes:
        source: the first stack, whose structure and shapes every other stack has.
    """

    def __init__(self, source: Any, start: int, stop: int, placement: Placement | None = None):
        adapted = adapt_source(source)
        self._all_names = adapted.names
        on_host, inside = adapted.host_and_device_parts()
        assert on_host is not None, "a traceable source needs no prefetch"
        self._on_host = on_host
        self._placement = placement
        self._inside = inside if placement is None else placement.replicate(inside)
        self._stop = stop
        # The first batch decides shapes and names; it is passed on to the first stack, since a source that
        # reads a stream must not be called twice for one step.
        first = on_host(start)
        self._count = _stack_size(first)
        self._names = tuple(first) if isinstance(first, Mapping) else None
        self._sizes = jax.tree.map(
            lambda leaf: np.shape(leaf)[0] if np.ndim(leaf) else 0, _columns(first, self._names, start)
        )
        self._start = start
        self.source = self._require_stack(self._stacked(start, first))
        # One thread: batches must be drawn in order, and a dataset may not be thread-safe. Not before the
        # first stack, which may raise.
        self._thread = Worker("phijax_rng-prefetch")
        self._next = self._thread.submit(self._stacked, start + self._count)

    def at(self, step: int) -> tuple[Any, int]:
        """The stack that contains `step`, and the step after its last."""
        if step == self._start + self._count:
            self.source, self._start = self._require_stack(self._next.result()), step
            self._next = self._thread.submit(self._stacked, step + self._count)
        return self.source, min(self._start + self._count, self._stop)

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread after the batch that it is drawing; without `wait`, returns at once."""
        self._thread.close(wait=wait)

    @staticmethod
    def _require_stack(stack: "StackedBatches | MixedBatches | None") -> "StackedBatches | MixedBatches":
        assert stack is not None, "there is no stack from the last step on"
        return stack

    def _stacked(self, start: int, first: Tree = None) -> "StackedBatches | MixedBatches | None":
        steps = range(start, min(start + self._count, self._stop))
        if not steps:
            return None
        if self._on_host.can_stack:
            # Each process reads only the rows that its devices hold.
            own_rows = None if self._placement is None else self._placement.shares.local_rows
            batches = self._on_host.stacked_batches(steps, self._count, own_rows)
            stacked = _columns(batches, self._names, start)
        else:
            stacked = self._drawn_one_by_one(steps, first)
        # The stack size is part of the compiled program's shapes. Padding after the last step is never read.
        stacked = jax.tree.map(lambda leaf: _padded(leaf, self._count), stacked)
        # Copied to the device in this thread, so that the transfer overlaps with the loop's computation.
        placed = self._placed(np.int32(start), stacked)
        return placed if self._inside is None else MixedBatches(placed, self._inside, self._all_names)

    def _placed(self, start: Any, stacked: Tree) -> "StackedBatches":
        if self._placement is None or self._placement.mesh is None:
            device = None if self._placement is None else self._placement.replicated
            return jax.device_put(StackedBatches(start, stacked, self._names), device)
        shares = self._placement.shares
        sizes = tuple(jax.tree.leaves(self._sizes)) if shares.pads else None
        batches = shares.shard_stacks(stacked, self._sizes)
        return StackedBatches(self._placement.replicate(start), batches, self._names, sizes)

    def _drawn_one_by_one(self, steps: range, first: Tree) -> Any:
        start = steps.start
        batches = [first if first is not None and step == start else self._on_host(step) for step in steps]
        columns = [_columns(batch, self._names, step) for batch, step in zip(batches, steps, strict=True)]
        return jax.tree.map(lambda *leaves: _stack(leaves, start), *columns)


@pytrees.record(data=("start", "batches"), meta=("names", "sizes"))
class StackedBatches:
    """The batches of consecutive steps, as a traceable source of these steps.

    Attributes:
        start: the step of the first, int32 of shape `()`.
        batches: a tuple of one entry per name (or one batch), every leaf with a leading axis of steps.
        names: the names of the batches in declaration order; `None` for a source without names.
        sizes: how many rows of each leaf are real, where leaves are padded; `None` where none is.
    """

    traceable = True

    def __init__(
        self, start: Any, batches: Tree, names: tuple[str, ...] | None, sizes: tuple[int, ...] | None = None
    ):
        self.start = start
        self.batches = batches
        self.names = names
        self.sizes = sizes

    def __call__(self, step: Step, sampler_state: SamplerStates | None = None) -> Any:
        """The batch of a step in range without its padding; may be traced."""
        batches, sizes = self.filled(step)
        if sizes is None:
            return batches
        return {name: jax.tree.map(_first_rows, rows, sizes[name]) for name, rows in batches.items()}

    def filled(self, step: Step, sampler_state: SamplerStates | None = None) -> tuple[Any, Any]:
        """The padded batch of a step, and how many rows of each array are real; `None` for all."""
        index = step - self.start

        def pick(leaf: Any) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

        picked = self._named(jax.tree.map(pick, self.batches))
        if self.sizes is None:
            return picked, None
        return picked, self._named(jax.tree.unflatten(jax.tree.structure(self.batches), self.sizes))

    def _named(self, columns: Tree) -> Any:
        return columns if self.names is None else dict(zip(self.names, columns, strict=True))


@pytrees.record(data=("stack", "inside"), meta=("names",))
class MixedBatches:
    """Batches that come in part from a stack and in part from samplers traced into the program.

    Attributes:
        stack: the prefetched part.
        inside: a traceable source of the rest.
        names: of both, in declaration order.
    """

    traceable = True

    def __init__(self, stack: StackedBatches, inside: AdaptedSource, names: tuple[str, ...]):
        self.stack = stack
        self.inside = inside
        self.names = names

    @property
    def samplers(self) -> Mapping[str, Any]:
        """The samplers that draw in the program, by name."""
        return self.inside.samplers

    def __call__(self, step: Step, sampler_state: SamplerStates | None = None) -> Any:
        """The batch of a step in range; may be traced."""
        batches = {**self.stack(step), **self.inside(step, sampler_state)}
        return {name: batches[name] for name in self.names}

    def filled(self, step: Step, sampler_state: SamplerStates | None = None) -> tuple[Any, Any]:
        """The batch of a step with padded rows, and how many of each array are real; `None` for all."""
        stacked, sizes = self.stack.filled(step)
        drawn = self.inside(step, sampler_state)
        batches = {**stacked, **drawn}
        if sizes is not None:
            sizes = {**sizes, **jax.tree.map(row_masks.rows_of, drawn)}
        return {name: batches[name] for name in self.names}, sizes


TracedSource: TypeAlias = AdaptedSource | StackedBatches | MixedBatches
"""What a program draws batches from, by `filled(step, sampler_state)`."""


def in_program(source: Any) -> TracedSource:
    """A source of batches as the program calls it."""
    return source if isinstance(source, (StackedBatches, MixedBatches)) else adapt_source(source)


def open_source(
    source: Any, start: int, stop: int, placement: Placement | None = None
) -> InProgramSource | Prefetcher:
    """A traceable source as it is; a prefetcher for any other."""
    source = adapt_source(source)
    return InProgramSource(source) if source.traceable else Prefetcher(source, start, stop, placement)


def _columns(batch: Tree, names: tuple[str, ...] | None, step: int) -> Any:
    if names is None:
        return batch
    if not isinstance(batch, Mapping) or set(batch) != set(names):
        found = validation.shown(batch) if isinstance(batch, Mapping) else repr(batch)
        raise ValueError(
            f"source({step}) must have the batches {validation.shown(names)} like the step before, "
            f"got {found}. "
            "Return the same names at every step."
        )
    return tuple(batch[name] for name in names)


def _stack(leaves: tuple[Any, ...], start: int) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    for index, array in enumerate(arrays):
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise ValueError(
                f"source({start + index}) must have the shapes and dtypes of the step before, got "
                f"{array.dtype}{list(array.shape)} after {arrays[0].dtype}{list(arrays[0].shape)}. "
                "Return batches of one size."
            )
    # On the host, since stacking on the device would compile a program for every shape.
    return np.stack(arrays)


def _padded(leaf: Any, count: int) -> Any:
    """The last entry repeated until there are `count`."""
    missing = count - len(leaf)
    return leaf if not missing else np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)])


def _first_rows(rows: jax.Array, size: int) -> jax.Array:
    return rows[:size] if size else rows


def _stack_size(batch: Tree) -> int:
    size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(batch))
    return max(1, min(_STACK_STEPS, _STACK_BYTES // max(size, 1)))
