"""What an audit leaves behind: a fit before the first audit of its process, and one after it.

Every pair is a process of its own, because a first audit happens once. An audit that left anything in
JAX, a replaced function or a program that is looked up the long way, would show in the second fit. The
control is the same without the audit in between.
"""

import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks import _heat, _ours
from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed

STEPS = 4000


def figures(pairs: int) -> Iterator[Figure]:
    audited, plain = interleaved(lambda: _in_a_process(True), lambda: _in_a_process(False), pairs, warm_up=0)
    label = f"a fit of {STEPS} steps, after an audit / before it"
    yield Figure(label, *_sides(audited, 1, 0), Bar(1.05))
    yield Figure("the same without the audit in between", *_sides(plain, 1, 0))
    yield Figure("the audit of three steps, from its call", [times[2] for times in audited])


def _sides(measured: list[Seconds], first: int, second: int) -> tuple[list[Seconds], list[Seconds]]:
    return [times[first] for times in measured], [times[second] for times in measured]


def _in_a_process(audited: bool) -> Seconds:
    """The seconds of a fit, of another one, and of the audit between them, in a fresh process."""
    command = f"from benchmarks import audit; audit.measure({audited})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    return np.asarray(json.loads(done.stdout))


def measure(audited: bool) -> None:
    """Prints them; the first fit of the process is not timed."""
    _ours.fit(STEPS, _heat.SIZES)
    before = timed(lambda: _ours.fit(STEPS, _heat.SIZES))
    between = timed(_ours.audit if audited else lambda: None)
    after = timed(lambda: _ours.fit(STEPS, _heat.SIZES))
    print(json.dumps([before.tolist(), after.tolist(), between.tolist()]))
