"""From a step to the named batches of that step.

    sampling_key --fold_in(step)--> step key --split(n)--> one key per sampler, in declaration order

`NamedBatchSource` is a pure function of (key, step): asking for the batch of step 1000 needs no batch
before it, and asking twice gives the same bits. A sampler's key depends on its place among the
samplers, so their order is part of the run.

>>> from phijax_rng import keys
>>> source = NamedBatchSource.from_pools(
...     {"bc": {"inputs": [[0.0], [1.0]]}, "pde": {"inputs": [[0.2], [0.4], [0.6]]}},
...     {"bc": "all", "pde": 2},
...     keys.split_root(0).sampling,
... )
>>> {name: rows["inputs"].shape for name, rows in source(7).items()}
{'bc': (2, 1), 'pde': (2, 1)}
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import _checks, _pytrees, keys
from phijax_rng._types import Batches, BatchSize, BatchSizes, KeyScalar, Step
from phijax_rng.hosted import INDEX, HostSampler, gather_own, make_sampler, place
from phijax_rng.samplers import AdaptiveSampler, Sampler, StepSampler


@runtime_checkable
class TrainingBatchSource(Protocol):
    """What the trainer needs of a source: a batch for a step.

    Optional members: `prepare(device)` returns the source as it should be asked; `traceable = True`
    promises that it is pure in the step and may be traced; `sample(key, batch_sizes)` draws diagnostics;
    `describe()` returns plain data for the contract; `stacked_batches(steps, count)` draws the batches of a
    range of steps at once, with a leading axis of steps, see `NamedBatchSource`. A source that does not
    say it is traceable is asked on the host, with a Python int.
    """

    def __call__(self, step: Any) -> Any:
        """The batch of this step: `{name: {field: rows}}`."""
        ...


@_pytrees.record(data=("_samplers", "key"), meta=("names", "_sizes"))
@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class NamedBatchSource:
    """`step -> {name: {field: rows}}`, one sampler for each name.

    A pytree that keeps declaration order through `jit`, `scan`, `vmap`, `tree.map`, pickling and copying;
    its leaves are the samplers' arrays and the key (a sampler that is no pytree is static). Called
    with an int it runs a program that is compiled once; called with a traced step it is traced into
    the caller's program.

    With a `HostSampler` among the samplers it is not `traceable`: row numbers are drawn on the device by
    the same keys, and rows are fetched on the host. The batches are those of the resident sampler.

    Attributes:
        names: the samplers' names, in declaration order.
        key: the sampling key, shape `()`.
    """

    names: tuple[str, ...]
    key: KeyScalar
    _samplers: tuple[Any, ...]
    _sizes: tuple[BatchSize, ...]

    fetches_own_rows = True

    def __init__(self, samplers: Mapping[str, Any], batch_sizes: BatchSizes, key: KeyScalar):
        """A source that draws from these samplers, in the order of the mapping.

        Args:
            samplers: name -> `Sampler`, `StepSampler`, `AdaptiveSampler` or `HostSampler`.
            batch_sizes: name -> positive int, or `"all"` for every row of a finite pool in its order
                (which still spends its key). The same names as `samplers`.
            key: the sampling key, one typed key.

        Raises:
            TypeError: not mappings by name, something that is not a sampler, or not a key.
            ValueError: names that differ, or a size that a sampler cannot serve.
        """
        names = _checks.names(_checks.mapping(samplers, "samplers"), "samplers")
        sizes = _checked_sizes(samplers, batch_sizes)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "key", keys.require_key(key, "key"))
        object.__setattr__(self, "_samplers", tuple(_held(samplers[name]) for name in names))
        object.__setattr__(self, "_sizes", tuple(sizes[name] for name in names))

    @classmethod
    def from_pools(
        cls,
        pools: Mapping[str, Any],
        batch_sizes: BatchSizes,
        key: KeyScalar,
        *,
        names: tuple[str, ...] | None = None,
        replace: bool = True,
        method: str = "permutation",
        order: str = "random",
        weights: Mapping[str, Any] | None = None,
        sort_axes: Mapping[str, int | None] | None = None,
        resident: bool | str = "auto",
    ) -> "NamedBatchSource":
        """A source of rows of finite pools.

        Args:
            pools: name -> `HostPool`, or mapping from field name to array, or a dataset (`len`, `[i]`), which
                always stays on the host; see `DatasetSampler`.
            batch_sizes: name -> positive int or `"all"`.
            key: the sampling key, one typed key.
            names: which pools to draw from, in this order; the order of `batch_sizes` when left out.
            replace: whether a row may appear twice in one batch.
            method: how distinct rows are found, see `RandomRowSampler`.
            order: `"random"` for rows drawn afresh at every step, `"shuffled"` for every row once per epoch,
                see `ShuffledRowSampler`.
            weights: name -> one weight for each row of that pool, see `WeightedRowSampler`.
            sort_axes: name -> column of `inputs` to sort that pool's batches by.
            resident: `True` puts every pool on the device, `False` leaves every pool on the host, `"auto"`
                puts there, the smallest first, what together fits into half of the device's memory (2 GiB
                where the device does not tell). It moves no batch. A source with a pool on the host cannot
                be traced.

        Raises:
            TypeError: not mappings by name, or fields that are not arrays of numbers.
            ValueError: a name without a pool or a size, a size that a pool cannot serve, or options that
                contradict each other.
        """
        _checks.mapping(pools, "pools")
        _checks.mapping(batch_sizes, "batch_sizes")
        if names is None:
            _require_sizes(pools, batch_sizes)
        chosen = _checks.names(tuple(batch_sizes) if names is None else names, "names")
        sort_axes, weights = dict(sort_axes or {}), dict(weights or {})
        for given, label in ((pools, "pools"), (batch_sizes, "batch_sizes")):
            _require_names(chosen, given, label)
        _require_known(sort_axes, pools, "sort_axes")
        _require_known(weights, pools, "weights")
        options: dict[str, Any] = {"replace": replace, "method": method, "order": order}
        samplers = {
            name: make_sampler(
                pools[name], name, weights=weights.get(name), sort_axis=sort_axes.get(name), **options
            )
            for name in chosen
        }
        samplers = place(samplers, resident)
        return cls(samplers, {name: batch_sizes[name] for name in chosen}, key)

    @property
    def samplers(self) -> dict[str, Any]:
        """The samplers by name, in declaration order."""
        return dict(zip(self.names, map(_sampler, self._samplers), strict=True))

    @property
    def batch_sizes(self) -> dict[str, BatchSize]:
        """The sizes by name, in declaration order."""
        return dict(zip(self.names, self._sizes, strict=True))

    @property
    def traceable(self) -> bool:
        """Whether a compiled program can draw the batches: no sampler fetches its rows on the host."""
        return not self._hosted

    def __call__(self, step: Step, sampler_state: Mapping[str, Any] | None = None) -> Batches:
        """The batches of a step, in declaration order.

        Args:
            step: completed updates, a whole number in [0, 2**31); may be traced.
            sampler_state: name -> state, for samplers that keep one.

        Returns:
            `{name: {field: array of shape (size, ...)}}`.

        Raises:
            TypeError: `step` is not a whole number (`True`, `1.5`), or traced where rows lie on the host.
            ValueError: `step` is out of range, or the state of an adaptive sampler is missing.
        """
        if self._adaptive_names:
            _require_states(self._adaptive_names, sampler_state or {})
        if isinstance(step, jax.core.Tracer) or self._is_traced:
            self._require_traceable()
            return _draw(self, step, dict(sampler_state or {}))
        number = _checks.step_number(step)
        draw, leaves = self._compiled
        drawn = draw(leaves, number, dict(sampler_state or {}))
        return self._gathered(dict(zip(self.names, drawn, strict=True)))

    def stacked_batches(
        self, steps: range, count: int, own_rows: Callable[[int], Any] = lambda size: None
    ) -> Batches:
        """The batches of consecutive steps, with a leading axis of steps; row numbers in one program.

        Args:
            steps: at least one step, one after the other, of [0, 2**31).
            count: how many steps are drawn, at least as many; each count is a program.
            own_rows: which rows of a batch of a size to fetch, where rows are fetched on the host; `None`
                for all of them.
        """
        draw, leaves = self._compiled_steps
        first = min(steps.start, 2**31 - count)
        drawn = draw(leaves, np.int32(first), count)
        wanted = slice(steps.start - first, steps.start - first + len(steps))
        batches = {
            name: jax.tree.map(lambda leaf: leaf[wanted], rows)
            for name, rows in zip(self.names, drawn, strict=True)
        }
        return self._gathered(batches, own_rows)

    def _gathered(self, batches: Batches, own_rows: Callable[[int], Any] = lambda size: None) -> Batches:
        """With the rows in place of their numbers, where a sampler fetches them on the host."""
        for name, sampler in self._hosted.items():
            index = np.asarray(batches[name][INDEX])
            batches[name] = gather_own(sampler, index, own_rows(index.shape[-1]))
        return batches

    def _require_traceable(self) -> None:
        for name in self._hosted:
            raise TypeError(
                f"the rows of {name!r} lie on the host and cannot be drawn under tracing. "
                "Ask source(step) with an int, or build the source with resident=True."
            )

    @functools.cached_property
    def _hosted(self) -> dict[str, Any]:
        return {name: sampler for name, sampler in self.samplers.items() if isinstance(sampler, HostSampler)}

    @functools.cached_property
    def _adaptive_names(self) -> tuple[str, ...]:
        return tuple(name for name, sampler in self.samplers.items() if _is_adaptive(sampler))

    @property
    def _is_traced(self) -> bool:
        if "_compiled" in self.__dict__:
            return False
        return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self))

    @functools.cached_property
    def _compiled(self) -> tuple[Callable[..., Any], list[jax.Array]]:
        """The compiled draw and its arrays, placed on the default device by the first eager call."""
        leaves, structure = jax.tree.flatten(self._drawing)
        # The first call may come while something else is traced; what is remembered must outlive that.
        with jax.ensure_compile_time_eval():
            return _compiled_draw(structure), [jax.device_put(_in_memory(leaf)) for leaf in leaves]

    @property
    def _compiled_steps(self) -> tuple[Callable[..., Any], list[jax.Array]]:
        return _compiled_stack(jax.tree.structure(self._drawing)), self._compiled[1]

    @property
    def _drawing(self) -> "NamedBatchSource":
        """The source without the rows that lie on the host: programs are kept, and would keep those."""
        samplers = tuple(held.chooser if isinstance(held, _Hosted) else held for held in self._samplers)
        bare = object.__new__(NamedBatchSource)
        for name, value in (("names", self.names), ("_sizes", self._sizes), ("key", self.key)):
            object.__setattr__(bare, name, value)
        object.__setattr__(bare, "_samplers", samplers)
        return bare

    def sample(
        self,
        key: KeyScalar,
        batch_sizes: BatchSizes | None = None,
        sampler_state: Mapping[str, Any] | None = None,
    ) -> Batches:
        """Batches from an explicit key, as `split(key, n)` deals it out; for diagnostics.

        `source.sample(keys.step_key(source.key, t))` is `source(t)` for samplers without step or state.

        Args:
            key: a typed key of shape `()`; may be traced.
            batch_sizes: sizes to use instead of the source's own, by name.
            sampler_state: name -> state, for samplers that keep one.

        Raises:
            ValueError: a size for an unknown name, or one that its sampler cannot serve; a state is missing.
        """
        keys.require_key(key, "key")
        overrides = dict(batch_sizes or {})
        _require_known(overrides, self.samplers, "batch_sizes")
        sizes = _checked_sizes(self.samplers, {**self.batch_sizes, **overrides})
        states = dict(sampler_state or {})
        _require_states(self._adaptive_names, states)
        if isinstance(key, jax.core.Tracer):
            self._require_traceable()
        source = jax.tree.map(_in_memory, self._drawing)
        drawn = _sample(source, tuple(sizes.values()), key, states)
        return self._gathered(dict(zip(self.names, drawn, strict=True)))

    def sampler_keys(self, step: Step) -> dict[str, KeyScalar]:
        """The key of each sampler at a step, by name. `step` may be traced."""
        step_key = keys.step_key(self.key, step)
        return dict(zip(self.names, _split(step_key, len(self.names)), strict=True))

    def prepare(self, device: Any = None) -> "NamedBatchSource":
        """The same source with its arrays on a device (or sharding); the default device for `None`."""
        return jax.device_put(jax.tree.map(_in_memory, self), device)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract: the samplers in order, with kinds, options and sizes."""
        return {
            "kind": "NamedBatchSource",
            "samplers": [
                {"name": name, "size": size, **_described(sampler)}
                for (name, sampler), size in zip(self.samplers.items(), self._sizes, strict=True)
            ],
        }

    def contents(self) -> dict[str, Any]:
        """What the samplers pick from, by name; digested for the contract."""
        return {
            name: sampler.contents()
            for name, sampler in self.samplers.items()
            if callable(getattr(sampler, "contents", None))
        }

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}={size!r}" for name, size in self.batch_sizes.items())
        return f"NamedBatchSource({listed})"

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what the first call remembered; keys as text, which every JAX can read."""
        named = {name: getattr(self, name) for name in ("names", "_samplers", "_sizes")}
        return {**named, "key": keys.fingerprint(self.key)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "key": keys.from_fingerprint(state["key"])}.items():
            object.__setattr__(self, name, value)


class HostSource:
    """A source that is asked on the host, by one thread at a time; otherwise the source it holds.

    The thread that draws ahead and the one that saves both ask; a reader or a generator that is
    seeded anew for each step must not be asked by both at once.
    """

    def __init__(self, source: Any):
        self._source = source
        self._lock = threading.Lock()

    def __call__(self, step: Any) -> Any:
        """The batch of a step, as a Python int."""
        with self._lock:
            return self._source(step)

    @property
    def source(self) -> Any:
        """The source it holds."""
        return self._source

    @property
    def contents(self) -> Callable[[], Any] | None:
        """`contents` of the source it holds, likewise; a dataset may be one that one thread may read."""
        inner = getattr(self._source, "contents", None)
        return None if inner is None else functools.partial(self._alone, inner)

    @property
    def stacked_batches(self) -> Callable[..., Any] | None:
        """`stacked_batches` of the source it holds, asked by one thread at a time; `None` if it has none."""
        inner = getattr(self._source, "stacked_batches", None)
        return None if inner is None else functools.partial(self._alone, inner)

    def _alone(self, inner: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            return inner(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def ask(source: Any, step: Step, sampler_state: Mapping[str, Any]) -> Any:
    """The batch of a step from any source, with the samplers' state where there is one."""
    return source(step, sampler_state) if sampler_state else source(step)


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class PoolDataModule:
    """The usual data module: pools and sizes, drawn with `NamedBatchSource.from_pools`.

    Attributes:
        pools: name -> `HostPool`, or mapping from field name to array.
        batch_sizes: name -> positive int or `"all"`.
        options: more arguments of `NamedBatchSource.from_pools` (`replace`, `order`, `resident`, ...).
    """

    pools: Mapping[str, Any]
    batch_sizes: BatchSizes
    options: Mapping[str, Any]

    def __init__(self, pools: Mapping[str, Any], batch_sizes: BatchSizes, **options: Any):
        _checks.mapping(pools, "pools")
        _checks.mapping(batch_sizes, "batch_sizes")
        _require_sizes(pools, batch_sizes)
        object.__setattr__(self, "pools", dict(pools))
        object.__setattr__(self, "batch_sizes", dict(batch_sizes))
        object.__setattr__(self, "options", options)

    def train_batch_source(self, batch_keys: tuple[str, ...], key: KeyScalar) -> NamedBatchSource:
        """A source of the batches with these names, in their order."""
        return NamedBatchSource.from_pools(
            self.pools, self.batch_sizes, key, names=batch_keys, **self.options
        )


def _draw(source: NamedBatchSource, step: Step, sampler_state: Mapping[str, Any]) -> Batches:
    step_key = keys.step_key(source.key, step)
    split = _split(step_key, len(source.names))
    batches = {}
    for (name, sampler), size, key in zip(source.samplers.items(), source._sizes, split, strict=True):
        if isinstance(sampler, StepSampler):
            own_key = keys.stream(source.key, "sampler", name)
            batches[name] = sampler.sample_at(own_key, step, size)
        elif _is_adaptive(sampler):
            batches[name] = sampler.sample(key, size, sampler_state[name])
        else:
            batches[name] = sampler.sample(key, size)
    return batches


@functools.lru_cache(maxsize=256)
def _compiled_draw(structure: Any) -> Callable[..., Any]:
    """One jitted draw for each structure, shared by all sources of it."""

    def draw(leaves: list[jax.Array], step: jax.Array, sampler_state: Mapping[str, Any]) -> tuple[Any, ...]:
        source = jax.tree.unflatten(structure, leaves)
        return tuple(_draw(source, step, sampler_state).values())

    return jax.jit(draw)


@functools.lru_cache(maxsize=256)
def _compiled_stack(structure: Any) -> Callable[..., Any]:
    """The same of consecutive steps, one turn of a loop for each."""

    def draw(leaves: list[jax.Array], first: jax.Array, count: int) -> tuple[Any, ...]:
        source = jax.tree.unflatten(structure, leaves)
        steps = first + jnp.arange(count, dtype=jnp.int32)
        return jax.lax.map(lambda step: tuple(_draw(source, step, {}).values()), steps)

    return jax.jit(draw, static_argnums=2)


@functools.partial(jax.jit, static_argnums=1)
def _sample(
    source: NamedBatchSource, sizes: tuple[BatchSize, ...], key: KeyScalar, states: Mapping[str, Any]
) -> tuple[Any, ...]:
    split = _split(key, len(source.names))
    return tuple(
        sampler.sample(own, size, states[name]) if _is_adaptive(sampler) else sampler.sample(own, size)
        for (name, sampler), size, own in zip(source.samplers.items(), sizes, split, strict=True)
    )


def _in_memory(leaf: Any) -> Any:
    """Rows that lie on disk, read; everything else as it is."""
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)


class _Same:
    """A value that equals itself alone, whatever its own `==` says: fit to be static."""

    def __init__(self, value: Any):
        self.value = value


@_pytrees.record(data=(), meta=("holder",))
class _Opaque:
    """A sampler that is no pytree: its arrays are constants of the programs that draw from it."""

    def __init__(self, sampler: Any):
        self.holder = _Same(sampler)


@_pytrees.record(data=("chooser",), meta=("holder",))
class _Hosted:
    """A sampler whose rows lie on the host: what draws their numbers, and what fetches them."""

    def __init__(self, sampler: Any):
        self.chooser = sampler.chooser
        self.holder = _Same(sampler)


def _held(sampler: Any) -> Any:
    if isinstance(sampler, HostSampler):
        return _Hosted(sampler)
    return _Opaque(sampler) if jax.tree_util.all_leaves([sampler]) else sampler


def _sampler(held: Any) -> Any:
    """The sampler as it was given."""
    return held.holder.value if isinstance(held, (_Opaque, _Hosted)) else held


def _split(key: KeyScalar, count: int) -> list[KeyScalar]:
    split = jax.random.split(key, count)
    return [split[index] for index in range(count)]


def _is_adaptive(sampler: Any) -> bool:
    return isinstance(sampler, AdaptiveSampler)


def _described(sampler: Any) -> dict[str, Any]:
    if hasattr(sampler, "describe"):
        return dict(sampler.describe())
    return {"kind": f"{type(sampler).__module__}.{type(sampler).__qualname__}"}


def _checked_sizes(samplers: Mapping[str, Any], batch_sizes: Any) -> dict[str, BatchSize]:
    """The sizes in the order of the samplers, each one its sampler can serve."""
    _require_sizes(samplers, _checks.mapping(batch_sizes, "batch_sizes"))
    sizes: dict[str, BatchSize] = {}
    for name, sampler in samplers.items():
        label = f"batch_sizes[{name!r}]"
        sizes[name] = _checks.batch_size(batch_sizes[name], label)
        if not isinstance(sampler, (Sampler, StepSampler)):
            raise TypeError(
                f"samplers[{name!r}] must offer sample(key, size), got {sampler!r}. "
                "Pass a sampler of phijax_rng or your own."
            )
        if hasattr(sampler, "check_size"):
            sampler.check_size(sizes[name], label)
        elif sizes[name] == "all" and not hasattr(sampler, "num_rows"):
            raise ValueError(
                f"{label}='all' needs a sampler with num_rows; {sampler!r} has none. Pass a positive int."
            )
    return sizes


def _require_sizes(samplers: Mapping[str, Any], batch_sizes: Mapping[str, Any]) -> None:
    for name in samplers:
        if name not in batch_sizes:
            raise ValueError(
                f"no batch size for sampler {name!r}; batch_sizes has {_checks.shown(batch_sizes)}. "
                f"Add batch_sizes[{name!r}] or drop the sampler."
            )
    _require_known(batch_sizes, samplers, "batch_sizes")


def _require_known(given: Mapping[str, Any], known: Mapping[str, Any], label: str) -> None:
    for name in given:
        if name not in known:
            raise ValueError(
                f"{label} names {name!r}, but there is only {_checks.shown(known)}. "
                "Drop it, or add what it names."
            )


def _require_names(names: tuple[str, ...], given: Mapping[str, Any], label: str) -> None:
    for name in names:
        if name not in given:
            raise ValueError(
                f"{label} has no entry {name!r}; it has {_checks.shown(given)}. "
                f"Add {label}[{name!r}] or drop the name."
            )


def _require_states(names: tuple[str, ...], sampler_state: Mapping[str, Any]) -> None:
    for name in names:
        if name not in sampler_state:
            raise ValueError(
                f"sampler {name!r} keeps a state, and sampler_state has {_checks.shown(sampler_state)}. "
                f"Pass sampler_state={{{name!r}: sampler.init(key)}}."
            )
