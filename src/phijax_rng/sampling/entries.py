"""What a source is made of, name by name: samplers, sizes and states, checked before anything is traced.

>>> require_sizes({"pde": None}, {"pde": 8, "bc": 2})
Traceback (most recent call last):
ValueError: batch_sizes names 'bc', but there is only 'pde'. Drop it, or add what it names.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from phijax_rng._base import validation
from phijax_rng._base.types import BatchSize
from phijax_rng.sampling.protocols import AdaptiveSampler, HostSampler, Sampler, StepSampler


def checked_sizes(samplers: Mapping[str, Any], batch_sizes: Any) -> dict[str, BatchSize]:
    """The sizes in the order of the samplers, each one its sampler can serve."""
    require_sizes(samplers, validation.mapping(batch_sizes, "batch_sizes"))
    return {name: _checked_size(name, sampler, batch_sizes[name]) for name, sampler in samplers.items()}


def _checked_size(name: str, sampler: Any, size: Any) -> BatchSize:
    label = f"batch_sizes[{name!r}]"
    _require_sampler(name, sampler)
    checked = validation.batch_size(size, label, finite=hasattr(sampler, "num_rows"))
    if hasattr(sampler, "check_size"):
        sampler.check_size(checked, label)
    elif checked == "all" and not hasattr(sampler, "num_rows"):
        raise ValueError(
            f"{label}='all' needs a sampler with num_rows; {sampler!r} has none. Pass a positive int."
        )
    return checked


def _require_sampler(name: str, sampler: Any) -> None:
    if not isinstance(sampler, (Sampler, StepSampler)):
        raise TypeError(
            f"samplers[{name!r}] must offer sample(key, size), got {sampler!r}. "
            "Pass a sampler of phijax_rng or your own."
        )
    parts = (sampler, getattr(sampler, "domain", None))
    if isinstance(sampler, AdaptiveSampler) and any(isinstance(part, HostSampler) for part in parts):
        raise ValueError(
            f"samplers[{name!r}] draws candidates in the compiled loop, and their rows lie on the host, got "
            f"{sampler!r}. Take a domain on the device, such as a geometry or a RandomRowSampler."
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


def require_known(given: Iterable[str], known: Iterable[str], label: str) -> None:
    """Raises for a name that is not known."""
    for name in given:
        if name not in known:
            raise ValueError(
                f"{label} names {name!r}, but there is only {validation.shown(known)}. "
                "Drop it, or add what it names."
            )


def require_names(names: tuple[str, ...], given: Mapping[str, Any], label: str) -> None:
    """Raises for a name without an entry."""
    for name in names:
        if name not in given:
            raise ValueError(
                f"{label} has no entry {name!r}; it has {validation.shown(given)}. "
                f"Add {label}[{name!r}] or drop the name."
            )


def require_states(names: tuple[str, ...], sampler_state: Mapping[str, Any]) -> None:
    """Raises for a sampler without its state."""
    for name in names:
        if name not in sampler_state:
            raise ValueError(
                f"sampler {name!r} keeps a state, and sampler_state has {validation.shown(sampler_state)}. "
                f"Pass sampler_state={{{name!r}: sampler.init(key)}}."
            )
