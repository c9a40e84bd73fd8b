"""The history of each key in a run: its derivations and its uses.

Everything inside one call of `jax.random` is one use of the key that was passed; keys that such a call makes
internally are not keys of the run. A history does not judge; `analysis` does.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from phijax_rng.auditing.call_sites import Place
from phijax_rng.auditing.events import Event, Row
from phijax_rng.auditing.findings import Bits, Draw, bits_of, fingerprint

_DERIVATIONS = ("split", "fold_in", "key", "PRNGKey", "wrap_key_data", "key_data", "clone", "key_impl")
"""Functions of `jax.random` that return keys or their data, and do not draw."""


@dataclasses.dataclass(frozen=True)
class Derivation:
    """One derivation of a key: the operation, the parent, and the line."""

    word: str
    parent: Bits | None
    label: str
    place: Place
    index: int  # of the event

    @property
    def way(self) -> tuple[Any, ...]:
        """Equal for derivations that are the same operation on the same parent."""
        return self.word, self.parent, self.label


@dataclasses.dataclass(frozen=True)
class Use:
    """A draw from a key, or a derivation from it."""

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


class History:
    """Derivations and uses of every key, in the order of the events.

    Attributes:
        events: all of them.
        labels: names of keys from outside.
        derivations: key -> all its derivations.
        uses: key -> every draw from it, and every split and fold of it.
        rows: call -> the rows of `vmap` that it ran in, where `vmap` runs row by row.
        spread: keys that one call used for several rows, for example `poisson` with one key and many rates.
        cloned: keys whose reuse `jax.random.clone` declares as intended.
    """

    def __init__(self, events: list[Event], labels: Mapping[Bits, str]):
        self.events = events
        self.labels = dict(labels)
        self.derivations: dict[Bits, list[Derivation]] = defaultdict(list)
        self.uses: dict[Bits, list[Use]] = defaultdict(list)
        self.rows = _common_rows(events)
        self.cloned: set[Bits] = set()
        self.spread: dict[Bits, Use] = {}
        self._streams: dict[Bits, tuple[Bits, int]] = {}
        self._names: dict[Bits, str] = {}
        self._read()

    def _read(self) -> None:
        used = self._used_keys()
        for index, event in enumerate(self.events):
            internal = event.call.function not in _DERIVATIONS and not event.kind.startswith("host")
            if event.kind in ("seed", "wrap", "split", "fold_in"):
                named = event.kind == "seed" or not internal or event.call.function == event.kind
                if named:
                    self._derive(index, event, used)
            if event.kind == "clone" and event.keys is not None:
                self.cloned.update(bits_of(event.keys))
        self._read_uses()

    def _used_keys(self) -> set[Bits]:
        used = set(self.labels)
        for event in self.events:
            if event.keys is not None:
                used.update(bits_of(event.keys))
        return used

    def _derive(self, index: int, event: Event, used: set[Bits]) -> None:
        if event.out is None:
            return
        if event.kind == "wrap" and event.call.function != "wrap_key_data":
            return  # a legacy key that a call converts
        parents = bits_of(event.keys) if event.keys is not None else [None]
        out = bits_of(event.out)
        each = len(out) // len(parents)
        for place, bits in enumerate(out):
            if bits not in used:  # a wide split makes a million keys and uses one
                continue
            parent = parents[place // each] if parents != [None] else None
            word, label = self._label(event, place, place % each)
            if event.helper is not None and event.helper[0] == "stream" and parent is not None:
                parent, label = self._within_stream(bits, parent, event.helper[1])
            self.derivations[bits].append(Derivation(word, parent, label, event.place, index))

    def _within_stream(self, bits: Bits, parent: Bits, names: tuple[str, ...]) -> tuple[Bits, str]:
        """The origin of a stream and its name; a stream is a chain of three folds."""
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
        if event.helper is not None and event.helper[0] == "root_key":
            return "seed", f"root_key({seed_in(event)})"
        return "wrap", "wrapped from its data"

    def _read_uses(self) -> None:
        inner: dict[int, set[Bits]] = defaultdict(set)  # keys made inside a call of jax.random
        counted: set[tuple[int, Bits]] = set()
        first_rows: dict[tuple[int, Bits], tuple[Row, ...]] = {}
        for index, event in enumerate(self.events):
            helper = event.helper[0] if event.helper else ""
            drawn = event.kind in ("bits", "gamma") or (event.kind == "unwrap" and helper == "host_rng")
            derived = event.kind in ("split", "fold_in")
            if event.keys is None or not (drawn or derived):
                continue
            if (event.helper or ("",))[0] == "stream" and bits_of(event.keys)[0] in self._streams:
                continue
            call = event.call
            # `randint` and others split their key first: for the caller that is a draw.
            inside = derived and call.function not in _DERIVATIONS and call.function != event.kind
            for row, bits in enumerate(bits_of(event.keys)):
                if bits in inner[call.number]:
                    continue
                draws = drawn or inside
                # One call of `jax.random` is one use, however many primitives it runs.
                once = (call.number, bits)
                if draws and _other_row(first_rows.setdefault(once, event.rows), event.rows):
                    self.spread.setdefault(bits, Use(event, index, draws, self._signature(event, draws, row)))
                if once in counted:
                    continue
                counted.add(once)
                self.uses[bits].append(Use(event, index, draws, self._signature(event, draws, row)))
            if inside and event.out is not None:
                inner[call.number].update(bits_of(event.out))

    def _signature(self, event: Event, draws: bool, row: int) -> tuple[Any, ...]:
        """Function, shape, dtype and line: equal for two uses that give the same numbers at one line."""
        if not draws:
            folded = int(event.data[row]) if event.kind == "fold_in" else event.data
            return (event.kind, folded, event.place)
        return (event.call.function, event.shape, event.bits, event.place)

    def name(self, bits: Bits) -> str:
        """The name of a key from outside, or its derivation."""
        chain: list[tuple[Bits, str]] = []  # a loop makes it as long as its steps: no recursion
        found = self._known_name(bits)
        while found is None:
            first = next(iter(self.derivations.get(bits, ())), None)
            if first is None or first.word == "wrap":
                found = fingerprint(bits)
                self._names[bits] = found
            elif first.parent is None:
                found = first.label
                self._names[bits] = found
            else:
                self._names[bits] = fingerprint(bits)  # a key can be derived from itself, by way of its data
                chain.append((bits, first.label))
                bits = first.parent
                found = self._known_name(bits)
        for child, label in reversed(chain):
            found = self._names[child] = found + label
        return found

    def _known_name(self, bits: Bits) -> str | None:
        return self._names.get(bits) or self.labels.get(bits)

    def draws(self) -> tuple[Draw, ...]:
        """Every draw, in order; equal draws at one line once, with a count."""
        calls: dict[int, dict[Bits, Use]] = defaultdict(dict)
        for bits, uses in self.uses.items():
            for use in uses:
                if use.draws:
                    calls[use.event.call.number][bits] = use
        counted: dict[Draw, int] = defaultdict(int)
        shapes = {e.call.number: (e.shape, e.bits) for e in self.events if e.kind in ("bits", "gamma")}
        for found in (item[1] for item in sorted(calls.items(), key=_first_index)):
            use = next(iter(found.values()))
            event, call = use.event, use.event.call
            primitive = event.helper[0] if event.kind == "unwrap" and event.helper else call.function
            shape, width = shapes.get(call.number, ((), event.bits))
            shape = call.shape if call.shape is not None else shape
            dtype = call.dtype or f"uint{width}"
            draw = Draw(tuple(map(self.name, found)), primitive, shape, dtype, event.place)
            counted[draw] += 1
        return tuple(dataclasses.replace(draw, count=count) for draw, count in counted.items())


def seed_in(event: Event) -> int:
    """The seed in the words that `keys.root_key` wraps."""
    assert event.out is not None
    high, low = event.out.rows[0][-2:]
    return int(high) << 32 | int(low)


def _common_rows(events: list[Event]) -> dict[int, tuple[Row, ...]]:
    """Call -> the rows that it ran in, without those of its own `vmap`, which `poisson` has."""
    common: dict[int, tuple[Row, ...]] = {}
    for event in events:
        before = common.setdefault(event.call.number, event.rows)
        same = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(before, event.rows, strict=False)
            )
        )
        common[event.call.number] = before[:same]
    return common


def _other_row(first: tuple[Row, ...], later: tuple[Row, ...]) -> bool:
    """Whether two events are in different rows of one `vmap`."""
    pairs = zip(first, later, strict=False)
    return any(one[0] == other[0] and one[1] != other[1] for one, other in pairs)


def _first_index(item: tuple[int, dict[Bits, Use]]) -> int:
    return min(use.index for use in item[1].values())
