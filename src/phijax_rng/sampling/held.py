"""How a source holds its samplers, so that all of them are pytrees: arrays are leaves, the rest is static.

A sampler that is a pytree is held as it is. One that is none is static as a whole. Of one whose rows lie
on the host only the drawing half has leaves: the rows never become arguments of a program.
"""

from typing import Any

import jax
import numpy as np

from phijax_rng._base import pytrees
from phijax_rng.sampling.protocols import HostSampler


class _Same:
    """A value that equals itself alone, whatever its own `==` says: fit to be static."""

    def __init__(self, value: Any):
        self.value = value


@pytrees.record(data=(), meta=("holder",))
class Opaque:
    """A sampler that is no pytree: its arrays are constants of the programs that draw from it."""

    def __init__(self, sampler: Any):
        self.holder = _Same(sampler)


@pytrees.record(data=("chooser",), meta=("holder",))
class Hosted:
    """A sampler whose rows lie on the host: what draws their numbers, and what fetches them."""

    def __init__(self, sampler: Any):
        self.chooser = sampler.chooser
        self.holder = _Same(sampler)


def held(sampler: Any) -> Any:
    """A sampler as a source holds it."""
    if isinstance(sampler, HostSampler):
        return Hosted(sampler)
    return Opaque(sampler) if jax.tree_util.all_leaves([sampler]) else sampler


def given(sampler: Any) -> Any:
    """A held sampler as it was given."""
    return sampler.holder.value if isinstance(sampler, (Opaque, Hosted)) else sampler


def drawing(sampler: Any) -> Any:
    """The half of a held sampler that draws; programs are kept, and would keep the rows of the other."""
    return sampler.chooser if isinstance(sampler, Hosted) else sampler


def in_memory(leaf: Any) -> Any:
    """Rows that lie on disk, read; everything else as it is."""
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)
