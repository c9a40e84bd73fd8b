"""What is wrong with the keys of a run, from the events of an audit.

Keys are compared by their bits, never by the variable they were held in. Every key has a name: the one it was
given, or the way it was derived, `key.split(3)[0].fold_in(7)`. A key may be drawn from once, or be
split and folded into as often as one likes with different numbers, and not both.

    fault   numbers repeat, or cannot be repeated: mend it, or allow it by name
    note    worth knowing, and often meant: a replay, a constant seed, a legacy key

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
"""A key as it is compared: implementation and words."""

MENDS = {
    "drawn twice": "Split the key, or fold a number in, and draw from each result once.",
    "two paths": (
        "Give each use a key of its own: one split for all of them, or keys.stream with a name for each. "
        "With JAX's Threefry split(k, n)[i] is fold_in(k, i), and a short split begins a longer one."
    ),
    "drawn and split": "Split first, and draw from one of the results; a key that was drawn from is spent.",
    "restarted": "Fold the absolute step in, or carry the key on, so that no step is drawn twice.",
    "broadcast": "Split the key into one for each row, and map over the keys.",
    "batched rbg": "Use a Threefry key, or keys.exact_vmap: with rbg every row comes from the first key.",
    "constant seed": "Pass the key in; a seed written into a function gives every caller the same numbers.",
    "legacy key": "Make typed keys with jax.random.key; they cannot be mistaken for data.",
    "replay": "Nothing, if the repetition is meant: the same draw for the same step.",
    "no key": "Draw with jax.random from a key, or from keys.host_rng(key) on the host.",
}
"""How to mend each kind of finding."""

NOTES = ("constant seed", "legacy key", "replay")
"""Kinds that are notes; all others are faults."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Numbers drawn by one call, or by several alike.

    Attributes:
        keys: names of the keys; one for each row of a batched draw.
        primitive: the function of `jax.random`, or the primitive outside of one.
        shape: for one key.
        dtype: of the numbers; `"uint32"` and the like where only the bits are known.
        place: who asked.
        count: how often the same keys gave the same draw at this place.
    """

    keys: tuple[str, ...]
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    place: Place
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about the keys of a run that a person should look at.

    Attributes:
        kind: one of `MENDS`.
        rank: `"fault"` or `"note"`.
        keys: names of the keys it is about.
        derivations: how the key came about, each with its line; both where there are two.
        uses: what was done with the key and where, in order.
        text: one sentence.
        mend: what to do.
        allowed: whether the caller allowed it by name; then it counts as a note.
    """

    kind: str
    rank: str
    keys: tuple[str, ...]
    derivations: tuple[str, ...]
    uses: tuple[str, ...]
    places: tuple[Place, ...]
    text: str
    mend: str
    allowed: bool = False

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the uses, in order, and those that called them where the uses share one line."""
        return tuple(line for place in self.places for line in (place.line, *place.callers))

    def __str__(self) -> str:
        listed = [f"{self.rank}: {self.text}"]
        listed += [f"    derived  {derivation}" for derivation in self.derivations]
        listed += [f"    used     {use}" for use in self.uses]
        return "\n".join([*listed, f"    mend     {self.mend}"])


@dataclasses.dataclass(frozen=True)
class KeyNode:
    """One key in the tree: its name, that of the key it came from, how, and what it was used for."""

    name: str
    parent: str | None
    how: str
    draws: tuple[str, ...]
    rank: str | None = None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What the events of a run come to."""

    draws: tuple[Draw, ...]
    findings: tuple[Finding, ...]
    keys: tuple[KeyNode, ...]


def bits_of(words: Words) -> list[Bits]:
    """The keys of an array, as they are compared."""
    rows = np.ascontiguousarray(words.rows)
    return [(words.implementation, row.tobytes()) for row in rows]


def fingerprint(bits: Bits) -> str:
    """A key without a name, as `keys.fingerprint` writes it."""
    return f"{bits[0]}:{'-'.join(map(str, np.frombuffer(bits[1], np.uint32)))}"


def name_matches(name: str, pattern: str) -> bool:
    """Whether a key's name is `pattern` or comes from a key of that name; `*` stands for anything."""
    literal = pattern.replace("[", "[[]")
    return fnmatch.fnmatchcase(name, literal) or any(
        fnmatch.fnmatchcase(name[: match.start()], literal) for match in re.finditer(r"[.\[]", name)
    )


def gathered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one kind at the same lines as one, faults first."""
    groups: dict[Any, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.kind, finding.rank, finding.uses, finding.allowed].append(finding)
    gathered = []
    for alike in groups.values():
        names = tuple(dict.fromkeys(name for finding in alike for name in finding.keys))
        others = len(names) - 1
        more = f"; {others} more {'key' if others == 1 else 'keys'} alike"
        more = more if others > 0 and len(alike) > 1 else ""
        gathered.append(dataclasses.replace(alike[0], keys=names, text=alike[0].text + more))
    return sorted(gathered, key=lambda finding: finding.rank == "note")
