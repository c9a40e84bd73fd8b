"""Who drew what from which key.

    report = audit(train_step, state, batch, names={"root": root})
    print(report)             # findings first, then every draw with the name of its key and its line
    assert report.clean

The function runs as it is, op by op, with JAX's random primitives observed: through `jit`, `grad`, `vmap`,
`scan`, `while_loop`, `cond`, `checkpoint` and custom derivatives, in whatever library. Keys are compared by
their bits, so that the same key under two names is seen for what it is. What could not be
observed is listed as not seen, and a report that has such a region is not clean.

Op by op is slow (a compile for every small operation, the first time): audit two or three small
steps. Nothing is replaced or slowed down before `audit` is called, and all is put back after it.
"""

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng.auditing import report
from phijax_rng.auditing.analysis import examine
from phijax_rng.auditing.findings import Bits, Draw, Finding, KeyNode, bits_of
from phijax_rng.auditing.jax_hooks import Words, words_of
from phijax_rng.auditing.recorder import Observer, Unseen

_LEGACY = {2: ("threefry2x32",), 4: ("rbg", "unsafe_rbg")}
"""Implementations whose legacy keys have this many words."""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit saw.

    Attributes:
        draws: every draw, in order; the same draw by the same line is counted, not repeated.
        findings: faults first, then notes.
        unseen: regions that ran compiled, or in another thread, and may hold draws.
        keys: every key that was used, and those it came from, parents first.
        result: what the audited function returned.
    """

    draws: tuple[Draw, ...]
    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]
    keys: tuple[KeyNode, ...]
    result: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings that make numbers repeat, or that cannot be repeated."""
        return tuple(finding for finding in self.findings if finding.rank == "fault")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that are worth knowing and often meant."""
        return tuple(finding for finding in self.findings if finding.rank == "note")

    @property
    def clean(self) -> bool:
        """Whether there is no fault, and nothing that could not be seen."""
        return not self.faults and not self.unseen

    def __str__(self) -> str:
        """Findings, what was not seen, and the draws, as plain text."""
        return report.as_text(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists and dicts, fit for JSON."""
        return {
            "clean": self.clean,
            "findings": [_plain(finding) for finding in self.findings],
            "unseen": [_plain(region) for region in self.unseen],
            "draws": [_plain(draw) for draw in self.draws],
            "keys": [_plain(node) for node in self.keys],
        }

    def show(self, file: TextIO | None = None, *, width: int | None = None) -> None:
        """Prints the findings, the tree of keys and the table of draws, in color on a terminal.

        Args:
            file: where to; standard output for `None`.
            width: columns; those of the terminal for `None`.
        """
        report.show(self.to_dict(), file, width)

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs nothing else: findings, a tree that folds, a table that filters.

        Args:
            path: a file to write it to.

        Returns:
            The page.
        """
        return _written(report.as_html(self.to_dict()), path)

    def svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """The tree of keys as a picture: what came from what, what was drawn, where the faults are."""
        return _written(report.as_svg(self.to_dict()), path)

    def png(self, path: str | os.PathLike[str]) -> None:
        """The same picture as a PNG file; needs Matplotlib."""
        report.write_png(self.to_dict(), path)


def audit(
    fn: Callable[..., Any],
    *args: Any,
    names: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
) -> AuditReport:
    """Runs `fn(*args)` and reports every draw, with the name of its key and the line that asked for it.

    Keys among the arguments are named by their parameter (`key`, `state.rng_key`), keys that `fn` closes over
    by their variable, and all others by how they were derived: `key.split(3)[0].fold_in(7)`.

    Args:
        fn: any function; what it does happens once, as in an ordinary call.
        *args: its arguments.
        names: name -> key, array of keys, or pytree of keys, to be called so in the report.
        allow: names of keys whose findings are meant, with those of all keys that come from them; `*` stands
            for anything. Their findings become notes.

    Returns:
        The report; `report.result` is what `fn` returned.

    Raises:
        TypeError: `fn` is not callable, or `names` does not map names to keys.
        RuntimeError: another audit is open in this process, or JAX has moved what the audit looks through.
        Exception: whatever `fn` raises; JAX is as it was before.
    """
    session = Session(names=names, allow=allow)
    session.give(validation.function(fn, "fn"), args)
    with session.observer.observing():
        result = fn(*args)
    return session.report(result)


class Session:
    """An audit step by step: name keys, run things under `observer.observing()`, ask for the report."""

    def __init__(
        self,
        *,
        names: Mapping[str, Any] | None = None,
        allow: Iterable[str] = (),
        kept: Iterable[str] = (),
    ):
        """See `audit`; `kept` names keys that each `asked` block may draw from once, by the same line."""
        self.observer = Observer()
        self._names: dict[Bits, str] = {}
        self._given: set[Bits] = set()
        self._seeds: set[int] = set()
        self._allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self._kept = tuple(kept)
        for name, keys in _named(names):
            self.name(name, keys)

    def name(self, name: str, keys: Any) -> None:
        """The key, or each key of a tree, is called so in the report."""
        for path, words in _keys_in(keys):
            for label, bits in _labeled(name + path, words):
                self._names.setdefault(bits, label)

    def give(self, fn: Any, args: tuple[Any, ...]) -> None:
        """The keys and seeds that a function is given or holds come from outside."""
        for parameter, value in _by_parameter(fn, args):
            for path, words in _keys_in(value, legacy=True):
                for label, bits in _labeled(parameter + path, words):
                    self._names.setdefault(bits, label)
                    self._given.add(bits)
            self._seeds.update(_integers(value))
        for variable, value in _held(fn):
            self.name(variable, value)
            self._seeds.update(_integers(value))

    def asked(self, what: str) -> contextlib.AbstractContextManager[None]:
        """In the block a loop asks for something; what another such block draws for the same is a replay."""
        return self.observer.enter("asks", what)

    def report(self, result: Any = None) -> AuditReport:
        """What was seen."""
        ledger = examine(
            self.observer.events,
            self._names,
            given=self._given,
            given_seeds=self._seeds,
            allow=self._allow,
            kept=self._kept,
        )
        unseen = tuple(dict.fromkeys(self.observer.not_seen))
        return AuditReport(ledger.draws, ledger.findings, unseen, ledger.keys, result)


def _named(names: Any) -> list[tuple[str, Any]]:
    if names is None:
        return []
    validation.mapping(names, "names")
    for name, keys in names.items():
        if not list(_keys_in(keys)):
            raise TypeError(
                f"names[{name!r}] must be a typed key or hold some, got {keys!r}. "
                "Make keys with keys.root_key or jax.random.key."
            )
    return list(names.items())


def _keys_in(tree: Any, *, legacy: bool = False) -> Iterator[tuple[str, Words]]:
    try:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    except ValueError:  # a dict whose keys have no order
        return
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or isinstance(leaf, jax.core.Tracer):
            continue
        where = jax.tree_util.keystr(path)
        if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
            yield where, words_of(leaf)
        elif legacy and dtype == np.uint32 and np.shape(leaf)[-1:] and np.shape(leaf)[-1] in _LEGACY:
            rows = np.asarray(leaf).reshape(-1, np.shape(leaf)[-1])
            for implementation in _LEGACY[rows.shape[1]]:
                yield where, Words(implementation, rows, tuple(np.shape(leaf)[:-1]))


def _labeled(name: str, words: Words) -> Iterator[tuple[str, Bits]]:
    for index, bits in enumerate(bits_of(words)):
        place = ", ".join(map(str, np.unravel_index(index, words.shape))) if words.shape else ""
        yield (f"{name}[{place}]" if place else name), bits


def _by_parameter(fn: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    try:
        bound = inspect.signature(fn).bind(*args).arguments
    except (TypeError, ValueError):  # compiled code does not tell
        yield from ((f"args[{index}]", value) for index, value in enumerate(args))
        return
    yield from bound.items()


def _held(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function closes over, and the globals that it names."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in code.co_names:
        if isinstance(fn.__globals__.get(name), jax.Array):
            yield name, fn.__globals__[name]


def _integers(value: Any) -> Iterator[int]:
    try:
        leaves = jax.tree.leaves(value)
    except ValueError:
        return
    for leaf in leaves:
        if validation.is_whole(leaf) and not isinstance(leaf, jax.core.Tracer):
            yield int(leaf)


def _plain(record: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name == "place":
            plain[field.name] = str(value)
        elif isinstance(value, tuple):
            plain[field.name] = [item if isinstance(item, (int, str)) else str(item) for item in value]
        else:
            plain[field.name] = value
    return plain


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text
