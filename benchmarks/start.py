"""The time to the first step, and of the import, each in a new process.

The clock of the first step starts when JAX is initialized and the pools exist, and stops after the first
update: it includes streams, model, optimizer, placement, tracing and compilation. The import is that of
`phijax_rng` after `jax`, `optax` and `orbax.checkpoint`.

The cost of resume checks at the start of a fit (contract, digest of the pools, canary, two draws from the
source) is measured with 92 MB of pools: a fit with checkpoints up to its first step, compared with the same
parts without them, one compilation of `source(step)`, and the allowed 50 ms.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._ratio import Bar, Figure, interleaved, timed

ALLOWED_SECONDS = 0.05


def figures(pairs: int) -> Iterator[Figure]:
    ours, hand = interleaved(lambda: _measured("ours"), lambda: _measured("hand"), pairs)
    yield Figure(
        "time to the first step, fit / hand-written loop",
        [sample["first_step"] for sample in ours],
        [sample["first_step"] for sample in hand],
        Bar(1.3),
    )
    yield Figure("import phijax_rng, in seconds", [sample["import"] for sample in ours], bar=Bar(0.1))
    fit, parts = interleaved(lambda: _measured("checked"), lambda: _measured("parts"), pairs)
    yield Figure(
        "a fit with 92 MB of pools up to step 1 / its parts, source(0) and 50 ms",
        [sample["first_step"] for sample in fit],
        [sample["first_step"] + ALLOWED_SECONDS for sample in parts],
        Bar(1.0),
    )


def _measured(whose: str) -> Any:
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.start", whose],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    sample = json.loads(child.stdout)
    return {name: np.array(seconds) for name, seconds in sample.items()}


def _measure(whose: str) -> dict[str, list[float]]:
    """In the new process."""
    import jax  # noqa: PLC0415 - what is imported when is what is measured
    import optax  # noqa: F401, PLC0415
    import orbax.checkpoint  # noqa: F401, PLC0415

    sample = {}
    if whose == "ours":
        wall, cpu = time.perf_counter(), time.process_time()
        import phijax_rng  # noqa: F401, PLC0415

        sample["import"] = [time.perf_counter() - wall, time.process_time() - cpu]

    from benchmarks import _heat  # noqa: PLC0415

    jax.devices()
    if whose in ("checked", "parts"):
        return {"first_step": _large(whose).tolist()}
    if whose == "ours":
        from benchmarks import _ours  # noqa: PLC0415

        sample["first_step"] = timed(lambda: _ours.fit(1, _heat.SIZES)).tolist()
    else:
        sample["first_step"] = timed(lambda: _heat.HandLoop(_heat.SIZES).run(1)).tolist()
    return sample


def _large(whose: str) -> Any:
    import numpy as np  # noqa: PLC0415

    from benchmarks import _heat, _ours  # noqa: PLC0415

    arrays = _heat.make_arrays()
    arrays["pde"]["inputs"] = np.random.default_rng(0).random((11_500_000, 2), dtype=np.float32)
    if whose == "parts":
        return timed(lambda: _ours.first_step_by_parts(arrays, _heat.SIZES))
    with tempfile.TemporaryDirectory(prefix="phijax_rng-bench-") as folder:
        return _ours.seconds_to_first_step(arrays, _heat.SIZES, folder)


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
