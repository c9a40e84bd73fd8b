"""Where a run ends: by steps, by epochs, or by the clock."""

import datetime

import numpy as np
import optax
import pytest

from phijax_rng import (
    HostPool,
    LossModule,
    PoolDataModule,
    RandomRowSampler,
    Trainer,
    UniformDomainSampler,
    keys,
)
from phijax_rng.sampling.adapters import adapt_source
from phijax_rng.trainer.limits import last_step
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal
from tests._fit import Samplers, fit, resumed

ROWS = np.ones((10, 2), np.float32)


def source(sizes, **options):
    pools = {name: HostPool(ROWS[: 10 - 4 * (name == "six")]) for name in sizes}
    return adapt_source(
        PoolDataModule(pools, sizes, **options).train_batch_source(tuple(sizes), keys.split_root(0).sampling)
    )


@pytest.mark.parametrize("options", [{}, {"order": "shuffled"}, {"order": "shuffled", "resident": False}])
@pytest.mark.parametrize(
    ("sizes", "epochs", "steps"),
    [
        ({"ten": 5}, 3, 6),
        ({"ten": 4}, 3, 8),  # 30 rows, and the last batch reaches into the fourth epoch
        ({"ten": 4, "six": 4}, {"ten": 2}, 5),
        ({"ten": 4, "six": 4}, {"six": 2}, 3),
        ({"ten": 5, "six": 3}, 4, 8),
    ],
)
def test_epochs_are_passes_over_the_rows(sizes, epochs, steps, options):
    assert last_step(None, epochs, source(sizes, **options)) == steps
    assert last_step(2, epochs, source(sizes, **options)) == 2
    assert last_step(100, epochs, source(sizes, **options)) == steps


def test_a_batch_of_all_rows_is_an_epoch_and_points_have_none():
    samplers = {
        "rows": RandomRowSampler({"inputs": ROWS}, replace=False),
        "points": UniformDomainSampler([(0, 1)]),
    }
    drawn = Samplers(samplers, {"rows": "all", "points": 7}).train_batch_source(
        (), keys.split_root(0).sampling
    )
    assert last_step(None, 9, adapt_source(drawn)) == 9


@pytest.mark.parametrize(
    ("sizes", "epochs", "message"),
    [
        (
            {"ten": 5, "six": 2},
            3,
            r"^max_epochs needs one length of an epoch, and the samplers have 'ten': 10 rows by 5, 'six': "
            r"6 rows by 2\. Name the one that counts, as in max_epochs=\{'ten': 3\}\.$",
        ),
        (
            {"ten": 5},
            {"six": 3},
            r"^max_epochs names 'six', and the samplers with finite pools are 'ten'\. Name one of them, or "
            r"pass max_steps\.$",
        ),
    ],
)
def test_epochs_that_are_not_one_length_are_refused(sizes, epochs, message):
    with pytest.raises(ValueError, match=message):
        last_step(None, epochs, source(sizes))


def test_a_source_without_pools_has_no_epochs():
    drawn = Samplers({"points": UniformDomainSampler([(0, 1)])}, {"points": 7})
    message = r"^max_epochs needs a sampler with a finite pool, and the source has none\. Pass max_steps\.$"
    for one in (drawn.train_batch_source((), keys.split_root(0).sampling), lambda step: {}):
        with pytest.raises(ValueError, match=message):
            last_step(None, 3, adapt_source(one))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, r"^pass max_steps or max_epochs, got neither\.$"),
        ({"max_epochs": 0}, ValueError, "^max_epochs must be"),
        ({"max_epochs": 1.5}, TypeError, "max_epochs must be"),
        ({"max_epochs": {"a": 1, "b": 2}}, ValueError, r"^max_epochs must name one sampler, got 'a', 'b'\."),
        ({"max_epochs": {"a": -1}}, ValueError, r"^max_epochs\['a'\] must be"),
        ({"max_steps": 1, "max_time": 0}, ValueError, r"^max_time must be positive, got 0\."),
        ({"max_steps": 1, "max_time": float("nan")}, ValueError, r"^max_time must be positive, got nan\."),
        (
            {"max_steps": 1, "max_time": "1h"},
            TypeError,
            r"^max_time must be seconds or a timedelta, got '1h'\.",
        ),
        (
            {"max_steps": 1, "max_time": datetime.timedelta(0)},
            ValueError,
            r"^max_time must be positive, got 0\.0\.",
        ),
        ({"max_steps": 1, "grace_period": True}, TypeError, r"^grace_period must be seconds or a timedelta"),
    ],
)
def test_wrong_limits_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Trainer(**options)


def test_a_run_of_epochs_is_that_of_its_steps(tmp_path):
    module = LossModule(
        lambda key: {"w": np.zeros((2, 1), np.float32)},
        lambda model, batches: {"a": ((batches["ten"]["inputs"] @ model["w"] - 1) ** 2).mean()},
        batch_keys=("ten",),
    )
    options = {
        "datamodule": PoolDataModule({"ten": HostPool(ROWS)}, {"ten": 4}, order="shuffled"),
        "optimizer": optax.sgd(0.1),
        "seed": 0,
    }
    by_epochs = Trainer(max_epochs=3, progress=False).fit(module, **options)
    assert int(by_epochs.state.step) == 8
    assert_trees_bitwise_equal(by_epochs.state, Trainer(8, progress=False).fit(module, **options).state)


@pytest.mark.parametrize(
    "max_time", [3600.0, pytest.param(datetime.timedelta(hours=1), marks=pytest.mark.full)]
)
def test_the_clock_ends_a_run_between_chunks_and_a_resume_continues(tmp_path, monkeypatch, max_time):
    problem = _problems.dropout()
    now = [1000.0]
    monkeypatch.setattr("phijax_rng.trainer.signals.time.monotonic", lambda: now[0])

    class Clock:
        every_n_steps = 1

        def __call__(self, event):
            now[0] += 600.0

    options = {"chunk_size": 3, "max_time": max_time, "callbacks": [Clock()]}
    first = fit(problem, 20, tmp_path, trainer=options)
    assert (int(first.state.step), first.interrupted, first.stopped_early) == (6, True, False)
    # Of each call, not of the run.
    second = resumed(problem, 20, tmp_path, trainer=options)
    assert (int(second.state.step), second.interrupted) == (12, True)
    last = resumed(problem, 20, tmp_path)
    assert_trees_bitwise_equal(last.state, problem.run(20))
    assert (last.interrupted, last.stopped_early) == (False, False)


def test_a_run_that_ends_by_itself_before_the_time_is_not_interrupted():
    result = fit(_problems.dropout(), 4, trainer={"max_time": 3600})
    assert (int(result.state.step), result.interrupted) == (4, False)
