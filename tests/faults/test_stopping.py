"""A second SIGINT leaves at once, wherever the run is, and names the step on disk."""

import re
import signal
import time
from pathlib import Path

import pytest

from phijax_rng import Checkpoints
from tests._selection import mostly_full
from tests._subprocess import run_python, start_python, wait_for_line

SCRIPT = Path(__file__).parent / "_stopping.py"

# Where it is when both signals come, and what stands then: at least so much, or nothing.
PLACES = {"source": 80, "save": 40, "compile": None}


@pytest.mark.parametrize(
    ("place",), mostly_full({name: (name,) for name in PLACES}, everyday=("source", "save"))
)
def test_a_second_sigint_leaves_at_once_and_names_what_is_on_disk(tmp_path, place):
    with start_python(SCRIPT, tmp_path / "run", place) as child:
        wait_for_line(child, f"at {place}")
        began = time.perf_counter()
        child.send_signal(signal.SIGINT)
        wait_for_line(child, "SIGINT: stopping after this chunk")
        child.send_signal(signal.SIGINT)
        text = child.stdout.read()
        status = child.wait(timeout=60)
    # A source, a save and a compilation that hang would take two minutes.
    assert time.perf_counter() - began < 30, text
    assert status in (-signal.SIGINT, 130), text
    said = re.search(r"KeyboardInterrupt: interrupted twice: (.*)", text)
    assert said, text
    assert "atexit" in text.splitlines()
    steps = Checkpoints(tmp_path / "run").steps
    if PLACES[place] is None:
        assert (said.group(1), steps) == ("no checkpoint was saved", ())
    else:
        assert said.group(1) == f"the newest checkpoint is step {steps[-1]} in {tmp_path / 'run'}"
        assert steps[-1] >= PLACES[place]


@pytest.mark.full
def test_sigint_and_then_sigterm_in_a_callback_end_with_status_143(tmp_path):
    with start_python(SCRIPT, tmp_path / "run", "callback") as child:
        lines = child.stdout.read()
        assert child.wait(timeout=60) == 143, lines
    assert "returned" not in lines
    assert Checkpoints(tmp_path / "run").latest_step == 40


@pytest.mark.full
def test_what_is_ignored_stays_ignored(tmp_path):
    with start_python(SCRIPT, tmp_path / "run", "ignored") as child:
        wait_for_line(child, "fitting")
        child.send_signal(signal.SIGINT)
        lines = child.stdout.read()
        assert child.wait(timeout=60) == 0, lines
    assert lines.splitlines()[-2:] == ["returned 400", "atexit"]


@pytest.mark.full
def test_a_save_that_nobody_waits_for_lands_when_the_process_ends(tmp_path):
    code = """
        import sys, jax, optax
        from phijax_rng import Checkpoints, initialize_train_state, keys

        model = {"w": jax.numpy.ones((1000, 1000))}
        state = initialize_train_state(model, optax.adam(0.1), {}, keys.split_root(0))
        checkpoints = Checkpoints(sys.argv[1])
        checkpoints.save(state)
    """
    assert "Error" not in run_python(code, tmp_path).stderr
    assert Checkpoints(tmp_path).steps == (0,)
