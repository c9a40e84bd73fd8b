"""Where sources and samplers enter: what a user passes becomes one complete, typed object.

The public protocols have optional members (the table in `protocols`). Only this module looks for them.
Everything behind it calls members that exist.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, final

import jax

from phijax_rng import keys
from phijax_rng._base import plain_data, pytrees, validation
from phijax_rng._base.types import Batches, BatchSizes, KeyScalar, Step
from phijax_rng.sampling.iterables import IterableSource
from phijax_rng.sampling.protocols import AdaptiveSampler

T = TypeVar("T")
States = Mapping[str, Any]
"""Name -> what an adaptive sampler draws from."""


@final
@pytrees.record(data=("_held",), meta=("_lock",))
class AdaptedSource:
    """A batch source with every member that the package calls; made by `adapt_source`.

    A pytree with the leaves of the user's source, so that its arrays are arguments of a program. Of a source
    that is called on the host, one thread at a time calls a member: the thread that prefetches and the one
    that saves both draw batches, and a reader or a reseeded generator cannot serve two at once.
    """

    def __init__(self, source: Callable[..., Any], lock: AbstractContextManager[Any] | None = None):
        is_opaque = jax.tree_util.all_leaves([source])
        self._held: Any = pytrees.Static(source) if is_opaque else source
        self._lock = None if self.traceable else lock or threading.Lock()

    @property
    def source(self) -> Any:
        """The user's source."""
        return self._held.value if isinstance(self._held, pytrees.Static) else self._held

    @property
    def traceable(self) -> bool:
        """Whether a program may trace it."""
        return bool(self._optional("traceable"))

    @property
    def fixed(self) -> bool:
        """Whether every step gets the same batch."""
        return bool(self._optional("fixed"))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the batches, in order; empty where they are not known."""
        return tuple(self._optional("names") or ())

    @property
    def key(self) -> KeyScalar | None:
        """The key that it draws from, where it has one."""
        key = self._optional("key")
        return key if key is not None and keys.is_typed_key(key) else None

    @property
    def samplers(self) -> Mapping[str, Any]:
        """The samplers by name, as the user made them; empty where they are not known."""
        return dict(self._optional("samplers") or {})

    @property
    def adaptive_samplers(self) -> dict[str, AdaptiveSampler]:
        """The samplers that draw from a state, by name."""
        return {name: each for name, each in self.samplers.items() if isinstance(each, AdaptiveSampler)}

    @property
    def batch_sizes(self) -> BatchSizes:
        """The sizes by name; empty where they are not known."""
        return dict(self._optional("batch_sizes") or {})

    def __call__(self, step: Step, sampler_state: States | None = None) -> Any:
        """The batch of a step, drawn from the samplers' states where there are any."""
        # The user's source need not take a state that it has no sampler for.
        return self._alone(self.source, *((step, sampler_state) if sampler_state else (step,)))

    def filled(self, step: Step, sampler_state: States | None = None) -> tuple[Any, None]:
        """The batch of a step, and `None`: every row of it counts; see `prefetch.StackedBatches.filled`."""
        return self(step, sampler_state), None

    @property
    def can_stack(self) -> bool:
        """Whether it draws the batches of many steps at once."""
        return self._optional("stacked_batches") is not None

    def stacked_batches(
        self, steps: range, count: int, own_rows: Callable[[int], Any] | None = None
    ) -> Batches:
        """The batches of consecutive steps with a leading axis; of fetched rows those of `own_rows` alone."""
        takes_rows = own_rows is not None and bool(self._optional("fetches_own_rows"))
        options = (own_rows,) if takes_rows else ()
        stacked: Batches = self._alone(self.source.stacked_batches, steps, count, *options)
        return stacked

    def host_and_device_parts(self) -> "tuple[AdaptedSource | None, AdaptedSource | None]":
        """What is called on the host, and what the program draws."""
        if self.traceable:
            return None, self
        if self._optional("host_and_device_parts") is None:
            return self, None
        on_host, in_program = self.source.host_and_device_parts()
        return AdaptedSource(on_host, self._lock), in_program and AdaptedSource(in_program)

    @property
    def can_sample(self) -> bool:
        """Whether it draws diagnostics."""
        return callable(self._optional("sample"))

    def sample(self, key: KeyScalar, batch_sizes: BatchSizes, sampler_state: States | None = None) -> Any:
        """Diagnostic batches from an explicit key."""
        states = (sampler_state,) if sampler_state else ()
        return self._alone(self.source.sample, key, batch_sizes, *states)

    def prepare(self, device: Any) -> "AdaptedSource":
        """The source to call in a run on a device, with its arrays there."""
        prepare = self._optional("prepare")
        return AdaptedSource(prepare(device), self._lock) if callable(prepare) else self

    def sampler_keys(self, step: Step) -> Mapping[str, KeyScalar]:
        """The key of each sampler at a step; empty where they are not known."""
        sampler_keys = self._optional("sampler_keys")
        return dict(sampler_keys(step)) if callable(sampler_keys) else {}

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return plain_data.described(self.source, settings=True)

    def contents(self) -> Mapping[str, Any]:
        """What each sampler picks from, by name; empty where it is not known."""
        contents = self._optional("contents")
        return dict(self._alone(contents)) if callable(contents) else {}

    def __repr__(self) -> str:
        return repr(self.source)

    def _optional(self, name: str) -> Any:
        return getattr(self.source, name, None)

    def _alone(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._lock is None:
            return function(*arguments)
        with self._lock:
            return function(*arguments)


def adapt_source(source: Any) -> AdaptedSource:
    """A user's source, or iterable of batches, as one complete object; what is one already stays as it is.

    Raises:
        TypeError: it can neither be called nor iterated over.
    """
    if isinstance(source, AdaptedSource):
        return source
    if not callable(source) and isinstance(source, Iterable) and not isinstance(source, Mapping):
        source = IterableSource(source)
    return AdaptedSource(validation.function(source, "source"))
