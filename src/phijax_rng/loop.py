"""Many updates in one compiled program, with the batch drawn inside it.

The program is a loop whose trip count is an argument: from `state.step` up to `stop`. XLA compiles a
scan of fixed length, a single step and such a loop differently, and the last bits of the parameters
move with it. Here every run uses the one program for every length, so where the host looks in can
never change a number.

    TrainLoop(train_step, state, source)    compiled ahead of time, once
        .place(state)                       a copy that the loop may consume
        .run(state, stop) -> Chunk          the state after `stop` updates, and every loss on the way

Executables are kept by the digest of their program, so the same program is compiled once in a process,
and a changed closure or global is compiled anew.
"""

import collections
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import _checks, keys
from phijax_rng.errors import NonFiniteError
from phijax_rng.module import StepOutput
from phijax_rng.sources import ask
from phijax_rng.state import TrainState, advance, is_trainable
from phijax_rng.step import TOTAL, TrainStep

POLICIES = ("raise", "skip", "ignore")
"""What to do when a loss or an updated leaf is not finite."""

# Rows of the device buffer that records each step, and so the most steps in one call. A constant:
# the buffer's size is part of the program.
CAPACITY = 4096

_MAX_KEPT = 32

_SECONDS_BETWEEN_CHECKS = 0.05


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
        on_nonfinite: str = "raise",
        device: Any = None,
        while_compiling: Callable[[], None] = lambda: None,
    ):
        """Traces and compiles; a program that this process has compiled before is not compiled again.

        Args:
            train_step: `(state, batches, key) -> (state, {name: scalar})`.
            state: a state such as `run` will be called with; not consumed.
            source: `step -> batches`, traceable. A pytree's arrays are arguments of the program.
            on_nonfinite: `"raise"` stops before the first update that is not finite and raises;
                `"skip"` leaves such an update out (step and runtime key advance); `"ignore"` goes on.
            device: where to run; the default device for `None`.
            while_compiling: called every now and then until the program is compiled.

        Raises:
            TypeError: `state` is not a `TrainState`.
            ValueError: an unknown policy, or a train step that changes the state's structure.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"state must be a TrainState, got {state!r}. Use initialize_train_state.")
        _checks.function(train_step, "train_step")
        policy = POLICIES.index(_checks.one_of(on_nonfinite, "on_nonfinite", POLICIES))
        self._sharding = jax.sharding.SingleDeviceSharding(device or default_device())
        self._policy = self._put(np.int32(policy))
        self._on_nonfinite = on_nonfinite
        rebuild, self._leaves = self._split_source(source)
        recorded = _Recorded(train_step)
        scalar = np.int32(0)
        arguments = jax.tree.map(self._abstract, (state, self._leaves, scalar, scalar))
        # Jitted so that asking for the shape of a record and the loop itself share one trace.
        update = jax.jit(functools.partial(_guarded_update, recorded, rebuild))
        program = jax.jit(functools.partial(_program, update), donate_argnums=0)
        lowered = program.lower(*arguments)
        self.names = recorded.names
        self.loss_names = recorded.loss_names
        self.program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        self._executable = _compiled(lowered, self.program, self._sharding, while_compiling)

    def place(self, state: TrainState) -> TrainState:
        """A copy of `state` on the loop's device, strong-typed, that `run` may consume."""
        return jax.tree.map(self._put, state)

    def run(self, state: TrainState, stop: int, source: Any = None) -> Chunk:
        """Updates until `state.step` is `stop`, at most 4096 of them.

        Args:
            state: from `place` or from the previous chunk. Its arrays are consumed.
            stop: the step to end at, above the state's own.
            source: another source of the same structure and shapes, instead of the compiled one.

        Raises:
            NonFiniteError: with `on_nonfinite="raise"`, and the state before that update in it.
            ValueError: the train step did not raise `step` by one.
        """
        leaves = self._leaves if source is None else self._split_source(source)[1]
        start = int(jax.device_get(state.step))
        stop = _checks.whole_number(stop, "stop", min(2**31, start + CAPACITY + 1), start=start + 1)
        limit = jax.device_put(np.int32(stop), self._sharding)
        following, buffers = self._executable(state, leaves, limit, self._policy)
        jax.block_until_ready(following)
        return self._chunk(following, buffers, start, stop)

    def _chunk(self, state: TrainState, buffers: list[jax.Array], start: int, stop: int) -> Chunk:
        places = np.arange(start, stop) % CAPACITY
        *columns, finite = (buffer[places] for buffer in jax.device_get(buffers))
        nonfinite = ~finite
        halted = self._on_nonfinite == "raise" and bool(nonfinite.any())
        end = start + int(np.argmax(nonfinite)) if halted else stop
        reached = int(jax.device_get(state.step))
        if reached != end:
            raise ValueError(
                f"train_step must raise state.step by one; after {end - start} updates from step "
                f"{start} it is "
                f"{reached}. Return state.replace(step=state.step + 1, ...)."
            )
        count = end - start
        named = dict(zip(self.names, columns, strict=True))
        records = {name: column[:count] for name, column in named.items()}
        chunk = Chunk(state, end, start, records, nonfinite[:count])
        if halted:
            raise _nonfinite_error({name: named[name][count] for name in self.loss_names}, chunk)
        return chunk

    def _split_source(self, source: Any) -> tuple[Callable[[Any], Any], list[jax.Array]]:
        """How to rebuild the source inside the program, and its arrays, placed."""
        if jax.tree_util.all_leaves([source]):
            return lambda leaves: source, []
        leaves, structure = jax.tree.flatten(source)
        return functools.partial(jax.tree.unflatten, structure), jax.device_put(leaves, self._sharding)

    def _put(self, leaf: Any) -> jax.Array:
        """A copy on the device: the loop donates its state, and the caller's arrays stay alive."""
        if not keys.is_typed_key(leaf) and getattr(leaf, "weak_type", True):
            array = np.asarray(leaf)
            leaf = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
        elif isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            # From a replicated array `may_alias=False` still takes the shard that lies on the device;
            # the copy below is then made from that.
            leaf = jax.device_put(leaf, self._sharding)
        return jax.device_put(leaf, self._sharding, may_alias=False)

    def _abstract(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype as `_put` would give them; the dtype is never weak."""
        dtype = (
            leaf.dtype if keys.is_typed_key(leaf) else jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
        )
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=self._sharding)


def default_device() -> jax.Device:
    """`jax_default_device` if it is set, else the first local device."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]


class _Recorded:
    """A train step that checks what it is given back, and remembers the recorded names."""

    def __init__(self, train_step: TrainStep):
        self._train_step = train_step
        self.names: tuple[str, ...] = ()
        self.loss_names: tuple[str, ...] = ()

    def __call__(self, state: TrainState, batches: Any, key: Any) -> tuple[TrainState, StepOutput]:
        following, output = self._train_step(state, batches, key)
        if not isinstance(output, StepOutput):
            output = StepOutput(losses=_checks.mapping(output, "the losses of train_step"))
        self.names = _checks.names((*output.losses, *output.diagnostics), "the records of train_step")
        self.loss_names = tuple(output.losses)
        _require_same_types(following, state)
        return following, output


def _program(
    update: Callable[..., Any], state: TrainState, leaves: list[jax.Array], stop: jax.Array, policy: jax.Array
) -> tuple[TrainState, list[jax.Array]]:
    """Updates from `state.step` up to `stop`, and the record of each."""
    record = jax.eval_shape(update, state, leaves, policy)[1]
    # One buffer for each recorded number: stacking them into rows made a small step 1.8 times slower
    # on JAX 0.12 (CPU), which recomputed the losses for the row.
    buffers = [jnp.zeros((CAPACITY,), scalar.dtype) for scalar in record]

    def unfinished(carry: Any) -> jax.Array:
        _, step, halted, _ = carry
        return (step < stop) & ~halted

    def body(carry: Any) -> Any:
        state, step, _, buffers = carry
        state, record, halted = update(state, leaves, policy)
        place = step % CAPACITY
        buffers = [
            jax.lax.dynamic_update_index_in_dim(buffer, scalar, place, 0)
            for buffer, scalar in zip(buffers, record, strict=True)
        ]
        return state, step + 1, halted, buffers

    # The loop counts for itself: a train step that forgets to raise `step` must not run for ever.
    start = (state, state.step, jnp.asarray(False), buffers)
    state, _, _, buffers = jax.lax.while_loop(unfinished, body, start)
    return state, buffers


def _guarded_update(
    train_step: _Recorded,
    rebuild: Callable[[Any], Any],
    state: TrainState,
    leaves: Any,
    policy: jax.Array,
) -> tuple[TrainState, list[jax.Array], jax.Array]:
    """One update; its record, the last entry whether all was finite; and whether to stop."""
    source = rebuild(leaves)
    batches = ask(source, state.step, state.sampler_state)
    advanced, key = advance(state)
    updated, output = train_step(advanced, batches, key)
    losses = [jnp.asarray(value) for value in output.losses.values()]
    model = [leaf for leaf in jax.tree.leaves(updated.model_state) if is_trainable(leaf)]
    finite = _all_finite([*losses, *model])
    take = finite | (policy == POLICIES.index("ignore"))
    move_on = take | (policy == POLICIES.index("skip"))
    kept = _select(take, updated, state)
    # A skipped update still spends its step and its runtime key.
    following = kept.replace(
        rng_key=_select(take, updated.rng_key, _select(move_on, advanced.rng_key, state.rng_key)),
        step=_select(move_on, updated.step, state.step),
    )
    diagnostics = [jnp.asarray(value) for value in output.diagnostics.values()]
    return following, [*losses, *diagnostics, finite], ~move_on


def _select(chosen: jax.Array, yes: Any, no: Any) -> Any:
    """`yes` where `chosen`, else `no`, leaf by leaf; untouched leaves cost nothing."""

    def pick(new: Any, old: Any) -> Any:
        if new is old:
            return old
        if not keys.is_typed_key(new):
            return jnp.where(chosen, new, old)
        # By their words: JAX's key-reuse checker would count a selection of keys as a use of both.
        words = jnp.where(chosen, jax.random.key_data(new), jax.random.key_data(old))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(new))

    return jax.tree.map(pick, yes, no)


def _all_finite(arrays: list[jax.Array]) -> jax.Array:
    """Whether every element is finite; `x * 0` is 0 for finite x alone, and sums faster than a test."""
    total = jnp.float32(0)
    for array in arrays:
        zeros = jnp.sum(array * 0)
        total = total + (jnp.abs(zeros) if jnp.iscomplexobj(zeros) else zeros).astype(jnp.float32)
    return total == 0


def _nonfinite_error(losses: Mapping[str, float], chunk: Chunk) -> NonFiniteError:
    bad = {name: value for name, value in losses.items() if not np.isfinite(value)}
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


def _require_same_types(following: Any, state: TrainState) -> None:
    if not isinstance(following, TrainState):
        raise TypeError(
            f"train_step must return a TrainState first, got {following!r}. Use state.replace(...)."
        )
    before, after = (str(jax.tree.structure(tree)) for tree in (state, following))
    if before != after:
        raise ValueError(
            "train_step changed the structure of the state\n"
            f"  given:    {before}\n"
            f"  returned: {after}\n"
            "Return state.replace(...) with leaves of the same structure."
        )
    new_leaves = jax.tree.leaves(following)
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(state), new_leaves, strict=True):
        if old.shape != jnp.shape(new) or old.dtype != _dtype(new):
            raise ValueError(
                f"train_step changed the type of state{jax.tree_util.keystr(path)}\n"
                f"  given:    {old.dtype}{list(old.shape)}\n"
                f"  returned: {_dtype(new)}{list(jnp.shape(new))}\n"
                "Return every leaf with its shape and dtype."
            )


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if keys.is_typed_key(leaf) else jnp.result_type(leaf)


_kept: "collections.OrderedDict[Any, jax.stages.Compiled]" = collections.OrderedDict()
_kept_lock = threading.Lock()


def _compiled(
    lowered: jax.stages.Lowered, program: str, sharding: Any, meanwhile: Callable[[], None]
) -> jax.stages.Compiled:
    """The executable of this program, from this process's store if it is there."""
    if jax.config.values.get("jax_use_simplified_jaxpr_constants"):
        # Captured arrays are then not part of the text, and the digest would not see them change.
        return _compile(lowered, meanwhile)
    output = tuple(str(leaf.dtype) for leaf in jax.tree.leaves(lowered.out_info))
    settings = tuple(sorted((name, repr(value)) for name, value in jax.config.values.items()))
    name = (program, sharding, lowered.in_tree, lowered.out_tree, output, settings)
    with _kept_lock:
        if name in _kept:
            _kept.move_to_end(name)
            return _kept[name]
    executable = _compile(lowered, meanwhile)
    with _kept_lock:
        _kept[name] = executable
        while len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)
    return executable


def _compile(lowered: jax.stages.Lowered, meanwhile: Callable[[], None]) -> jax.stages.Compiled:
    """Compiles in a thread of its own, so that this one can answer a signal."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(lowered.compile())
        except BaseException as error:  # raised again by the thread that waits
            outcome.append(error)

    worker = threading.Thread(target=work, name="phijax_rng-compile", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(_SECONDS_BETWEEN_CHECKS)
        meanwhile()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


class Pace:
    """Chooses how many updates go into one call, by the clock.

    Long enough that a call costs nothing beside its updates, short enough that a signal is
    answered at once. The choice never changes a number.
    """

    def __init__(self, chunk_size: int | None = None, *, target_seconds: float = 0.2):
        self._fixed = None if chunk_size is None else _checks.positive(chunk_size, "chunk_size")
        self._target = target_seconds
        self._count = 1

    def next_count(self, bound: int) -> int:
        """Updates of the next call, at most `bound`."""
        return min(self._fixed or self._count, bound, CAPACITY)

    def measured(self, count: int, seconds: float) -> None:
        """Learns from a call of `count` updates; grows eightfold at most, since the first is slow."""
        affordable = int(self._target * count / max(seconds, 1e-9))
        self._count = max(1, min(affordable, 8 * count))
