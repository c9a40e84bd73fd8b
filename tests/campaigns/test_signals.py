"""Many SIGTERMs and SIGINTs at random moments. PHIJAX_RNG_SIGNALS sets how many of each."""

import collections
import os
import re
import signal
import time

import numpy as np
import pytest

from phijax_rng import Checkpoints
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal
from tests._subprocess import start_python, wait_for_line
from tests.faults import _kills

SIGNALS = int(os.environ.get("PHIJAX_RNG_SIGNALS", "50"))
FAR = 1_000_000
SECONDS = 6.0  # restoring, compiling and a few hundred steps
PER_RUN = 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)], ids=["SIGTERM", "SIGINT"]
)
def test_every_signal_leaves_a_checkpoint_at_the_step_where_the_run_stopped(tmp_path, capsys, number, code):
    problem = _problems.dropout()
    rng = np.random.default_rng(11 + number)
    met: collections.Counter[str] = collections.Counter()
    for index in range(SIGNALS):
        folder = tmp_path / f"run-{index // PER_RUN}"
        before = Checkpoints(folder).latest_step or 0
        lines = signalled(folder, number, code, delay=rng.uniform(0.05, SECONDS))
        shown = [int(step) for step in re.findall(r"^step (\d+)/", "\n".join(lines), re.MULTILINE)]
        checkpoints = Checkpoints(folder)
        stopped = checkpoints.latest_step
        assert stopped == (shown[-1] if shown else before), lines
        assert f"step {stopped} is saved in {folder}" in lines
        assert_trees_bitwise_equal(
            checkpoints.restore(problem.state()), problem.run(stopped), dict_order=False
        )
        met["while it trained" if shown else "before the first update"] += 1
    with capsys.disabled():
        print(f"\n{SIGNALS} times {signal.Signals(number).name}: {dict(met)}")


def signalled(folder, number, code, *, delay):
    """The lines of one start of the run, which got the signal this long after it said "fitting"."""
    with start_python(_kills.SCRIPT, folder, FAR, "exit", "announce") as child:
        wait_for_line(child, "fitting")
        time.sleep(delay)
        child.send_signal(number)
        lines = [line.rstrip("\n") for line in child.stdout]
        assert child.wait(timeout=120) == code, lines
    return lines
