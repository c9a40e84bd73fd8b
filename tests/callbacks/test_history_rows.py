"""Means, learning rates, norms and times of rows: the same wherever the host looked in, and no bit moves."""

import dataclasses
import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import Checkpoints, StepOutput, initialize_train_state, keys
from phijax_rng.callbacks import history
from phijax_rng.callbacks.history import IntervalMeans, LearningRates, Stopwatch
from tests import _fit, _problems
from tests._bitwise import assert_trees_bitwise_equal

HEAT = _problems.heat()
SCHEDULE = optax.cosine_decay_schedule(1e-2, 100)
SHOWN = dataclasses.replace(HEAT, optimizer=optax.inject_hyperparams(optax.adam)(SCHEDULE))


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """The state is looked at as often as every 20 updates."""
    assert [history.look_every(every) for every in (1, 30, 100, 250)] == [100, 120, 100, 250]
    monkeypatch.setattr(history, "_LEAST_UPDATES", 20)


def fit(stop, folder=None, *, problem=HEAT, every=6, **trainer):
    options = {"log_every_n_steps": every, **trainer}
    return _fit.fit(problem, stop, folder, trainer=options, resume="auto" if folder else False)


# Means


def test_a_mean_does_not_depend_on_where_a_chunk_ends():
    values = np.random.default_rng(0).lognormal(sigma=9, size=500).astype(np.float32)
    expected = 0.0
    for value in values:
        expected += float(value)
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(501), 7))
        means = IntervalMeans({})
        for start, stop in itertools.pairwise([0, *cuts, 500]):
            means.add({"loss": values[start:stop]})
            means = IntervalMeans(json.loads(json.dumps(means.plain())))
        assert means.take() == {"mean/loss": expected / 500}
    # Which the sum by pairs that NumPy makes would not pass.
    assert float(np.sum(values.astype(np.float64))) != expected


def test_an_interval_of_which_a_part_is_not_known_has_no_mean():
    for means in (IntervalMeans(None), IntervalMeans({"count": 1, "sums": {"other": 1.0}})):
        means.add({"loss": np.ones(2)})
        assert means.plain() is None
        assert means.take() == {}
        means.add({"loss": np.array([1.0, 2.0])})
        assert means.take() == {"mean/loss": 1.5}
    assert IntervalMeans({}).take() == {}


def test_a_history_is_that_of_an_uninterrupted_run_when_an_interval_is_cut(tmp_path):
    straight = fit(40, tmp_path / "straight", problem=SHOWN, every=10, gradient_norm=True)
    for stop in (7, 19, 40):
        cut = fit(stop, tmp_path / "cut", problem=SHOWN, every=10, gradient_norm=True, chunk_size=4)
    assert repr(cut.history) == repr(straight.history)
    names = ["total_loss", "pde", "initial", "boundary"]
    means = [f"mean/{name}" for name in names]
    assert [list(row) for row in straight.history] == [
        ["step", *names, *means],
        ["step", *names, *means, "learning_rate", "gradient_norm"],
    ] * 2
    memories = [Checkpoints(tmp_path / name).memory(40) for name in ("straight", "cut")]
    for memory in memories:
        assert [row[0] for row in memory.pop("timing")["rows"]] == [10, 20, 30, 40]
        assert memory.pop("seconds") > 0
    assert memories[0] == memories[1]
    assert_trees_bitwise_equal(cut.state, straight.state)


def test_rows_of_every_step_have_no_means():
    assert not any(name.startswith("mean/") for row in fit(3, every=1).history for name in row)


def test_a_mean_leaves_skipped_updates_out():
    def broken(model_state, batches):
        value = HEAT.module.losses(model_state, batches)["pde"]
        return {"pde": value, "nan": jnp.where(batches["pde"]["inputs"][0, 0] > 0.7, jnp.nan, value)}

    module = dataclasses.replace(HEAT.module, losses=broken)
    problem = dataclasses.replace(HEAT, module=module)
    every, rows = (
        fit(18, problem=problem, every=n, on_nonfinite="skip", max_skipped_in_a_row=20).history
        for n in (1, 6)
    )
    for index, row in enumerate(rows):
        made = [each["nan"] for each in every[6 * index : 6 * index + 6] if np.isfinite(each["nan"])]
        assert len(made) > 0
        assert row["mean/nan"] == sum(made) / len(made)
    assert 0 < rows[-1]["skipped_updates"] < 18


# Learning rates and norms


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adam(1e-3), {}),
        (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(0.5)), {"learning_rate": 0.5}),
        (optax.lbfgs(), {"learning_rate": 1.0}),
        (
            optax.multi_transform(
                {name: optax.inject_hyperparams(optax.sgd)(rate) for name, rate in (("a", 0.25), ("b", 0.5))},
                {"learning_rate": "a", "w": "b"},
            ),
            {"learning_rate/a": 0.25, "learning_rate/b": 0.5},
        ),
        (
            optax.chain(*(optax.inject_hyperparams(optax.sgd)(rate) for rate in (0.25, 0.5))),
            {"learning_rate/0": 0.25, "learning_rate/1": 0.5},
        ),
    ],
    ids=["none", "injected", "line search", "two groups", "two"],
)
def test_learning_rates_are_those_that_the_state_of_the_optimizer_shows(optimizer, expected):
    # Moments of a parameter of that name are no learning rates.
    model = {"learning_rate": jnp.float32(7), "w": jnp.zeros(2)}
    state = initialize_train_state(model, optimizer, {}, keys.split_root(0))
    rates = LearningRates(state, 20)
    assert rates.read(state, 40) == expected
    assert rates.read(state, 39) == {}
    assert rates.next_step(20) == (40 if expected else None)


def test_a_scheduled_rate_is_that_of_the_update_of_the_row():
    rows = fit(60, problem=SHOWN).history
    found = {row["step"]: row["learning_rate"] for row in rows if "learning_rate" in row}
    assert found == {24: pytest.approx(float(SCHEDULE(23))), 48: pytest.approx(float(SCHEDULE(47)))}


@pytest.mark.full
def test_the_norm_is_that_of_the_gradient_of_the_update_of_the_row():
    row = fit(20, every=20, gradient_norm=True).history[0]
    state = HEAT.run(19)
    batches = HEAT.source()(19)

    def total(model_state):
        return sum(HEAT.module.losses(model_state, batches).values())

    expected = float(
        jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(total)(state.model_state))))
    )
    assert row["gradient_norm"] == pytest.approx(expected, rel=1e-5)
    assert row["gradient_norm"] != pytest.approx(1.01 * expected, rel=1e-5)


def test_rows_move_no_bit():
    quiet, watched = fit(40, every=40), fit(40, every=2, gradient_norm=True, chunk_size=3)
    assert_trees_bitwise_equal(quiet.state, watched.state)
    assert quiet.metrics == watched.metrics


def test_a_norm_needs_an_optimizer():
    def train_step(state, batches, key):
        return state, StepOutput({"loss": jnp.float32(0)})

    with pytest.raises(ValueError, match="gradient_norm=True records the gradient of an optimizer's update"):
        _fit.Trainer(5, gradient_norm=True, progress=False).fit_state(
            None, HEAT.state(), train_step=train_step, source=HEAT.source()
        )


# Time


def test_time_goes_with_steps_within_a_chunk_and_compiling_has_no_speed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(history.time, "perf_counter", lambda: now[0])
    watch = Stopwatch(7.0)
    now[0] += 50  # compiling
    watch.start(10)
    now[0] += 4
    rows = [watch.row(step, 30, watch.seconds) for step in (15, 25)]
    assert rows == [
        {"seconds": 58.0, "steps_per_second": 5.0},
        {"seconds": 60.0, "steps_per_second": 5.0},
    ]
    now[0] += 5  # an evaluation
    watch.next_chunk(30)
    now[0] += 1
    assert watch.row(35, 40, watch.seconds) == {"seconds": 66.5, "steps_per_second": 10 / 6.5}
    assert watch.row(35, 40, watch.seconds) == {"seconds": 66.5}


def test_timing_has_the_steps_of_the_history_and_goes_on_after_a_resume(tmp_path):
    first, second = fit(13, tmp_path), fit(25, tmp_path)
    assert (
        [row["step"] for row in second.timing] == [row["step"] for row in second.history] == [6, 12, 18, 24]
    )
    assert second.timing[:2] == first.timing
    seconds = [row["seconds"] for row in second.timing]
    assert sorted(seconds) == seconds
    assert all(row["steps_per_second"] > 0 for row in second.timing)
    assert not any("seconds" in row for row in second.history)
