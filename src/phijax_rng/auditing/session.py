"""An audit in steps, for callers that name keys while the audited code runs."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng.auditing import jax_hooks
from phijax_rng.auditing.analysis import examine
from phijax_rng.auditing.audit import AuditReport
from phijax_rng.auditing.events import Words, words_of
from phijax_rng.auditing.findings import Bits, bits_of
from phijax_rng.auditing.recorder import Observer

_LEGACY = {2: ("threefry2x32",), 4: ("rbg", "unsafe_rbg")}
"""Implementations whose legacy keys have this many words."""


class Session:
    """An audit step by step: name keys, run code under `observing()`, get the report."""

    def __init__(
        self,
        *,
        names: Mapping[str, Any] | None = None,
        allow: Iterable[str] = (),
        kept: Iterable[str] = (),
    ):
        """See `audit`; `kept` names keys that each `asked` block may draw from once, by the same line."""
        jax_hooks.private_modules()  # every later look at a key depends on them
        self._observer = Observer()
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

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """In the block every draw of this thread is recorded."""
        return self._observer.observing()

    def unobserved(self) -> contextlib.AbstractContextManager[None]:
        """In the block, inside one of `observing`, nothing is recorded."""
        return self._observer.blinded()

    def asked(self, what: str) -> contextlib.AbstractContextManager[None]:
        """In the block a loop asks for something; what another such block draws for the same is a replay."""
        return self._observer.enter("asks", what)

    def report(self, result: Any = None) -> AuditReport:
        """What was seen."""
        ledger = examine(
            self._observer.events,
            self._names,
            given=self._given,
            given_seeds=self._seeds,
            allow=self._allow,
            kept=self._kept,
        )
        unseen = tuple(dict.fromkeys(self._observer.not_seen))
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
