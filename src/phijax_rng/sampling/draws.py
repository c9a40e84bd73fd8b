"""The programs that draw the batches of a source: each compiled once for all sources of one structure.

A sampler draws from its place in the split key, or, where it asks for the step, from a stream of its own.
A source that is a part of another (see `NamedBatchSource.host_and_device_parts`) has the places of the whole.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from phijax_rng import keys
from phijax_rng._base.types import Batches, BatchSize, KeyScalar, Step
from phijax_rng.sampling.protocols import AdaptiveSampler, StepSampler


def draw(source: Any, step: Step, sampler_state: Mapping[str, Any]) -> Batches:
    """The batches of a step; may be traced."""
    dealt = deal(keys.step_key(source.key, step), source.dealt_to)
    batches = {}
    for (name, sampler), size in zip(source.samplers.items(), source.batch_sizes.values(), strict=True):
        if isinstance(sampler, StepSampler):
            own_key = keys.stream(source.key, "sampler", name)
            batches[name] = sampler.sample_at(own_key, step, size)
        elif is_adaptive(sampler):
            batches[name] = sampler.sample(dealt[name], size, sampler_state[name])
        else:
            batches[name] = sampler.sample(dealt[name], size)
    return batches


@functools.lru_cache(maxsize=256)
def compiled_draw(structure: Any) -> Callable[..., Any]:
    """One jitted draw for each structure, shared by all sources of it."""

    def drawn(leaves: list[jax.Array], step: jax.Array, sampler_state: Mapping[str, Any]) -> tuple[Any, ...]:
        source = jax.tree.unflatten(structure, leaves)
        return tuple(draw(source, step, sampler_state).values())

    return jax.jit(drawn)


@functools.lru_cache(maxsize=256)
def compiled_stack(structure: Any) -> Callable[..., Any]:
    """The same of consecutive steps, one turn of a loop for each."""

    def drawn(leaves: list[jax.Array], first: jax.Array, count: int) -> tuple[Any, ...]:
        source = jax.tree.unflatten(structure, leaves)
        steps = first + jnp.arange(count, dtype=jnp.int32)
        return jax.lax.map(lambda step: tuple(draw(source, step, {}).values()), steps)

    return jax.jit(drawn, static_argnums=2)


@functools.partial(jax.jit, static_argnums=1)
def sample(
    source: Any, sizes: tuple[BatchSize, ...], key: KeyScalar, states: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Batches of these sizes from an explicit key, in the order of the names."""
    dealt = deal(key, source.dealt_to)
    return tuple(
        sampler.sample(dealt[name], size, states[name])
        if is_adaptive(sampler)
        else sampler.sample(dealt[name], size)
        for (name, sampler), size in zip(source.samplers.items(), sizes, strict=True)
    )


def deal(key: KeyScalar, names: tuple[str, ...]) -> dict[str, KeyScalar]:
    """One key for each name, in their order."""
    split = keys.settled(jax.random.split(key, len(names)))
    return {name: split[index] for index, name in enumerate(names)}


def is_adaptive(sampler: Any) -> bool:
    """Whether a sampler draws from a state."""
    return isinstance(sampler, AdaptiveSampler)
