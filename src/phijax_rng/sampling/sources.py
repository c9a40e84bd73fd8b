"""From a step to the named batches of that step.

    sampling_key --fold_in(step)--> step key --split(n)--> one key per sampler, in declaration order

`NamedBatchSource` is a pure function of (key, step): the batch of step 1000 needs no batch
before it, and two calls return the same bits. A sampler's key depends on its position among the
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
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import keys
from phijax_rng._base import pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Batches, BatchSize, BatchSizes, KeyScalar, Step
from phijax_rng.sampling.adapters import AdaptedSampler, States, adapt_sampler
from phijax_rng.sampling.from_pools import make_samplers, require_known, require_pools, require_sizes
from phijax_rng.sampling.protocols import INDEX
from phijax_rng.sampling.rows import batch_of, choose_together, read


@pytrees.record(data=("_samplers", "key"), meta=("names", "key_names", "_sizes"))
@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class NamedBatchSource:
    """`step -> {name: {field: rows}}`, one sampler for each name.

    A pytree that keeps declaration order through `jit`, `scan`, `vmap`, `tree.map`, pickling and copying;
    its leaves are the samplers' arrays and the key (a sampler that is no pytree is static). Called
    with an int it runs a program that is compiled once; called with a traced step it is traced into
    the caller's program.

    With a `HostSampler` among the samplers it is not `traceable`: row numbers are drawn on the device by
    the same keys, and rows are fetched on the host. The batches are those of the resident sampler. In a
    trainer's loop only those rows are prefetched; every other sampler draws inside the program.

    Attributes:
        names: the samplers' names, in declaration order.
        key: the sampling key, shape `()`.
        key_names: the names that a step key is split among; more than `names` in a part of a source.
    """

    names: tuple[str, ...]
    key: KeyScalar
    key_names: tuple[str, ...]
    _samplers: tuple[AdaptedSampler, ...]
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
        names = validation.names(tuple(validation.mapping(samplers, "samplers")), "samplers")
        require_sizes(samplers, validation.mapping(batch_sizes, "batch_sizes"))
        adapted = {name: adapt_sampler(samplers[name], f"samplers[{name!r}]") for name in names}
        sizes = _checked_sizes(adapted, batch_sizes)
        key = keys.require_key(key, "key")
        assign(self, names=names, key=key, key_names=names, _samplers=tuple(adapted.values()), _sizes=sizes)

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
            pools: name -> `HostPool`, or mapping from field name to array, or a DataFrame, whose columns are
                the fields, or a dataset (`len`, `[i]`), which always stays on the host; see `DatasetSampler`.
            batch_sizes: name -> positive int or `"all"`.
            key: the sampling key, one typed key.
            names: which pools to draw from, in this order; the order of `batch_sizes` when left out.
            replace: whether a row may appear twice in one batch.
            method: how distinct rows are found, see `RandomRowSampler`.
            order: `"random"` for new rows at every step, `"shuffled"` for every row once per epoch,
                see `ShuffledRowSampler`.
            weights: name -> one weight for each row of that pool, see `WeightedRowSampler`.
            sort_axes: name -> column of `inputs` to sort that pool's batches by.
            resident: `True` puts every pool on the device, `False` leaves every pool on the host, `"auto"`
                puts there, the smallest first, what together fits into half of the device's memory (2 GiB
                where the device does not report it). Batches do not depend on it. A source with a pool on
                the host cannot be traced.

        Raises:
            TypeError: not mappings by name, or fields that are not arrays of numbers.
            ValueError: a name without a pool or a size, a size that a pool cannot serve, or options that
                contradict each other.
        """
        samplers = make_samplers(
            pools,
            batch_sizes,
            names,
            weights=dict(weights or {}),
            sort_axes=dict(sort_axes or {}),
            resident=resident,
            replace=replace,
            method=method,
            order=order,
        )
        return cls(samplers, {name: batch_sizes[name] for name in samplers}, key)

    @property
    def samplers(self) -> dict[str, Any]:
        """The samplers by name, in declaration order."""
        return {name: adapted.sampler for name, adapted in self._by_name.items()}

    @property
    def batch_sizes(self) -> dict[str, BatchSize]:
        """The sizes by name, in declaration order."""
        return dict(zip(self.names, self._sizes, strict=True))

    @property
    def traceable(self) -> bool:
        """Whether a compiled program can draw the batches: no sampler fetches its rows on the host."""
        return not self._hosted

    def __call__(self, step: Step, sampler_state: States | None = None) -> Batches:
        """The batches of a step, in declaration order.

        Args:
            step: completed updates, a whole number in [0, 2**31); may be traced.
            sampler_state: name -> state, for samplers that have one.

        Returns:
            `{name: {field: array of shape (size, ...)}}`.

        Raises:
            TypeError: `step` is not a whole number (`True`, `1.5`), or traced where rows are on the host.
            ValueError: `step` is out of range, or the state of an adaptive sampler is missing.
        """
        states = dict(sampler_state or {})
        _require_states(self._adaptive_names, states)
        if isinstance(step, jax.core.Tracer) or self._is_traced:
            self._require_traceable()
            return _draw(self, step, states)
        number = validation.step_number(step)
        draw, leaves = self._compiled
        return self._gathered(dict(zip(self.names, draw(leaves, number, states), strict=True)))

    def stacked_batches(
        self, steps: range, count: int, own_rows: Callable[[int], Any] = lambda size: None
    ) -> Batches:
        """The batches of consecutive steps, with a leading axis of steps; row numbers in one program.

        Args:
            steps: at least one step, one after the other, of [0, 2**31).
            count: how many steps are drawn, at least as many; each count is a program.
            own_rows: which rows of a batch of a size to fetch, where rows are fetched on the host; `None`
                for all of them.

        Raises:
            ValueError: a sampler draws from a state, which is not known in advance.
        """
        if self._adaptive_names:
            raise ValueError(
                f"sampler {self._adaptive_names[0]!r} draws from a state, which is not known in advance. "
                "Call source(step, sampler_state) step by step, or stack the first of "
                "source.host_and_device_parts()."
            )
        draw, leaves = self._compiled_steps
        first = min(steps.start, 2**31 - count)
        drawn = draw(leaves, np.int32(first), count)
        wanted = slice(steps.start - first, steps.start - first + len(steps))
        batches = {
            name: jax.tree.map(lambda leaf: leaf[wanted], rows)
            for name, rows in zip(self.names, drawn, strict=True)
        }
        return self._gathered(batches, own_rows)

    def host_and_device_parts(self) -> "tuple[NamedBatchSource, NamedBatchSource | None]":
        """Two sources with the same keys: what fetches rows on the host, and what a program draws.

        Returns:
            Sources of the hosted samplers and of the others, which is traceable; `None` where there are none.
        """
        in_program = {name: sampler for name, sampler in self._by_name.items() if not sampler.is_hosted}
        return (self._part(self._hosted), self._part(in_program)) if in_program else (self, None)

    def _part(self, samplers: Mapping[str, AdaptedSampler]) -> "NamedBatchSource":
        """A source of some of the samplers, or of what draws for them, with the same keys."""
        part = object.__new__(NamedBatchSource)
        sizes = tuple(self.batch_sizes[name] for name in samplers)
        assign(part, names=tuple(samplers), key=self.key, key_names=self.key_names)
        assign(part, _samplers=tuple(samplers.values()), _sizes=sizes)
        return part

    def _gathered(self, batches: Batches, own_rows: Callable[[int], Any] = lambda size: None) -> Batches:
        """The batches with rows instead of row numbers, where a sampler fetches rows on the host."""
        for name, sampler in self._hosted.items():
            index = np.asarray(batches[name][INDEX])
            batches[name] = sampler.gather(index, own_rows(index.shape[-1]))
        return batches

    def _require_traceable(self) -> None:
        for name in self._hosted:
            raise TypeError(
                f"the rows of {name!r} are on the host and cannot be drawn under tracing. "
                "Ask source(step) with an int, or build the source with resident=True."
            )

    @property
    def _by_name(self) -> dict[str, AdaptedSampler]:
        return dict(zip(self.names, self._samplers, strict=True))

    @functools.cached_property
    def _hosted(self) -> dict[str, AdaptedSampler]:
        return {name: sampler for name, sampler in self._by_name.items() if sampler.is_hosted}

    @functools.cached_property
    def _adaptive_names(self) -> tuple[str, ...]:
        return tuple(name for name, sampler in self._by_name.items() if sampler.is_adaptive)

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
        """The source without the rows that are on the host."""
        return self._part({name: sampler.without_rows() for name, sampler in self._by_name.items()})

    def sample(
        self,
        key: KeyScalar,
        batch_sizes: BatchSizes | None = None,
        sampler_state: States | None = None,
    ) -> Batches:
        """Batches from an explicit key, split as a step key is; for diagnostics.

        `source.sample(keys.step_key(source.key, t))` is `source(t)` for samplers without step or state.

        Args:
            key: a typed key of shape `()`; may be traced.
            batch_sizes: sizes to use instead of the source's own, by name.
            sampler_state: name -> state, for samplers that have one.

        Raises:
            ValueError: a size for an unknown name, or one that its sampler cannot serve; a state is missing.
        """
        keys.require_key(key, "key")
        overrides = dict(batch_sizes or {})
        require_known(overrides, self.names, "batch_sizes")
        sizes = _checked_sizes(self._by_name, {**self.batch_sizes, **overrides})
        states = dict(sampler_state or {})
        _require_states(self._adaptive_names, states)
        if isinstance(key, jax.core.Tracer):
            self._require_traceable()
        source = jax.tree.map(_in_memory, self._drawing)
        drawn = _sample(source, sizes, key, states)
        return self._gathered(dict(zip(self.names, drawn, strict=True)))

    def sampler_keys(self, step: Step) -> dict[str, KeyScalar]:
        """The key of each sampler at a step, by name. `step` may be traced."""
        split = _split(keys.step_key(self.key, step), self.key_names)
        return {name: split[name] for name in self.names}

    def prepare(self, device: object = None) -> "NamedBatchSource":
        """The same source with its arrays on a device (or sharding); the default device for `None`."""
        return jax.device_put(jax.tree.map(_in_memory, self), device)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract: the samplers in order, with kinds, options and sizes."""
        return {
            "kind": "NamedBatchSource",
            "samplers": [
                {"name": name, "size": size, **sampler.describe()}
                for name, sampler, size in zip(self.names, self._samplers, self._sizes, strict=True)
            ],
        }

    def contents(self) -> dict[str, Any]:
        """What the samplers pick from, by name; digested for the contract."""
        contents = {name: sampler.contents() for name, sampler in self._by_name.items()}
        return {name: fields for name, fields in contents.items() if fields is not None}

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}={size!r}" for name, size in self.batch_sizes.items())
        return f"NamedBatchSource({listed})"

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what the first call cached; keys as text, which every JAX can read."""
        named = {name: getattr(self, name) for name in ("names", "key_names", "_samplers", "_sizes")}
        return {**named, "key": keys.fingerprint(self.key)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        assign(self, **{**state, "key": keys.from_fingerprint(state["key"])})


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class PoolDataModule:
    """The usual data module: pools and sizes, drawn with `NamedBatchSource.from_pools`.

    Attributes:
        pools: name -> `HostPool`, or mapping from field name to array, or a DataFrame.
        batch_sizes: name -> positive int or `"all"`.
        options: more arguments of `NamedBatchSource.from_pools` (`replace`, `order`, `resident`, ...).
    """

    pools: Mapping[str, Any]
    batch_sizes: BatchSizes
    options: Mapping[str, Any]

    def __init__(self, pools: Mapping[str, Any], batch_sizes: BatchSizes, **options: object):
        validation.mapping(pools, "pools")
        validation.mapping(batch_sizes, "batch_sizes")
        require_pools(pools, batch_sizes)
        require_sizes(pools, batch_sizes)
        assign(self, pools=dict(pools), batch_sizes=dict(batch_sizes), options=options)

    def train_batch_source(self, batch_keys: tuple[str, ...], key: KeyScalar) -> NamedBatchSource:
        """A source of the batches with these names, in their order."""
        return NamedBatchSource.from_pools(
            self.pools, self.batch_sizes, key, names=batch_keys, **self.options
        )


def _draw(source: NamedBatchSource, step: Step, sampler_state: States) -> Batches:
    """The batches of a step; may be traced."""
    split = _split(keys.step_key(source.key, step), source.key_names)
    chosen = choose_together(source.samplers, source.batch_sizes, split)
    batches = {}
    for name, sampler, size in zip(source.names, source._samplers, source._sizes, strict=True):
        if sampler.follows_step:
            stream = keys.stream(source.key, "sampler", name)
            batches[name] = sampler.sample_at(stream, step, size)
        elif name in chosen:
            batches[name] = batch_of(sampler.sampler.fields, chosen[name], sampler.sampler.sort_axis)
        else:
            batches[name] = sampler.sample(split[name], size, sampler_state.get(name))
    return batches


def _split(key: KeyScalar, names: tuple[str, ...]) -> dict[str, KeyScalar]:
    """One key for each name, in their order."""
    split = keys.settled(jax.random.split(key, len(names)))
    return {name: split[index] for index, name in enumerate(names)}


@functools.lru_cache(maxsize=256)
def _compiled_draw(structure: object) -> Callable[..., Any]:
    """One jitted draw for each structure, shared by all sources of it."""

    def drawn(leaves: list[jax.Array], step: jax.Array, sampler_state: States) -> tuple[Any, ...]:
        source = jax.tree.unflatten(structure, leaves)
        return tuple(_draw(source, step, sampler_state).values())

    return jax.jit(drawn)


@functools.lru_cache(maxsize=256)
def _compiled_stack(structure: object) -> Callable[..., Any]:
    """The same of consecutive steps, one turn of a loop for each."""

    def drawn(leaves: list[jax.Array], first: jax.Array, count: int) -> tuple[Any, ...]:
        source = jax.tree.unflatten(structure, leaves)
        steps = first + jnp.arange(count, dtype=jnp.int32)
        return jax.lax.map(lambda step: tuple(_draw(source, step, {}).values()), steps)

    return jax.jit(drawn, static_argnums=2)


@functools.partial(jax.jit, static_argnums=1)
def _sample(
    source: NamedBatchSource, sizes: tuple[BatchSize, ...], key: KeyScalar, states: States
) -> tuple[Any, ...]:
    """Batches of these sizes from an explicit key, in the order of the names."""
    split = _split(key, source.key_names)
    return tuple(
        sampler.sample(split[name], size, states.get(name))
        for name, sampler, size in zip(source.names, source._samplers, sizes, strict=True)
    )


def _checked_sizes(samplers: Mapping[str, AdaptedSampler], sizes: BatchSizes) -> tuple[BatchSize, ...]:
    """The sizes in the order of the samplers, each one its sampler can serve."""
    return tuple(
        sampler.check_size(sizes[name], f"batch_sizes[{name!r}]") for name, sampler in samplers.items()
    )


def _require_states(names: tuple[str, ...], sampler_state: States) -> None:
    """Raises for a sampler without its state."""
    for name in names:
        if name not in sampler_state:
            raise ValueError(
                f"sampler {name!r} draws from a state, and sampler_state has "
                f"{validation.shown(sampler_state)}. "
                f"Pass sampler_state={{{name!r}: sampler.init(key)}}."
            )


def _in_memory(leaf: object) -> jax.Array | np.ndarray[Any, Any]:
    """Rows on disk, read; everything else as it is."""
    in_memory: jax.Array | np.ndarray[Any, Any] = read(leaf)
    return in_memory
