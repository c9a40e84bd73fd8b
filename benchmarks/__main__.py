"""Measure all figures, or the named groups: `python -m benchmarks [group] ...`."""

import argparse
import importlib
import os
import sys
import time
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the bars are for CPUs

from benchmarks import _machine, _ratio

GROUPS = (
    *("loop", "rival", "balance", "adaptive", "draw", "start", "saving", "shuffles", "pools"),
    *("devices", "audit", "memory"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", metavar="group", help=f"some of {', '.join(GROUPS)}; all if none"
    )
    parser.add_argument("--pairs", type=int, default=_ratio.PAIRS, help="pairs of each figure")
    options = parser.parse_args()
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    print(_machine.description(), "\n", _machine.load(), sep="", flush=True)
    rows, notes = [], []
    for name in options.groups or GROUPS:
        began = time.perf_counter()
        for figure in importlib.import_module(f"benchmarks.{name}").figures(options.pairs):
            if isinstance(figure, str):
                notes.append(f"{name}: {figure}.")
                continue
            rows.append(figure.row())
            print("  ".join(cell for cell in rows[-1] if cell), flush=True)
        print(
            f"({name}: {time.perf_counter() - began:.0f} s, {_machine.load()})", file=sys.stderr, flush=True
        )
    print("", _ratio.table(rows), *notes, _machine.load(), sep="\n")
    return int(any(row[-1] == "MISSED" for row in rows))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
