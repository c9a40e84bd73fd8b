"""Where sources and samplers enter: what a user passes becomes one complete, typed object.

The public protocols have optional members (the table in `protocols`). Only this module looks for them.
Inside the package every call is of a member that exists.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, final

import jax
import numpy as np

from phijax_rng import keys
from phijax_rng._base import plain_data, pytrees, validation
from phijax_rng._base.types import Batches, BatchSize, BatchSizes, KeyScalar, Rows, Step
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.iterables import IterableSource, checked_batch
from phijax_rng.sampling.protocols import AdaptiveSampler, HostSampler, Sampler, StepSampler

T = TypeVar("T")
States = Mapping[str, Any]
"""Name -> what an adaptive sampler draws from."""


@final
@pytrees.record(data=("_drawn",), meta=("_host",))
class AdaptedSampler:
    """A sampler with every member that a source calls; made by `adapt_sampler`.

    A pytree: the arrays of the user's sampler are leaves; a sampler that is no pytree is static. Of a
    `HostSampler` only the chooser has leaves, so its rows never become arguments of a program.
    """

    def __init__(self, sampler: Any):
        is_hosted = isinstance(sampler, HostSampler)
        drawn = sampler.chooser if is_hosted else sampler
        self._drawn: Any = pytrees.Static(drawn) if jax.tree_util.all_leaves([drawn]) else drawn
        self._host: pytrees.Static[Any] | None = pytrees.Static(sampler) if is_hosted else None

    @property
    def sampler(self) -> Any:
        """The user's sampler."""
        return self._in_program if self._host is None else self._host.value

    @property
    def _in_program(self) -> Any:
        return self._drawn.value if isinstance(self._drawn, pytrees.Static) else self._drawn

    @property
    def is_hosted(self) -> bool:
        """Whether its rows are fetched on the host."""
        return self._host is not None

    @property
    def is_adaptive(self) -> bool:
        """Whether it draws from a state."""
        return isinstance(self._in_program, AdaptiveSampler)

    @property
    def follows_step(self) -> bool:
        """Whether it draws from a stream of its own and the step, instead of a key for each step."""
        return isinstance(self._in_program, StepSampler)

    @property
    def fixed(self) -> bool:
        """Whether every step gets the same rows."""
        return bool(getattr(self.sampler, "fixed", False))

    @property
    def inner_parts(self) -> tuple[Any, ...]:
        """Geometries and samplers that it draws through."""
        wrapped = (getattr(self.sampler, name, None) for name in ("domain", "space", "sampler"))
        parts = (part for part in wrapped if part is not None)
        return (*parts, *getattr(self.sampler, "parts", ()))

    def sample(self, key: KeyScalar, size: BatchSize, state: object = None) -> Rows:
        """Rows from a key, or row numbers of a hosted sampler; an adaptive sampler draws from its state."""
        states = (state,) if self.is_adaptive else ()
        rows: Rows = self._in_program.sample(key, size, *states)
        return rows

    def sample_at(self, key: KeyScalar, step: Step, size: BatchSize) -> Rows:
        """The same of a sampler that follows the step."""
        rows: Rows = self._in_program.sample_at(key, step, size)
        return rows

    def gather(self, index: np.ndarray[Any, Any], positions: Any = None) -> Rows:
        """The rows of a hosted sampler at these positions of a batch; all for `None`."""
        if positions is None:
            return dict(self.sampler.gather(index))
        inner = getattr(self.sampler, "sampler", self.sampler)
        if getattr(inner, "sort_axis", None) is None:
            return dict(self.sampler.gather(index[..., positions]))
        # The position of a row among the sorted depends on all of them.
        rows = self.sampler.gather(index)
        return dict(jax.tree.map(lambda leaf: np.take(leaf, positions, axis=index.ndim - 1), rows))

    def without_rows(self) -> "AdaptedSampler":
        """What draws, without what fetches: programs are cached, and would keep the rows alive."""
        return self if self._host is None else AdaptedSampler(self._in_program)

    @property
    def num_rows(self) -> int | None:
        """The rows of a finite pool; `None` where there is none."""
        rows = getattr(self.sampler, "num_rows", None)
        return None if rows is None else int(rows)

    def check_size(self, size: BatchSize, label: str) -> BatchSize:
        """The size, if a batch can have it; `"all"` for a finite pool."""
        is_finite = self.num_rows is not None
        checked = validation.batch_size(size, label, finite=is_finite)
        if hasattr(self.sampler, "check_size"):
            self.sampler.check_size(checked, label)
        elif checked == "all" and not is_finite:
            raise ValueError(
                f"{label}='all' needs a sampler with num_rows; {formatted(self.sampler)} has none. "
                "Pass a positive int."
            )
        return checked

    def init(self, key: KeyScalar) -> Any:
        """The state of an adaptive sampler before its first refresh."""
        return self.sampler.init(key)

    def due(self, step: Step, state: object) -> Any:
        """Whether an adaptive sampler is refreshed before the batch of `step`."""
        return self.sampler.due(step, state)

    def refresh(self, key: KeyScalar, state: object, residuals: Callable[[Rows], jax.Array]) -> Any:
        """The state of an adaptive sampler after a refresh."""
        return self.sampler.refresh(key, state, residuals)

    def residual_names(self, name: str) -> tuple[str, ...]:
        """The residuals that an adaptive sampler follows; those called `name` if it names none."""
        return tuple(getattr(self.sampler, "residual_names", None) or (name,))

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return plain_data.described(self.sampler)

    def contents(self) -> Any:
        """What it picks from, for the contract; `None` where it is not known."""
        contents = getattr(self.sampler, "contents", None)
        return contents() if callable(contents) else None


def adapt_sampler(sampler: object, label: str) -> AdaptedSampler:
    """A user's sampler as one complete object; what is one already stays as it is.

    Raises:
        TypeError: it cannot draw rows.
        ValueError: it would draw candidates in the program from rows that are on the host.
    """
    if isinstance(sampler, AdaptedSampler):
        return sampler
    if not isinstance(sampler, (Sampler, StepSampler)):
        raise TypeError(
            f"{label} must offer sample(key, size), got {formatted(sampler)}. "
            "Pass a sampler of phijax_rng or your own."
        )
    parts = (sampler, getattr(sampler, "domain", None))
    if isinstance(sampler, AdaptiveSampler) and any(isinstance(part, HostSampler) for part in parts):
        raise ValueError(
            f"{label} draws candidates in the compiled loop, and their rows are on the host, got "
            f"{formatted(sampler)}. Take a domain on the device, such as a geometry or a RandomRowSampler."
        )
    return AdaptedSampler(sampler)


@final
@pytrees.record(data=("_wrapped",), meta=("_lock",))
class AdaptedSource:
    """A batch source with every member that the package calls; made by `adapt_source`.

    A pytree with the leaves of the user's source, so that its arrays are arguments of a program. Of a source
    that is called on the host, one thread at a time calls a member: the thread that prefetches and the one
    that saves both draw batches, and a reader or a reseeded generator cannot serve two at once.
    """

    def __init__(self, source: Callable[..., Any], lock: AbstractContextManager[Any] | None = None):
        is_opaque = jax.tree_util.all_leaves([source])
        self._wrapped: Any = pytrees.Static(source) if is_opaque else source
        self._lock = None if self.traceable else lock or threading.Lock()

    @property
    def source(self) -> Any:
        """The user's source."""
        return self._wrapped.value if isinstance(self._wrapped, pytrees.Static) else self._wrapped

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
    def adaptive_samplers(self) -> dict[str, AdaptedSampler]:
        """The samplers that draw from a state, by name."""
        samplers = self.samplers.items()
        return {name: AdaptedSampler(each) for name, each in samplers if isinstance(each, AdaptiveSampler)}

    @property
    def batch_sizes(self) -> BatchSizes:
        """The sizes by name; empty where they are not known."""
        return dict(self._optional("batch_sizes") or {})

    def __call__(self, step: Step, sampler_state: States | None = None) -> Any:
        """The batch of a step, drawn from the samplers' states where there are any."""
        # The user's source need not take a state that it has no sampler for.
        batch = self._alone(self.source, *((step, sampler_state) if sampler_state else (step,)))
        return batch if self.traceable else checked_batch(batch, step)

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
        """The batches of consecutive steps, with a leading axis; `own_rows` says which rows to fetch."""
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
        batch = self._alone(self.source.sample, key, batch_sizes, *states)
        return batch if self.traceable else checked_batch(batch, "for diagnostics")

    def prepare(self, device: object) -> "AdaptedSource":
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

    def _alone(self, function: Callable[..., T], *arguments: object) -> T:
        if self._lock is None:
            return function(*arguments)
        with self._lock:
            return function(*arguments)


def adapt_source(source: object, label: str = "source") -> AdaptedSource:
    """A user's source, or iterable of batches, as one complete object; what is one already stays as it is.

    Args:
        source: the user's object.
        label: its name in messages.

    Raises:
        TypeError: it can neither be called nor iterated over, or is called first to make such an object.
    """
    if isinstance(source, AdaptedSource):
        return source
    validation.instance(source, label)
    if inspect.isgeneratorfunction(source):
        raise TypeError(
            f"{label} must return the batches of a step, got the generator function {source.__name__}. "
            f"Call it: {source.__name__}(...) is an iterable of batches."
        )
    if source is None or isinstance(source, Mapping):
        raise TypeError(
            f"{label} must be a function of the step or an iterable of batches, got {formatted(source)}. "
            f"{'Return one.' if source is None else 'Pass lambda step: batches for the same at every step.'}"
        )
    if not callable(source) and isinstance(source, Iterable) and not isinstance(source, Mapping):
        source = IterableSource(source)
    return AdaptedSource(validation.function(source, label))
