"""The kinds of findings, and their data.

Keys are compared by their bits, not by their variables. Every key has a name: that of a parameter or of its
derivation, `key.split(3)[0].fold_in(7)`. A program may draw from a key once, or split it and fold different
numbers into it, but not both.

    fault   numbers repeat, or cannot be reproduced: fix it, or allow it by name
    note    often intended: a replay, a constant seed, a legacy key

"""

import dataclasses
import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from phijax_rng.auditing.call_sites import Line, Place
from phijax_rng.auditing.events import Words

Bits = tuple[str, bytes]
"""A key for comparisons: implementation and bytes."""

FIXES = {
    "drawn twice": "Split the key, or fold a number in, and draw from each result once.",
    "two paths": (
        "Give each use a key of its own: one split for all of them, or keys.stream with a name for each. "
        "With JAX's Threefry split(k, n)[i] is fold_in(k, i), and a short split is the start of a longer one."
    ),
    "drawn and split": "Split first, then draw from one of the results.",
    "restarted": "Fold in the absolute step, or carry the new key, so that no step repeats a draw.",
    "broadcast": "Split the key into one for each row, and map over the keys.",
    "batched rbg": "Use a Threefry key, or keys.exact_vmap: with rbg every row uses the first key.",
    "constant seed": "Pass the key as an argument; a constant seed gives every caller the same numbers.",
    "legacy key": "Make typed keys with jax.random.key; nothing can mistake them for data.",
    "replay": "Nothing, if the repetition is intended: the same draw for the same step.",
    "no key": "Draw with jax.random from a key, or from keys.host_rng(key) on the host.",
}
"""How to fix each kind."""

NOTES = ("constant seed", "legacy key", "replay")
"""Kinds that are notes; all others are faults."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Numbers drawn by one call, or by several equal calls.

    Attributes:
        keys: names of the keys, one for each row of a batched draw.
        primitive: the function of `jax.random`, or the primitive outside of one.
        shape: of the numbers for one key.
        dtype: of the numbers; `"uint32"` or similar where only the bits are known.
        place: the line of the call.
        count: how often this line made the same draw from the same keys.
    """

    keys: tuple[str, ...]
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    place: Place
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Finding:
    """A possible mistake in the use of keys.

    Attributes:
        kind: one of `FIXES`.
        rank: `"fault"` or `"note"`.
        keys: names of the keys.
        derivations: how the key was derived, with lines; both derivations if there are two.
        uses: what the key was used for, with lines, in order.
        text: one sentence.
        fix: what to do.
        allowed: whether the caller allowed it by name, which makes it a note.
    """

    kind: str
    rank: str
    keys: tuple[str, ...]
    derivations: tuple[str, ...]
    uses: tuple[str, ...]
    places: tuple[Place, ...]
    text: str
    fix: str
    allowed: bool = False

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the uses, in order, and their callers where uses share one line."""
        return tuple(line for place in self.places for line in (place.line, *place.callers))

    def __str__(self) -> str:
        listed = [f"{self.rank}: {self.text}"]
        listed += [f"    derived  {derivation}" for derivation in self.derivations]
        listed += [f"    used     {use}" for use in self.uses]
        return "\n".join([*listed, f"    fix      {self.fix}"])


@dataclasses.dataclass(frozen=True)
class KeyNode:
    """One key in the tree: its name, its parent, its derivation and its draws."""

    name: str
    parent: str | None
    how: str
    draws: tuple[str, ...]
    rank: str | None = None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The draws, findings and keys of a run."""

    draws: tuple[Draw, ...]
    findings: tuple[Finding, ...]
    keys: tuple[KeyNode, ...]


def bits_of(words: Words) -> list[Bits]:
    """The keys of an array, for comparisons."""
    # Bytes hash and compare fast; a wide split has a million rows.
    rows = np.ascontiguousarray(words.rows)
    return [(words.implementation, row.tobytes()) for row in rows]


def fingerprint(bits: Bits) -> str:
    """The name of a key without a derivation, equal to `keys.fingerprint`."""
    return f"{bits[0]}:{'-'.join(map(str, np.frombuffer(bits[1], np.uint32)))}"


def name_matches(name: str, pattern: str) -> bool:
    """Whether `pattern` matches a key or one of its ancestors; `*` matches anything."""
    # Brackets are part of names, `split(2)[0]`, but a set of characters to fnmatch.
    literal = pattern.replace("[", "[[]")
    return fnmatch.fnmatchcase(name, literal) or any(
        fnmatch.fnmatchcase(name[: match.start()], literal) for match in re.finditer(r"[.\[]", name)
    )


def gathered(findings: Iterable[Finding]) -> list[Finding]:
    """Joins findings of one kind at the same lines; faults first."""
    groups: dict[Any, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.kind, finding.rank, finding.uses, finding.allowed].append(finding)
    gathered = []
    for alike in groups.values():
        names = tuple(dict.fromkeys(name for finding in alike for name in finding.keys))
        others = len(names) - 1
        more = f"; {others} more {'key' if others == 1 else 'keys'} like it"
        more = more if others > 0 and len(alike) > 1 else ""
        gathered.append(dataclasses.replace(alike[0], keys=names, text=alike[0].text + more))
    return sorted(gathered, key=lambda finding: finding.rank == "note")
