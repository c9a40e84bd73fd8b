"""From pools and options to the samplers of a source, and which of their rows go to the device."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.types import BatchSizes
from phijax_rng.sampling.hosted import DatasetSampler, HostedRowSampler, RowSampler, is_dataset, row_sampler
from phijax_rng.sampling.pools import as_fields

# What `resident="auto"` puts on a device that does not report how much memory it has, as CPUs do not.
_RESIDENT_BYTES = 2 * 2**30


def make_samplers(
    pools: Mapping[str, Any],
    batch_sizes: BatchSizes,
    names: tuple[str, ...] | None,
    *,
    weights: Mapping[str, Any],
    sort_axes: Mapping[str, int | None],
    resident: bool | str,
    **options: object,
) -> dict[str, RowSampler | DatasetSampler | HostedRowSampler]:
    """Name -> sampler, for the arguments of `NamedBatchSource.from_pools`."""
    validation.mapping(pools, "pools")
    validation.mapping(batch_sizes, "batch_sizes")
    if names is None:
        require_sizes(pools, batch_sizes)
    chosen = validation.names(tuple(batch_sizes) if names is None else names, "names")
    for entries, label in ((pools, "pools"), (batch_sizes, "batch_sizes")):
        _require_names(chosen, entries, label)
    require_known(sort_axes, pools, "sort_axes")
    require_known(weights, pools, "weights")
    samplers = {
        name: _make_sampler(
            pools[name], name, weights=weights.get(name), sort_axis=sort_axes.get(name), **options
        )
        for name in chosen
    }
    return _placed(samplers, resident)


def _make_sampler(
    pool: Any, name: str, *, weights: Any, sort_axis: int | None, **options: Any
) -> RowSampler | DatasetSampler:
    """The sampler of a pool, or of a dataset, that these options of `NamedBatchSource.from_pools` name."""
    if type(pool) is tuple:
        # It has a length and elements, as a dataset has, and is meant as (inputs, targets).
        raise TypeError(
            f"pools[{name!r}] must be a dict of fields or a dataset, got the tuple "
            f"{validation.formatted(pool)}. "
            "Pass {'inputs': ..., 'targets': ...}, or the elements of a dataset in a list."
        )
    if not is_dataset(pool):
        return row_sampler(as_fields(pool), weights=weights, sort_axis=sort_axis, **options)
    if sort_axis is not None:
        raise ValueError(
            f"sort_axes names {name!r}, a dataset, whose batches are not sorted. Drop it, or pass arrays."
        )
    if options["method"] != "permutation":
        raise ValueError(
            f"method={options['method']!r} is for pools of arrays, and {name!r} is a dataset. "
            "Drop it, or pass arrays."
        )
    return DatasetSampler(pool, weights=weights, order=options["order"], replace=options["replace"])


def _placed(
    samplers: Mapping[str, RowSampler | DatasetSampler], resident: bool | str
) -> dict[str, RowSampler | DatasetSampler | HostedRowSampler]:
    """These samplers; those whose rows do not go to the device fetch them on the host."""
    validation.one_of(resident, "resident", (True, False, "auto"))
    sizes = {
        name: _num_bytes(sampler.fields)
        for name, sampler in samplers.items()
        if not isinstance(sampler, DatasetSampler)
    }
    on_device = set(sizes) if resident is True else set()
    room = _room() if resident == "auto" else 0
    for name in sorted(sizes, key=lambda name: sizes[name]):
        room -= sizes[name]
        if room >= 0:
            on_device.add(name)
    return {
        name: sampler
        if isinstance(sampler, DatasetSampler) or name in on_device
        else HostedRowSampler(sampler)
        for name, sampler in samplers.items()
    }


def _num_bytes(fields: object) -> int:
    return sum(
        int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(fields)
    )


def _room() -> int:
    """Bytes that pools may take on the default device."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    device = device if isinstance(device, jax.Device) else jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return _RESIDENT_BYTES if limit is None else int(limit) // 2


def require_pools(pools: Mapping[str, Any], batch_sizes: Mapping[str, Any]) -> None:
    """Raises for the fields of one pool in place of pools by name."""
    if "inputs" in pools and not set(pools) & set(batch_sizes):
        name = next(iter(batch_sizes))
        raise ValueError(
            f"pools must be pools by name, got {validation.formatted(dict(pools))}, and batch_sizes names "
            f"{validation.shown(batch_sizes)}. Pass {{{name!r}: {{'inputs': ..., ...}}}}."
        )


def require_sizes(samplers: Mapping[str, Any], batch_sizes: Mapping[str, Any]) -> None:
    """Raises unless there is a size for each sampler, and no other."""
    for name in samplers:
        if name not in batch_sizes:
            raise ValueError(
                f"no batch size for sampler {name!r}; batch_sizes has {validation.shown(batch_sizes)}. "
                f"Add batch_sizes[{name!r}] or drop the sampler."
            )
    require_known(batch_sizes, samplers, "batch_sizes")


def require_known(names: Iterable[str], known: Iterable[str], label: str) -> None:
    """Raises for a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(
                f"{label} names {name!r}, but there is only {validation.shown(known)}. "
                "Drop it, or add what it names."
            )


def _require_names(names: tuple[str, ...], entries: Mapping[str, Any], label: str) -> None:
    """Raises for a name without an entry."""
    for name in names:
        if name not in entries:
            raise ValueError(
                f"{label} has no entry {name!r}; it has {validation.shown(entries)}. "
                f"Add {label}[{name!r}] or drop the name."
            )
