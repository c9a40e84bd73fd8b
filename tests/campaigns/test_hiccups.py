"""A hundred errors of the file system at random calls of reads and of writes; a reader beside a writer."""

import collections
import os
import random
import subprocess

import pytest

from phijax_rng import Checkpoints
from tests._subprocess import start_python
from tests.faults import _damage
from tests.faults._hiccups import CODES
from tests.faults.test_hiccups import calls_of_a_restore, check_read, check_write, fit

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

ERRORS = int(os.environ.get("PHIJAX_RNG_HICCUPS", "100"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("phijax_rng.checkpoints.directory._PAUSES", (0.0,) * 3)


def test_reads_are_repeated_or_raised_by_name(tmp_path):
    _damage.save_all(tmp_path)
    calls, rng = calls_of_a_restore(tmp_path), random.Random(0)
    outcomes: collections.Counter[str] = collections.Counter()
    for index in range(ERRORS):
        count = (1, 3, float("inf"))[index % 3]
        read = check_read(tmp_path, rng.randint(1, calls), count, rng.choice(CODES))
        assert read or count == float("inf")
        outcomes["read" if read else "raised by name"] += 1
    print(f"{ERRORS} errors of reads: {dict(outcomes)}")


def test_writes_end_in_the_right_bits_or_lose_no_step(tmp_path):
    whole = tmp_path / "whole"
    result = fit(whole, 8)
    rng, outcomes = random.Random(1), collections.Counter()
    for index in range(ERRORS):
        count = (1, 2, float("inf"))[index % 3]
        ended = check_write((whole, result), tmp_path / "run", rng.randint(1, 60), count, rng.choice(CODES))
        outcomes["ended" if ended else "raised with the state"] += 1
    print(f"{ERRORS} errors of writes: {dict(outcomes)}")


WRITER = """
import sys
from phijax_rng import Checkpoints
from tests.faults._damage import state_at
import jax.numpy as jnp
state = state_at(1)
with Checkpoints(sys.argv[1], max_to_keep=1, asynchronous=False) as checkpoints:
    step = 0
    while True:
        step += 1
        checkpoints.save(state.replace(step=jnp.int32(step)))
"""


def test_a_reader_beside_a_writer_that_keeps_one_step(tmp_path):
    right = _damage.state_at(1)
    reads = 3 * ERRORS
    with start_python(WRITER, tmp_path, stderr=subprocess.PIPE) as child:
        try:
            while not Checkpoints(tmp_path).steps:
                assert child.poll() is None
            steps = []
            for _ in range(reads):
                state, step, told = _damage.restore_after(tmp_path)
                assert told == [] and step is not None
                assert (state.model_state["w"] == right.model_state["w"]).all()
                steps.append(step)
        finally:
            child.kill()
    assert steps == sorted(steps)
    print(f"{reads} reads beside a writer, of {len(set(steps))} steps")
