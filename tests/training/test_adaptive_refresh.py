"""Refreshes inside the compiled loop: when, from which key, with which residuals; and resumes around them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    GradNormBalancer,
    LossModule,
    NamedBatchSource,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    Trainer,
    TrainLoop,
    UniformDomainSampler,
    keys,
)
from phijax_rng.sampling.geometry import Box
from phijax_rng.training import AdaptiveRefresh
from phijax_rng.training.adaptive_refresh import adaptive_refresh, with_sampler_state
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import resumed
from tests._problems import Problem
from tests._selection import mostly_full

STOP, EVERY = 14, 4
BOX = [(0.0, 1.0), (-1.0, 1.0)]
NAMES = ("pde", "grown", "bc")


def model(params, inputs):
    return jnp.tanh(inputs @ params["a"]) @ params["b"]


def init_model(key):
    first, second = jax.random.split(key)
    return {"a": jax.random.normal(first, (2, 6)), "b": jax.random.normal(second, (6,))}


def residuals(params, batches):
    return {name: residual(params, batches[name]["inputs"]) for name in ("pde", "grown")}


def residual(params, inputs):
    return model(params, inputs) - jnp.abs(inputs[:, 1])


def losses(params, batches):
    found = residuals(params, batches)
    return {
        "bc": jnp.mean(model(params, batches["bc"]["inputs"]) ** 2),
        "grown": jnp.mean(found["grown"] ** 2),
        "pde": jnp.mean(batches["pde"]["weights"] * found["pde"] ** 2),
    }


@dataclasses.dataclass(frozen=True)
class Points:
    """A data module with two samplers that follow residuals, and one that does not."""

    every: int = EVERY

    def train_batch_source(self, batch_keys, key):
        return NamedBatchSource(samplers(self.every), {"pde": 8, "grown": 4, "bc": 4}, key)


def samplers(every=EVERY):
    return {
        "pde": ResidualDistributionSampler(Box(BOX), every, num_candidates=64),
        "grown": ResidualRefinementSampler(
            Box(BOX), every, capacity=20, num_initial=12, num_added=4, num_candidates=32
        ),
        "bc": UniformDomainSampler(BOX),
    }


MODULE = LossModule(init_model, losses, batch_keys=NAMES, residuals=residuals)
PROBLEM = Problem(MODULE, Points(), optax.adam(1e-2))


@functools.cache
def begun():
    """The state that a fit begins with, and its source."""
    source = PROBLEM.source()
    return with_sampler_state(PROBLEM.state(), source), source


@functools.cache
def loop(refreshed=True):
    state, source = begun()
    refresh = adaptive_refresh(MODULE, source) if refreshed else None
    return TrainLoop(PROBLEM.train_step, state, source, refresh=refresh)


@functools.cache
def run(stop):
    """The state after so many updates, by the loop alone."""
    state, _ = begun()
    return loop().run(loop().place(state), stop).state if stop else state


def train(stop, folder=None, *, every_n_steps=None, **options):
    return resumed(PROBLEM, stop, folder, saves={"every_n_steps": every_n_steps}, **options)


# When, and from which key


def test_states_change_at_their_steps_and_at_no_other():
    kept = [run(step).sampler_state for step in range(STOP + 1)]
    changed = {
        name: [
            step
            for step in range(STOP)
            if first_difference(kept[step][name], kept[step + 1][name]) is not None
        ]
        for name in ("pde", "grown")
    }
    # The refinement is full after two refreshes.
    assert changed == {"pde": [4, 8, 12], "grown": [4, 8]}
    assert [int(state["grown"]["count"]) for state in kept[::4]] == [12, 12, 16, 20]


def test_a_refresh_is_that_of_its_step_and_its_own_stream():
    state, source = run(8), begun()[1]
    refreshed = jax.jit(lambda state: AdaptiveRefresh(MODULE, ("pde",))(state, source))(state)
    stream = keys.stream(state.sampling_key, "adaptive", "pde")
    key, _ = jax.random.split(keys.fold_in(stream, 8))

    @jax.jit
    def by_hand(params, own):
        return samplers()["pde"].refresh(key, own, lambda rows: residual(params, rows["inputs"]))

    expected = by_hand(state.model_state, state.sampler_state["pde"])
    assert_trees_bitwise_equal(refreshed.sampler_state["pde"], expected)
    other = keys.fold_in(keys.stream(state.sampling_key, "adaptive", "grown"), 8)
    assert keys.fingerprint(key) != keys.fingerprint(jax.random.split(other)[0])


def test_a_refresh_moves_nothing_but_the_state_of_its_samplers():
    state, source = begun()
    at_refresh = state.replace(step=jnp.int32(4))
    refreshed = jax.jit(adaptive_refresh(MODULE, source))(at_refresh, source)
    assert_trees_bitwise_equal(refreshed.replace(sampler_state={}), at_refresh.replace(sampler_state={}))
    between = state.replace(step=jnp.int32(5))
    assert_trees_bitwise_equal(jax.jit(adaptive_refresh(MODULE, source))(between, source), between)


def test_samplers_without_a_state_draw_what_they_draw_without_a_refresh():
    source = begun()[1]
    for step in (3, 4, 5):
        alone = NamedBatchSource(samplers(99), source.batch_sizes, source.key)
        moved = source(step, run(step + 1).sampler_state)
        kept = alone(step, begun()[0].sampler_state)
        assert_trees_bitwise_equal(moved["bc"], kept["bc"])
        assert (first_difference(moved["pde"], kept["pde"]) is None) == (step < 4)


def test_every_sampler_starts_from_a_key_of_its_own():
    state, source = begun()
    for name, sampler in list(source.samplers.items())[:2]:
        key = keys.fold_in(keys.stream(state.sampling_key, "adaptive", name), 2**31)
        assert_trees_bitwise_equal(state.sampler_state[name], sampler.init(key), dict_order=False)
    assert with_sampler_state(state, source) is state


def test_points_do_go_where_residuals_are_large():
    state = run(5)
    inputs = np.asarray(state.sampler_state["pde"]["rows"]["inputs"])
    size = np.abs(np.asarray(residual(run(4).model_state, inputs)))
    weights = np.asarray(state.sampler_state["pde"]["weights"])
    np.testing.assert_allclose(weights, 2 / (size / size.mean() + 1), rtol=1e-4)


# With the trainer


def test_a_fit_is_the_loop_with_its_refresh():
    assert_trees_bitwise_equal(train(STOP).state, run(STOP))


@pytest.mark.full
def test_no_key_of_a_run_with_refreshes_is_used_twice():
    with jax.debug_key_reuse(True):
        assert_trees_bitwise_equal(train(6).state, run(6))


def test_without_the_refresh_the_run_is_another():
    state, _ = begun()
    still = loop(refreshed=False).run(loop().place(state), STOP).state
    assert first_difference(still.model_state, run(STOP).model_state) is not None
    early = loop(refreshed=False).run(loop().place(state), EVERY).state
    np.testing.assert_allclose(early.model_state["b"], run(EVERY).model_state["b"], rtol=1e-5)


def test_a_fit_of_a_state_begins_with_its_own_sampler_state_or_a_fresh_one():
    state, source = begun()
    options = {"optimizer": PROBLEM.optimizer, "source": source}
    for given in (PROBLEM.state(), state):
        ended = Trainer(STOP, progress=False).fit_state(MODULE, given, **options)
        assert_trees_bitwise_equal(ended.state, run(STOP))
    own = state.replace(sampler_state={**state.sampler_state, "pde": run(5).sampler_state["pde"]})
    ended = Trainer(3, progress=False).fit_state(MODULE, own, **options)
    assert_trees_bitwise_equal(ended.state.sampler_state["pde"], run(5).sampler_state["pde"])


# Resumes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The root of a run that was saved at every step."""
    root = tmp_path_factory.mktemp("saved") / "run"
    train(STOP, root, every_n_steps=1)
    return root


@pytest.mark.parametrize("cut", mostly_full(range(1, STOP + 1), everyday=(1, EVERY, EVERY + 1, STOP)))
def test_k_steps_and_a_resume_are_the_whole_run(saved, tmp_path, cut):
    again = train(STOP, tmp_path / "run", ckpt_path=saved, ckpt_step=cut)
    assert again.iterations == STOP - cut
    assert_trees_bitwise_equal(again.state, run(STOP))


def test_what_was_saved_is_what_as_many_steps_give(saved):
    checkpoints = Checkpoints(saved)
    for step in range(1, STOP + 1):
        assert_trees_bitwise_equal(checkpoints.restore(begun()[0], step), run(step))


def _with_a_fresh_set(state):
    fresh = begun()[0].sampler_state
    return state.replace(sampler_state={**state.sampler_state, "grown": fresh["grown"]})


def _with_a_fresh_density(state):
    fresh = begun()[0].sampler_state
    return state.replace(sampler_state={**state.sampler_state, "pde": fresh["pde"]})


@pytest.mark.parametrize("lose", [_with_a_fresh_set, _with_a_fresh_density], ids=["set", "density"])
@pytest.mark.parametrize("cut", mostly_full([5, 8, 11], everyday=[8]))
def test_a_resume_that_lost_the_sampler_state_is_told_apart(saved, lose, cut):
    restored = Checkpoints(saved).restore(begun()[0], cut)
    ended = loop().run(loop().place(restored), STOP).state
    assert_trees_bitwise_equal(ended, run(STOP))
    lost = loop().run(loop().place(lose(restored)), STOP).state
    assert first_difference(lost.model_state, run(STOP).model_state) is not None or (
        cut == 8 and lose is _with_a_fresh_density  # drawn anew before the next batch
    )


@pytest.mark.full
def test_an_update_that_is_not_finite_leaves_the_state_of_before_the_refresh():
    def step(state, batches, key):
        following, output = PROBLEM.train_step(state, batches, key)
        spoiled = jnp.where(state.step == 4, jnp.nan, output.losses["bc"])
        return following, {"bc": spoiled}

    state, source = begun()
    skipping = TrainLoop(step, state, source, refresh=adaptive_refresh(MODULE, source), on_nonfinite="skip")
    chunk = skipping.run(skipping.place(state), 6)
    assert chunk.nonfinite.tolist() == [False] * 4 + [True, False]
    assert int(chunk.state.sampler_state["grown"]["count"]) == 16


# What is refused


def test_a_module_without_residuals_is_refused():
    bare = LossModule(init_model, losses, batch_keys=NAMES)
    with pytest.raises(ValueError) as caught:
        Trainer(3, progress=False).fit(bare, seed=0, **PROBLEM.arguments)
    assert str(caught.value) == (
        "samplers['pde'] follows residuals, and the module has none. Pass LossModule(..., residuals=...)."
    )


WRONG: dict[str, tuple[Any, str]] = {
    "another name": (
        lambda params, batches: {"momentum": residual(params, batches["pde"]["inputs"])},
        "residuals returned 'momentum', and 'pde' is wanted. Set the sampler's residual_names.",
    ),
    "a mean": (
        lambda params, batches: {"pde": jnp.mean(residual(params, batches["pde"]["inputs"]))},
        "residuals['pde'] must have one row for each of 64 points, got shape (). Return it unreduced.",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_residuals_that_do_not_fit_are_refused(wrong, message):
    state, source = begun()
    refresh = AdaptiveRefresh(dataclasses.replace(MODULE, residuals=wrong), ("pde",))
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(refresh, state, source)
    assert str(caught.value) == message


@pytest.mark.full
def test_several_residuals_are_followed_together_by_name():
    def two(params, batches, key):
        found = residual(params, batches["pde"]["inputs"])
        assert batches["bc"]["inputs"].shape == (4, 2)  # the others are this step's batches
        return {"momentum": jnp.stack([3 * found, 0 * found], axis=1), "mass": -4 * found, "bc": found}

    followed = dataclasses.replace(samplers()["pde"], residual_names=("momentum", "mass"))
    state, source = begun()
    source = NamedBatchSource({**samplers(), "pde": followed}, source.batch_sizes, source.key)
    module = dataclasses.replace(MODULE, residuals=two)
    state = state.replace(step=jnp.int32(4))
    together = jax.jit(AdaptiveRefresh(module, ("pde",)))(state, source).sampler_state["pde"]
    alone = jax.jit(AdaptiveRefresh(MODULE, ("pde",)))(state, begun()[1]).sampler_state["pde"]
    np.testing.assert_allclose(together["weights"], alone["weights"], rtol=1e-5)
    assert_trees_bitwise_equal(together["rows"], alone["rows"])


def test_a_source_that_is_asked_on_the_host_is_refused():
    @dataclasses.dataclass
    class OnTheHost:
        samplers: Any

        def __call__(self, step, sampler_state=None):
            return {name: {"inputs": np.full((4, 2), step, np.float32)} for name in NAMES}

    state, _ = begun()
    with pytest.raises(ValueError) as caught:
        Trainer(3, progress=False).fit_state(
            MODULE, state, optimizer=PROBLEM.optimizer, source=OnTheHost(samplers())
        )
    assert str(caught.value) == (
        "samplers['pde'] follows residuals, and its source is called on the host, ahead of the residuals. "
        "Draw it inside the loop: from a NamedBatchSource, or a traceable source."
    )


# Beside a balancer


def balanced(stop, folder=None, **words):
    checkpoints = None if folder is None else Checkpoints(folder, max_to_keep=None, asynchronous=False)
    balancer = GradNormBalancer(
        ("bc", "grown", "pde"), update_every_n_steps=3, diagnostic_batch_sizes={"pde": 6}
    )
    trainer = Trainer(stop, checkpoints=checkpoints, progress=False)
    return trainer.fit(MODULE, seed=0, balancer=balancer, **words, **PROBLEM.arguments).state


@pytest.mark.full
def test_samplers_and_a_balancer_are_refreshed_in_one_run_and_over_a_resume(tmp_path):
    whole = balanced(STOP)
    for cut in (3, 4, 7):
        balanced(cut, tmp_path / str(cut))
        assert_trees_bitwise_equal(balanced(STOP, tmp_path / str(cut), resume=True), whole)
    alone = run(STOP)
    assert first_difference(whole.sampler_state, alone.sampler_state) is not None
    assert np.ptp(whole.balancer_state["weights"]) > 0
