"""What is wrong with the keys of a run, from the events of an audit.

Keys are compared by their bits, never by the variable they were held in. Every key has a name: the one it was
given, or the way it was derived, `key.split(3)[0].fold_in(7)`. A key may be drawn from once, or be
split and folded into as often as one likes with different numbers, and not both.

    fault   numbers repeat, or cannot be repeated: mend it, or allow it by name
    note    worth knowing, and often meant: a replay, a constant seed, a legacy key

"""

import dataclasses
import fnmatch
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from phijax_rng._internals import Words
from phijax_rng._observe import Event, Line, Place, Unseen

Bits = tuple[str, bytes]
"""A key as it is compared: implementation and words."""

MENDS = {
    "drawn twice": "Split the key, or fold a number in, and draw from each result once.",
    "two paths": (
        "Give each use a key of its own: one split for all of them, or keys.stream with a name for each. "
        "With JAX's Threefry split(k, n)[i] is fold_in(k, i), and a shorter split is the start of a longer one."
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

_DERIVATIONS = ("split", "fold_in", "key", "PRNGKey", "wrap_key_data", "key_data", "clone", "key_impl")
_RBG = ("rbg", "unsafe_rbg")


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


@dataclasses.dataclass(frozen=True)
class _Derivation:
    """One way to a key: the operation, the key it started from, and where it was asked for."""

    word: str
    parent: Bits | None
    label: str
    place: Place
    index: int  # of the event

    @property
    def way(self) -> tuple[Any, ...]:
        """What makes two derivations the same one."""
        return self.word, self.parent, self.label


@dataclasses.dataclass(frozen=True)
class _Use:
    """A key drawn from, or derived from."""

    event: Event
    index: int
    draws: bool
    signature: tuple[Any, ...]

    @property
    def place(self) -> Place:
        return self.event.place

    @property
    def text(self) -> str:
        word = self.event.call.function if self.draws else self.event.kind
        return f"{word} at {self.place}"


def examine(
    events: list[Event],
    names: Mapping[Bits, str],
    *,
    given: Iterable[Bits] = (),
    given_seeds: Iterable[int] = (),
    allow: Iterable[str] = (),
) -> Ledger:
    """The draws, findings and keys of a run.

    Args:
        events: what an `Observer` collected.
        names: names of keys, by their bits.
        given: keys that came in from outside, which is a path of its own to them.
        given_seeds: integers that came in from outside.
        allow: names, or patterns with `*`, of keys whose findings are meant, and of all that comes from them.
    """
    return _Examination(events, names, frozenset(given), frozenset(given_seeds), tuple(allow)).ledger()


class _Examination:
    def __init__(
        self,
        events: list[Event],
        names: Mapping[Bits, str],
        given: frozenset[Bits],
        given_seeds: frozenset[int],
        allow: tuple[str, ...],
    ):
        self.events = events
        self.labels = dict(names)
        self.given = given
        self.given_seeds = given_seeds
        self.allow = allow
        self.derivations: dict[Bits, list[_Derivation]] = defaultdict(list)
        self.uses: dict[Bits, list[_Use]] = defaultdict(list)
        self.cloned: set[Bits] = set()
        self._streams: dict[Bits, tuple[Bits, int]] = {}
        self.names: dict[Bits, str] = {}
        self.findings: list[Finding] = []
        self._call_rows = _common_rows(events)
        self._read()

    def ledger(self) -> Ledger:
        for bits in list(self.uses):
            self._judge(bits)
        self._judge_events()
        findings = tuple(_gathered(self._allowed(finding) for finding in self.findings))
        return Ledger(self._draws(), findings, self._nodes(findings))

    # -- reading ------------------------------------------------------------------------------

    def _read(self) -> None:
        used = self._used_bits()
        for index, event in enumerate(self.events):
            internal = event.call.function not in _DERIVATIONS and event.kind != "host"
            if event.kind in ("seed", "wrap", "split", "fold_in"):
                named = event.kind == "seed" or not internal or event.call.function == event.kind
                if named:
                    self._derive(index, event, used)
            if event.kind == "clone" and event.keys is not None:
                self.cloned.update(_bits(event.keys))
        self._read_uses()

    def _used_bits(self) -> set[Bits]:
        used = set(self.labels)
        for event in self.events:
            if event.keys is not None:
                used.update(_bits(event.keys))
        return used

    def _derive(self, index: int, event: Event, used: set[Bits]) -> None:
        if event.out is None:
            return
        if event.kind == "wrap" and event.call.function != "wrap_key_data":
            return  # a legacy key on its way in
        parents = _bits(event.keys) if event.keys is not None else [None]
        out = _bits(event.out)
        each = len(out) // len(parents)
        for place, bits in enumerate(out):
            if bits not in used:
                continue
            parent = parents[place // each] if parents != [None] else None
            word, label = self._label(event, place, place % each)
            if event.speaking is not None and event.speaking[0] == "stream" and parent is not None:
                parent, label = self._within_stream(bits, parent, event.speaking[1])
            self.derivations[bits].append(_Derivation(word, parent, label, event.place, index))

    def _within_stream(self, bits: Bits, parent: Bits, names: tuple[str, ...]) -> tuple[Bits, str]:
        """The key that the stream started from, and the name of the stream, for each of its folds."""
        origin, folds = self._streams.get(parent, (parent, 0))
        self._streams[bits] = (origin, folds + 1)
        label = f".stream({', '.join(map(repr, names))})"
        return origin, label if folds == 2 else f"{label}#{folds + 1}"

    def _label(self, event: Event, place: int, child: int) -> tuple[str, str]:
        if event.kind == "split":
            shape = event.data
            inner = ", ".join(map(str, np.unravel_index(child, shape))) if shape else ""
            return "split", f".split({', '.join(map(str, shape))})[{inner}]"
        if event.kind == "fold_in":
            return "fold_in", f".fold_in({int(event.data[place])})"
        if event.kind == "seed":
            return "seed", f"key({int(event.data[place])})"
        if event.speaking is not None and event.speaking[0] == "root_key":
            return "seed", f"root_key({_seed_in(event)})"
        return "wrap", "rebuilt from its data"

    def _read_uses(self) -> None:
        inner: dict[int, set[Bits]] = defaultdict(set)  # keys made inside a call of jax.random
        counted: set[tuple[int, Bits, tuple[Any, ...]]] = set()
        for index, event in enumerate(self.events):
            speaking = event.speaking[0] if event.speaking else ""
            drawn = event.kind in ("bits", "gamma") or (event.kind == "unwrap" and speaking == "host_rng")
            derived = event.kind in ("split", "fold_in")
            if event.keys is None or not (drawn or derived):
                continue
            if (event.speaking or ("",))[0] == "stream" and _bits(event.keys)[0] in self._streams:
                continue
            call = event.call
            inside = derived and call.function not in _DERIVATIONS and call.function != event.kind
            for row, bits in enumerate(_bits(event.keys)):
                if bits in inner[call.number]:
                    continue
                once = (call.number, bits)
                if once in counted:
                    continue
                counted.add(once)
                draws = drawn or inside
                self.uses[bits].append(_Use(event, index, draws, self._signature(event, draws, row)))
            if inside and event.out is not None:
                inner[call.number].update(_bits(event.out))

    def _signature(self, event: Event, draws: bool, row: int) -> tuple[Any, ...]:
        """What makes two uses of one key the same: function, shape, dtype, line."""
        if not draws:
            folded = int(event.data[row]) if event.kind == "fold_in" else event.data
            return (event.kind, folded, event.place)
        return (event.call.function, event.shape, event.bits, event.place)

    # -- judging ------------------------------------------------------------------------------

    def _judge(self, bits: Bits) -> None:
        draws = [use for use in self.uses[bits] if use.draws]
        derived = [use for use in self.uses[bits] if not use.draws]
        draws = self._without_rows(bits, draws)
        draws = self._without_positions(draws)
        draws = self._without_replays(bits, draws)
        ways = self._ways(bits)
        if len(draws) > 1:
            self._report(self._kind_of_repeat(bits, draws, ways), bits, draws)
        if draws and derived:
            kind = "two paths" if len(ways) > 1 else "drawn and split"
            self._report(kind, bits, sorted([*draws, derived[0]], key=lambda use: use.index))
        elif len(ways) > 1 and len({use.place for use in derived}) > 1:
            self._report("two paths", bits, derived)

    def _ways(self, bits: Bits) -> list[_Derivation]:
        """The different derivations of a key, first of each."""
        ways = list({d.way: d for d in reversed(self.derivations[bits])}.values())[::-1]
        if bits in self.given and ways:
            ways.insert(0, _Derivation("given", None, self.name(bits), ways[0].place, -1))
        return ways

    def _without_rows(self, bits: Bits, draws: list[_Use]) -> list[_Use]:
        """Draws of different rows of one `vmap` count once, and are reported as broadcast."""
        kept: dict[tuple[Any, ...], _Use] = {}
        for use in draws:
            rows = self._call_rows[use.event.call.number]
            groups = tuple(group for group, _, _ in rows)
            first = kept.setdefault((groups, use.signature) if groups else (use.index,), use)
            if first is not use and self._call_rows[first.event.call.number] != rows:
                self._report("broadcast", bits, [first], rows=rows[-1][2])
            elif first is not use:
                kept[(use.index,)] = use
        return sorted(kept.values(), key=lambda use: use.index)

    def _without_positions(self, draws: list[_Use]) -> list[_Use]:
        """A keyed permutation may be asked for other positions with the same key."""
        kept: dict[Any, _Use] = {}
        for use in draws:
            word, asked = use.event.speaking or ("", None)
            if word in ("permute_index", "invert_index"):
                positions = {u.event.speaking for u in kept.values() if u.event.speaking}
                if positions and all(p[0] in ("permute_index", "invert_index") for p in positions):
                    if (word, asked) not in positions:
                        continue
            kept[use.index] = use
        return list(kept.values())

    def _without_replays(self, bits: Bits, draws: list[_Use]) -> list[_Use]:
        kept: list[_Use] = []
        for use in draws:
            original = next((earlier for earlier in kept if _replays(use, earlier)), None)
            if original is None:
                kept.append(use)
            else:
                self._report("replay", bits, [original, use])
        return kept

    def _kind_of_repeat(self, bits: Bits, draws: list[_Use], ways: list[_Derivation]) -> str:
        if len(ways) > 1:
            return "two paths"
        first, second = draws[:2]
        again = [d for d in self.derivations[bits] if first.index < d.index <= second.index]
        same_line = first.signature == second.signature
        return "restarted" if again and same_line else "drawn twice"

    def _report(self, kind: str, bits: Bits, uses: list[_Use], *, rows: int = 0) -> None:
        rank = "note" if kind in NOTES or (bits in self.cloned and kind == "drawn twice") else "fault"
        name = self.name(bits)
        times = "twice" if len(uses) == 2 else f"{len(uses)} times"
        uses = uses[:20]
        callers = _parting_callers(uses)
        shown = list(
            {(u.place, c): (u, c) for u, c in reversed(list(zip(uses, callers, strict=True)))}.values()
        )
        shown = shown[::-1][:4] if len(shown) > 1 else list(zip(uses, callers, strict=True))[:2]
        text = _SENTENCES[kind].format(name=name, rows=rows, times=times)
        derivations = [self._derived_text(d) for d in self._shown_derivations(bits, kind)]
        self.findings.append(
            Finding(
                kind,
                rank,
                (name,),
                tuple(derivations),
                tuple(use.text + (f", called from {c}" if c else "") for use, c in shown),
                tuple(dataclasses.replace(use.place, callers=(c,) if c else ()) for use, c in shown),
                text,
                MENDS[kind],
            )
        )

    def _shown_derivations(self, bits: Bits, kind: str) -> list[_Derivation]:
        found = self._ways(bits)
        if kind in ("drawn twice", "restarted") and len(found) < 2:
            by_place = {(d.way, d.place): d for d in reversed(self.derivations[bits])}
            found = list(by_place.values())[::-1]
        if kind == "restarted" and len(found) == 1:
            found = found * 2
        if not found and bits in self.given:
            found = [_Derivation("given", None, self.name(bits), self.uses[bits][0].place, -1)]
        return found[:2]

    def _derived_text(self, derivation: _Derivation) -> str:
        if derivation.word == "given":
            return f"{derivation.label}, as it was given"
        parent = "" if derivation.parent is None else self.name(derivation.parent)
        return f"{parent}{derivation.label} at {derivation.place}"

    def _judge_events(self) -> None:
        legacy: dict[Place, Event] = {}
        for event in self.events:
            if event.kind == "host":
                self._event_finding("no key", event, f"{event.data} gives numbers that no key names")
            elif event.kind == "seed" or (event.speaking or ("",))[0] == "root_key":
                seeds = {int(seed) for seed in event.data} if event.kind == "seed" else {_seed_in(event)}
                if not seeds <= self.given_seeds:
                    shown = ", ".join(map(str, sorted(seeds)[:3]))
                    self._event_finding("constant seed", event, f"a key is made from the seed {shown} here")
            if event.call.function == "PRNGKey" or (
                event.kind == "wrap" and event.call.function != "wrap_key_data"
            ):
                legacy.setdefault(event.place, event)
            if event.kind in ("bits", "gamma") and event.keys is not None:
                self._judge_batch(event)
        for event in legacy.values():
            self._event_finding("legacy key", event, "a legacy uint32 key is made or used here")

    def _judge_batch(self, event: Event) -> None:
        assert event.keys is not None
        names = tuple(dict.fromkeys(self.name(bits) for bits in _bits(event.keys)))
        if event.keys.implementation in _RBG and len(event.keys.rows) > 1 and event.kind == "bits":
            text = f"{len(event.keys.rows)} rows are drawn from keys of {event.keys.implementation} at once"
            self._event_finding("batched rbg", event, text, names)
        spread = [size for size, name, mapped in event.maps if not mapped and size > 1]
        over_mesh = [name for _, name, mapped in event.maps if not mapped and name in event.meshes]
        if len(spread) > len(over_mesh):
            text = f"one key, {names[0]}, gives the same numbers to all {max(spread)} rows of a vmap"
            self._event_finding("broadcast", event, text, names)
        elif spread:
            text = f"one key, {names[0]}, gives the same numbers to every device along {over_mesh[0]!r}"
            self._event_finding("broadcast", event, text, names, rank="note")
        elif len(names) < len(event.keys.rows):
            text = f"{len(event.keys.rows)} rows are drawn from {len(names)} different keys"
            self._event_finding("broadcast", event, text, names)

    def _event_finding(
        self, kind: str, event: Event, text: str, names: tuple[str, ...] = (), rank: str = ""
    ) -> None:
        rank = rank or ("note" if kind in NOTES else "fault")
        place = dataclasses.replace(event.place, callers=())
        names = names or (tuple(self.name(b) for b in _bits(event.out)[:1]) if event.out else ())
        derivations: tuple[str, ...] = ()
        if event.keys is not None:
            shown = self._shown_derivations(_bits(event.keys)[0], kind)[:1]
            derivations = tuple(map(self._derived_text, shown))
        word = event.data if event.kind == "host" else event.call.function
        use = f"{word} at {event.place}"
        self.findings.append(Finding(kind, rank, names, derivations, (use,), (place,), text, MENDS[kind]))

    def _allowed(self, finding: Finding) -> Finding:
        if finding.rank == "fault" and finding.keys and all(map(self._is_allowed, finding.keys)):
            return dataclasses.replace(finding, rank="note", allowed=True)
        return finding

    def _is_allowed(self, name: str) -> bool:
        return any(name_matches(name, pattern) for pattern in self.allow)

    # -- naming -------------------------------------------------------------------------------

    def name(self, bits: Bits) -> str:
        """The name a key was given, or how it was derived."""
        found = self.names.get(bits) or self.labels.get(bits)
        if found is None:
            self.names[bits] = fingerprint(bits)  # ends a circle of derivations
            derivations = self.derivations.get(bits)
            if derivations:
                first = derivations[0]
                found = (self.name(first.parent) if first.parent is not None else "") + first.label
            if not derivations or derivations[0].word == "wrap":
                found = fingerprint(bits)
        self.names[bits] = found
        return found

    # -- what is reported ----------------------------------------------------------------------

    def _draws(self) -> tuple[Draw, ...]:
        calls: dict[int, dict[Bits, _Use]] = defaultdict(dict)
        for bits, uses in self.uses.items():
            for use in uses:
                if use.draws:
                    calls[use.event.call.number][bits] = use
        counted: dict[Draw, int] = defaultdict(int)
        shapes = {e.call.number: (e.shape, e.bits) for e in self.events if e.kind in ("bits", "gamma")}
        for found in (item[1] for item in sorted(calls.items(), key=_first_index)):
            use = next(iter(found.values()))
            event, asked = use.event, use.event.call
            primitive = event.speaking[0] if event.kind == "unwrap" and event.speaking else asked.function
            shape, bits = shapes.get(asked.number, ((), event.bits))
            shape = asked.shape if asked.shape is not None else shape
            dtype = asked.dtype or f"uint{bits}"
            draw = Draw(tuple(map(self.name, found)), primitive, shape, dtype, event.place)
            counted[draw] += 1
        return tuple(dataclasses.replace(draw, count=count) for draw, count in counted.items())

    def _nodes(self, findings: tuple[Finding, ...]) -> tuple[KeyNode, ...]:
        ranks: dict[str, str] = {}
        for finding in findings:
            for name in finding.keys:
                if ranks.get(name) != "fault":
                    ranks[name] = finding.rank
        wanted: dict[Bits, None] = {}

        def want(bits: Bits) -> None:
            if bits not in wanted:
                first = next(iter(self.derivations.get(bits, ())), None)
                wanted[bits] = None
                if first is not None and first.parent is not None:
                    want(first.parent)

        for bits in self.uses:
            want(bits)
        nodes = []
        for bits in wanted:
            first = next(iter(self.derivations.get(bits, ())), None)
            parent = None if first is None or first.parent is None else self.name(first.parent)
            how = "given" if first is None else first.label
            draws = tuple(dict.fromkeys(use.text for use in self.uses[bits] if use.draws))
            nodes.append(KeyNode(self.name(bits), parent, how, draws, ranks.get(self.name(bits))))
        return tuple(nodes)


_SENTENCES = {
    "drawn twice": "{name} is drawn from {times}",
    "two paths": "one key is reached by two paths and used on both: {name}",
    "drawn and split": "{name} is drawn from and also split or folded into",
    "restarted": "a stream starts again: {name} is made and drawn from again",
    "broadcast": "one key, {name}, gives the same numbers to all {rows} rows of a vmap",
    "replay": "{name} is drawn from again by the same line of the same computation",
}


def _bits(words: Words) -> list[Bits]:
    rows = np.ascontiguousarray(words.rows)
    return [(words.implementation, row.tobytes()) for row in rows]


def _seed_in(event: Event) -> int:
    """The seed in the words that `keys.root_key` wraps."""
    assert event.out is not None
    high, low = event.out.rows[0][-2:]
    return int(high) << 32 | int(low)


def bits_of(words: Words) -> list[Bits]:
    """The keys of an array, as they are compared."""
    return _bits(words)


def fingerprint(bits: Bits) -> str:
    """A key without a name, as `keys.fingerprint` writes it."""
    return f"{bits[0]}:{'-'.join(map(str, np.frombuffer(bits[1], np.uint32)))}"


def name_matches(name: str, pattern: str) -> bool:
    """Whether a key's name is `pattern` or comes from a key of that name; `*` stands for anything."""
    literal = pattern.replace("[", "[[]")
    return fnmatch.fnmatchcase(name, literal) or any(
        fnmatch.fnmatchcase(name[: match.start()], literal) for match in re.finditer(r"[.\[]", name)
    )


def _parting_callers(uses: list[_Use]) -> list[Line | None]:
    """Where uses at one line part: for each, its innermost caller that another use at that line has not."""
    callers: list[Line | None] = []
    for use in uses:
        alike = [other for other in uses if other.place == use.place]
        parting = (
            line
            for depth, line in enumerate(use.place.callers)
            if any(other.place.callers[depth : depth + 1] != (line,) for other in alike)
        )
        callers.append(next(parting, None))
    return callers


def _common_rows(events: list[Event]) -> dict[int, tuple[tuple[int, int, int], ...]]:
    """Call -> the rows that it ran in; not those that it opened itself, as `poisson` does under `vmap`."""
    common: dict[int, tuple[tuple[int, int, int], ...]] = {}
    for event in events:
        before = common.setdefault(event.call.number, event.rows)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, event.rows)))
        common[event.call.number] = before[:same]
    return common


def _first_index(item: tuple[int, dict[Bits, _Use]]) -> int:
    return min(use.index for use in item[1].values())


def _replays(later: _Use, earlier: _Use) -> bool:
    """Whether a draw repeats an earlier one because JAX computes the same thing again."""
    if later.signature != earlier.signature:
        return False
    if later.event.backward and not earlier.event.backward:
        return True
    ours, theirs = later.event.differentiations, earlier.event.differentiations
    return any(
        number != other and digest == digest_of_other
        for number, digest in ours
        for other, digest_of_other in theirs
    )


def _gathered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one kind at the same lines as one, faults first."""
    groups: dict[Any, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.kind, finding.rank, finding.uses, finding.allowed].append(finding)
    gathered = []
    for alike in groups.values():
        names = tuple(dict.fromkeys(name for finding in alike for name in finding.keys))
        others = len(names) - 1
        more = (
            f"; {others} more {'key' if others == 1 else 'keys'} alike" if others and len(alike) > 1 else ""
        )
        gathered.append(dataclasses.replace(alike[0], keys=names, text=alike[0].text + more))
    return sorted(gathered, key=lambda finding: finding.rank == "note")


__all__ = ["Draw", "Finding", "KeyNode", "Ledger", "Line", "Place", "Unseen", "examine"]
