import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    LossModule,
    LossTrainStep,
    StepOutput,
    Trainer,
    TrainLoop,
    TrainState,
    initialize_train_state,
    keys,
)
from phijax_rng.errors import NonFiniteError
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._subprocess import EIGHT_DEVICES, run_python

NEVER = -1
POLICIES = ("raise", "skip", "ignore")


# A program that turns non-finite where its source says so. The places are arguments, so one
# executable serves every test.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Poison:
    """The steps at which a loss, a gradient and a diagnostic are NaN; a traceable source."""

    loss: int | jax.Array = NEVER
    gradient: int | jax.Array = NEVER
    diagnostic: int | jax.Array = NEVER

    def __call__(self, step):
        return {
            "data": {
                "target": jnp.sin(step.astype(jnp.float32)),
                "loss": jnp.where(jnp.any(step == self.loss), jnp.nan, 0.0),
                "gradient": jnp.where(step == self.gradient, 0.0, 1.0),
                "diagnostic": jnp.where(step == self.diagnostic, jnp.nan, 0.0),
            }
        }


def _poisoned_losses(params, batches):
    data = batches["data"]
    losses = {
        "fit": jnp.sum((params["w"] - data["target"]) ** 2),
        "term": jnp.sum(params["w"]) + data["loss"],
        # The square root of 0 is finite, its gradient times 0 is not.
        "root": jnp.sum(jnp.sqrt(data["gradient"] * (1 + params["w"] ** 2))),
    }
    return StepOutput(losses, diagnostics={"watched": data["diagnostic"]})


POISONED = LossModule(lambda key: {"w": jnp.ones(3)}, _poisoned_losses, batch_keys=("data",))
POISONED_STEP = LossTrainStep(POISONED, optax.adam(0.1))


def poisoned_state() -> TrainState:
    streams = keys.split_root(0)
    return initialize_train_state(POISONED.init(streams.model), POISONED_STEP.optimizer, {}, streams)


def poisoned_run(stop, *, policy="raise", **where):
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison(**where), on_nonfinite=policy)
    return loop.run(loop.place(poisoned_state()), stop)


# Chunks


@pytest.mark.parametrize("problem", [_problems.heat, _problems.dropout, _problems.statistics])
def test_chunks_of_1_7_64_and_all_steps_give_the_same_bits(problem):
    whole = problem().run(130)
    for chunk_size in (1, 7, 64):
        assert_trees_bitwise_equal(problem().run(130, chunk_size=chunk_size), whole)
    assert first_difference(problem().run(129), whole) is not None


def test_the_records_of_chunks_are_those_of_the_whole_run():
    loop = _problems.statistics().loop()
    whole = loop.run(loop.place(_problems.statistics().state()), 130)
    state, parts = loop.place(_problems.statistics().state()), []
    for stop in (1, 8, 72, 130):
        chunk = loop.run(state, stop)
        state = chunk.state
        parts.append(chunk.records)
    assert loop.names == ("total_loss", "fit", "spread")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in loop.names}
    assert_trees_bitwise_equal(joined, dict(whole.records))
    assert len(set(whole.records["fit"].tolist())) > 100


def test_a_chunk_says_where_it_began_and_ended():
    loop = _problems.heat().loop()
    chunk = loop.run(loop.place(_problems.heat().state().replace(step=jnp.int32(5))), 12)
    assert (chunk.start, chunk.step, int(chunk.state.step)) == (5, 12, 12)
    assert {len(column) for column in chunk.records.values()} == {7}
    assert chunk.nonfinite.tolist() == [False] * 7


@pytest.mark.parametrize("begin", [0, 100], ids=["at 0", "across the buffer's end"])
def test_4096_updates_fit_into_one_chunk_and_equal_two_halves(begin):
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    start = poisoned_state().replace(step=jnp.int32(begin))
    whole = loop.run(loop.place(start), begin + 4096)
    first = loop.run(loop.place(start), begin + 2048)
    second = loop.run(first.state, begin + 4096)
    assert_trees_bitwise_equal(second.state, whole.state)
    halves = np.concatenate([first.records["fit"], second.records["fit"]])
    assert_trees_bitwise_equal(halves, whole.records["fit"])


def test_more_updates_than_a_call_holds_are_several_calls():
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    whole = loop.run(loop.place(poisoned_state()), 5000)
    first = loop.run(loop.place(poisoned_state()), 3000)
    second = loop.run(first.state, 5000)
    assert (whole.start, whole.step, len(whole.records["fit"])) == (0, 5000, 5000)
    assert_trees_bitwise_equal(second.state, whole.state)


def test_a_state_that_is_there_already_is_not_updated():
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    there = loop.place(poisoned_state().replace(step=jnp.int32(10)))
    chunk = loop.run(there, 10)
    assert (chunk.start, chunk.step, list(chunk.records)) == (10, 10, list(loop.names))
    assert chunk.nonfinite.shape == chunk.unbalanced.shape == (0,)
    assert_trees_bitwise_equal(chunk.state, there)


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        (2**31, ValueError, "stop must be in [10, 2**31), got 2147483648. Pick a number inside the range."),
        (9, ValueError, "stop must be in [10, 2**31), got 9. Pick a number inside the range."),
        (11.0, TypeError, "stop must be a whole number, got 11.0. Pass an int or a NumPy integer."),
        (True, TypeError, "stop must be a whole number, got True. Pass an int or a NumPy integer."),
    ],
    ids=["beyond the last step", "back", "float", "bool"],
)
def test_a_step_that_cannot_be_run_to_is_refused_and_consumes_nothing(stop, error, message):
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    placed = loop.place(poisoned_state().replace(step=jnp.int32(10)))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        loop.run(placed, stop)
    assert loop.run(placed, 11).step == 11


def test_the_last_step_there_is_can_be_reached_and_not_passed():
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    near_the_end = poisoned_state().replace(step=jnp.int32(2**31 - 3))
    assert int(loop.run(loop.place(near_the_end), 2**31 - 1).state.step) == 2**31 - 1
    message = f"stop must be in [{2**31 - 3}, 2**31), got {2**31}. Pick a number inside the range."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loop.run(loop.place(near_the_end), 2**31)


# Arrays of the caller


def test_the_callers_arrays_stay_alive_and_unchanged():
    problem = _problems.heat()
    given = problem.state()
    on_host = jax.tree.map(lambda leaf: leaf if keys.is_typed_key(leaf) else np.array(leaf), given)
    before = jax.tree.map(lambda leaf: leaf if keys.is_typed_key(leaf) else np.array(leaf), given)
    loop = problem.loop()
    source = problem.source()
    for state in (given, on_host):
        placed = loop.place(state)
        loop.run(placed, 3, source)
        assert_trees_bitwise_equal(state, before)
        assert_trees_bitwise_equal(placed, before)
    assert_trees_bitwise_equal(source.key, problem.source().key)


def test_a_placed_state_does_not_follow_the_numpy_arrays_it_came_from():
    room = np.ones(64, np.float32)
    first = (-room.ctypes.data % 64) // 4
    weights = room[first : first + 3]  # aligned, so that JAX would share its memory if it may
    shared = jax.device_put(weights, jax.local_devices()[0], may_alias=True)
    given = poisoned_state().replace(model_state={"w": weights})
    placed = TrainLoop(POISONED_STEP, given, Poison()).place(given)
    weights[:] = 7
    assert (np.asarray(shared) == 7).all(), "nothing is shared here, so nothing is shown"
    assert (np.asarray(placed.model_state["w"]) == 1).all()


# Refresh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Count:
    """Adds what the source gives to a counter in `balancer_state`, at multiples of `every`."""

    every: int | jax.Array

    def __call__(self, state, source):
        more = source(state.step)["data"]["target"]
        count = state.balancer_state["count"]
        fires = state.step % self.every == 0
        return state.replace(balancer_state={"count": jnp.where(fires, count + more, count)})


def counted(stop, every, chunk_size=None, **poison):
    state = poisoned_state().replace(balancer_state={"count": jnp.float32(0)})
    policy = "skip" if poison else "raise"
    loop = TrainLoop(POISONED_STEP, state, Poison(**poison), refresh=Count(every), on_nonfinite=policy)
    state = loop.place(state)
    for end in range(chunk_size or stop, stop + 1, chunk_size or stop):
        state = loop.run(state, end).state
    return state


def test_a_refresh_comes_before_the_batch_of_its_step_whatever_the_chunks():
    steps = np.arange(20)
    for every in (1, 3, 7):
        expected = np.sum(np.sin(steps[steps % every == 0].astype(np.float32)))
        state = counted(20, every)
        np.testing.assert_allclose(state.balancer_state["count"], expected, atol=1e-5)
        assert_trees_bitwise_equal(counted(20, every, chunk_size=4), state)
        assert_trees_bitwise_equal(state.model_state, poisoned_run(20).state.model_state)


def test_another_schedule_of_a_refresh_compiles_nothing():
    counted(20, 3)
    with _problems.compilations() as compiled:
        counted(20, 5)
    assert [name for name in compiled if "_program" in name] == []


def test_a_refresh_is_kept_where_the_update_of_its_step_is_left_out():
    state = counted(20, 3, loss=6)
    assert_trees_bitwise_equal(state.balancer_state, counted(20, 3).balancer_state)
    assert first_difference(state.model_state, counted(20, 3).model_state) is not None


# Executables


def test_a_second_loop_and_a_second_fit_of_the_same_program_compile_nothing():
    problem = _problems.heat()
    trainer = Trainer(20, progress=False)
    problem.loop()
    trainer.fit(problem.module, seed=0, **problem.arguments)
    with _problems.compilations() as compiled:
        problem.loop()
        trainer.fit(problem.module, seed=0, **problem.arguments)
        trainer.fit(problem.module, seed=1, **problem.arguments)
    assert compiled == []


def test_policies_share_one_executable():
    TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    with _problems.compilations() as compiled:
        for policy in POLICIES:
            TrainLoop(POISONED_STEP, poisoned_state(), Poison(), on_nonfinite=policy)
    assert compiled == []


def test_fresh_restored_committed_weak_and_sharded_states_lead_to_one_executable():
    run_python(
        """
        import tempfile
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from phijax_rng import Checkpoints, TrainLoop, Trainer
        from tests import _problems
        from tests._bitwise import assert_trees_bitwise_equal

        assert jax.device_count() == 8
        problem = _problems.heat()
        fresh = problem.state()
        folder = tempfile.mkdtemp()
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(fresh)
            checkpoints.wait()
            restored = checkpoints.restore(fresh)
        committed = jax.device_put(fresh, jax.devices()[3])

        def weak(leaf):
            return jnp.full(leaf.shape, 0.0) if leaf.shape == (8,) else leaf

        weak_typed = fresh.replace(model_state=jax.tree.map(weak, fresh.model_state), step=0)
        assert weak_typed.model_state["hidden"]["bias"].weak_type
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

        def shard(leaf):
            spec = PartitionSpec("x") if leaf.shape[:1] == (8,) else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(mesh, spec))

        sharded = jax.tree.map(shard, fresh)
        assert len(sharded.model_state["output"]["kernel"].sharding.device_set) == 8

        ends = []
        with _problems.compilations() as compiled:
            for state in (fresh, restored, committed, weak_typed, sharded):
                loop = TrainLoop(problem.train_step, state, problem.source())
                ends.append(loop.run(loop.place(state), 5).state)
                trainer = Trainer(5, progress=False)
                fitted = trainer.fit_state(
                    problem.module, state, optimizer=problem.optimizer, source=problem.source()
                )
                ends.append(fitted.state)
        programs = [name for name in compiled if "_program" in name]
        assert len(programs) == 1, compiled
        for end in ends:
            assert_trees_bitwise_equal(end, ends[0])
        """,
        env=EIGHT_DEVICES,
    )


SCALE = 1.0
SMALL = np.arange(3.0, dtype=np.float32)
BIG = np.ones(100_000, dtype=np.float32)


def _losses_with_globals(params, batches):
    small, big = jnp.asarray(SMALL), jnp.asarray(BIG)
    return {"fit": SCALE * jnp.sum(small * params["w"] ** 2) + jnp.max(big)}


def first_loss_with_globals():
    module = LossModule(lambda key: {"w": jnp.ones(3)}, _losses_with_globals, batch_keys=("data",))
    loop = TrainLoop(LossTrainStep(module, POISONED_STEP.optimizer), poisoned_state(), Poison())
    return float(loop.run(loop.place(poisoned_state()), 1).records["fit"][0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "changed", "loss"),
    [
        ("SCALE", 2.0, 7.0),
        ("SMALL", np.array([0, 1, 5], dtype=np.float32), 7.0),
        ("BIG", np.append(np.ones(99_999, np.float32), np.float32(9)), 12.0),
    ],
    ids=["float", "small array", "big array"],
)
def test_a_global_that_changed_between_two_loops_changes_the_result(monkeypatch, name, changed, loss):
    assert first_loss_with_globals() == 4.0
    monkeypatch.setitem(globals(), name, changed)
    assert first_loss_with_globals() == loss
    monkeypatch.undo()
    assert first_loss_with_globals() == 4.0


def test_the_program_is_named_by_its_text():
    one = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    faster = dataclasses.replace(POISONED_STEP, optimizer=optax.adam(0.2))
    assert re.fullmatch("[0-9a-f]{64}", one.program)
    assert TrainLoop(POISONED_STEP, poisoned_state(), Poison(loss=3)).program == one.program
    assert TrainLoop(faster, poisoned_state(), Poison()).program != one.program


def test_another_source_of_the_same_structure_needs_no_other_executable():
    own = poisoned_run(5)
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison(loss=2))
    assert_trees_bitwise_equal(loop.run(loop.place(poisoned_state()), 5, Poison()).state, own.state)
    with pytest.raises(NonFiniteError):
        loop.run(loop.place(poisoned_state()), 5)


# Non-finite numbers


@pytest.mark.parametrize("bad", [0, 1, 7, 19])
def test_a_planted_nan_names_step_and_term_and_keeps_the_state_before_it(bad):
    with pytest.raises(NonFiniteError) as caught:
        poisoned_run(20, loss=bad)
    assert str(caught.value) == (
        f"training became non-finite at step {bad}: 'term' is nan. The state before that update is kept; "
        f"draw its batch again with source({bad}), or pass on_nonfinite='skip'."
    )
    assert (caught.value.step, caught.value.terms) == (bad, ("term",))
    expected = poisoned_run(bad).state if bad else poisoned_state()
    assert_trees_bitwise_equal(caught.value.state, expected)
    assert first_difference(caught.value.state, poisoned_run(bad + 1).state) is not None
    assert {len(column) for column in caught.value.chunk.records.values()} == {bad}


def test_nan_in_the_gradients_alone_is_a_fault_of_the_model_state():
    with pytest.raises(NonFiniteError) as caught:
        poisoned_run(20, gradient=7)
    assert str(caught.value) == (
        "training became non-finite at step 7: every loss is finite but the update turns model_state['w'], "
        "optimizer_state[0].mu['w'], optimizer_state[0].nu['w'] non-finite. The state before that update is "
        "kept; draw its batch again with source(7), or pass on_nonfinite='skip'."
    )
    assert caught.value.terms == ("model_state",)
    assert_trees_bitwise_equal(caught.value.state, poisoned_run(7).state)


def test_a_diagnostic_is_recorded_and_never_trips_the_guard():
    chunk = poisoned_run(20, diagnostic=7)
    assert np.flatnonzero(np.isnan(chunk.records["watched"])).tolist() == [7]
    assert not chunk.nonfinite.any()
    assert_trees_bitwise_equal(chunk.state, poisoned_run(20).state)


@pytest.mark.parametrize(
    ("where", "terms"),
    [({"loss": 7}, ("term",)), ({"gradient": 7}, ("model_state",))],
    ids=["loss", "gradient"],
)
def test_a_nan_diagnostic_is_not_blamed_for_another_fault(where, terms):
    with pytest.raises(NonFiniteError) as caught:
        poisoned_run(20, diagnostic=7, **where)
    assert caught.value.terms == terms


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_skip_leaves_the_update_out_and_spends_step_and_key(where):
    chunk = poisoned_run(20, policy="skip", **{where: 7})
    assert np.flatnonzero(chunk.nonfinite).tolist() == [7]
    before, clean = poisoned_run(7).state, poisoned_run(8).state
    skipped = poisoned_run(8, policy="skip", **{where: 7}).state
    expected = before.replace(step=clean.step, rng_key=clean.rng_key)
    assert_trees_bitwise_equal(skipped, expected)
    assert first_difference(skipped, clean) is not None
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    assert_trees_bitwise_equal(chunk.state, loop.run(loop.place(expected), 20).state)


@pytest.mark.parametrize("bad", [(0,), (19,), (0, 1, 2), (3, 4, 11, 19)], ids=str)
def test_skip_leaves_out_every_update_that_is_not_finite(bad):
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    expected = loop.place(poisoned_state())
    for step in range(20):
        following = loop.run(expected, step + 1).state
        spent = expected.replace(step=following.step, rng_key=following.rng_key)
        expected = spent if step in bad else following
    chunk = poisoned_run(20, policy="skip", loss=np.array(bad))
    assert np.flatnonzero(chunk.nonfinite).tolist() == list(bad)
    assert np.flatnonzero(np.isnan(chunk.records["term"])).tolist() == list(bad)
    assert_trees_bitwise_equal(chunk.state, expected)
    assert {len(column) for column in chunk.records.values()} == {20}


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_ignore_goes_on_with_the_nan(where):
    chunk = poisoned_run(20, policy="ignore", **{where: 7})
    assert chunk.step == int(chunk.state.step) == 20
    if where == "gradient":
        assert np.flatnonzero(chunk.nonfinite).tolist() == list(range(7, 20))
        assert np.isnan(chunk.state.model_state["w"]).all()
    else:
        # A NaN that is added to a loss has no gradient.
        assert np.flatnonzero(chunk.nonfinite).tolist() == [7]
        assert_trees_bitwise_equal(chunk.state, poisoned_run(20).state)


def test_the_three_policies_give_equal_bits_on_a_finite_run():
    ends = [poisoned_run(50, policy=policy) for policy in POLICIES]
    for end in ends[1:]:
        assert_trees_bitwise_equal(end.state, ends[0].state)
        assert_trees_bitwise_equal(dict(end.records), dict(ends[0].records))


def test_a_run_that_stopped_at_a_nan_goes_on_from_the_state_it_kept():
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison(loss=7))
    with pytest.raises(NonFiniteError) as caught:
        loop.run(loop.place(poisoned_state()), 20)
    resumed = loop.run(loop.place(caught.value.state), 20, Poison())
    assert_trees_bitwise_equal(resumed.state, poisoned_run(20).state)


# What a train step may not do


def _forgets_the_step(state, batches, key):
    return state, {"fit": jnp.float32(1)}


def _skips_a_step(state, batches, key):
    return state.replace(step=state.step + 2), {"fit": jnp.float32(1)}


def _changes_a_dtype(state, batches, key):
    model_state = {"w": state.model_state["w"].astype(jnp.float16)}
    return state.replace(step=state.step + 1, model_state=model_state), {"fit": jnp.float32(1)}


def _changes_a_shape(state, batches, key):
    model_state = {"w": state.model_state["w"][:2]}
    return state.replace(step=state.step + 1, model_state=model_state), {"fit": jnp.float32(1)}


def _changes_the_structure(state, batches, key):
    model_state = {"v": state.model_state["w"]}
    return state.replace(step=state.step + 1, model_state=model_state), {"fit": jnp.float32(1)}


def _returns_no_mapping(state, batches, key):
    return state.replace(step=state.step + 1), jnp.float32(1)


def _returns_no_losses(state, batches, key):
    return state.replace(step=state.step + 1), {}


def _returns_no_state(state, batches, key):
    return 5, {"fit": jnp.float32(1)}


@pytest.mark.parametrize(
    ("train_step", "reached"), [(_forgets_the_step, 0), (_skips_a_step, 8)], ids=["not raised", "raised by 2"]
)
def test_a_train_step_must_raise_the_step_by_one(train_step, reached):
    loop = TrainLoop(train_step, poisoned_state(), Poison())
    message = (
        f"train_step must raise state.step by one; after 4 updates from step 0 it is {reached}. "
        "Return state.replace(step=state.step + 1, ...)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loop.run(loop.place(poisoned_state()), 4)


@pytest.mark.parametrize(
    ("train_step", "message"),
    [
        (
            _changes_a_dtype,
            "train_step changed the type of state.model_state['w']\n"
            "  given:    float32[3]\n"
            "  returned: float16[3]\n"
            "Return every leaf with its shape and dtype.",
        ),
        (
            _changes_a_shape,
            "train_step changed the type of state.model_state['w']\n"
            "  given:    float32[3]\n"
            "  returned: float32[2]\n"
            "Return every leaf with its shape and dtype.",
        ),
    ],
    ids=["dtype", "shape"],
)
def test_a_train_step_must_keep_shapes_and_dtypes(train_step, message):
    with pytest.raises(ValueError) as caught:
        TrainLoop(train_step, poisoned_state(), Poison())
    assert str(caught.value) == message


def test_a_train_step_must_keep_the_structure():
    with pytest.raises(ValueError) as caught:
        TrainLoop(_changes_the_structure, poisoned_state(), Poison())
    first, given, returned, last = str(caught.value).split("\n")
    assert first == "train_step changed the structure of the state"
    assert given.startswith("  given:    ") and "'w'" in given
    assert returned.startswith("  returned: ") and "'v'" in returned
    assert last == "Return state.replace(...) with leaves of the same structure."


def _returns_a_vector(state, batches, key):
    return state.replace(step=state.step + 1), {"fit": state.model_state["w"]}


def _returns_text_beside_losses(state, batches, key):
    return state.replace(step=state.step + 1), StepOutput({"fit": jnp.float32(1)}, diagnostics={"own": "x"})


@pytest.mark.parametrize(
    ("train_step", "error", "message"),
    [
        (
            _returns_a_vector,
            ValueError,
            "the losses of train_step['fit'] must be a scalar, got shape (3,). "
            "Reduce it, for example with jnp.mean.",
        ),
        (
            _returns_text_beside_losses,
            TypeError,
            "the diagnostics of train_step['own'] must be a real scalar, got 'x'. Return a number.",
        ),
        (
            lambda state, batches: state,
            TypeError,
            "train_step must take (state, batches, key), got (state, batches). Fix its parameters.",
        ),
        (_returns_no_mapping, TypeError, "the losses of train_step must be a mapping, got "),
        (_returns_no_losses, ValueError, "the losses of train_step must name at least one entry, got (). "),
        (
            _returns_no_state,
            TypeError,
            "train_step must return a TrainState first, got 5. Use state.replace(...).",
        ),
        (5, TypeError, "train_step must be callable, got 5. Pass a function."),
    ],
    ids=["a vector", "text", "no key", "no mapping", "no losses", "no state", "no function"],
)
def test_a_train_step_must_return_a_state_and_named_losses(train_step, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        TrainLoop(train_step, poisoned_state(), Poison())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"on_nonfinite": "stop"},
            ValueError,
            "on_nonfinite must be one of 'raise', 'skip', 'ignore', got 'stop'. Pick one of them.",
        ),
        ({"state": 5}, TypeError, "state must be a TrainState, got 5. Use initialize_train_state."),
    ],
    ids=["policy", "state"],
)
def test_arguments_are_refused_before_anything_is_traced(change, error, message):
    def untraced(state, batches, key):
        raise AssertionError("traced")

    arguments = {"train_step": untraced, "state": poisoned_state(), "source": Poison(), **change}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        TrainLoop(**arguments)


# In a loop of one's own


def test_chunks_move_nothing_between_host_and_device_that_is_not_said():
    loop = TrainLoop(POISONED_STEP, poisoned_state(), Poison())
    state = loop.run(loop.place(poisoned_state()), 1).state
    with jax.transfer_guard("disallow"):
        for stop in range(2, 12):
            state = loop.run(state, stop).state
    assert_trees_bitwise_equal(state, poisoned_run(11).state)
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(Exception, match="Disallowed host-to-device transfer"),
    ):
        jax.jit(lambda number: number)(3)


def test_the_loop_alone_gives_the_bits_of_the_trainer(tmp_path):
    problem = _problems.dropout()
    loop = problem.loop()
    state = loop.place(problem.state())
    with Checkpoints(tmp_path / "own") as checkpoints:
        while int(state.step) < 20:
            state = loop.run(state, int(state.step) + 4).state
            checkpoints.save(state)
        checkpoints.wait()
        halfway = checkpoints.restore(state, 16)
    fitted = Trainer(20, progress=False).fit(problem.module, seed=0, **problem.arguments)
    assert_trees_bitwise_equal(state, fitted.state)
    assert_trees_bitwise_equal(loop.run(loop.place(halfway), 20).state, fitted.state)


def test_a_record_named_step_is_refused():
    def train_step(state, batches, key):
        return state.replace(step=state.step + 1), {"step": jnp.float32(0)}

    message = (
        "the records of train_step must not be named 'step', got 'step'. "
        "Rename it: rows of the history have a step already."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        TrainLoop(train_step, poisoned_state(), Poison())
