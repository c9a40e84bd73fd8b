"""When a balancer is updated, with which batches, and what it may return."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    GradNormBalancer,
    HostPool,
    LossModule,
    NTKBalancer,
    PoolDataModule,
    Trainer,
    initialize_train_state,
    keys,
)
from phijax_rng.errors import NonFiniteError
from phijax_rng.training.balancing.adapter import adapt_balancer
from phijax_rng.training.balancing.schedule import BalancerRefresh, make_refresh
from tests import _balancing, _problems
from tests._balancing import LOSSES
from tests._bitwise import assert_trees_bitwise_equal
from tests._selection import mostly_full

MODULE, DATA = _balancing.make_module(), _balancing.make_data()


class Count:
    """Counts its updates and remembers what it was given."""

    loss_names = LOSSES
    update_every_n_steps = 3
    update_start_step = None
    diagnostic_batch_sizes = None

    def initialize(self):
        return {"at": jnp.int32(-1), "seen": jnp.float32(0), "updates": jnp.int32(0)}

    def combine(self, losses, state):
        return sum(losses.values())

    def diagnostics(self, state):
        return {"updates": state["updates"]}

    def update(self, module, model_state, batches, key, state):
        seen = jnp.sum(batches["pde"]["inputs"]) + 0 * jax.random.uniform(key)
        return {"at": state["updates"], "seen": seen, "updates": state["updates"] + 1}


def make_state(balancer, step=0):
    optimizer = optax.adam(1e-2)
    streams = keys.split_root(0)
    state = initialize_train_state(MODULE.init(streams.model), optimizer, balancer.initialize(), streams)
    return state.replace(step=jnp.int32(step))


SOURCE = DATA.train_batch_source(LOSSES, make_state(Count()).sampling_key)


def with_settings(**settings):
    balancer = Count()
    for name, value in settings.items():
        setattr(balancer, name, value)
    return balancer


@pytest.mark.parametrize(
    ("every", "start", "due"),
    [
        (3, None, (3, 6, 9, 12)),
        (4, 0, (0, 4, 8, 12)),
        (1, 11, (11, 12, 13, 2**31 - 1)),
        (100, 2**31 - 1, (2**31 - 1,)),
        (2**31 - 1, 5, (5,)),
    ],
)
def test_updates_are_due_at_absolute_steps(every, start, due):
    refresh = BalancerRefresh(
        adapt_balancer(with_settings(update_every_n_steps=every, update_start_step=start)), MODULE
    )
    is_due = jax.jit(refresh.is_due)
    steps = [*range(14), 2**31 - 1]
    assert tuple(step for step in steps if is_due(np.int32(step))) == due


def test_a_schedule_is_an_argument_of_the_program():
    traced = []

    @jax.jit
    def refreshed(refresh, state, source):
        traced.append(1)
        return refresh(state, source).balancer_state

    balancer = Count()
    refresh = BalancerRefresh(adapt_balancer(balancer), MODULE)
    parts = refresh.parts
    for every, step, fires in ((3, 6, True), (4, 6, False), (2, 6, True)):
        other = BalancerRefresh(adapt_balancer(with_settings(update_every_n_steps=every)), MODULE)
        other.parts = parts
        state = refreshed(other, make_state(balancer, step), SOURCE)
        assert bool(state["updates"]) is fires
    assert len(traced) == 1


def test_the_batch_of_the_step_is_what_the_step_draws():
    state = make_state(Count(), 6)
    renewed = BalancerRefresh(adapt_balancer(Count()), MODULE)(state, SOURCE).balancer_state
    np.testing.assert_allclose(renewed["seen"], np.sum(SOURCE(6)["pde"]["inputs"]), rtol=1e-6)
    assert int(renewed["updates"]) == 1


@pytest.mark.parametrize("step", [0, 3, 300])
def test_diagnostic_batches_are_those_of_step_0_of_the_balancer_stream(step):
    balancer = with_settings(diagnostic_batch_sizes={"pde": 5})
    state = make_state(balancer, step)
    refresh = make_refresh(adapt_balancer(balancer), MODULE, SOURCE, state.balancer_key, LOSSES)
    expected = SOURCE.sample(jax.random.fold_in(state.balancer_key, 0), {"pde": 5})
    assert refresh.names == LOSSES
    assert_trees_bitwise_equal(refresh.batches, tuple(expected.values()), dict_order=False)
    assert refresh.batches[2]["inputs"].shape == (5, 2)


def test_what_is_not_finite_is_not_taken_over():
    class Broken(Count):
        def update(self, module, model_state, batches, key, state):
            return super().update(module, model_state, batches, key, state) | {"seen": jnp.float32("nan")}

    state = make_state(Count(), 3)
    renewed = BalancerRefresh(adapt_balancer(Broken()), MODULE)(state, SOURCE)
    assert_trees_bitwise_equal(renewed, state, dict_order=False)
    control = BalancerRefresh(adapt_balancer(Count()), MODULE)(state, SOURCE)
    assert int(control.balancer_state["updates"]) == 1


def test_an_update_that_changes_its_state_is_refused():
    class Grown(Count):
        def update(self, module, model_state, batches, key, state):
            return state | {"seen": jnp.zeros(2)}

    message = (
        "Grown.update changed the form of the balancer's state\n"
        "  given:    ['at']: int32[], ['seen']: float32[], ['updates']: int32[]\n"
        "  returned: ['at']: int32[], ['seen']: float32[2], ['updates']: int32[]\n"
        "Return every array that `initialize` gives, with its shape and dtype."
    )
    with pytest.raises(ValueError) as caught:
        BalancerRefresh(adapt_balancer(Grown()), MODULE)(make_state(Count(), 3), SOURCE)
    assert str(caught.value) == message


def test_a_balancer_that_does_not_adapt_has_no_refresh():
    assert make_refresh(adapt_balancer(None), MODULE, SOURCE, keys.root_key(0), LOSSES) is None


@pytest.mark.parametrize(
    ("balancer", "source", "message"),
    [
        (
            with_settings(diagnostic_batch_sizes=4),
            abs,
            "the balancer needs diagnostic batches, and the source has no sample(key, batch_sizes), got "
            "<built-in function abs>. Give it one, or balance on the batches of the steps "
            "(diagnostic_batch_sizes=None).",
        ),
        (
            with_settings(diagnostic_batch_sizes={"walls": 4}),
            SOURCE,
            "batch_sizes names 'walls', but there is only 'initial', 'boundary', 'pde'. "
            "Drop it, or add what it names.",
        ),
        (
            with_settings(update_every_n_steps=0),
            SOURCE,
            "balancer.update_every_n_steps must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
    ],
    ids=["no sample", "no such batch", "never"],
)
def test_what_cannot_be_updated_is_refused_at_the_door(balancer, source, message):
    with pytest.raises(ValueError) as caught:
        make_refresh(adapt_balancer(balancer), MODULE, source, keys.root_key(0), LOSSES)
    assert str(caught.value) == message


def fit(balancer, stop=8, source=None, **options):
    trainer = Trainer(stop, progress=False, log_every_n_steps=1, **options)
    state = make_state(balancer)
    where = {"datamodule": DATA} if source is None else {"source": source}
    return trainer.fit_state(MODULE, state, optimizer=optax.adam(1e-2), balancer=balancer, **where)


def test_a_users_own_balancer_is_updated_in_the_loop_and_recorded():
    result = fit(Count())
    assert [row["weight/updates"] for row in result.history] == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.full
def test_a_source_on_the_host_is_balanced_to_the_same_bits():
    resident = fit(Count())
    hosted = fit(Count(), source=SOURCE.__call__)
    assert_trees_bitwise_equal(hosted.state.balancer_state, resident.state.balancer_state)
    assert int(resident.state.balancer_state["updates"]) == 2


def test_a_state_that_is_not_the_balancers_is_refused():
    state = make_state(Count()).replace(balancer_state={})
    with pytest.raises(ValueError, match=r"^state\.balancer_state does not fit the balancer\n"):
        Trainer(4, progress=False).fit_state(
            MODULE, state, optimizer=optax.adam(1e-2), balancer=Count(), datamodule=DATA
        )


# What is not finite, by the three policies


class Poisoned(Count):
    """Updates at steps 3, 6, 9: the one that finds this many before it, and each one behind it, is NaN."""

    def __init__(self, poison):
        self.poison = poison

    def initialize(self):
        return super().initialize() | {"poison": jnp.int32(self.poison)}

    def update(self, module, model_state, batches, key, state):
        new = state | super().update(module, model_state, batches, key, state)
        bad = state["updates"] == state["poison"]
        return new | {"seen": jnp.where(bad, jnp.nan, new["seen"])}


POISONED, SOUND = Poisoned(1), Poisoned(-1)


@pytest.mark.parametrize("chunk_size", mostly_full([1, 5, None], everyday=[5]))
def test_an_update_that_is_not_finite_stops_the_run_at_its_step(tmp_path, chunk_size):
    with pytest.raises(NonFiniteError) as caught:
        fit(POISONED, 12, chunk_size=chunk_size, checkpoints=Checkpoints(tmp_path))
    error = caught.value
    assert (error.step, error.terms) == (6, ("balancer_state",))
    assert str(error) == (
        "training became non-finite at step 6: every loss is finite but the new state of the balancer is "
        "not. The state before that update is kept; draw its batch again with source(6), or pass "
        "on_nonfinite='skip'."
    )
    assert_trees_bitwise_equal(
        error.state, fit(SOUND, 6).state.replace(balancer_state=error.state.balancer_state)
    )
    assert int(error.state.balancer_state["updates"]) == 1
    assert Checkpoints(tmp_path).latest_step == 6
    assert error.__notes__[0].startswith("to make the new state of the balancer at step 6 again:\n")
    key = keys.fold_in(keys.stream(error.state.balancer_key, "balancer", "update"), 6)
    assert 'keys.fold_in(keys.stream(state.balancer_key, "balancer", use), 6)' in error.__notes__[0]
    again = POISONED.update(MODULE, error.state.model_state, SOURCE(6), key, error.state.balancer_state)
    assert np.isnan(again["seen"])


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_an_update_that_is_not_finite_is_left_out_and_told_once(caplog, policy):
    result = fit(POISONED, 12, on_nonfinite=policy)
    assert [row["weight/updates"] for row in result.history] == [0] * 3 + [1] * 9
    assert caplog.messages == [
        "the update of the balancer before step 6 is not finite and is skipped; its weights stay"
    ]
    # Its weights move nothing in this balancer, so the model is that of a run whose updates were finite.
    assert_trees_bitwise_equal(result.state.model_state, fit(SOUND, 12).state.model_state)


def test_three_policies_give_the_bits_of_one_run_where_updates_are_finite(caplog):
    runs = [fit(SOUND, 8, on_nonfinite=policy).state for policy in ("raise", "skip", "ignore")]
    assert_trees_bitwise_equal(runs[1], runs[0])
    assert_trees_bitwise_equal(runs[2], runs[0])
    assert caplog.messages == []


class Learning:
    """An observer whose next weight is NaN at step 3, which no total of that step shows."""

    loss_names = LOSSES

    def initialize(self):
        one = jnp.float32(1)
        return {"best": jnp.float32(jnp.inf), "count": jnp.int32(0), "next": one, "used": one}

    def combine(self, losses, state):
        return state["used"] * sum(losses.values())

    def diagnostics(self, state):
        return {"used": state["used"]}

    def observe(self, losses, key, state):
        count = state["count"] + 1
        moved = jnp.where(count == 4, jnp.nan, state["next"])
        # An infinite number that began as one is no fault.
        return {"best": state["best"], "count": count, "next": moved, "used": state["next"]}


@pytest.mark.full
def test_an_observer_that_becomes_non_finite_stops_the_run_before_its_weights_are_used():
    with pytest.raises(NonFiniteError) as caught:
        fit(Learning())
    assert (caught.value.step, caught.value.terms) == (3, ("balancer_state",))
    assert float(caught.value.state.balancer_state["next"]) == 1


@pytest.mark.full
def test_the_kernel_of_a_residual_that_is_nan_stops_the_run_and_is_left_out_by_the_others(caplog):
    def residuals(model_state, batches):
        inputs = batches["data"]["inputs"][:, 0]
        return {"a": model_state["w"] * inputs, "b": model_state["w"] * jnp.sqrt(inputs)}

    def losses(model_state, batches):
        return dict.fromkeys(("a", "b"), (model_state["w"] - 1) ** 2)

    module = LossModule(lambda key: {"w": jnp.float32(2)}, losses, batch_keys=("data",), residuals=residuals)
    data = PoolDataModule({"data": HostPool(-np.ones((4, 1), np.float32))}, {"data": 2})
    balancer = NTKBalancer(("a", "b"), update_every_n_steps=2, diagnostic_batch_sizes=2)

    def train(policy):
        return Trainer(5, progress=False, on_nonfinite=policy).fit(
            module, datamodule=data, optimizer=optax.sgd(0.1), seed=0, balancer=balancer
        )

    with pytest.raises(NonFiniteError) as caught:
        train("raise")
    assert (caught.value.step, caught.value.terms) == (2, ("balancer_state",))
    kept = train("skip").state.balancer_state
    np.testing.assert_array_equal(kept["weights"], [1, 1])
    assert caplog.messages == [
        "the update of the balancer before step 2 is not finite and is skipped; its weights stay"
    ]


def test_a_static_run_has_no_refresh_in_its_program():
    problem = _problems.heat()
    loop = problem.loop()
    assert "stablehlo.case" not in loop_text(problem)
    assert loop.names == ("total_loss", "pde", "initial", "boundary")


def loop_text(problem):
    texts = []
    original = jax.stages.Lowered.as_text

    def spy(self, *arguments, **options):
        texts.append(original(self, *arguments, **options))
        return texts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "as_text", spy)
        problem.loop()
    return texts[0]


@pytest.mark.full
def test_a_bad_update_behind_a_refresh_keeps_the_state_before_both():
    """A run that stopped at step 3, where an update is due, goes on to the bits of one that did not."""

    def poisoned(step):
        batch = SOURCE(step)
        if step == 3 and broken[0]:
            batch["pde"] = {"inputs": np.full((32, 2), np.nan, np.float32)}
        return batch

    balancer = dataclasses.replace(GradNormBalancer(LOSSES, update_every_n_steps=3))
    broken = [True]
    with pytest.raises(NonFiniteError) as caught:
        fit(balancer, source=poisoned)
    assert caught.value.step == 3
    assert float(caught.value.state.balancer_state["norms"].sum()) == 0  # not updated yet
    broken[0] = False
    trainer = Trainer(8, progress=False)
    resumed = trainer.fit_state(
        MODULE, caught.value.state, optimizer=optax.adam(1e-2), balancer=balancer, source=poisoned
    )
    assert_trees_bitwise_equal(resumed.state, fit(balancer, source=poisoned).state)
