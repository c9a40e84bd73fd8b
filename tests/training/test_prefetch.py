import functools
import re
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import Checkpoints, LossTrainStep, StepOutput, Trainer, TrainLoop
from phijax_rng.training import prefetch
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference

STOP = 150  # two stacks of 64 steps, and a part of a third
BEFORE = [0, 0, 1, 2, 3]  # before a fit: one step twice, and three others


class HostSource:
    """The batches of a problem as NumPy arrays from a plain callable, which notes what it is asked."""

    def __init__(self, problem):
        self._source = problem.source()
        self.asked = []
        self.threads = set()

    def __call__(self, step):
        self.asked.append(step)
        self.threads.add(threading.current_thread().name)
        batches = self._source(step)
        return {name: {k: np.asarray(v) for k, v in rows.items()} for name, rows in batches.items()}


def fit(problem, source, stop=STOP, *, state=None, **options):
    trainer = Trainer(stop, progress=False, **options)
    return trainer.fit_state(
        problem.module, state or problem.state(), optimizer=problem.optimizer, source=source
    )


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("phijax_rng-prefetch")]


@pytest.mark.parametrize("problem", [_problems.heat, _problems.dropout])
def test_a_host_source_gives_the_bits_of_the_resident_one(problem):
    resident = problem().run(STOP)
    assert_trees_bitwise_equal(fit(problem(), HostSource(problem())).state, resident)
    another = HostSource(problem())
    assert first_difference(fit(problem(), lambda step: another(step + 1)).state, resident) is not None


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100])
def test_chunk_sizes_do_not_change_what_a_host_source_gives(chunk_size):
    problem = _problems.dropout()
    source = HostSource(problem)
    fitted = fit(problem, source, chunk_size=chunk_size)
    assert_trees_bitwise_equal(fitted.state, problem.run(STOP))
    assert source.asked == [*BEFORE, *range(STOP)]


@pytest.mark.parametrize("stack", [1, 5])
def test_stack_sizes_do_not_change_what_a_host_source_gives(monkeypatch, stack):
    problem = _problems.dropout()
    monkeypatch.setattr(prefetch, "_STACK_STEPS", stack)
    assert_trees_bitwise_equal(fit(problem, HostSource(problem), 33).state, problem.run(33))


def test_a_batch_larger_than_the_budget_makes_stacks_of_one_step(monkeypatch):
    problem = _problems.dropout()
    monkeypatch.setattr(prefetch, "_STACK_BYTES", 1)
    feed = prefetch.Prefetcher(HostSource(problem), 0, 10)
    try:
        assert feed.at(0)[1] == 1
    finally:
        feed.close()
    monkeypatch.undo()
    feed = prefetch.Prefetcher(HostSource(problem), 0, 100)
    try:
        assert feed.at(0)[1] == 64
    finally:
        feed.close()


def test_saves_inside_a_stack_and_a_resume_from_there_change_nothing(tmp_path):
    problem = _problems.dropout()
    checkpoints = Checkpoints(tmp_path / "run", every_n_steps=30, max_to_keep=None)
    fitted = fit(problem, HostSource(problem), checkpoints=checkpoints)
    assert checkpoints.steps == (30, 60, 90, 120, 150)
    assert_trees_bitwise_equal(fitted.state, problem.run(STOP))
    for step in (30, 90):
        halfway = checkpoints.restore(problem.state(), step)
        assert_trees_bitwise_equal(halfway, problem.run(step))
        resumed = fit(problem, HostSource(problem), state=halfway)
        assert_trees_bitwise_equal(resumed.state, fitted.state)


def test_names_reach_the_train_step_in_the_order_of_the_source():
    problem = _problems.heat()
    seen = []

    def train_step(state, batches, key):
        seen.append(tuple(batches))
        return LossTrainStep(problem.module, problem.optimizer)(state, batches, key)

    feed = prefetch.Prefetcher(HostSource(problem), 0, 10)
    try:
        TrainLoop(train_step, problem.state(), feed.source)
    finally:
        feed.close()
    assert set(seen) == {("initial", "boundary", "pde")}


def test_a_source_of_unnamed_arrays_is_fed_too():
    def train_step(state, batch, key):
        return state.replace(step=state.step + 1), StepOutput({"fit": jnp.sum(batch)})

    def source(step):
        return np.array([step, step], np.float32)

    trainer = Trainer(100, progress=False, log_every_n_steps=1)
    fitted = trainer.fit_state(None, _problems.dropout().state(), train_step=train_step, source=source)
    assert [entry["fit"] for entry in fitted.history] == [2.0 * step for step in range(100)]


def test_a_numpy_callable_is_asked_at_every_step_and_not_traced():
    problem = _problems.dropout()
    source = HostSource(problem)
    fit(problem, source, 70)
    assert source.asked == [*BEFORE, *range(70)]
    assert {type(step) for step in source.asked} == {int}


def test_a_traceable_source_is_resident_and_any_other_callable_is_not():
    source = _problems.dropout().source()
    assert isinstance(prefetch.open_source(source, 0, 10), prefetch.InProgramSource)
    feed = prefetch.open_source(functools.partial(source), 0, 10)
    assert isinstance(feed, prefetch.Prefetcher)
    feed.close()
    with pytest.raises(TypeError, match=r"^source must be callable, got 5\. Pass a function\.$"):
        prefetch.open_source(5, 0, 10)


# Faults of a source


class LostConnectionError(Exception):
    pass


@pytest.mark.parametrize("bad", [0, 3, 64, 140], ids=["first", "in a stack", "at a boundary", "in the last"])
def test_an_exception_of_the_source_surfaces_with_its_own_type(tmp_path, bad):
    problem = _problems.dropout()
    healthy = HostSource(problem)

    def source(step):
        if step == bad:
            raise LostConnectionError(f"at {step}")
        return healthy(step)

    checkpoints = Checkpoints(tmp_path / "run")
    with pytest.raises(LostConnectionError, match=f"^at {bad}$"):
        fit(problem, source, checkpoints=checkpoints)
    assert feed_threads() == []
    # What the updates before it reached is kept.
    reached = bad // 64 * 64
    assert checkpoints.steps == ((reached,) if reached else ())
    if reached:
        assert_trees_bitwise_equal(checkpoints.restore(problem.state()), problem.run(reached))


@pytest.mark.parametrize("kept", [False, True], ids=["nothing is kept", "the end is saved"])
def test_an_exception_behind_the_last_step_is_never_met(tmp_path, kept):
    problem = _problems.dropout()
    healthy = HostSource(problem)

    def source(step):
        if step >= STOP:
            raise LostConnectionError(f"at {step}")
        return healthy(step)

    checkpoints = Checkpoints(tmp_path / "run") if kept else None
    assert_trees_bitwise_equal(fit(problem, source, checkpoints=checkpoints).state, problem.run(STOP))
    if kept:
        assert_trees_bitwise_equal(checkpoints.restore(problem.state()), problem.run(STOP))


@pytest.mark.parametrize("changes", [3, 64], ids=["in a stack", "at a boundary"])
def test_a_source_that_changes_its_names_is_refused(changes):
    problem = _problems.dropout()
    healthy = HostSource(problem)

    def source(step):
        batches = healthy(step)
        return {"other": batches["data"]} if step >= changes else batches

    message = (
        f"source({changes}) must have the batches 'data' like the step before, got 'other'. "
        "Return the same names at every step."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(problem, source)
    assert feed_threads() == []


@pytest.mark.parametrize("changes", [3, 64], ids=["in a stack", "at a boundary"])
def test_a_source_that_changes_the_order_of_its_names_still_gives_the_same_batches(changes):
    def train_step(state, batches, key):
        return state.replace(step=state.step + 1), {name: jnp.sum(batches[name]) for name in ("a", "b")}

    def source(step):
        batches = {"a": np.float32(step), "b": np.float32(-step)}
        return dict(reversed(batches.items())) if step >= changes else batches

    trainer = Trainer(100, progress=False, log_every_n_steps=1)
    fitted = trainer.fit_state(None, _problems.dropout().state(), train_step=train_step, source=source)
    assert [entry["a"] for entry in fitted.history] == list(range(100))
    assert [entry["b"] for entry in fitted.history] == [-step for step in range(100)]


def test_a_source_without_a_batch_that_the_module_reads_is_refused():
    problem = _problems.dropout()
    message = (
        "the source has no batch 'data'; it has 'other', and the module's batch_keys are 'data'. "
        "Make them agree."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(problem, lambda step: {"other": {"inputs": np.full((4, 2), step, np.float32)}})
    assert feed_threads() == []


def test_the_thread_that_asks_ends_with_the_run():
    problem = _problems.dropout()
    source = HostSource(problem)
    fit(problem, source)
    assert any(name.startswith("phijax_rng-prefetch") for name in source.threads)
    assert feed_threads() == []


def test_a_source_is_never_asked_by_two_threads_at_once(tmp_path):
    problem = _problems.dropout()
    healthy, busy, together = HostSource(problem), threading.Lock(), []

    def source(step):
        if not busy.acquire(blocking=False):
            together.append(step)
            return healthy(step)
        try:
            time.sleep(0.002)  # long enough for another thread to come in
            return healthy(step)
        finally:
            busy.release()

    checkpoints = Checkpoints(tmp_path / "run", every_n_steps=10, max_to_keep=1)
    assert_trees_bitwise_equal(fit(problem, source, checkpoints=checkpoints).state, problem.run(STOP))
    assert together == []
