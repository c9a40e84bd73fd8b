"""Ratios of two times, taken in interleaved pairs, with the spread.

The speed of a shared machine varies; two interleaved measurements see the same load, so their ratio is
reliable where neither of them is. Every figure is the median of
the ratios of at least 15 pairs, whose order alternates, with the 95 % interval of the bootstrap.
A bar is met when the interval reaches it.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PAIRS = 15
"""The fewest pairs that a bar is judged by."""

Seconds = np.ndarray[Any, np.dtype[np.float64]]
"""Two numbers: on the wall, and of this process's CPU time on all threads."""


def timed(work: Callable[[], Any]) -> Seconds:
    """The seconds that `work` takes. It must wait for its results."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return np.array([time.perf_counter() - wall, time.process_time() - cpu])


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], pairs: int, *, warm_up: int = 1
) -> tuple[list[Any], list[Any]]:
    """The results of each in each pair; each begins every other pair. Warm-up calls are dropped."""
    for _ in range(warm_up):
        first(), second()
    firsts, seconds = [], []
    for pair in range(pairs):
        if pair % 2:
            seconds.append(second())
            firsts.append(first())
        else:
            firsts.append(first())
            seconds.append(second())
    return firsts, seconds


def shown_seconds(seconds: float) -> str:
    """A time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def shown_bytes(size: float) -> str:
    """A size in megabytes."""
    return f"{size / 2**20:.0f} MB"


@dataclasses.dataclass(frozen=True)
class Bar:
    """The value that a figure must reach: at least so many times faster, or at most so much slower."""

    limit: float
    at_least: bool = False

    def met_by(self, low: float, high: float) -> bool:
        return high >= self.limit if self.at_least else low <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """Our time compared with another, `ours / other`, or `other / ours` where being faster is the claim.

    Attributes:
        label: what was measured.
        ours: seconds of each pair, shape `(pairs, 2)`: wall and CPU.
        other: the same of the other; `None` for a figure in seconds of our own.
        bar: the bar for its wall time; `None` for information.
        faster: whether the ratio says how many times faster we are.
        cpu: whether the CPU time is meaningful, and shown.
        shown: a value with its unit.
        fewest: the fewest pairs that the bar is judged by.
    """

    label: str
    ours: Any
    other: Any = None
    bar: Bar | None = None
    faster: bool = False
    cpu: bool = True
    shown: Callable[[Any], str] = shown_seconds
    fewest: int = PAIRS

    @property
    def values(self) -> Seconds:
        """One value for each pair: a ratio, or seconds where there is no other."""
        ours = np.asarray(self.ours)
        if self.other is None:
            return ours
        other = np.asarray(self.other)
        return other / ours if self.faster else ours / other

    def row(self) -> list[str]:
        """The figure for the table."""
        wall, cpu = self.values.T
        low, high = interval(wall)
        verdict = ""
        if self.bar is not None:
            met = "met" if self.bar.met_by(low, high) else "MISSED"
            verdict = met if len(wall) >= self.fewest else f"({met}: {len(wall)} pairs)"
        return [
            self.label,
            self.shown(np.median(np.asarray(self.ours)[:, 0])),
            "" if self.other is None else self.shown(np.median(np.asarray(self.other)[:, 0])),
            f"{np.median(wall):.3g} [{low:.3g}, {high:.3g}]",
            f"{np.median(cpu):.3g}" if self.cpu else "",
            "" if self.bar is None else str(self.bar),
            verdict,
        ]


def interval(values: Seconds, level: float = 0.95, resamples: int = 10_000) -> tuple[float, float]:
    """The bootstrap interval of the median."""
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values)))
    tail = (1 - level) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return float(low), float(high)


HEADINGS = ["figure", "ours", "other", "ratio [95 %]", "CPU time", "bar", ""]


def table(rows: list[list[str]]) -> str:
    """Rows as a Markdown table, which also reads well on a terminal."""
    ruled = [HEADINGS, *rows]
    widths = [max(len(row[column]) for row in ruled) for column in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in ruled
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
