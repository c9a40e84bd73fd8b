"""An audit in steps, for callers that name keys while the audited code runs."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng.auditing import jax_hooks
from phijax_rng.auditing.analysis import examine
from phijax_rng.auditing.audit_report import AuditReport
from phijax_rng.auditing.events import Words, words_of
from phijax_rng.auditing.findings import Bits, bits_of
from phijax_rng.auditing.recorder import Observer

_LEGACY = {2: ("threefry2x32",), 4: ("rbg", "unsafe_rbg")}
"""Implementations whose legacy keys have this many words."""


class Session:
    """An audit in steps: name keys, run code under `observing()`, get the report."""

    def __init__(
        self,
        *,
        names: Mapping[str, Any] | None = None,
        allow: Iterable[str] = (),
        reusable: Iterable[str] = (),
    ):
        """See `audit`; each `request` block may draw once from keys named `reusable`, at one line."""
        jax_hooks.private_modules()  # reading the bits of a key depends on them
        self._observer = Observer()
        self._names: dict[Bits, str] = {}
        self._from_outside: set[Bits] = set()
        self._seeds: set[int] = set()
        # A single name is a string, and a string is an iterable of letters.
        self._allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self._reusable = tuple(reusable)
        for name, keys in _named(names):
            self.name(name, keys)

    def name(self, name: str, keys: object) -> None:
        """Gives the key, or each key of a pytree, its name in the report."""
        for path, words in _keys_in(keys):
            for label, bits in _labeled(name + path, words):
                self._names.setdefault(bits, label)

    def add_inputs(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Names the keys that a function receives or closes over; its seeds are no constants."""
        for parameter, value in _by_parameter(fn, args):
            for path, words in _keys_in(value, legacy=True):
                for label, bits in _labeled(parameter + path, words):
                    self._names.setdefault(bits, label)
                    self._from_outside.add(bits)
            self._seeds.update(_integers(value))
        # A key in a closure gets a name but is not an input: the program may have derived it itself.
        for variable, value in _closed_over(fn):
            self.name(variable, value)
            self._seeds.update(_integers(value))

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """In the block every draw of this thread is recorded."""
        return self._observer.observing()

    def unobserved(self) -> contextlib.AbstractContextManager[None]:
        """In the block, inside one of `observing`, nothing is recorded."""
        return self._observer.blinded()

    def request(self, what: str) -> contextlib.AbstractContextManager[None]:
        """In the block a loop computes `what`; the same draws in another block for `what` are a replay."""
        return self._observer.enter("requests", what)

    def report(self, result: object = None) -> AuditReport:
        """The report of everything recorded so far."""
        ledger = examine(
            self._observer.events,
            self._names,
            from_outside=self._from_outside,
            seeds=self._seeds,
            allow=self._allow,
            reusable=self._reusable,
        )
        unseen = tuple(dict.fromkeys(self._observer.not_seen))
        return AuditReport(ledger.draws, ledger.findings, unseen, ledger.keys, result)


def _named(names: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if names is None:
        return []
    validation.mapping(names, "names")
    for name, keys in names.items():
        if not list(_keys_in(keys)):
            raise TypeError(
                f"names[{name!r}] must be a typed key or contain one, got {validation.formatted(keys)}. "
                "Make keys with keys.root_key or jax.random.key."
            )
    return list(names.items())


def _keys_in(tree: object, *, legacy: bool = False) -> Iterator[tuple[str, Words]]:
    try:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    except ValueError:  # jax cannot sort the keys of this dict
        return
    for path, leaf in leaves:
        # Leaves are any objects of the user; only arrays have a dtype, and tracers have no bits.
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or isinstance(leaf, jax.core.Tracer):
            continue
        where = jax.tree_util.keystr(path)
        if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
            yield where, words_of(leaf)
        # Any uint32 array of the right length may be a legacy key, so a name for it does no harm.
        elif legacy and dtype == np.uint32 and np.shape(leaf)[-1:] and np.shape(leaf)[-1] in _LEGACY:
            rows = np.asarray(leaf).reshape(-1, np.shape(leaf)[-1])
            for implementation in _LEGACY[rows.shape[1]]:
                yield where, Words(implementation, rows, tuple(np.shape(leaf)[:-1]))


def _labeled(name: str, words: Words) -> Iterator[tuple[str, Bits]]:
    for index, bits in enumerate(bits_of(words)):
        position = ", ".join(map(str, np.unravel_index(index, words.shape))) if words.shape else ""
        yield (f"{name}[{position}]" if position else name), bits


def _by_parameter(fn: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    try:
        bound = inspect.signature(fn).bind(*args).arguments
    except (TypeError, ValueError):  # some built-in functions have no signature
        yield from ((f"args[{index}]", value) for index, value in enumerate(args))
        return
    yield from bound.items()


def _closed_over(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function closes over, and the arrays among its globals."""
    fn = inspect.unwrap(fn)  # `jax.jit` and decorators hide the function that has the closure
    fn = fn.__func__ if inspect.ismethod(fn) else fn
    if not inspect.isfunction(fn):
        return
    code = fn.__code__
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    for name in code.co_names:
        if isinstance(fn.__globals__.get(name), jax.Array):
            yield name, fn.__globals__[name]


def _integers(value: object) -> Iterator[int]:
    try:
        leaves = jax.tree.leaves(value)
    except ValueError:
        return
    for leaf in leaves:
        if validation.is_whole(leaf) and not isinstance(leaf, jax.core.Tracer):
            yield int(leaf)
