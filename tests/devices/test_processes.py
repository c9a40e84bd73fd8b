"""Two real processes as one run: the same batches, one decides and writes; and the loss of a process."""

import contextlib
import os
import shutil
import signal
import time

import numpy as np
import pytest

from phijax_rng import Checkpoints
from phijax_rng.devices import processes
from tests import _pair
from tests._subprocess import EIGHT_DEVICES, Servers, run_python, wait_for_line

# Seconds that the survivor may take: the heartbeat, and as long again for the coordinator to tell.
UNTIL_THE_END = 3 * _pair.HEARTBEAT_SECONDS + 30


@pytest.fixture(scope="module")
def in_both():
    """Runs a function of `_pair` in two processes; what each printed."""
    with contextlib.closing(Servers(_pair.pair_of_servers)) as servers:
        yield servers


@pytest.mark.full
def test_the_first_process_prepares_the_data_and_its_clock_ends_the_run(tmp_path):
    first, second = _pair.run_pair(_pair.limits, tmp_path)
    assert (
        first.splitlines()[:2] == second.splitlines()[:2] == ["prepared: ['prepared by 0']", "ended 5 True"]
    )
    assert first.splitlines()[2] == "OSError no such host"
    assert second.splitlines()[2].startswith("RuntimeError the primary process raised an exception.")


def test_one_process_agrees_with_itself():
    assert processes.broadcast(3, True, 2**31 - 1) == (3, 1, 2**31 - 1)
    assert processes.maximum(4) == 4
    assert processes.run_on_primary(lambda: "done") == "done"
    tree = {"a": np.arange(3)}
    assert processes.to_local(tree)["a"] is tree["a"] is processes.gather(tree["a"])
    assert processes.agreed_seed(None) is None and processes.agreed_seed(3) == 3
    with pytest.raises(ZeroDivisionError):
        processes.run_on_primary(lambda: 1 // 0)


@pytest.mark.full
def test_two_processes_use_the_values_of_the_first(in_both):
    first, second = (output.splitlines() for output in in_both(_pair.agreements))
    first = [line for line in first if "drew seed" not in line]
    everywhere = [
        "agree (7, 2147483647)",
        "most 3",
        "bits [2147483648, 2143289344, 71362]",
        "key threefry2x32:0-3",
    ]
    assert first[:4] == second[:4] == everywhere
    differ = "ValueError seed must be the same in every process, got {} here. Pass one seed to all."
    assert [first[4], second[4]] == [differ.format(5), differ.format(6)]
    assert first[5].startswith("ZeroDivisionError ")
    waits = "RuntimeError the primary process raised an exception. Fix what its message names."
    assert second[5] == waits
    assert [first[6], second[6]] == ["first wrote", "first None"]
    apart = (
        "ValueError devices names {} devices of the 2 processes, but each must have equally many. "
        "Pass devices='auto' to use every device of each."
    )
    assert [first[7], second[7]] == [apart.format("1, 0"), apart.format("0, 1")]
    uneven = "ValueError devices=3 does not divide equally over 2 processes. Pass 'auto' to use every device "
    assert first[8] == second[8] == f"{uneven}of each."
    assert [first[9], second[9]] == [apart.format("4, 0"), apart.format("0, 4")]
    assert [first[10], second[10]] == ["four [0, 0, 1, 1] 0 True", "four [0, 0, 1, 1] 1 True"]
    apart = (
        "ValueError the processes see different checkpoints; the newest that is seen here is {}. "
        "Keep them in a directory that every process sees."
    )
    assert [first[11], second[11]] == [apart.format(5), apart.format(None)]
    assert first[12:] == second[12:] == ["seed True"]


def test_the_batches_of_two_processes_are_those_of_one_device(in_both):
    assert in_both(_pair.batches) == ["equal (6, 2)\n"] * 2


@pytest.mark.full
def test_each_process_fetches_its_own_rows_from_the_host(in_both):
    assert in_both(_pair.hosted) == ["own True\nfilled up\n"] * 2


SINGLE = """
import sys, shutil
from tests import _devices
from tests._bitwise import assert_trees_bitwise_equal
folder, *counts = sys.argv[1:]
whole = _devices.fit(12)[0].state
for count in map(int, counts):
    _devices.fit(5, devices=count, directory=f"{folder}/one-{count}")
    own = shutil.copytree(f"{folder}/two", f"{folder}/two-{count}")
    result, told = _devices.fit(12, devices=count, directory=own)
    assert any("machine.processes: 2 in the checkpoint, 1 in this run" in text for text in told), told
    print("two", count, "rounding", f"{_devices.farthest(result.state, whole):.0e}", sep="|")
    for name in ("rng_key", "sampling_key", "balancer_key", "step"):
        assert_trees_bitwise_equal(getattr(result.state, name), getattr(whole, name))
import jax
print([jax.device_get(leaf).tolist() for leaf in jax.tree.leaves(whole.model_state)])
"""


@pytest.mark.full
def test_a_run_resumes_on_another_number_of_processes(in_both, tmp_path):
    first, second = in_both(_pair.matrix, tmp_path / "two")
    assert first == second and len(first) == 65
    *down, whole = run_python(SINGLE, tmp_path, 1, 2, 4, 8, env=EIGHT_DEVICES).stdout.splitlines()
    shutil.copytree(tmp_path / "two", tmp_path / "same")
    saved = ["same", "one-1", "one-2", "one-4", "one-8"]
    outputs = in_both(_pair.matrix, tmp_path, *saved)
    assert outputs[0] == outputs[1]
    rows = [line.split("|") for line in outputs[0].splitlines()]
    assert [row[:3] for row in rows] == [["same", "exact", "0"]] + [[n, "rounding", "1"] for n in saved[1:]]
    assert rows[0][3] == first.strip(), "the same layout goes on to the same bits"
    print("saved on | resumed on | survives | farthest from one device")
    for row in down:
        _, count, level, away = row.split("|")
        print(f"2 processes | 1 process, {count} devices | {level} | {away}")
        assert float(away) < 1e-4
    for name, level, _, _, model in rows:
        pairs = zip(_numbers(model), _numbers(whole), strict=True)
        away = max(np.abs(one - other).max() / np.abs(other).max() for one, other in pairs)
        print(f"{name} | 2 processes | {level} | {away:.0e}")
        assert away < 1e-4


def _numbers(text):
    import ast

    return [np.array(leaf) for leaf in ast.literal_eval(text)]


@pytest.mark.full
def test_clocks_that_disagree_change_nothing(tmp_path):
    first, second = _pair.run_pair(_pair.clocks, "together")
    assert first == second and "done" in first
    assert _pair.run_pair(_pair.saves, tmp_path / "run") == ["(9,)\n"] * 2


@pytest.mark.full
def test_without_the_first_process_to_decide_they_would():
    """The control: trip counts that differ leave one process waiting, or end in other numbers."""
    with _pair.start_pair(_pair.clocks, "apart") as pair:
        for child in pair:
            wait_for_line(child, "fitting")
        ends = []
        for child in pair:
            try:
                ends.append((_pair.ended(child, 10), child.returncode))
            except _pair.subprocess.TimeoutExpired:
                ends.append(("waits", None))
    # A process that crashes for another reason shows nothing.
    for output, code in ends:
        assert code is None or (code == 0 and "done" in output) or "ProcessLostError" in output, ends
    assert ends[0] != ends[1] or ends[0] == ("waits", None), ends


# Ends


def begin(folder):
    return _pair.start_pair(_pair.long_run, folder, 100_000)


@pytest.mark.full
def test_a_sigterm_to_one_process_saves_what_both_resume(tmp_path):
    with begin(tmp_path / "run") as pair:
        wait_for_line(pair[0], "step 40/")
        pair[1].send_signal(signal.SIGTERM)
        outputs = [_pair.ended(child) for child in pair]
    assert [child.returncode for child in pair] == [143, 143], outputs
    assert "step " in outputs[0] and "step " not in outputs[1].replace("SIGTERM", ""), "one display"
    saved = Checkpoints(tmp_path / "run").latest_step
    assert f"step {saved} is saved in " in outputs[0]
    stop = saved + 6
    outputs = _pair.run_pair(_pair.long_run, tmp_path / "run", stop)
    last = [output.splitlines()[-1] for output in outputs]
    assert last == [f"done {stop} the bits of an uninterrupted run"] * 2


@pytest.mark.full
def test_a_killed_process_ends_the_other_and_a_restart_resumes(tmp_path):
    with begin(tmp_path / "run") as pair:
        wait_for_line(pair[0], "step 44/")
        pair[1].kill()
        killed = time.monotonic()
        output = _pair.ended(pair[0], UNTIL_THE_END)
        took = time.monotonic() - killed
    assert pair[0].returncode not in {0, None}, output
    print(f"the other process ended after {took:.1f} s")
    told = "ProcessLostError: process 0 of 2 ", "If one of them has ended, restart all of them; "
    # Where the transport does not see the connection close, JAX ends the process and says why.
    missed = "stopped sending heartbeats", "Terminating process because the JAX distributed service detected"
    assert any(all(text in output for text in texts) for texts in (told, missed)), output
    saved = Checkpoints(tmp_path / "run").latest_step
    assert saved in {20, 40}, os.listdir(tmp_path / "run")
    first, second = _pair.run_pair(_pair.long_run, tmp_path / "run", 50)
    assert f"continuing from step {saved}" in first and "continuing" not in second
    last = [output.splitlines()[-1] for output in (first, second)]
    assert last == ["done 50 the bits of an uninterrupted run"] * 2
