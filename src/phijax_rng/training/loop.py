"""Many updates in one compiled program, with the batch drawn inside it.

The program is a loop whose trip count is an argument: from `state.step` up to `stop`. XLA compiles a scan of
fixed length, a single step and such a loop differently, and the last bits of the parameters differ between
them. Every run uses one program for every length, so chunk length cannot change a number.

    TrainLoop(train_step, state, source)    compiled ahead of time, once
        .place(state)                       the state, as the program takes it
        .run(state, stop) -> Chunk          the state after `stop` updates, and every loss on the way

The program tests every update for non-finite values, see `guard`, and stops after the first. Selecting
between the old and the new state in every step would make a small step a fifth slower, since each selection
waits for the test.
Instead the input state of a call stays alive, and after a bad update the call is repeated up to the step
before it, and then for it alone. The same program on the same input returns the same bits.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.types import Tree
from phijax_rng.devices.placement import Placement, on_device
from phijax_rng.sampling.adapters import AdaptedSource
from phijax_rng.state import TrainState, advance
from phijax_rng.training import guard
from phijax_rng.training.adaptive_refresh import CheckedRefresh, Refresh
from phijax_rng.training.balancing.adapter import stays_finite
from phijax_rng.training.chunks import Chunk, joined, nonfinite_error, part
from phijax_rng.training.compile_cache import compiled
from phijax_rng.training.prefetch import TracedSource, in_program
from phijax_rng.training.recorded_step import RecordedStep, require_step
from phijax_rng.training.step import TrainStep

POLICIES = ("raise", "skip", "ignore")
"""What to do when a loss or an updated leaf is not finite."""

# Rows of the device buffer that records each step, and so the most steps in one call. A constant:
# the buffer's size is part of the program.
CAPACITY = 4096

# Elements up to which an array's kernel costs more to start than to run.
_SMALL = 4096


class TrainLoop:
    """A train step and a source, compiled into one program.

    Attributes:
        names: the names of the recorded numbers, in the order the step returns them.
        loss_names: those of them that are losses.
        program: SHA-256 of the program's StableHLO text.
    """

    def __init__(
        self,
        train_step: TrainStep,
        state: TrainState,
        source: Any,
        *,
        refresh: Refresh | None = None,
        on_nonfinite: str = "raise",
        max_skipped_in_a_row: int = 100,
        device: Any = None,
        placement: Placement | None = None,
        while_compiling: Callable[[], None] = lambda: None,
    ):
        """Traces and compiles; a program that this process has compiled before is not compiled again.

        Args:
            train_step: `(state, batches, key) -> (state, {name: scalar})`.
            state: a state such as `run` will be called with; not consumed.
            source: `step -> batches`, traceable. A pytree's arrays are arguments of the program.
            refresh: `(state, source) -> state`, traceable, called before each batch is drawn. Adaptive
                samplers and balancers update their state there. A pytree's arrays are arguments of the
                program.
            on_nonfinite: `"raise"` stops before the first update that is not finite and raises;
                `"skip"` leaves such an update out (step and runtime key advance); `"ignore"` continues.
                An update is not finite if a loss is not, or if it turns a finite entry of the model's or the
                optimizer's state into one that is not.
            max_skipped_in_a_row: raises at the last of so many updates that `"skip"` would leave out.
            device: where to run; the default device for `None`.
            placement: several devices to run on, from `placement.resolve`; instead of `device`.
            while_compiling: called about twenty times a second until the program is compiled.

        Raises:
            TypeError: `state` is not a `TrainState`.
            ValueError: an unknown policy, a train step that changes the state's structure, or no compilation
                because of `jax_disable_jit`.
        """
        _require_compilable(state)
        self._on_nonfinite = validation.one_of(on_nonfinite, "on_nonfinite", POLICIES)
        self._max_skipped = validation.positive(max_skipped_in_a_row, "max_skipped_in_a_row")
        self._has_logged = False  # the first non-finite update
        self._placed = placement or on_device(device)
        require_step(train_step, self._placed.shares.pads)
        self._sharding = self._placed.replicated
        self._of_state, self._refresh = self._placed.of_state(state), refresh
        self._halting = self._placed.replicate(np.bool_(on_nonfinite != "ignore"))
        self._compile(train_step, state, source, while_compiling)

    def _compile(
        self, train_step: TrainStep, state: TrainState, source: Any, while_compiling: Callable[[], None]
    ) -> None:
        rebuild, self._leaves = self._arguments(source)
        constrain = functools.partial(self._placed.constrain, shardings=self._of_state)
        recorded = RecordedStep(train_step)
        # Concatenating leaves that are split over devices would gather them on one.
        together = _SMALL if self._placed.mesh is None else 0
        parts = _Parts(recorded, rebuild, self._placed.shares.split, constrain, together)
        arguments = self._abstract((state, self._leaves, np.int32(0), self._halting))
        program = jax.jit(functools.partial(_program, parts), **self._outputs())
        from phijax_rng.training import cpu_threefry  # noqa: PLC0415 - needs private names of JAX

        lowered = cpu_threefry.lower(program, arguments, self._placed.host_device.platform)
        self._left_out, self._gradient_norm = _jitted(parts, _left_out, _gradient_norm)
        self.names, self.loss_names = recorded.names, recorded.loss_names
        self.program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        self._executable = compiled(lowered, self.program, self._sharding, while_compiling)

    def place(self, state: TrainState) -> TrainState:
        """`state` on the loop's devices without weak types; arrays that are there already are not copied."""
        return self._placed.place(state)

    def run(self, state: TrainState, stop: int, source: Any = None, *, skipped_in_a_row: int = 0) -> Chunk:
        """Updates until `state.step` is `stop`, in calls of at most 4096; none if it is already.

        Two states are on the device while it runs. A non-finite update makes it run again up to that
        update; with `on_nonfinite="ignore"` only the first one does, for the paths of its leaves.

        Args:
            state: from `place` or from a chunk. Its arrays stay alive.
            stop: the step to end at, not below the state's own.
            source: another source of the same structure and shapes, instead of the compiled one.
            skipped_in_a_row: how many updates right before `state` were skipped.

        Raises:
            NonFiniteError: an update is not finite, with `on_nonfinite="raise"`; or it is the last of
                `max_skipped_in_a_row` with `"skip"`. It has the state before that update.
            ValueError: the train step did not raise `step` by one.
        """
        leaves = self._leaves if source is None else self._arguments(source)[1]
        start = int(jax.device_get(state.step))
        stop = validation.whole_number(stop, "stop", 2**31, start=start)
        if stop == start:
            none = np.zeros(0, np.bool_)
            return Chunk(state, start, start, {name: np.zeros(0) for name in self.names}, none, none)
        chunks: list[Chunk] = []
        reached, end = start, stop
        while reached < stop:
            chunk = self._call(state, leaves, min(end, reached + CAPACITY))
            first, end = self._first_nonfinite(chunk), stop
            if first is not None and chunk.step - reached > 1:
                # Again up to that update; then that update alone, between the states before and after it.
                end = reached + max(first, 1)
                continue
            skipped_in_a_row = 0 if first is None else skipped_in_a_row + 1
            if first is not None:
                ends = self._on_nonfinite == "raise" or (
                    self._on_nonfinite == "skip" and skipped_in_a_row >= self._max_skipped
                )
                chunk = self._with_paths(chunk, state, needed=ends)
                if ends:
                    before = joined([*chunks, part(chunk, slice(0), state)])
                    raise nonfinite_error(chunk, self.loss_names, before, skipped_in_a_row)
                if self._on_nonfinite == "skip":
                    chunk = dataclasses.replace(chunk, state=self._left_out(state, leaves))
            chunks.append(chunk)
            state, reached = chunk.state, chunk.step
        return joined(chunks)

    def gradient_norm(self, state: TrainState, source: Any = None) -> float:
        """The 2-norm of the gradient of the next update, whose train step is a `LossTrainStep`.

        A program of its own: a norm inside the loop would change how XLA compiles the update, and with it the
        last bits of the parameters.

        Args:
            state: from `place` or from a chunk. It is not updated.
            source: as in `run`.
        """
        leaves = self._leaves if source is None else self._arguments(source)[1]
        return float(self._gradient_norm(state, leaves))

    def _call(self, state: TrainState, leaves: Tree, stop: int) -> Chunk:
        """One call of the program, see `_program`."""
        start = int(jax.device_get(state.step))
        # Placed explicitly: an implicit transfer of a Python int trips `jax.transfer_guard`.
        limit = self._placed.replicate(np.int32(stop))
        following, reached, buffers = self._executable(state, leaves, limit, self._halting)
        # Wait here and not in `device_get`, which delays signal handlers until the whole chunk is done.
        jax.block_until_ready(following)
        end = int(jax.device_get(reached))
        rows = np.arange(start, end) % CAPACITY  # as the program indexes them, see `_program`
        *columns, finite = (buffer[rows] for buffer in jax.device_get(buffers))
        raised_to = int(jax.device_get(following.step))
        if raised_to != end:
            raise ValueError(
                f"train_step must raise state.step by one; after {end - start} updates from step "
                f"{start} it is {raised_to}. Return state.replace(step=state.step + 1, ...)."
            )
        balanced = columns[len(self.names) :]  # whether the balancer stayed finite, where one adapts
        unbalanced = ~balanced[0] if balanced else np.zeros(end - start, bool)
        # The program continues after a balancer that is not finite, as the other policies need.
        nonfinite = ~finite | unbalanced if self._on_nonfinite == "raise" else ~finite
        records = dict(zip(self.names, columns, strict=False))
        return Chunk(following, end, start, records, nonfinite, unbalanced)

    def _first_nonfinite(self, chunk: Chunk) -> int | None:
        """The first update of a chunk that the policy must look at."""
        if not chunk.nonfinite.any() or (self._on_nonfinite == "ignore" and self._has_logged):
            return None
        return int(np.argmax(chunk.nonfinite))

    def _with_paths(self, chunk: Chunk, before: TrainState, *, needed: bool) -> Chunk:
        """A chunk of one update with the paths of the leaves that it made non-finite."""
        # Of the updates that a run goes on after the first is logged, and the others should stay fast.
        if self._has_logged and not needed:
            return chunk
        self._has_logged = True
        return dataclasses.replace(chunk, turned=guard.turned_leaves(before, chunk.state))

    def _arguments(self, source: Any) -> tuple[Callable[[Any], Any], Any]:
        """How to rebuild source and refresh inside the program, and their arrays, placed."""
        rebuilds, leaves = zip(*map(_split, (in_program(source), self._refresh)), strict=True)
        return functools.partial(_rebuilt, rebuilds), self._placed.replicate(leaves)

    def _abstract(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shapes, dtypes and shardings of the arguments; no dtype is weak.

        With them the program is compiled once. Through plain `jit` a fit compiles two to four times: for
        weak types, for uncommitted arrays, and for new shardings.
        """
        state, *others = arguments
        return (
            jax.tree.map(_abstract, state, self._of_state),
            *(jax.tree.map(self._abstract_other, other) for other in others),
        )

    def _abstract_other(self, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        """The same for a leaf that is placed already, or is replicated."""
        return _abstract(leaf, leaf.sharding if isinstance(leaf, jax.Array) else self._sharding)

    def _outputs(self) -> dict[str, Any]:
        """The shardings of the results; none are needed on one device."""
        shardings = (self._of_state, self._sharding, self._sharding)
        return {} if self._placed.mesh is None else {"out_shardings": shardings}


def _abstract(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if keys.is_typed_key(leaf) else jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)


def _split(part: object) -> tuple[Callable[[Any], Any], list[Any]]:
    """How to rebuild a pytree from its leaves, and the leaves; an object that is no pytree has none."""
    if jax.tree_util.all_leaves([part]):
        return lambda leaves: part, []
    leaves, structure = jax.tree.flatten(part)
    return functools.partial(jax.tree.unflatten, structure), leaves


def _rebuilt(rebuilds: Sequence[Callable[[Any], Any]], leaves: Sequence[Any]) -> list[Any]:
    return [rebuild(own) for rebuild, own in zip(rebuilds, leaves, strict=True)]


def _program(
    parts: "_Parts", state: TrainState, leaves: Tree, stop: jax.Array, halting: jax.Array
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


@dataclasses.dataclass(frozen=True)
class _Parts:
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


def _update(
    parts: _Parts, state: TrainState, leaves: Tree, pattern: list[jax.Array]
) -> tuple[TrainState, list[jax.Array], jax.Array]:
    """One update, its record, and whether it changed which entries are non-finite.

    The last entry of the record is whether the update is finite.
    """
    source, state, balanced = _refreshed(parts, state, leaves)
    batches, mask = parts.split(*source.filled(state.step, state.sampler_state))
    advanced, key = advance(state)
    updated, output = parts.train_step(advanced, batches, key, mask)
    losses = [jnp.asarray(value) for value in output.losses.values()]
    diagnostics = [jnp.asarray(value) for value in output.diagnostics.values()]
    change = guard.change_of_pattern(updated, pattern, parts.together)
    finite = guard.all_finite(losses) & ~jnp.isnan(change)
    new, old = updated.balancer_state, state.balancer_state
    # Compared by identity while tracing: a step that does not observe passes the same tracers on, and then
    # the test is not part of the program.
    if any(a is not b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)):
        kept = stays_finite(new, old)
        finite, balanced = finite & kept, [kept & entry for entry in balanced] or [kept]
    return parts.constrain(updated), [*losses, *diagnostics, *balanced, finite], change != 0


def _require_compilable(state: TrainState) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a TrainState, got {state!r}. Use initialize_train_state.")
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "jax_disable_jit is on, and training runs in a compiled loop. "
            "Turn it off; jax.debug.print and Trainer.audit show values and draws of a run."
        )


def _jitted(parts: _Parts, *functions: Callable[..., Any]) -> list[Any]:
    return [jax.jit(functools.partial(each, parts)) for each in functions]


def _left_out(parts: _Parts, state: TrainState, leaves: Tree) -> TrainState:
    """An update that is left out: step and runtime key advance, nothing else changes."""
    _, state, _ = _refreshed(parts, state, leaves)
    advanced, _ = advance(state)
    return parts.constrain(advanced.replace(step=state.step + 1))


def _gradient_norm(parts: _Parts, state: TrainState, leaves: Tree) -> jax.Array:
    """The norm of the gradient of an update that is not made."""
    source, state, _ = _refreshed(parts, state, leaves)
    batches, mask = parts.split(*source.filled(state.step, state.sampler_state))
    advanced, key = advance(state)
    return parts.train_step.gradient_norm(advanced, batches, key, mask)


def _refreshed(
    parts: _Parts, state: TrainState, leaves: Tree
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


class Pace:
    """Chooses how many updates go into one call, by the clock.

    A call is long enough to hide its overhead and short enough to answer a signal quickly. The choice never
    changes a number.
    """

    def __init__(self, chunk_size: int | None = None, *, target_seconds: float = 0.2):
        self._fixed = None if chunk_size is None else validation.positive(chunk_size, "chunk_size")
        self._target = target_seconds
        self._count = 1

    def next_count(self, bound: int) -> int:
        """Updates of the next call, at most `bound`."""
        return min(self._fixed or self._count, bound, CAPACITY)

    def measured(self, count: int, seconds: float) -> None:
        """Adapts to a call of `count` updates. It grows at most eightfold, since the first call is slow."""
        affordable = int(self._target * count / max(seconds, 1e-9))
        self._count = max(1, min(affordable, 8 * count))
