"""From the events of a run to its draws, findings and keys.

Each key is judged separately, by its derivations and its uses. Uses that are no fault are removed first: rows
of one `vmap`, other positions of one keyed permutation, replays. One draw may remain, or splits and folds
without a draw.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from phijax_rng.auditing.call_sites import Line, Place, library_of
from phijax_rng.auditing.events import Event
from phijax_rng.auditing.findings import (
    FIXES,
    NOTES,
    Bits,
    Finding,
    KeyNode,
    Ledger,
    bits_of,
    gathered,
    name_matches,
)
from phijax_rng.auditing.key_lineage import Derivation, History, Use, seed_in

# Under `vmap` their draws come from the first key alone.
_RBG = ("rbg", "unsafe_rbg")
_PERMUTATIONS = ("permute_index", "invert_index")


def examine(
    events: list[Event],
    names: Mapping[Bits, str],
    *,
    from_outside: Iterable[Bits] = (),
    seeds: Iterable[int] = (),
    allow: Iterable[str] = (),
    reusable: Iterable[str] = (),
) -> Ledger:
    """The draws, findings and keys of a run.

    Args:
        events: those of an `Observer`.
        names: names of keys, by their bits.
        from_outside: keys among the arguments; this counts as one derivation.
        seeds: integers among the arguments, which are no constants.
        allow: names, or patterns with `*`, of keys whose faults are intended, here and in derived keys.
        reusable: likewise, of keys that every request of a loop may draw from once, at one line.
    """
    return _Examination(
        History(events, names), frozenset(from_outside), frozenset(seeds), tuple(allow), tuple(reusable)
    ).ledger()


class _Examination:
    def __init__(
        self,
        history: History,
        from_outside: frozenset[Bits],
        seeds: frozenset[int],
        allow: tuple[str, ...],
        reusable: tuple[str, ...],
    ):
        self.history = history
        self.from_outside = from_outside
        self.seeds = seeds
        self.allow = allow
        self.reusable = reusable
        self.findings: list[Finding] = []

    def ledger(self) -> Ledger:
        for bits in list(self.history.uses):
            self._judge(bits)
        self._judge_events()
        findings = tuple(gathered(self._allowed(finding) for finding in self.findings))
        return Ledger(self.history.draws(), findings, self._nodes(findings))

    def _judge(self, bits: Bits) -> None:
        draws = [use for use in self.history.uses[bits] if use.draws]
        derived = [use for use in self.history.uses[bits] if not use.draws]
        # In this order: a replay of a mapped draw repeats all its rows.
        draws = self._without_rows(bits, draws)
        draws = self._without_positions(draws)
        draws = self._without_replays(bits, draws)
        ways = self._ways(bits)
        if len(draws) > 1:
            self._report(self._kind_of_repeat(bits, draws, ways), bits, draws)
        if draws and derived:
            kind = "two paths" if len(ways) > 1 else "drawn and split"
            self._report(kind, bits, sorted([*draws, derived[0]], key=lambda use: use.index))
        # A key that two lines split or fold, each by its own path, gives equal children.
        elif len(ways) > 1 and len({use.place for use in derived}) > 1:
            self._report("two paths", bits, derived)

    def _ways(self, bits: Bits) -> list[Derivation]:
        """The distinct derivations of a key, in order."""
        ways = list({d.way: d for d in reversed(self.history.derivations[bits])}.values())[::-1]
        if bits in self.from_outside and ways:
            ways.insert(0, Derivation("argument", None, self.history.name(bits), ways[0].place, -1))
        return ways

    def _without_rows(self, bits: Bits, draws: list[Use]) -> list[Use]:
        """Counts draws of different rows of one `vmap` once, and reports them as broadcast."""
        remaining: dict[tuple[Any, ...], Use] = {}
        for use in draws:
            rows = self.history.rows[use.event.call.number]
            groups = tuple(group for group, _, _ in rows)
            first = remaining.setdefault((groups, use.signature) if groups else (use.index,), use)
            if first is not use and self.history.rows[first.event.call.number] != rows:
                if not self._computed_again(bits, first.event):
                    self._report("broadcast", bits, [first], rows=rows[-1][2].size)
            elif first is not use:
                remaining[(use.index,)] = use
        return sorted(remaining.values(), key=lambda use: use.index)

    def _computed_again(self, bits: Bits, event: Event) -> bool:
        """Whether `checkpoint` repeats in the backward pass what the forward pass drew."""
        signature = (event.call.function, event.shape, event.bits, event.place)
        return event.backward and any(
            use.draws and not use.event.backward and use.signature == signature
            for use in self.history.uses[bits]
        )

    def _without_positions(self, draws: list[Use]) -> list[Use]:
        """Counts calls of one keyed permutation once: other positions need no other key."""
        remaining: dict[Any, Use] = {}
        for use in draws:
            word, arguments = use.event.helper or ("", None)
            if word in _PERMUTATIONS:
                positions = {u.event.helper for u in remaining.values() if u.event.helper}
                # A permutation of another range is another draw from the key.
                others = all(
                    p[0] in _PERMUTATIONS and _range_of(p) == _range_of((word, arguments)) for p in positions
                )
                if positions and others and (word, arguments) not in positions:
                    continue
            remaining[use.index] = use
        return list(remaining.values())

    def _without_replays(self, bits: Bits, draws: list[Use]) -> list[Use]:
        remaining: list[Use] = []
        for use in draws:
            original = next((earlier for earlier in remaining if _replays(use, earlier)), None)
            if original is None:
                remaining.append(use)
            else:
                self._report("replay", bits, [original, use])
        return remaining

    def _kind_of_repeat(self, bits: Bits, draws: list[Use], ways: list[Derivation]) -> str:
        if len(ways) > 1:
            return "two paths"
        requests = {use.event.request for use in draws}
        if requests != {None}:
            alike = len({use.signature for use in draws}) == 1
            return (
                "restarted"
                if alike and None not in requests and len(requests) == len(draws)
                else "drawn twice"
            )
        first, second = draws[:2]
        again = [d for d in self.history.derivations[bits] if first.index < d.index <= second.index]
        same_line = first.signature == second.signature
        return "restarted" if again and same_line else "drawn twice"

    def _report(self, kind: str, bits: Bits, uses: list[Use], *, rows: int = 0) -> None:
        rank = _rank_of(kind, uses[0].event)
        if kind == "drawn twice" and bits in self.history.cloned:
            rank = "note"
        name = self.history.name(bits)
        times = "twice" if len(uses) == 2 else f"{len(uses)} times"
        uses = uses[:20]  # a loop may draw thousands of times; more lines would not help a reader
        callers = _parting_callers(uses)
        listed = list(
            {(u.place, c): (u, c) for u, c in reversed(list(zip(uses, callers, strict=True)))}.values()
        )
        listed = listed[::-1][:4] if len(listed) > 1 else list(zip(uses, callers, strict=True))[:2]
        text = _SENTENCES[kind].format(name=name, rows=rows, times=times)
        derivations = [self._derived_text(d) for d in self._shown_derivations(bits, kind)]
        self.findings.append(
            Finding(
                kind,
                rank,
                (name,),
                tuple(derivations),
                tuple(use.text + (f", called from {c}" if c else "") for use, c in listed),
                tuple(dataclasses.replace(use.place, callers=(c,) if c else ()) for use, c in listed),
                text,
                self._fix(bits, kind, uses),
            )
        )

    def _fix(self, bits: Bits, kind: str, uses: list[Use]) -> str:
        """The fix of this kind, or a hint if one library made and used the key without the user."""
        places = [use.place for use in uses] + [d.place for d in self.history.derivations[bits]]
        libraries = {library_of(place) for place in places}
        if len(libraries) > 1 or None in libraries or not self.history.derivations[bits]:
            return FIXES[kind]
        library = libraries.pop()
        return f"{library} makes and uses this key: report it there, or allow the key by name."

    def _shown_derivations(self, bits: Bits, kind: str) -> list[Derivation]:
        found = self._ways(bits)
        if kind in ("drawn twice", "restarted") and len(found) < 2:
            by_place = {(d.way, d.place): d for d in reversed(self.history.derivations[bits])}
            found = list(by_place.values())[::-1]
        if kind == "restarted" and len(found) == 1:  # one line, run twice
            found = found * 2
        if not found and bits in self.from_outside:
            found = [
                Derivation("argument", None, self.history.name(bits), self.history.uses[bits][0].place, -1)
            ]
        return found[:2]

    def _derived_text(self, derivation: Derivation) -> str:
        if derivation.word == "argument":
            return f"{derivation.label}, an argument"
        parent = "" if derivation.parent is None else self.history.name(derivation.parent)
        return f"{parent}{derivation.label} at {derivation.place}"

    def _judge_events(self) -> None:
        for bits, use in self.history.spread.items():
            if not self._computed_again(bits, use.event):
                self._report("broadcast", bits, [use], rows=use.event.rows[-1][2].size)
        legacy: dict[Place, Event] = {}
        for event in self.history.events:
            if event.kind == "host":
                self._event_finding("no key", event, f"{event.call.function} gave numbers without a key")
            elif event.kind == "seed" or (event.helper or ("",))[0] == "root_key":
                self._judge_seed(event)
            elif event.kind in ("bits", "gamma") and event.keys is not None:
                self._judge_batch(event)
            if event.call.function == "PRNGKey" or (
                event.kind == "wrap" and event.call.function != "wrap_key_data"
            ):
                legacy.setdefault(event.place, event)
        for event in legacy.values():
            self._event_finding("legacy key", event, "a legacy uint32 key is made or used here")

    def _judge_seed(self, event: Event) -> None:
        seeds = {int(seed) for seed in event.data} if event.kind == "seed" else {seed_in(event)}
        # A seed among the arguments is the caller's choice.
        if seeds <= self.seeds:
            return
        text = f"a key is made from the seed {', '.join(map(str, sorted(seeds)[:3]))} here"
        passed = event.call.seed
        if passed is not None and passed not in seeds and not -(2**31) <= passed < 2**32:
            used = next(iter(seeds)) % 2**32
            text = f"a key is made from the seed {passed} here; JAX uses 32 bits of it, which are {used}"
        self._event_finding("constant seed", event, text)

    def _judge_batch(self, event: Event) -> None:
        assert event.keys is not None
        names = tuple(dict.fromkeys(self.history.name(bits) for bits in bits_of(event.keys)))
        if event.keys.implementation in _RBG and len(event.keys.rows) > 1 and event.kind == "bits":
            text = f"{len(event.keys.rows)} rows are drawn from keys of {event.keys.implementation} at once"
            self._event_finding("batched rbg", event, text, names)
        # `jacrev` maps the backward pass over the outputs, which share the mask of the forward pass.
        if all(self._computed_again(bits, event) for bits in bits_of(event.keys)):
            return
        size = max((around.size for around in event.maps if around.shared), default=0)
        text = ""
        if size:
            text = _SENTENCES["broadcast"].format(name=names[0], rows=size)
        elif len(names) < len(event.keys.rows):
            size = len(event.keys.rows)
            text = f"{size} rows are drawn from {len(names)} different keys"
            if len(names) == 1:
                text = _SENTENCES["broadcast"].format(name=names[0], rows=size)
        if text:
            self._event_finding("broadcast", event, text, names)

    def _event_finding(self, kind: str, event: Event, text: str, names: tuple[str, ...] = ()) -> None:
        rank = _rank_of(kind, event)
        caller = _caller(event.place)
        place = dataclasses.replace(event.place, callers=(caller,) if caller else ())
        names = names or (tuple(self.history.name(b) for b in bits_of(event.out)[:1]) if event.out else ())
        derivations: tuple[str, ...] = ()
        if event.keys is not None:
            listed = self._shown_derivations(bits_of(event.keys)[0], kind)[:1]
            derivations = tuple(map(self._derived_text, listed))
        use = f"{event.call.function} at {event.place}" + (f", called from {caller}" if caller else "")
        self.findings.append(Finding(kind, rank, names, derivations, (use,), (place,), text, FIXES[kind]))

    def _allowed(self, finding: Finding) -> Finding:
        patterns = (*self.allow, *self.reusable) if finding.kind == "restarted" else self.allow
        intended = [any(name_matches(name, pattern) for pattern in patterns) for name in finding.keys]
        if finding.rank == "fault" and intended and all(intended):
            return dataclasses.replace(finding, rank="note", allowed=True)
        return finding

    def _nodes(self, findings: tuple[Finding, ...]) -> tuple[KeyNode, ...]:
        ranks: dict[str, str] = {}
        for finding in findings:
            for name in finding.keys:
                if ranks.get(name) != "fault":
                    ranks[name] = finding.rank
        nodes = []
        for bits in self._ancestry():
            first = next(iter(self.history.derivations.get(bits, ())), None)
            parent = None if first is None or first.parent is None else self.history.name(first.parent)
            how = "argument" if first is None else first.label
            draws = tuple(dict.fromkeys(use.text for use in self.history.uses[bits] if use.draws))
            nodes.append(
                KeyNode(self.history.name(bits), parent, how, draws, ranks.get(self.history.name(bits)))
            )
        return tuple(nodes)

    def _ancestry(self) -> Iterable[Bits]:
        """Every key that was used, and its ancestors."""
        wanted: dict[Bits, None] = {}
        for used in self.history.uses:
            bits: Bits | None = used
            while bits is not None and bits not in wanted:
                wanted[bits] = None
                first = next(iter(self.history.derivations.get(bits, ())), None)
                bits = None if first is None else first.parent
        return wanted


_SENTENCES = {
    "drawn twice": "{name} is drawn from {times}",
    "two paths": "one key is reached by two paths and used on both: {name}",
    "drawn and split": "{name} is drawn from and also split or folded into",
    "restarted": "a stream restarts: {name} is derived and drawn from again",
    "broadcast": "one key, {name}, gives the same numbers to all {rows} rows of a vmap",
    "replay": "the same line of the same computation draws from {name} again",
}


def _rank_of(kind: str, event: Event) -> str:
    # The rows of `jacfwd` and `hessian` differentiate one computation and share its draws, which is right.
    # The audit cannot distinguish their `vmap` from one of the user, so a shared key under `jvp` is a note.
    often_right = kind in NOTES or (kind == "broadcast" and event.forward)
    # Libraries draw from Python's generator for other purposes than results, for example Flax and beartype.
    return "note" if often_right or (kind == "no key" and event.data == "Python") else "fault"


def _parting_callers(uses: list[Use]) -> list[Line | None]:
    """For each use the innermost caller that other uses at that line do not share, or the nearest."""
    callers: list[Line | None] = []
    for use in uses:
        alike = [other for other in uses if other.place == use.place]
        parting = (
            line
            for depth, line in enumerate(use.place.callers)
            if any(other.place.callers[depth : depth + 1] != (line,) for other in alike)
        )
        callers.append(next(parting, _caller(use.place)))
    return callers


def _caller(place: Place) -> Line | None:
    """The nearest other line around a place."""
    own = place.line.file, place.line.number
    return next((line for line in place.callers if (line.file, line.number) != own), None)


def _replays(later: Use, earlier: Use) -> bool:
    """Whether a draw repeats an earlier one because JAX computes the same thing again."""
    if later.signature != earlier.signature:
        return False
    # `checkpoint` computes its block once more in the backward pass, with the same keys.
    if later.event.backward and not earlier.event.backward:
        return True
    if _requested_again(later.event, earlier.event):
        return True
    if None not in (later.event.code, earlier.event.code) and later.event.code != earlier.event.code:
        return False  # two functions on one line
    # The gradient of each loss term differentiates one function at the same arguments.
    ours, theirs = later.event.differentiations, earlier.event.differentiations
    return any(
        number != other and digest == digest_of_other
        for number, digest in ours
        for other, digest_of_other in theirs
    )


def _requested_again(later: Event, earlier: Event) -> bool:
    """Whether two `Session.request` blocks for the same thing made these draws."""
    if later.request is None or earlier.request is None:
        return False
    return later.request[0] != earlier.request[0] and later.request[1] == earlier.request[1]


def _range_of(spoken: tuple[str, Any]) -> Any:
    """The `n` of a keyed permutation, from what its frame says: word, (positions, n)."""
    return spoken[1][1]
