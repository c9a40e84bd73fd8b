import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import LossModule, LossTrainStep, TrainLoop, TrainState, initialize_train_state, keys
from phijax_rng.errors import NonFiniteError
from tests._bitwise import assert_trees_bitwise_equal
from tests._selection import mostly_full
from tests._subprocess import EIGHT_DEVICES, run_python

# States by a script: an update sets every leaf to what its source says, so one program serves every case.

STEPS = 10
MODEL = {
    "bool": jnp.zeros(2, bool),
    "bfloat16": jnp.zeros(2, jnp.bfloat16),
    "complex": jnp.zeros(2, jnp.complex64),
    "float16": jnp.zeros(2, jnp.float16),
    "int": jnp.zeros(2, jnp.int32),
    "large": jnp.zeros((3, 2000)),
    "mask": jnp.zeros(2),
    "scalar": jnp.zeros(()),
}
OPTIMIZER = ({"nu": jnp.zeros(3)}, jnp.zeros((), jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Script:
    """The loss and the state after the update of each step; a traceable source."""

    loss: jax.Array
    states: tuple

    def __call__(self, step):
        return {"data": {"loss": self.loss[step], "states": jax.tree.map(lambda all: all[step], self.states)}}


def _follow(state, batches, key):
    model, optimizer = batches["data"]["states"]
    following = state.replace(model_state=model, optimizer_state=optimizer, step=state.step + 1)
    return following, {"fit": batches["data"]["loss"]}


def scripted(states, loss=None) -> tuple[TrainState, Script]:
    """The first of these states, and the source that leads to the others."""
    loss = np.zeros(STEPS, np.float32) if loss is None else np.float32(loss)
    first = jax.tree.map(lambda leaves: jnp.asarray(leaves[0]), states)
    state = initialize_train_state(first[0], optax.identity(), {}, keys.split_root(0))
    return state.replace(optimizer_state=first[1]), Script(loss, jax.tree.map(lambda all: all[1:], states))


def constant():
    """States in which nothing changes, as NumPy arrays with one row for each step and the first."""
    rows = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], STEPS + 1, axis=0), (MODEL, OPTIMIZER))
    return jax.tree.map(lambda leaf: leaf.copy(), rows)


def random(seed: int):
    """States whose entries turn non-finite and back at random, and losses that are rarely NaN."""
    rng = np.random.default_rng(seed)

    def spoilt(leaf):
        if leaf.dtype.kind in "ib":
            return rng.integers(0, 2, leaf.shape).astype(leaf.dtype)
        # Some entries begin non-finite and become finite; in some leaves one turns, for a while.
        rows = np.arange(STEPS + 1).reshape(-1, *[1] * (leaf.ndim - 1))
        shape = leaf.shape[1:]
        bad = (rng.random(shape) < 0.3) & (rows < rng.integers(0, STEPS + 2, shape))
        if rng.random() < 0.15:
            first, *entry = (rng.integers(size) for size in leaf.shape)
            bad[(slice(first, first + 2), *entry)] = True
        kinds = [np.nan, np.inf, -np.inf, *([complex(0, np.inf)] if leaf.dtype.kind == "c" else [])]
        leaf[bad] = rng.choice(kinds, leaf.shape)[bad]
        return leaf

    loss = np.where(rng.random(STEPS) < 0.05, np.inf, 1)
    return jax.tree.map(spoilt, constant()), loss


def _leaves(states, step):
    return {
        ("model_state" if path[0].idx == 0 else "optimizer_state") + jax.tree_util.keystr(path[1:]): leaf[
            step
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(states)
    }


def turned(before, after):
    """The rule, in NumPy: paths of leaves in which a finite entry is no longer finite."""
    finite = {name: np.isfinite(leaf.astype(np.complex64)) for name, leaf in before.items()}
    new = {name: np.isfinite(leaf.astype(np.complex64)) for name, leaf in after.items()}
    return tuple(name for name in before if (finite[name] & ~new[name]).any())


def expected(states, loss, policy):
    """Which updates are non-finite, their leaves, and the step whose state stands at the end."""
    found, now = [], _leaves(states, 0)
    for step in range(STEPS):
        following = _leaves(states, step + 1)
        paths = turned(now, following)
        if paths or not np.isfinite(loss[step]):
            found.append((step, paths))
            if policy == "raise":
                break
            if policy == "skip":
                continue
        now = following
    return found, now


def run(states, loss, policy, chunk_size=STEPS):
    state, script = scripted(states, loss)
    loop = TrainLoop(_follow, state, script, on_nonfinite=policy)
    state, chunks = loop.place(state), []
    for stop in range(chunk_size, STEPS + chunk_size, chunk_size):
        chunks.append(loop.run(state, min(stop, STEPS)))
        state = chunks[-1].state
    return chunks


def _state_leaves(state):
    named = {"model_state": state.model_state, "optimizer_state": state.optimizer_state}
    return {
        name + jax.tree_util.keystr(path): np.asarray(leaf)
        for name, tree in named.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize("seed", mostly_full(range(40), everyday=range(4)))
def test_an_update_is_an_event_if_and_only_if_it_turns_a_finite_entry_non_finite(seed):
    states, loss = random(seed)
    events, _ = expected(states, loss, "raise")
    if events:
        (bad, paths), *_ = events
        with pytest.raises(NonFiniteError) as caught:
            run(states, loss, "raise")
        error = caught.value
        assert (error.step, error.first_step, error.leaves) == (bad, bad, paths)
        assert_trees_bitwise_equal(_state_leaves(error.state), _leaves(states, bad), dict_order=False)
    else:
        assert run(states, loss, "raise")[-1].step == STEPS
    for policy in ("skip", "ignore"):
        events, end = expected(states, loss, policy)
        for chunk_size in (STEPS, 3):
            chunks = run(states, loss, policy, chunk_size)
            flags = np.concatenate([chunk.nonfinite for chunk in chunks])
            assert np.flatnonzero(flags).tolist() == [step for step, _ in events]
            assert_trees_bitwise_equal(_state_leaves(chunks[-1].state), end, dict_order=False)
            named = [chunk.turned for chunk in chunks if chunk.nonfinite.any()][:1]
            assert named == [paths for _, paths in events][:1]


def test_the_random_scripts_have_events_of_every_kind():
    found = [expected(*random(seed), "raise")[0] for seed in range(40)]
    assert 5 < sum(not events for events in found) < 20
    assert {path for events in found for _, paths in events for path in paths} >= {
        "model_state['bfloat16']",
        "model_state['complex']",
        "model_state['float16']",
        "model_state['large']",
        "model_state['mask']",
        "optimizer_state[0]['nu']",
    }


def test_what_was_never_finite_is_no_event_and_what_is_beside_it_is_one():
    states = constant()
    states[0]["mask"][:, 1] = -np.inf
    states[1][0]["nu"][:3] = np.inf  # as an optimizer begins; finite from step 3 on
    assert not run(states, None, "raise")[0].nonfinite.any()
    states[0]["mask"][7:, 0] = -np.inf
    with pytest.raises(NonFiniteError) as caught:
        run(states, None, "raise")
    message = (
        "training became non-finite at step 6: every loss is finite but the update turns "
        "model_state['mask'] non-finite. The state before that update is kept; draw its batch again with "
        "source(6), or pass on_nonfinite='skip'."
    )
    assert str(caught.value) == message
    assert caught.value.terms == ("model_state",)


def test_what_became_finite_and_turns_back_is_an_event():
    states = constant()
    states[1][0]["nu"][:2] = np.inf
    states[1][0]["nu"][5:] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        run(states, None, "raise")
    assert (caught.value.step, caught.value.leaves) == (4, ("optimizer_state[0]['nu']",))
    assert caught.value.terms == ("optimizer_state",)


def test_an_exchange_within_one_leaf_is_an_event():
    # One entry becomes finite in the update that spoils another: their number stays the same.
    states = constant()
    states[0]["mask"][:5, 0] = np.inf
    states[0]["mask"][5:, 1] = np.inf
    with pytest.raises(NonFiniteError) as caught:
        run(states, None, "raise")
    assert (caught.value.step, caught.value.leaves) == (4, ("model_state['mask']",))


def test_an_integer_that_overflows_is_none():
    states = constant()
    states[0]["int"][:] = np.iinfo(np.int32).max
    states[0]["int"][4:] = np.iinfo(np.int32).min
    assert not run(states, None, "raise")[0].nonfinite.any()


def test_many_leaves_are_counted_and_a_few_are_named():
    states = constant()
    for name in ("bfloat16", "complex", "float16", "large", "scalar"):
        states[0][name][3:] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        run(states, np.where(np.arange(STEPS) == 2, np.inf, 0), "raise")
    assert "'fit' is inf, and the update turns model_state['bfloat16'], model_state['complex'], " in str(
        caught.value
    )
    assert "model_state['float16'] and 2 more non-finite." in str(caught.value)
    assert (len(caught.value.leaves), caught.value.terms) == (5, ("fit",))


# Real updates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """The weight of the loss, another one at one step."""

    at: int | jax.Array
    weight: float | jax.Array

    def __call__(self, step):
        return {"data": {"weight": jnp.where(step == self.at, self.weight, 1.0)}}


def _weighed(params, batches):
    shares = jax.nn.softmax(params["logits"] + jax.lax.stop_gradient(params["mask"]))
    return {"fit": batches["data"]["weight"] * jnp.sum((shares - jnp.array([0.9, 0, 0.1])) ** 2)}


def _logits(key):
    return {"logits": jnp.zeros(3), "mask": jnp.array([0, -jnp.inf, 0])}


WEIGHED = LossTrainStep(LossModule(_logits, _weighed, batch_keys=("data",)), optax.adam(0.1))


def weighed(at, weight, policy="raise"):
    state = initialize_train_state(_logits(None), WEIGHED.optimizer, {}, keys.split_root(0))
    loop = TrainLoop(WEIGHED, state, Weight(at, weight), on_nonfinite=policy)
    return loop.run(loop.place(state), 40)


def test_a_model_with_a_constant_mask_of_infinities_trains():
    chunk = weighed(20, 1.0)
    assert chunk.records["fit"][-1] < chunk.records["fit"][0] / 10
    assert np.asarray(chunk.state.model_state["mask"]).tolist() == [0, -np.inf, 0]


def test_a_moment_of_adam_that_overflows_is_an_event():
    with pytest.raises(NonFiniteError) as caught:
        weighed(20, 1e22)
    assert (caught.value.step, caught.value.terms) == (20, ("optimizer_state",))
    assert caught.value.leaves == ("optimizer_state[0].nu['logits']",)
    # Finite loss, finite parameters, and an optimizer that stands still: what the guard is for.
    ignored = weighed(20, 1e22, "ignore")
    assert np.isfinite(ignored.records["fit"]).all()
    assert np.flatnonzero(ignored.nonfinite).tolist() == [20]
    assert_trees_bitwise_equal(ignored.records["fit"][22:], ignored.records["fit"][21:-1])
    skipped = weighed(20, 1e22, "skip")
    assert len(set(skipped.records["fit"][22:].tolist())) == 18


# Skipped updates in a row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spoilt:
    """Batches that make the loss NaN at some steps."""

    at: jax.Array

    def __call__(self, step):
        return {"data": {"weight": jnp.where(self.at[step], jnp.nan, 1.0)}}


def spoilt(at, most, chunk_size=20):
    state = initialize_train_state(_logits(None), WEIGHED.optimizer, {}, keys.split_root(0))
    source = Spoilt(np.isin(np.arange(20), at))
    loop = TrainLoop(WEIGHED, state, source, on_nonfinite="skip", max_skipped_in_a_row=most)
    state, in_a_row = loop.place(state), 0
    for stop in range(chunk_size, 21, chunk_size):
        chunk = loop.run(state, stop, skipped_in_a_row=in_a_row)
        state = chunk.state
        in_a_row = 0 if not chunk.nonfinite[-1] else in_a_row + len(chunk.nonfinite)
    return state


@pytest.mark.parametrize("chunk_size", [20, 1], ids="chunks of {}".format)
def test_the_last_of_so_many_updates_in_a_row_raises_whatever_the_chunks(chunk_size):
    at = [2, 3, 5, 6, 7, 8]
    spoilt(at, 5, chunk_size)
    with pytest.raises(NonFiniteError) as caught:
        spoilt(at, 3, chunk_size)
    error = caught.value
    assert str(error) == (
        "training became non-finite at every step from 5 to 7, 3 in a row: 'fit' is nan, and the update "
        "turns model_state['logits'], optimizer_state[0].mu['logits'], optimizer_state[0].nu['logits'] "
        "non-finite. The state before that update is kept; draw its batch again with source(7), or pass a "
        "larger max_skipped_in_a_row."
    )
    assert (error.step, error.first_step, error.terms, int(error.state.step)) == (7, 5, ("fit",), 7)
    with pytest.raises(NonFiniteError) as at_once:
        spoilt(at, 1, chunk_size)
    assert (at_once.value.step, at_once.value.first_step) == (2, 2)


def test_the_number_of_updates_in_a_row_is_positive():
    message = "max_skipped_in_a_row must be in [1, 2**31), got 0. Pick a number inside the range."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        spoilt([], 0)


# Other ways to run


@pytest.mark.full
def test_micro_batches_averages_padding_and_several_devices_have_the_same_event():
    run_python(
        """
        import jax, jax.numpy as jnp, numpy as np, optax
        from jax.sharding import Mesh, PartitionSpec
        from phijax_rng import LossModule, Trainer, masked_mean
        from phijax_rng.errors import NonFiniteError

        rows = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

        class Data:
            def __init__(self, count, weight):
                self.count, self.weight = count, weight

            def train_batch_source(self, names, key):
                def source(step):
                    weight = jnp.where(step == 7, self.weight, 1.0) + 0.001 * step
                    x = jnp.asarray(rows[: self.count])
                    return {"data": {"inputs": x, "weight": jnp.full((self.count, 1), weight)}}

                return source

        def init(key):
            return {"mask": jnp.array([0, -jnp.inf]), "w": jnp.ones((4, 8)) / 4}

        def losses(params, batches, mask=None):
            data = batches["data"]
            error = data["weight"] * (jnp.tanh(data["inputs"] @ params["w"]).sum(1, keepdims=True) - 1) ** 2
            return {"fit": jnp.mean(error) if mask is None else masked_mean(error, mask["data"])}

        def by_columns(state):
            whole, split = PartitionSpec(), PartitionSpec(None, "x")
            return jax.tree.map(lambda leaf: split if leaf.ndim == 2 else whole, state)

        mesh = Mesh(np.array(jax.devices()), ("x",))
        nu = "optimizer_state[0].nu['w']"
        for options, count, leaf in (
            ({}, 16, nu),
            ({"microbatches": 4}, 16, nu),
            ({"ema_decay": 0.9}, 16, f"optimizer_state.{nu}"),
            ({"devices": 8}, 16, nu),
            ({"devices": mesh, "shardings": by_columns}, 16, nu),
            ({"devices": 8, "uneven": "pad"}, 12, nu),
        ):
            def fit(weight, policy):
                trainer = Trainer(12, progress=False, on_nonfinite=policy, **options)
                module = LossModule(init, losses, batch_keys=("data",))
                return trainer.fit(module, datamodule=Data(count, weight), optimizer=optax.adam(1e-2), seed=0)

            try:
                fit(1e22, "raise")
            except NonFiniteError as error:
                assert (error.step, error.leaves) == (7, (leaf,)), (options, error)
            else:
                raise AssertionError(options)
            assert fit(np.nan, "skip").skipped_updates == 1, options
            assert fit(1.0, "raise").skipped_updates == 0, options
        """,
        env=EIGHT_DEVICES,
    )
