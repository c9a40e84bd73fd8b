"""The effect of an earlier audit: fits in a process that has audited, compared with one that has not.

Two processes stay open and fit alternately. Each has made a first fit, and one of them an audit.
An audit that left anything in JAX, such as a replaced function or a slower cache lookup, would show.
"""

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import _heat, _ours
from benchmarks._ratio import Bar, Figure, Seconds, interleaved, timed

STEPS = 4000


def figures(pairs: int) -> Iterator[Figure]:
    with _process(audited=True) as audited, _process(audited=False) as plain:
        auditing = _answer(audited)
        _answer(plain)
        samples = interleaved(functools.partial(_asked, audited), functools.partial(_asked, plain), pairs)
    label = f"a call of fit with {STEPS} steps, in a process that has audited / that has not"
    yield Figure(label, *samples, Bar(1.05))
    yield Figure("the audit of three steps, with compiling", [auditing])


@contextlib.contextmanager
def _process(*, audited: bool) -> Iterator[Any]:
    command = [sys.executable, "-c", f"from benchmarks import audit; audit.serve({audited})"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.communicate()


def _asked(process: Any) -> Seconds:
    process.stdin.write("fit\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: Any) -> Seconds:
    return np.asarray(json.loads(process.stdout.readline()))


def serve(audited: bool) -> None:
    """Fits once, audits or not, and then times a fit for every input line."""
    fit = functools.partial(_ours.fit, STEPS, _heat.SIZES)
    fit()
    print(json.dumps(timed(_ours.audit if audited else fit).tolist()), flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed(fit).tolist()), flush=True)
