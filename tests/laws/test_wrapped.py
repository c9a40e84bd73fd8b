"""What a sampler draws through may be the user's own: it is asked twice, and its data is in the contract."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import (
    LatinHypercubeSampler,
    NamedBatchSource,
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    SobolSampler,
    UniformDomainSampler,
    keys,
)
from phijax_rng.resume import contract
from phijax_rng.sampling import HostedRowSampler
from phijax_rng.sampling.adapters import adapt_source
from phijax_rng.sampling.geometry import Ball, Box, InitialSlab, SpaceTimeCylinder, Union
from phijax_rng.training import source_checks

KEY = keys.split_root(0).sampling
SQUARE = Box([(0.0, 1.0), (0.0, 1.0)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """A geometry whose NumPy draw is frozen into the program when it is traced."""

    scale: Any = dataclasses.field(default_factory=lambda: jnp.float32(1))
    num_axes = 2
    num_uniforms = 2

    def place(self, u):
        return {"inputs": self.scale * np.random.default_rng(0).random((len(u), 2), np.float32)}


class Mine(Box):
    """A subclass, which may draw as it likes."""


class Drawn(RandomRowSampler):
    """The same of rows."""


WRAPPING = {
    "Sobol points": SobolSampler,
    "a Latin hypercube": LatinHypercubeSampler,
    "a union": lambda part: Union((part, part), (0, 1)),
    "a slab": InitialSlab,
    "a cylinder": lambda space: SpaceTimeCylinder(space, (0.0, 1.0)),
    "a density": lambda domain: ResidualDistributionSampler(SobolSampler(domain), 5, num_candidates=8),
    "a growing set": lambda domain: ResidualRefinementSampler(
        InitialSlab(domain), 5, capacity=8, num_initial=4, num_added=4, num_candidates=8
    ),
    "a union of slabs": lambda space: SobolSampler(Union((InitialSlab(space), InitialSlab(space)), (1, 1))),
}
wrapping = pytest.mark.parametrize("wrap", WRAPPING.values(), ids=WRAPPING)


def source_of(sampler):
    return NamedBatchSource({"rows": sampler}, {"rows": 4}, KEY)


@wrapping
def test_what_draws_through_a_geometry_of_the_users_own_is_checked(wrap):
    assert source_checks._checked_names(adapt_source(source_of(wrap(Frozen())))) == ["rows"]
    assert source_checks._checked_names(adapt_source(source_of(wrap(SQUARE)))) == []


@pytest.mark.parametrize(
    "sampler",
    [Mine([(0.0, 1.0)]), SobolSampler(Frozen()), HostedRowSampler(Drawn({"inputs": np.zeros((3, 1))}))],
    ids=["a subclass", "wrapped", "a subclass on the host"],
)
def test_a_subclass_is_not_taken_for_what_it_derives_from(sampler):
    assert source_checks._checked_names(adapt_source(source_of(sampler))) == ["rows"]


@pytest.mark.parametrize("name", ["Sobol points", "a Latin hypercube", "a union", "a slab"])
def test_a_frozen_draw_behind_a_sampler_is_named(name):
    with pytest.warns(UserWarning, match=r"the source returns the same 'rows' at steps 0 to 3\."):
        source_checks.check_source(source_of(WRAPPING[name](Frozen())), 0, 100, {})


# The contract


def weighted(weight):
    """A geometry that holds data of its own."""
    return UniformDomainSampler([(0.0, 1.0), (0.0, 1.0)], {"weight": np.float32(weight)})


def digests(sampler):
    return contract.digest_contents(source_of(sampler))


@wrapping
def test_data_of_a_wrapped_geometry_is_part_of_the_contract(wrap):
    one, same, other = (digests(wrap(weighted(weight))) for weight in (1, 1, 2))
    assert one == same
    assert one != other
    # The description, in which data has its shape alone, does not tell them apart.
    described = [contract.describe_part(source_of(wrap(weighted(weight)))) for weight in (1, 2)]
    assert described[0] == described[1]


def test_parts_that_change_places_are_told_apart():
    one, two = weighted(1), weighted(2)
    assert digests(Union((one, two), (1, 1))) != digests(Union((two, one), (1, 1)))
    assert digests(Union((SQUARE, Ball((0.0, 0.0), 1.0)), (1, 1)))  # without data of their own
