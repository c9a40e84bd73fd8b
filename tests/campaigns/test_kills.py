"""Many SIGKILLs at random moments. PHIJAX_RNG_KILLS sets how many; the distribution is printed."""

import collections
import os

import numpy as np
import pytest

from phijax_rng import Checkpoints
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal
from tests.faults import _kills

STOP = 400
KILLS = int(os.environ.get("PHIJAX_RNG_KILLS", "20"))


@pytest.mark.slow
def test_runs_that_are_killed_at_random_end_in_the_bits_of_an_uninterrupted_one(tmp_path, capsys):
    problem = _problems.dropout()
    expected = problem.run(STOP)
    reference = _kills.run_once(tmp_path / "reference", STOP)
    assert reference.lines[-1] == f"done {STOP}"
    rng = np.random.default_rng(7)
    kills, runs = [], 0
    while len(kills) < KILLS:
        folder = tmp_path / str(runs)
        # At half the expected time, so that most kills find their run alive; at most five for a run, so
        # that they do not gather at its end.
        per_step, left = reference.seconds / STOP / 2, KILLS - len(kills)
        kills += _kills.run_until_done(folder, STOP, rng, per_step=per_step, kills=min(5, left))
        assert_trees_bitwise_equal(Checkpoints(folder).restore(problem.state()), expected)
        assert Checkpoints(folder).latest_step == STOP
        runs += 1
    with capsys.disabled():
        print("\n" + distribution(kills, runs))


def distribution(kills, runs):
    """Where the kills fell, for a terminal."""
    at = collections.Counter(min(9, kill.shown * 10 // STOP) for kill in kills)
    lines = [
        f"{len(kills)} kills over {runs} runs of {STOP} steps, a save every 10 steps",
        f"  while a save was under way: {sum(kill.saving for kill in kills)}",
        f"  before the first save of the run: {sum(kill.saved == 0 for kill in kills)}",
        f"  updates lost: median {np.median([k.shown - k.saved for k in kills]):.0f}, "
        f"at most {max(kill.shown - kill.saved for kill in kills)}",
        "  by the last step shown:",
    ]
    lines += [f"    {d * STOP // 10:4d} to {(d + 1) * STOP // 10:4d}  {'#' * at[d]}" for d in range(10)]
    return "\n".join(lines)
