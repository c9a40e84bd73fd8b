"""States that are updated in place: the same run, in half the memory, and nothing of others is written over.

Here any state is large; `usual` switches back to the rule that users have.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    Evaluate,
    GradNormBalancer,
    LossModule,
    LossTrainStep,
    PoolDataModule,
    ResidualDistributionSampler,
    Trainer,
    TrainLoop,
    initialize_train_state,
    keys,
)
from phijax_rng.devices.placement import resolve
from phijax_rng.errors import NonFiniteError
from phijax_rng.sampling.geometry import Box
from phijax_rng.training import donation
from phijax_rng.training.donation import Donation
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import Samplers, fit, resumed
from tests._selection import mostly_full
from tests.training import test_guard, test_loop


def own_heat():
    """The heat problem with a loop of its own: other tests share the one of `_problems.heat()`."""
    return dataclasses.replace(_problems.heat())


@pytest.fixture
def usual(monkeypatch):
    """A function that switches back to the rule that users have."""
    large, least = donation.LARGE_BYTES, donation._LEAST_BYTES
    monkeypatch.setattr(donation, "LARGE_BYTES", 0)
    monkeypatch.setattr(donation, "_LEAST_BYTES", 0)

    def switch():
        monkeypatch.setattr(donation, "LARGE_BYTES", large)
        monkeypatch.setattr(donation, "_LEAST_BYTES", least)

    return switch


# The rule


def test_a_state_is_large_from_so_many_bytes_of_model_and_optimizer():
    begun = initialize_train_state(
        {"w": jnp.zeros(2)}, optax.sgd(0.1), {"kept": jnp.zeros(9)}, keys.split_root(0)
    )

    def state(elements):
        return begun.replace(optimizer_state={"m": jax.ShapeDtypeStruct((elements,), jnp.float32)})

    assert Donation.of(state(2**24 - 3)) is None
    large = Donation.of(state(2**24 - 2))
    assert large is not None
    # Keys, the step, the balancer's state and what is small are not written over.
    written, kept = large.split(state(2**24 - 2))
    assert ([leaf.size for leaf in written], len(kept)) == ([2**24 - 2], 6)


# Events


def outcome(seed, policy, chunk_size):
    try:
        chunks = test_guard.run(*test_guard.random(seed), policy, chunk_size)
    except NonFiniteError as error:
        return error.state, (str(error), error.leaves, error.step, error.first_step, error.terms)
    flags = np.concatenate([chunk.nonfinite for chunk in chunks]).tolist()
    return chunks[-1].state, (flags, [chunk.turned for chunk in chunks if chunk.turned])


@pytest.mark.parametrize("seed", mostly_full(range(12), everyday=(1, 5)))
def test_random_events_have_the_outcome_of_the_usual_program(usual, seed):
    cases = [(policy, size) for policy in test_loop.POLICIES for size in (10, 3)]
    found = [outcome(seed, *case) for case in cases]
    usual()
    for case, (state, rest), (wanted, others) in zip(
        cases, found, (outcome(seed, *case) for case in cases), strict=True
    ):
        assert_trees_bitwise_equal(state, wanted)
        assert rest == others, case


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_bad_update_at_any_place_of_a_chunk_is_not_made(usual, kind):
    loops = {
        policy: TrainLoop(
            test_loop.POISONED_STEP, test_loop.poisoned_state(), test_loop.Poison(), on_nonfinite=policy
        )
        for policy in ("raise", "skip")
    }
    assert loops["raise"]._executable is loops["skip"]._executable
    clean = test_loop.poisoned_state()
    for place in range(6):
        poison = test_loop.Poison(**{kind: jnp.int32(place)})
        with pytest.raises(NonFiniteError) as caught:
            loops["raise"].run(test_loop.poisoned_state(), 6, poison)
        error = caught.value
        assert (error.step, int(error.state.step)) == (place, place)
        assert_trees_bitwise_equal(error.state, clean)
        assert error.leaves[:1] == (() if kind == "loss" else ("model_state['w']",))
        skipped = loops["skip"].run(test_loop.poisoned_state(), 6, poison)
        assert skipped.nonfinite.tolist() == [step == place for step in range(6)]
        again = loops["skip"].run(clean, 6, poison)
        assert_trees_bitwise_equal(again.state, skipped.state)
        assert first_difference(again.state, loops["skip"].run(clean, 6, test_loop.Poison()).state)
        clean = loops["raise"].run(clean, place + 1).state


# The same run


def _line(params, batches):
    return {"fit": jnp.sum(params["w"] * batches["data"]["inputs"].sum(0))}


def test_where_arithmetic_is_exact_both_programs_end_in_the_same_bits(usual):
    # Whole numbers, and rates that are powers of two: no operation rounds, in whatever order.
    rows = np.arange(24, dtype=np.float32).reshape(8, 3) - 12
    module = LossModule(lambda key: {"w": jnp.arange(3.0)}, _line, batch_keys=("data",))
    data = PoolDataModule({"data": {"inputs": rows}}, {"data": 4})

    def run(rate):
        options = {"datamodule": data, "optimizer": optax.sgd(rate, momentum=0.5), "seed": 0}
        return Trainer(12, progress=False, chunk_size=5).fit(module, **options)

    here, other = run(0.5), run(0.25)
    usual()
    there = run(0.5)
    assert_trees_bitwise_equal(here.state, there.state)
    assert here.history == there.history
    assert first_difference(other.state, there.state)


def _residuals(params, batches):
    return {"data": _problems._mlp(params, batches["data"]["inputs"]) - 1}


def _two_losses(params, batches):
    error = _residuals(params, batches)["data"]
    return {"fit": jnp.mean(error**2), "size": jnp.mean(jnp.abs(error))}


_DATA = PoolDataModule(
    {"data": {"inputs": np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)}}, {"data": 4}
)
_SQUARE = Box([(0.0, 1.0), (0.0, 1.0)])
_POINTS = ResidualDistributionSampler(_SQUARE, num_candidates=16, refresh_every_n_steps=2)
_CASES = {
    "plain": ({}, {}),
    "average": ({"ema_decay": 0.9}, {}),
    "micro-batches": ({"microbatches": 2}, {}),
    "balancer": ({}, {"balancer": GradNormBalancer(("fit", "size"), update_every_n_steps=2)}),
    "adaptive points": ({}, {"datamodule": Samplers({"data": _POINTS}, {"data": 4})}),
    "L-BFGS": ({}, {"optimizer": optax.lbfgs(memory_size=3)}),
    "skip": ({"on_nonfinite": "skip"}, {}),
}


def _width(params, key):
    return {"norm": jnp.sum(params["hidden"]["kernel"] ** 2), "draw": jax.random.uniform(key)}


@pytest.mark.parametrize("name", mostly_full(list(_CASES), everyday=("plain",)))
def test_a_run_resumed_at_any_cut_ends_in_its_bits(usual, name, tmp_path):
    trainer, options = _CASES[name]
    module = LossModule(
        _problems._init_mlp,
        _two_losses,
        batch_keys=("data",),
        loss_names=("fit", "size"),
        residuals=_residuals,
    )

    def run(stop, folder=None, resume=False, size=None):
        host = Trainer(
            stop,
            progress=False,
            chunk_size=size,
            callbacks=(Evaluate(_width, every_n_steps=2),),
            log_every_n_steps=2,
            checkpoints=None if folder is None else Checkpoints(folder, max_to_keep=None),
            **trainer,
        )
        given = {"datamodule": _DATA, "optimizer": optax.adam(1e-2), "seed": 0, **options}
        return host.fit(module, **given, resume=resume)

    whole = run(7)
    assert_trees_bitwise_equal(run(7, size=2).state, whole.state)
    for cut in (1, 4):
        folder = tmp_path / str(cut)
        run(cut, folder)
        again = run(7, folder, resume=True)
        assert_trees_bitwise_equal(again.state, whole.state)
        assert again.history == whole.history
    assert first_difference(run(6).state.model_state, whole.state.model_state)
    usual()
    for here, there in zip(*(jax.tree.leaves(r.state.model_state) for r in (whole, run(7))), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-5)


# What belongs to others


def test_nothing_that_a_caller_holds_is_written_over(usual):
    held = {"w": jnp.arange(3.0)}
    optimizer = optax.GradientTransformation(
        lambda params: {"z": params, "kept": held}, lambda grads, state, params: (grads, state)
    )
    module = LossModule(
        lambda key: held, lambda p, batches: {"fit": jnp.sum(p["w"] ** 2)}, batch_keys=("data",)
    )
    for _ in range(2):
        result = Trainer(3, progress=False).fit(module, datamodule=_DATA, optimizer=optimizer, seed=0)
    np.testing.assert_array_equal(held["w"], [0, 1, 2])
    assert first_difference(result.state.model_state, held)

    problem = own_heat()
    state = problem.state()
    bits = jax.tree.map(lambda leaf: leaf + 0, state.model_state)
    first, second = (
        Trainer(4, progress=False).fit_state(
            problem.module, state, optimizer=problem.optimizer, source=problem.source()
        )
        for _ in range(2)
    )
    assert_trees_bitwise_equal(first.state, second.state)
    assert_trees_bitwise_equal(state.model_state, bits)
    # A result is not written over by the run that continues from it.
    kept = jax.tree.map(lambda leaf: leaf + 0, first.state.model_state)
    Trainer(6, progress=False).fit_state(
        problem.module, first.state, optimizer=problem.optimizer, source=problem.source()
    )
    assert_trees_bitwise_equal(first.state.model_state, kept)


class Greedy:
    """Keeps the state of every call, and donates another."""

    every_n_steps = 2

    def __init__(self):
        self.kept = {}

    def __call__(self, event):
        self.kept[event.step] = event.state
        jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)(
            event.state.model_state
        )
        event.evaluation_params["output"]["bias"].delete()


def test_what_a_callback_keeps_or_donates_is_apart_from_the_run(usual, monkeypatch):
    monkeypatch.setattr("phijax_rng.devices.processes._LENT_BYTES", 0)
    problem, greedy = own_heat(), Greedy()
    alone = fit(problem, 6)
    result = fit(problem, 6, trainer={"callbacks": (greedy,)})
    assert_trees_bitwise_equal(result.state, alone.state)
    for step, state in greedy.kept.items():
        assert_trees_bitwise_equal(state, fit(problem, step).state)
    assert first_difference(greedy.kept[2].model_state, greedy.kept[4].model_state)


def test_a_save_in_the_background_has_the_bits_of_its_step(usual, tmp_path):
    problem = own_heat()
    saves = {"every_n_steps": 1, "asynchronous": True}
    fit(problem, 8, tmp_path, saves=saves)
    for step in range(1, 9):
        restored = Checkpoints(tmp_path).restore(problem.state(), step)
        assert_trees_bitwise_equal(restored, problem.run(step))


def test_an_error_in_a_call_keeps_what_is_on_disk_and_says_so(usual, tmp_path, monkeypatch):
    chunk, calls = TrainLoop._chunk, []

    def fails(self, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return chunk(self, *arguments)

    monkeypatch.setattr(TrainLoop, "_chunk", fails)
    problem = own_heat()
    with pytest.raises(RuntimeError, match=r"^the device is gone") as caught:
        fit(problem, 8, tmp_path, saves={"every_n_steps": 2}, trainer={"chunk_size": 2})
    (note,) = caught.value.__notes__
    assert note == f"the state was being updated in place; the newest checkpoint is step 4 in {tmp_path}"
    assert Checkpoints(tmp_path).steps == (2, 4)
    again = resumed(problem, 8, tmp_path)
    assert_trees_bitwise_equal(again.state, fit(problem, 8).state)


# Memory


def _wide(key):
    layers = jax.random.split(key, 4)
    return {f"layer{i}": jax.random.normal(layer, (256, 256)) / 16 for i, layer in enumerate(layers)}


def _deep(params, batches):
    hidden = batches["data"]["inputs"] @ jnp.ones((2, 256))
    for weights in params.values():
        hidden = jnp.tanh(hidden @ weights)
    return {"fit": jnp.mean((hidden - 1) ** 2)}


def temporary(step):
    """Bytes that the program needs besides the state and in place of it, in parts of the state's."""
    state = initialize_train_state(_wide(jax.random.key(0)), optax.adam(1e-3), {}, keys.split_root(0))
    source = _DATA.train_batch_source(("data",), state.sampling_key)
    found = TrainLoop(step, state, source)._executable.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state.model_state, state.optimizer_state)))
    return found.temp_size_in_bytes / size, found.alias_size_in_bytes / size


def test_the_program_needs_the_gradient_besides_the_state(usual):
    step = LossTrainStep(LossModule(_wide, _deep, batch_keys=("data",)), optax.adam(1e-3))
    more, reused = temporary(step)
    assert more < 0.6, more  # the gradient is a third
    assert reused > 0.99

    # The control: a step that is not split has its new state beside the old one.
    def custom(state, batches, key):
        return step(state, batches, key)

    whole, _ = temporary(custom)
    assert whole > 0.9, whole
    usual()
    assert temporary(step)[1] == 0


def test_the_states_of_a_run_do_not_pile_up(usual):
    problem, seen = own_heat(), []

    class Count:
        every_n_steps = 2

        def __call__(self, event):
            gc.collect()
            seen.append(sum(not array.is_deleted() for array in jax.live_arrays()))

    fit(problem, 10, trainer={"callbacks": (Count(),), "chunk_size": 2})
    assert len(set(seen[1:])) == 1, seen


def by_rows(state):
    """Splits what has rows for eight devices."""
    split = jax.sharding.PartitionSpec("data")
    return jax.tree.map(lambda leaf: split if leaf.ndim == 2 and leaf.shape[0] % 8 == 0 else None, state)


def split_in_place():
    """Trains on eight devices, in calls of several lengths, and looks at the memory of the program."""
    donation.LARGE_BYTES = donation._LEAST_BYTES = 0
    step = LossTrainStep(LossModule(_wide, _deep, batch_keys=("data",)), optax.adam(1e-3))
    state = initialize_train_state(_wide(jax.random.key(0)), step.optimizer, {}, keys.split_root(0))
    source = PoolDataModule({"data": {"inputs": np.ones((16, 2), np.float32)}}, {"data": 8})
    source = source.train_batch_source(("data",), state.sampling_key)
    ends = []
    for options in ({"devices": 1}, {"devices": 8}, {"devices": 8, "shardings": by_rows}):
        loop = TrainLoop(step, state, source, placement=resolve(**options))
        whole = loop.run(loop.place(state), 6).state
        own = loop.owned(lambda: state)
        for stop in (2, 6):
            own = loop.run(own, stop, donate=True).state
        assert_trees_bitwise_equal(own, whole, dict_order=False)
        found = loop._executable.memory_analysis()
        print(found.temp_size_in_bytes / found.alias_size_in_bytes)
        ends.append(jax.tree.map(np.asarray, own.model_state))
    for end in ends[1:]:
        for here, there in zip(*map(jax.tree.leaves, (end, ends[0])), strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-5)


@pytest.mark.full
def test_a_state_that_is_split_over_devices_is_updated_in_place(in_eight):
    more = [float(line) for line in in_eight(split_in_place).splitlines()]
    # The gradient, and on several devices its sum; a second state would be 1 more.
    assert more[0] < 0.6 and more[1] < 0.8, more
    # Of the split state an eighth is on each device, and the gradient of all rows.
    assert more[2] < 3, more


def test_what_a_model_carries_beside_its_arrays_is_not_written_over(usual):
    model = {"w": jnp.ones(3), "activation": jnp.tanh, "name": "rows"}
    state = initialize_train_state(model, optax.adam(0.1), {}, keys.split_root(0))
    parts = Donation.of(state)
    given, kept = parts.split(state)
    # The weights, the count and the two moments of Adam.
    assert [leaf.shape for leaf in given] == [(3,), (), (3,), (3,)]
    again = parts.joined(given, kept)
    assert_trees_bitwise_equal(again, state)
    assert (again.model_state["activation"], again.model_state["name"]) == (jnp.tanh, "rows")
    usual()
    assert Donation.of(state) is None
