"""Real changes of the machine between a save and a resume: cores, and the instruction set of XLA."""

import os
import shutil
import subprocess
import sys

import pytest

from tests._subprocess import ROOT, child_environment

pytestmark = pytest.mark.full  # a faked change of the same settings is in tests/test_changes.py

RUN = """
import sys, warnings
from phijax_rng import Checkpoints, Trainer
from tests import _problems

problem = _problems.heat()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    trainer = Trainer(int(sys.argv[2]), checkpoints=Checkpoints(sys.argv[1]), progress=False)
    trainer.fit(problem.module, seed=0, resume="auto", **problem.arguments)
print("\\n".join(str(warning.message) for warning in told) or "silent")
contract = Checkpoints(sys.argv[1]).contract()
print([(change["step"], change["survives"]) for change in contract["run"]["changes"]])
"""


def run(folder, stop, *, before=(), env=None):
    """What a process of its own is told by a fit up to `stop`, and the changes it has recorded."""
    child = subprocess.run(
        [*before, sys.executable, "-c", RUN, folder, str(stop)],
        env=child_environment(env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.skipif(
    shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < 2, reason="needs taskset and two cores"
)
def test_one_core_after_two_is_named_and_goes_on(tmp_path):
    two, one = (["taskset", "-c", ",".join(map(str, cores))] for cores in _some_cores())
    assert run(tmp_path, 4, before=two) == "silent\n[]\n"
    assert run(tmp_path, 6, before=two) == "silent\n[]\n"
    told = run(tmp_path, 8, before=one)
    assert "\n    machine.cores: 2 in the checkpoint, 1 in this run\n" in told, told
    assert told.endswith("[(6, 'rounding')]\n")


def _some_cores():
    cores = sorted(os.sched_getaffinity(0))
    return cores[:2], cores[:1]


def test_another_instruction_set_is_named_and_goes_on(tmp_path):
    assert run(tmp_path, 4) == "silent\n[]\n"
    told = run(tmp_path, 6, env={"XLA_FLAGS": "--xla_cpu_max_isa=AVX"})
    assert '\n    settings.XLA_FLAGS: "" in the checkpoint, --xla_cpu_max_isa=AVX in this run\n' in told, told
    assert told.endswith("[(4, 'rounding')]\n")
