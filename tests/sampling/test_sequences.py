"""Sequences are SciPy's before they are scrambled, and keep what makes them even after it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import qmc

from phijax_rng import LatinHypercubeSampler, SobolSampler, UniformDomainSampler, keys
from phijax_rng.sampling import sequences
from phijax_rng.sampling.geometry import Ball, Box
from tests._bitwise import assert_trees_bitwise_equal
from tests._selection import mostly_full

SQUARE = Box([(0, 1), (0, 1)])
CUBE = Box([(0, 1)] * 5)
few = settings(max_examples=10)
seeds = st.integers(0, 2**64 - 1)


@functools.partial(jax.jit, static_argnums=2)
def draw(sampler, key, size):
    return sampler.sample(key, size)


def points(sampler, key, size):
    return np.asarray(draw(sampler, key, size)["inputs"])


# Sobol


@pytest.mark.parametrize(("num_axes", "size"), [(1, 2), (2, 300), (5, 1024), (40, 64)])
def test_unscrambled_points_are_those_of_scipy(num_axes, size):
    directions = sequences.direction_numbers(num_axes, (size - 1).bit_length())
    words = np.asarray(sequences._sequence(jnp.asarray(directions), size))
    power = 2 ** (size - 1).bit_length()
    expected = qmc.Sobol(num_axes, scramble=False, bits=30).random(power)[:size]
    np.testing.assert_array_equal(words / 2.0**32, expected)


def cells(unit, counts):
    """How many points each box of a grid holds, where it holds any."""
    inside = np.floor(unit.astype(float) * counts).astype(int)
    return np.unique(inside, axis=0, return_counts=True)[1]


@few
@given(seeds)
def test_every_dyadic_box_of_the_first_two_axes_holds_one_scrambled_point(seed):
    unit = points(SobolSampler(SQUARE), keys.root_key(seed), 256)
    for wide in range(9):
        assert len(cells(unit, [2**wide, 2 ** (8 - wide)])) == 256


def test_uniform_points_do_not_fill_every_dyadic_box():
    unit = points(SQUARE, keys.root_key(0), 256)
    assert len(cells(unit, [16, 16])) < 200


@few
@given(seeds)
def test_each_axis_is_stratified_at_every_power_of_two(seed):
    for size in (8, 1024):
        unit = points(SobolSampler(CUBE), keys.root_key(seed), size)
        for axis in range(5):
            assert len(cells(unit[:, axis, None], [size])) == size


@pytest.mark.full
@few
@given(seeds)
def test_a_scrambled_point_does_not_depend_on_the_size_of_its_batch(seed):
    sampler, key = SobolSampler(CUBE), keys.root_key(seed)
    large = points(sampler, key, 1000)
    for size in (1, 33, 512):
        np.testing.assert_array_equal(points(sampler, key, size), large[:size])


def test_scrambling_moves_every_axis_in_its_own_way():
    one, other = (points(SobolSampler(CUBE), keys.root_key(seed), 256) for seed in (0, 1))
    plain = sequences._unit(sequences._sequence(jnp.asarray(sequences.direction_numbers(5, 8)), 256))
    for axis in range(5):
        moves = [np.asarray(unit[:, axis] - plain[:, axis]) for unit in (one, other)]
        # Not a shift, and not the same for two keys.
        assert all(len(np.unique(move)) > 16 for move in moves)
        assert not np.array_equal(*moves)


def test_coordinates_are_multiples_of_two_to_the_minus_24_below_one():
    unit = points(SobolSampler(CUBE), keys.root_key(3), 4096).astype(float)
    assert (unit * 2**24 == np.round(unit * 2**24)).all()
    assert unit.min() >= 0 and unit.max() < 1


# Latin hypercubes


@pytest.mark.parametrize("size", mostly_full([1, 2, 3, 7, 97, 1000, 4099, 2**16 + 1, 2**20], everyday=[1, 7]))
def test_every_interval_of_every_axis_holds_one_point(size):
    for seed in range(3 if size < 2**16 else 1):
        unit = points(LatinHypercubeSampler(SQUARE), keys.root_key(seed), size).astype(float)
        assert unit.min() >= 0 and unit.max() < 1
        for axis in range(2):
            assert len(np.unique(np.floor(unit[:, axis] * size))) == size


def test_axes_are_permuted_apart_from_each_other():
    unit = points(LatinHypercubeSampler(CUBE), keys.root_key(0), 1000)
    ranks = np.argsort(unit, axis=0).argsort(axis=0)
    correlations = np.corrcoef(ranks.T)[~np.eye(5, dtype=bool)]
    # Ten independent correlations of standard deviation 1/sqrt(999): beyond 5 of them about once in 2e5.
    assert np.abs(correlations).max() < 5 / np.sqrt(999)


def test_rows_of_a_latin_hypercube_do_depend_on_its_size():
    sampler, key = LatinHypercubeSampler(SQUARE), keys.root_key(0)
    assert not np.array_equal(points(sampler, key, 10), points(sampler, key, 20)[:10])


# Both

SEQUENCES = {"Sobol": SobolSampler, "Latin hypercube": LatinHypercubeSampler}
both = pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)


@both
def test_points_of_the_unit_cube_go_through_the_place_of_the_domain(make):
    key = keys.root_key(5)
    unit = jnp.asarray(points(make(SQUARE), key, 64))
    disk = Ball((1.0, 2.0), 3.0)
    assert_trees_bitwise_equal(draw(make(disk), key, 64), jax.jit(disk.place)(unit))


@both
def test_a_box_with_templates_keeps_its_fields(make):
    domain = UniformDomainSampler([(0.1, 0.7)], {"targets": np.float32(3)})
    rows = draw(make(domain), keys.root_key(0), 5)
    assert rows["targets"].tolist() == [3.0] * 5


def test_more_axes_than_there_are_direction_numbers_are_rejected():
    domain = Ball(np.zeros(21201, np.float32), 1.0)
    with pytest.raises(ValueError) as caught:
        SobolSampler(domain)
    assert str(caught.value) == (
        "domain takes 21202 uniform numbers for a point, and Sobol's sequence has 21201 axes. "
        "Use LatinHypercubeSampler."
    )
