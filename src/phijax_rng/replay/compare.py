"""Where two runs part: contracts, history rows, states, in this order.

Everything is read from the two directories. A row of the history holds losses bit for bit, and a document
the digests of the state, so equal rows and digests are equal bits. Arrays are read at one step alone, the
first at which the digests differ.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.keys import is_typed_key
from phijax_rng.resume.contract import Difference, compare

_MOST_LEAVES = 12
_MOVING = ("batches", "keys", "none")


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """A leaf whose bits differ.

    Attributes:
        path: its place in the state.
        count: how many of its entries differ; 0 where dtype or shape do.
        size: how many it has.
        largest: the largest absolute difference of two numbers; `None` where they cannot be subtracted.
    """

    path: str
    count: int
    size: int
    largest: float | None

    def __str__(self) -> str:
        largest = "" if self.largest is None else f", by at most {self.largest:.3g}"
        return (
            f"{self.path}: {self.count} of {self.size}{largest}" if self.count else f"{self.path}: other type"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs beside each other.

    Attributes:
        directories: of both.
        newest: the newest step of both.
        changes: what their contracts differ in.
        rows: how many rows of the history were compared.
        row: the first step whose row differs; `None` where none does.
        columns: the names that differ there.
        steps: the steps that both saved.
        equal_step: the last saved step up to which all states are equal.
        step: the first saved step at which the states differ; `None` where none does.
        leaves: the leaves that differ there.
        cause: what differs that explains it: "keys", "batch", "program", "arithmetic", or `None`.
    """

    directories: tuple[str, str]
    newest: tuple[int, int]
    changes: tuple[Difference, ...]
    rows: int
    row: int | None
    columns: tuple[str, ...]
    steps: tuple[int, ...]
    equal_step: int | None
    step: int | None
    leaves: tuple[LeafDifference, ...]
    cause: str | None

    @property
    def comparable(self) -> bool:
        """Whether there is a row or a step that both runs have."""
        return bool(self.rows or self.steps)

    @property
    def equal(self) -> bool:
        """Whether every row and state that both have is equal."""
        return self.comparable and self.row is None and self.step is None

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.comparable:
            return "not comparable: the runs have no step in common"
        if self.equal:
            until = max((self.equal_step or 0, min(self.newest) if self.rows else 0))
            moving = sorted({c.setting.partition(".")[0] for c in self.changes if c.survives in _MOVING})
            return f"equal to step {until}" + (f", although {' and '.join(moving)} differ" if moving else "")
        first = min(step for step in (self.row, self.step) if step is not None)
        why = f"{self.cause} differ" if self.cause == "keys" else f"the {self.cause} differs"
        return f"different at step {first}: {why if self.cause else 'no setting explains it'}"

    def plain(self) -> dict[str, Any]:
        """All of it as JSON can store it."""
        changes = [[d.setting, str(d.saved), str(d.current), d.survives] for d in self.changes]
        return {**dataclasses.asdict(self), "changes": changes, "equal": self.equal, "verdict": self.verdict}

    def __str__(self) -> str:
        lines = [f"a: {self.directories[0]}, newest step {self.newest[0]}"]
        lines += [f"b: {self.directories[1]}, newest step {self.newest[1]}"]
        if self.changes:
            lines.append("settings that differ, and what stays equal all the same:")
            lines += [f"  {_setting(change)}" for change in self.changes]
        if self.row is not None:
            lines.append(f"first row that differs: step {self.row}, {', '.join(self.columns)}")
        elif self.rows:
            lines.append(f"{self.rows} rows of the history are equal")
        if self.step is not None:
            lines.append(f"first saved state that differs: step {self.step}")
            lines += [f"  {leaf}" for leaf in self.leaves[:_MOST_LEAVES]]
            if len(self.leaves) > _MOST_LEAVES:
                lines.append(f"  and {len(self.leaves) - _MOST_LEAVES} more")
        elif self.steps:
            lines.append(f"{len(self.steps)} saved states are equal, to step {self.equal_step}")
        return "\n".join([*lines, self.verdict])


def compare_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compares two runs by what lies in their directories; nothing is written or trained.

    Args:
        a: directory of a run.
        b: directory of another, or of a copy.

    Raises:
        FileNotFoundError: one of them has no step.
        DamagedCheckpointError: what is compared is damaged; the message names it.
    """
    runs = (Checkpoints(a), Checkpoints(b))
    newest = (runs[0].existing(), runs[1].existing())
    steps = tuple(sorted(set(runs[0].steps) & set(runs[1].steps)))
    changes = _changes(runs, newest, steps)
    rows, row, columns = _rows(*(_table(run, step) for run, step in zip(runs, newest, strict=True)))
    digests = {step: [run.digests(step) for run in runs] for step in steps}
    step = next((step for step in steps if digests[step][0] != digests[step][1]), None)
    before = [found for found in steps if step is None or found < step]
    return Comparison(
        directories=(str(runs[0].directory), str(runs[1].directory)),
        newest=newest,
        changes=changes,
        rows=rows,
        row=row,
        columns=columns,
        steps=steps,
        equal_step=before[-1] if before else None,
        step=step,
        leaves=() if step is None else _leaves(*(run.arrays(step) for run in runs)),
        cause=None if step is None and row is None else _cause(changes),
    )


_STAYS = {
    "exact": "everything",
    "rounding": "all but the last bits of parameters",
    "batches": "batches",
    "keys": "keys",
    "none": "nothing",
}


def _setting(change: Difference) -> str:
    values = [
        text if len(text) <= 40 else f"{text[:37]}..." for text in (str(change.saved), str(change.current))
    ]
    return f"{change.setting}: {values[0]} in a, {values[1]} in b ({_STAYS[change.survives]})"


def _table(run: Checkpoints, step: int) -> dict[int, dict[str, Any]]:
    table = run.memory(step).get("history", {})
    return {row[0]: dict(zip(table["names"], row[1:], strict=True)) for row in table.get("rows", ())}


def _rows(
    a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]]
) -> tuple[int, int | None, tuple[str, ...]]:
    """How many rows both have, the first step at which one differs, and the columns that do."""
    common = sorted(set(a) & set(b))
    for step in common:
        names = [n for n in a[step] if n in b[step] and None not in (a[step][n], b[step][n])]
        different = tuple(n for n in names if repr(a[step][n]) != repr(b[step][n]))
        if different:
            return len(common), step, different
    return len(common), None, ()


def _leaves(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[LeafDifference, ...]:
    found = []
    for path in dict.fromkeys((*a, *b)):
        old, new = (None if path not in arrays else _words(arrays[path]) for arrays in (a, b))
        if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
            found.append(LeafDifference(path, 0, 0, None))
            continue
        bits = [np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8) for array in (old, new)]
        count = int(np.count_nonzero((bits[0] != bits[1]).any(axis=1))) if old.size else 0
        if count:
            number = np.issubdtype(old.dtype, np.inexact)
            largest = float(np.nanmax(np.abs(old - new))) if number else None
            found.append(LeafDifference(path, count, old.size, largest))
    return tuple(found)


def _words(leaf: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(leaf) if is_typed_key(leaf) else leaf)


def _changes(
    runs: tuple[Checkpoints, Checkpoints], newest: tuple[int, int], steps: tuple[int, ...]
) -> tuple[Difference, ...]:
    """What the contracts differ in at the first step that both saved; without one, all but the next batch."""
    at = (steps[0], steps[0]) if steps else newest
    contracts = [run.contract(step) for run, step in zip(runs, at, strict=True)]
    if not steps:
        contracts = [{**contract, "canary": None} for contract in contracts]
    return tuple(compare(*contracts))


# In the order of a step: keys decide the batch, the batch and the program the update.
_CAUSES = (
    ("keys", ("keys", "derivation")),
    ("batch", ("canary", "source", "contents")),
    ("program", ("training", "memory")),
    ("arithmetic", ("versions", "settings", "machine")),
)


def _cause(changes: tuple[Difference, ...]) -> str | None:
    """The first kind of setting that differs."""
    kinds = {change.setting.partition(".")[0] for change in changes}
    return next((cause for cause, settings in _CAUSES if kinds & set(settings)), None)
