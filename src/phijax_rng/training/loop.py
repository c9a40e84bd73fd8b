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
A large state is updated in place instead, see `donation` and `program`, and no call is repeated.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.types import Tree
from phijax_rng.devices.placement import Placement, on_device
from phijax_rng.state import TrainState
from phijax_rng.training import guard, program
from phijax_rng.training.adaptive_refresh import Refresh
from phijax_rng.training.chunks import Chunk, joined, nonfinite_error, part
from phijax_rng.training.compile_cache import compiled
from phijax_rng.training.donation import Donation
from phijax_rng.training.program import CAPACITY, Event, Policy
from phijax_rng.training.recorded_step import RecordedStep, require_step
from phijax_rng.training.step import TrainStep

POLICIES = ("raise", "skip", "ignore")
"""What to do when a loss or an updated leaf is not finite."""

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
        halting, strict = on_nonfinite != "ignore", on_nonfinite == "raise"
        self._policy = self._placed.replicate(Policy(np.bool_(halting), np.bool_(strict)))
        self.donation = Donation.of(state)
        self._paths = guard.watched_paths(state)
        self._compile(train_step, state, source, while_compiling)

    def _compile(
        self, train_step: TrainStep, state: TrainState, source: Any, while_compiling: Callable[[], None]
    ) -> None:
        rebuild, self._leaves = self._arguments(source)
        constrain = functools.partial(self._placed.constrain, shardings=self._of_state)
        recorded = RecordedStep(train_step)
        # Concatenating leaves that are split over devices would gather them on one.
        together = _SMALL if self._placed.mesh is None else 0
        parts = program.Parts(recorded, rebuild, self._placed.shares.split, constrain, together)
        traced, arguments = self._traced(parts, state)
        from phijax_rng.training import cpu_threefry  # noqa: PLC0415 - needs private names of JAX

        lowered = cpu_threefry.lower(traced, arguments, self._placed.host_device.platform)
        self._left_out, self._gradient_norm = program.left_out(parts), program.gradient_norm(parts)
        self.names, self.loss_names = recorded.names, recorded.loss_names
        self.program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        self._executable = compiled(lowered, self.program, self._sharding, while_compiling)

    def _traced(self, parts: program.Parts, state: TrainState) -> tuple[Any, tuple[Any, ...]]:
        """The program to compile, and what it is called with: shapes, dtypes and shardings; no dtype is weak.

        With them the program is compiled once. Through plain `jit` a fit compiles two to four times: for
        weak types, for uncommitted arrays, and for new shardings.
        """
        abstract = jax.tree.map(_abstract, state, self._of_state)
        others = jax.tree.map(self._abstract_other, (self._leaves, np.int32(0), self._policy))
        results, rest = self._placed.mesh is not None, self._sharding
        if self.donation is None:
            leaves, stop, policy = others
            of_results: Any = {"out_shardings": (self._of_state, rest, rest)} if results else {}
            return jax.jit(program.usual(parts), **of_results), (abstract, leaves, stop, policy.halting)
        of_parts = self.donation.split(self._of_state)
        of_results = {"out_shardings": (*of_parts, rest, rest, rest)} if results else {}
        traced = jax.jit(program.in_place(parts, self.donation), donate_argnums=0, **of_results)
        return traced, (*self.donation.split(abstract), *others)

    def place(self, state: TrainState) -> TrainState:
        """`state` on the loop's devices without weak types; arrays that are there already are not copied."""
        return self._placed.place(state)

    def owned(self, take: Callable[[], TrainState]) -> TrainState:
        """The state that `take` returns, placed, and of a large one copies of the arrays that `run` reuses.

        Where `take` gives the last reference away, at most one array exists twice at a time.
        """
        if self.donation is None:
            return self.place(take())
        return self.donation.owned(lambda: self.place(take()))

    def run(
        self,
        state: TrainState,
        stop: int,
        source: Any = None,
        *,
        skipped_in_a_row: int = 0,
        donate: bool = False,
    ) -> Chunk:
        """Updates until `state.step` is `stop`, in calls of at most 4096; none if it is already.

        Two states are on the device while it runs. A non-finite update makes it run again up to that
        update; with `on_nonfinite="ignore"` only the first one does, for the paths of its leaves.
        A large state (see `donation`) is updated in place, without a repeated call.

        Args:
            state: from `place`, `owned` or a chunk. Its arrays stay alive, unless `donate` gives them away.
            stop: the step to end at, not below the state's own.
            source: another source of the same structure and shapes, instead of the compiled one.
            skipped_in_a_row: how many updates right before `state` were skipped.
            donate: whether the arrays of a large state, from `owned` or a chunk, may be written over; a
                copy is made of it otherwise.

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
        if self.donation is not None and not donate:
            state = self.donation.owned(lambda: state)
        call = self._repeated if self.donation is None else self._in_place
        chunks: list[Chunk] = []
        reached = start
        while reached < stop:
            chunk, bad = call(state, leaves, min(stop, reached + CAPACITY))
            if chunk.step > chunk.start:
                chunks.append(chunk)
                skipped_in_a_row = 0
            if bad is not None:
                skipped_in_a_row += 1
                ends = self._ends(skipped_in_a_row)
                bad = self._with_paths(bad, chunk.state, needed=ends)
                if ends:
                    before = joined([*chunks, part(bad, slice(0), chunk.state)])
                    raise nonfinite_error(bad, self.loss_names, before, skipped_in_a_row)
                if self._on_nonfinite == "skip":
                    bad = dataclasses.replace(bad, state=self._left_out(chunk.state, leaves))
                chunks.append(bad)
            state, reached = chunks[-1].state, chunks[-1].step
        return joined(chunks)

    def _ends(self, skipped_in_a_row: int) -> bool:
        """Whether the last of so many updates that are not finite ends the run."""
        skips = self._on_nonfinite == "skip"
        return self._on_nonfinite == "raise" or (skips and skipped_in_a_row >= self._max_skipped)

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

    def _repeated(self, state: TrainState, leaves: Tree, stop: int) -> tuple[Chunk, Chunk | None]:
        """The updates before the first that the policy must look at, and that update alone."""
        following, reached, buffers = self._executable(state, leaves, self._limit(stop), self._policy.halting)
        chunk = self._chunk(state.step, following, reached, buffers)
        if not chunk.nonfinite.any() or (self._on_nonfinite == "ignore" and self._has_logged):
            return chunk, None
        first = int(np.argmax(chunk.nonfinite))
        if chunk.step - chunk.start == 1:
            return part(chunk, slice(0), state), chunk
        before = (
            self._repeated(state, leaves, chunk.start + first)[0] if first else part(chunk, slice(0), state)
        )
        return before, self._repeated(before.state, leaves, before.step + 1)[1]

    def _in_place(self, state: TrainState, leaves: Tree, stop: int) -> tuple[Chunk, Chunk | None]:
        """The same from a program that halts before such an update; `state` is gone afterwards."""
        assert self.donation is not None
        step, parts = state.step, self.donation.split(state)
        *parts, reached, event, buffers = self._executable(*parts, leaves, self._limit(stop), self._policy)
        following, event = self.donation.joined(*parts), Event(*jax.device_get(event))
        chunk = self._chunk(step, following, reached, buffers, int(event.halted))
        count, paths = chunk.step - chunk.start, zip(self._paths, event.turned, strict=True)
        turned = tuple(path for path, has_turned in paths if has_turned)
        if not event.halted:
            whole = dataclasses.replace(chunk, turned=turned)
            return (self._with_paths(whole, following) if event.seen else chunk), None
        bad = part(chunk, slice(count - 1, count), following)
        return part(chunk, slice(count - 1), following), dataclasses.replace(bad, turned=turned)

    def _limit(self, stop: int) -> ArrayLike:
        # Placed explicitly: an implicit transfer of a Python int trips `jax.transfer_guard`.
        return self._placed.replicate(np.int32(stop))

    def _chunk(
        self, start: jax.Array, following: TrainState, reached: jax.Array, buffers: Any, more: int = 0
    ) -> Chunk:
        """What a call of the program did, and with `more` the record of an update that it did not make."""
        # Wait here and not in `device_get`, which delays signal handlers until the whole chunk is done.
        jax.block_until_ready(following)
        first, end = int(jax.device_get(start)), int(jax.device_get(reached))
        rows = np.arange(first, end + more) % CAPACITY  # as the program indexes them
        *columns, finite = (buffer[rows] for buffer in jax.device_get(buffers))
        raised_to = int(jax.device_get(following.step))
        if raised_to != end:
            raise ValueError(
                f"train_step must raise state.step by one; after {end - first} updates from step "
                f"{first} it is {raised_to}. Return state.replace(step=state.step + 1, ...)."
            )
        balanced = columns[len(self.names) :]  # whether the balancer stayed finite, where one adapts
        unbalanced = ~balanced[0] if balanced else np.zeros(len(rows), bool)
        # The usual program continues after a balancer that is not finite, as the other policies need.
        nonfinite = ~finite | unbalanced if self._on_nonfinite == "raise" else ~finite
        records = dict(zip(self.names, columns, strict=False))
        return Chunk(following, end + more, first, records, nonfinite, unbalanced)

    def _with_paths(self, chunk: Chunk, before: TrainState, *, needed: bool = False) -> Chunk:
        """A chunk with the paths of the leaves that its first bad update made non-finite."""
        # Of the updates that a run goes on after the first is logged, and the others should stay fast.
        if self._has_logged and not needed:
            return dataclasses.replace(chunk, turned=())
        self._has_logged = True
        if self.donation is not None:
            return chunk  # the program found them
        return dataclasses.replace(chunk, turned=guard.turned_leaves(before, chunk.state))

    def _arguments(self, source: Any) -> tuple[Callable[[Any], Any], Any]:
        """How to rebuild source and refresh inside the program, and their arrays, placed."""
        rebuild, leaves = program.arguments(source, self._refresh)
        return rebuild, self._placed.replicate(leaves)

    def _abstract_other(self, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        """The same for a leaf that is placed already, or is replicated."""
        return _abstract(leaf, leaf.sharding if isinstance(leaf, jax.Array) else self._sharding)


def _abstract(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if keys.is_typed_key(leaf) else jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)


def _require_compilable(state: TrainState) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a TrainState, got {state!r}. Use initialize_train_state.")
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "jax_disable_jit is on, and training runs in a compiled loop. "
            "Turn it off; jax.debug.print and Trainer.audit show values and draws of a run."
        )


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
