"""Calls a source twice for one step before a run relies on it.

A batch must be a pure function of the step. A source that returns different batches for the same step is
refused. A source that returns the same batch at every step, without `fixed = True`, causes a warning: a
traced NumPy generator freezes its first draw in this way. The samplers of this package are pure by
construction and are not checked, unless they draw through a user's geometry or sampler.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.digests import digest
from phijax_rng.devices import processes
from phijax_rng.errors import ImpureSourceError
from phijax_rng.sampling.adapters import AdaptedSampler, AdaptedSource, adapt_source
from phijax_rng.sampling.adaptive import ResidualDistributionSampler, ResidualRefinementSampler
from phijax_rng.sampling.domains import SpaceTimeSampler, UniformDomainSampler
from phijax_rng.sampling.geometry.balls import Ball, Sphere
from phijax_rng.sampling.geometry.boxes import Box, BoxEdges, BoxFaces
from phijax_rng.sampling.geometry.composites import InitialSlab, SpaceTimeCylinder, Union
from phijax_rng.sampling.hosted import HostedRowSampler
from phijax_rng.sampling.rows import RandomRowSampler, ShuffledRowSampler
from phijax_rng.sampling.sequences import LatinHypercubeSampler, SobolSampler
from phijax_rng.sampling.sources import NamedBatchSource
from phijax_rng.sampling.weighted import WeightedRowSampler

_PURE = {
    *(RandomRowSampler, ShuffledRowSampler, WeightedRowSampler, HostedRowSampler),
    *(SpaceTimeSampler, UniformDomainSampler),
    *(Box, BoxFaces, BoxEdges, Ball, Sphere, SpaceTimeCylinder, InitialSlab, Union),
    *(SobolSampler, LatinHypercubeSampler),
    *(ResidualDistributionSampler, ResidualRefinementSampler),
}
_OTHER_STEPS = 3


def check_source(
    source: Any,
    step: int,
    stop: int,
    sampler_state: Mapping[str, Any],
    batch_keys: tuple[str, ...] = (),
) -> None:
    """Raises if two calls of `source(step)` differ; warns if the steps after it, below `stop`, do not differ.

    Args:
        source: to call.
        step: where the run starts.
        stop: where it ends.
        sampler_state: what adaptive samplers draw from.
        batch_keys: the batches that must be there; none where they are not known.

    Raises:
        ImpureSourceError: naming the batches that differ.
        TypeError: there are names of batches, and the source does not return batches by name.
        ValueError: a batch is missing.
    """
    source = adapt_source(source)
    names = _checked_names(source)
    if names is not None and not names:
        return
    # A host source runs in each process and cannot read arrays that span processes.
    sampler_state = processes.to_local(sampler_state)  # the host reads one device
    # Two calls in a row find counters and global generators; more calls would find nothing else.
    batches = source(step, sampler_state)
    _require_named(batches, step, batch_keys)
    first, again = _digests(batches, names), _digests(source(step, sampler_state), names)
    different = [name for name in first if again.get(name) != first[name]]
    if different:
        raise ImpureSourceError(
            f"source({step}) returned another {validation.shown(different)} when it was called again. "
            "Draw from the key and the step alone: neither from a global generator, nor from a counter, nor "
            "from a loader that shuffles by a state of its own."
        )
    steps = range(step + 1, stop)[:_OTHER_STEPS]
    others = [_digests(source(other, sampler_state), names) for other in steps]
    same = [name for name in first if others and all(other.get(name) == first[name] for other in others)]
    if same and not source.fixed and processes.is_primary():
        warnings.warn(
            f"the source returns the same {validation.shown(same)} at steps {step} to "
            f"{step + len(others)}. If that is intended, "
            "set an attribute fixed = True; if not, it does not draw from the step.",
            UserWarning,
            # The caller's line; this module does not know how far out the user's is.
            stacklevel=2,
        )


def _checked_names(source: AdaptedSource) -> list[str] | None:
    """The batches to compare; `None` for all of them."""
    if not isinstance(source.source, NamedBatchSource):
        return None
    return [
        name
        for name, sampler in source.samplers.items()
        if not _is_pure(sampler) and source.batch_sizes[name] != "all" and not AdaptedSampler(sampler).fixed
    ]


def _is_pure(sampler: Any) -> bool:
    """Whether this is a class of this package, neither a subclass nor a wrapper of something a user wrote."""
    return type(sampler) in _PURE and all(map(_is_pure, AdaptedSampler(sampler).inner_parts))


def _require_named(batches: object, step: int, batch_keys: tuple[str, ...]) -> None:
    """Raises unless every batch that the module reads is there by name."""
    if not batch_keys:
        return
    if not isinstance(batches, Mapping):
        raise TypeError(
            f"source({step}) must return a dict of batches by name, got {validation.formatted(batches)}. "
            f"Return {{{batch_keys[0]!r}: rows}}: batch_keys are {validation.shown(batch_keys)}."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(batches), is_leaf=_is_list_of_numbers):
        is_list = _is_list_of_numbers(leaf)
        if is_list or np.asarray(leaf).dtype.kind in "OSUmM":
            found = "a list of numbers" if is_list else validation.formatted(leaf)
            raise TypeError(
                f"source({step}){jax.tree_util.keystr(path)} must be an array of numbers, got {found}. "
                "Convert it with np.asarray, or leave it out."
            )
    missing = [name for name in batch_keys if name not in batches]
    if missing:
        raise ValueError(
            f"the source has no batch {missing[0]!r}; it has {validation.shown(batches)}, and the "
            f"module's batch_keys are {validation.shown(batch_keys)}. Make them agree."
        )


def _is_list_of_numbers(leaf: object) -> bool:
    """Whether JAX would take it for as many arrays as it has numbers."""
    return isinstance(leaf, list) and bool(leaf) and (isinstance(leaf[0], list) or np.shape(leaf[0]) == ())


def _digests(batch: Any, names: list[str] | None) -> dict[str, str]:
    if not isinstance(batch, Mapping):
        return {"batch": digest(batch)}
    return {name: digest(batch[name]) for name in (batch if names is None else names)}
