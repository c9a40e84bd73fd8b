"""Real processes that are killed, terminated and interrupted; what they leave continues exactly."""

import signal

import numpy as np
import pytest

from phijax_rng import Checkpoints, Trainer
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal
from tests._subprocess import run_python, start_python, wait_for_line
from tests.faults import _kills, _run

STOP = 400
FAR = 1_000_000


def require_uninterrupted(folder, stop):
    """The run in `folder` ended in the bits that no interruption would have changed."""
    problem = _problems.dropout()
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest_step == stop
    assert_trees_bitwise_equal(checkpoints.restore(problem.state()), problem.run(stop))


@pytest.mark.full
def test_a_run_that_is_killed_three_times_ends_in_the_bits_of_an_uninterrupted_one(tmp_path):
    reference = _kills.run_once(tmp_path / "reference", STOP)
    assert (reference.returncode, reference.lines[-1]) == (0, f"done {STOP}")
    require_uninterrupted(tmp_path / "reference", STOP)
    rng = np.random.default_rng(20240229)
    per_step = reference.seconds / STOP / 2  # in the first half, so that three kills find it alive
    kills = _kills.run_until_done(tmp_path / "run", STOP, rng, per_step=per_step, kills=3)
    assert len(kills) == 3
    require_uninterrupted(tmp_path / "run", STOP)


@pytest.mark.full
def test_a_balanced_run_that_is_killed_between_two_updates_ends_in_the_bits_of_an_uninterrupted_one(tmp_path):
    """Updates at every twelfth step: two lie before the save that is left, and at least one behind it."""
    words = ("exit", "", "balanced")
    with start_python(_kills.SCRIPT, tmp_path, FAR, *words) as child:
        wait_for_line(child, "step 43/")
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    saved = Checkpoints(tmp_path).latest_step
    stop = saved + 20
    done = run_python(_kills.SCRIPT, tmp_path, stop, *words)
    assert done.stdout.splitlines()[-1] == f"done {stop}"

    problem = _problems.heat()
    straight = Trainer(stop, progress=False).fit(
        problem.module, seed=0, balancer=_run.BALANCER, **problem.arguments
    )
    assert_trees_bitwise_equal(Checkpoints(tmp_path).restore(straight.state), straight.state)
    weights = [
        Checkpoints(tmp_path).restore(straight.state, step).balancer_state["weights"]
        for step in (saved, stop)
    ]
    assert saved >= 30  # a save waits for the one before
    assert (np.asarray(weights[0]) != 1).all()
    assert (np.asarray(weights[0]) != np.asarray(weights[1])).any()


@pytest.mark.parametrize(
    ("number", "options", "code", "last_word"),
    [
        (signal.SIGTERM, (), 143, None),
        (signal.SIGTERM, ("return",), 0, "interrupted"),
        (signal.SIGINT, (), 0, "interrupted"),
    ],
    ids=["SIGTERM", "SIGTERM returning", "SIGINT"],
)
def test_a_signal_ends_a_process_with_a_checkpoint_where_it_stopped(
    tmp_path, *, number, options, code, last_word
):
    with start_python(_kills.SCRIPT, tmp_path, FAR, *options) as child:
        lines = [wait_for_line(child, "step "), wait_for_line(child, "step ")]
        child.send_signal(number)
        lines += [line.rstrip("\n") for line in child.stdout]
        assert child.wait(timeout=60) == code, lines
    (step,) = Checkpoints(tmp_path).steps[-1:]
    assert f"step {step} is saved in {tmp_path}" in lines
    assert any(f"{number.name}: stopping after this chunk" in line for line in lines)
    if last_word is not None:
        assert lines[-1] == f"{last_word} {step}"
    require_uninterrupted(tmp_path, step)
