"""Samplers that follow residuals: what a refresh keeps, what is drawn after it, and what is refused."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from phijax_rng import (
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    UniformDomainSampler,
    keys,
)
from phijax_rng.sampling import AdaptiveSampler
from phijax_rng.sampling.geometry import Ball, Box
from tests._bitwise import assert_trees_bitwise_equal, first_difference

KEY, OTHER = jax.random.split(keys.root_key(3))
LINE = Box([(0.0, 1.0)])
FALSE_ALARM = 1e-4

draw = jax.jit(lambda sampler, key, size, state: sampler.sample(key, size, state), static_argnums=2)
refresh = jax.jit(
    lambda sampler, residuals, key, state: sampler.refresh(key, state, residuals), static_argnums=1
)
init = jax.jit(lambda sampler, key: sampler.init(key))


def ramp(rows):
    """A residual that grows from 0 to 1 along the first axis."""
    return rows["inputs"][:, 0]


def peak(rows):
    return jnp.where(jnp.abs(rows["inputs"][:, 0] - 0.3) < 0.01, 1.0, 0.0)


def nothing(rows):
    return jnp.zeros(rows["inputs"].shape[0])


def broken(rows):
    """Infinite on the left half, NaN on the right."""
    return jnp.where(rows["inputs"][:, 0] < 0.5, jnp.inf, jnp.nan)


def partly_broken(rows):
    return jnp.where(rows["inputs"][:, 0] < 0.5, jnp.nan, 1.0)


def rad(**options):
    return ResidualDistributionSampler(LINE, 10, **{"num_candidates": 4096, **options})


def rar(**options):
    chosen = {"capacity": 64, "num_initial": 32, "num_added": 8, "num_candidates": 1024, **options}
    return ResidualRefinementSampler(LINE, 10, **chosen)


SAMPLERS = {"distribution": rad(), "refinement": rar(), "greedy": rar(method="greedy")}
each = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def refreshed(sampler, residuals):
    return refresh(sampler, residuals, KEY, init(sampler, KEY))


def first(sampler, state, size=50_000):
    """The first coordinates of a large batch."""
    return np.asarray(draw(sampler, OTHER, size, state)["inputs"])[:, 0].astype(float)


# Both


@each
def test_an_adaptive_sampler_is_one(sampler):
    assert isinstance(sampler, AdaptiveSampler)


@each
def test_before_the_first_refresh_points_are_uniform(sampler):
    state = init(sampler, KEY)
    points = np.asarray(state["rows"]["inputs"])[:32, 0]
    assert_trees_bitwise_equal(points, np.asarray(LINE.sample(KEY, 32)["inputs"])[:, 0])
    assert set(np.float32(first(sampler, state))) <= set(np.asarray(state["rows"]["inputs"])[:, 0])


@each
@settings(max_examples=10)
@given(st.integers(0, 2**64 - 1))
def test_a_row_does_not_depend_on_the_size_of_its_batch(sampler, seed):
    state, key = refreshed(sampler, ramp), keys.root_key(seed)
    large = draw(sampler, key, 100, state)
    small = draw(sampler, key, 33, state)
    assert_trees_bitwise_equal(small, jax.tree.map(lambda rows: rows[:33], large))


@each
def test_a_refresh_keeps_the_structure_and_the_types_of_the_state(sampler):
    before, after = init(sampler, KEY), refreshed(sampler, ramp)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), state) for state in (before, after)]
    assert shapes[0] == shapes[1]
    assert first_difference(before, after) is not None


@each
def test_refreshes_come_at_fixed_steps(sampler):
    state = init(sampler, KEY)
    assert [step for step in range(45) if sampler.due(step, state)] == [10, 20, 30, 40]
    early = ResidualDistributionSampler(LINE, 10, refresh_start_step=3)
    assert [step for step in range(35) if early.due(step, state)] == [3, 13, 23, 33]


@each
def test_a_sampler_is_described_in_plain_data_and_survives_pickling(sampler):
    described = sampler.describe()
    assert json.loads(json.dumps(described)) == described
    again = pickle.loads(pickle.dumps(sampler))
    assert again.describe() == described
    state = refreshed(sampler, ramp)
    assert_trees_bitwise_equal(draw(again, OTHER, 9, state), draw(sampler, OTHER, 9, state))


@each
def test_x64_moves_neither_state_nor_rows(sampler):
    @jax.jit
    def state_and_rows():
        state = sampler.refresh(KEY, sampler.init(KEY), ramp)
        return state, sampler.sample(OTHER, 9, state)

    def everything():
        return jax.tree.map(np.asarray, state_and_rows())

    plain = everything()
    with jax.enable_x64(True):
        assert_trees_bitwise_equal(everything(), plain)


@each
def test_residuals_of_another_length_are_rejected(sampler):
    with pytest.raises(ValueError) as caught:
        sampler.refresh(KEY, sampler.init(KEY), lambda rows: jnp.float32(1))
    assert str(caught.value) == (
        f"residuals must have one row for each of the {sampler.num_candidates} candidates, got shape (). "
        "Return them unreduced."
    )


def test_components_count_together_by_the_root_of_their_squares():
    def pair(rows):
        return jnp.stack([3 * ramp(rows), -4 * ramp(rows)], axis=1)

    alone, together = refreshed(rad(), lambda rows: 5 * ramp(rows)), refreshed(rad(), pair)
    np.testing.assert_allclose(alone["weights"], together["weights"], rtol=1e-5)


@pytest.mark.full
def test_residuals_may_be_large_and_small():
    expected = refreshed(rad(), ramp)["weights"]
    for scale in (1e30, 1e-24):
        state = refreshed(rad(), lambda rows, scale=scale: scale * ramp(rows))
        np.testing.assert_allclose(state["weights"], expected, rtol=1e-3)
    for scale in (1e38, 1e-38):  # all alike to it
        state = refreshed(rad(), lambda rows, scale=scale: scale * (1 + ramp(rows)))
        np.testing.assert_allclose(state["weights"], 1, rtol=1e-5)


# The distribution


def density_of_ramp(exponent, offset):
    """Of a point at x, when the residual is x: `x**k / mean + c`, normalized."""
    return lambda x: (x**exponent * (exponent + 1) + offset) / (1 + offset)


@pytest.mark.parametrize(("exponent", "offset"), [(1, 1), (2, 0), (0.5, 0.3)])
def test_points_follow_the_density_of_the_paper(exponent, offset):
    sampler = rad(exponent=exponent, offset=offset, num_candidates=2**16)
    points = first(sampler, refreshed(sampler, ramp), 20_000)
    edges = np.linspace(0, 1, 11)
    cumulative = (edges ** (exponent + 1) + offset * edges) / (1 + offset)
    expected = np.diff(cumulative) * len(points)
    observed = np.histogram(points, edges)[0]
    # The candidates add noise of their own, a third of the draws'; hence the variance is inflated.
    statistic = ((observed - expected) ** 2 / expected).sum() / (1 + len(points) / 2**16)
    assert stats.chi2.sf(statistic, 9) > FALSE_ALARM


def test_weights_turn_a_mean_over_the_points_into_one_over_uniform_points():
    sampler = rad(num_candidates=2**16)
    rows = draw(sampler, OTHER, 2**16, refreshed(sampler, ramp))
    squares = np.asarray(rows["inputs"][:, 0], float) ** 2
    # Five standard errors of the draws and of the candidates; perfect ones miss it once in 1e6.
    assert abs((rows["weights"] * squares).mean() - 1 / 3) < 5 * 0.3 * np.sqrt(2) / 256
    assert abs(squares.mean() - 5 / 12) < 5 * 0.3 * np.sqrt(2) / 256
    assert np.asarray(rows["weights"]).max() <= 2 * (1 + 1e-5)


def test_weights_are_the_uniform_density_over_that_of_the_point():
    sampler = rad(num_candidates=2**16)
    state = refreshed(sampler, ramp)
    x = np.asarray(state["rows"]["inputs"])[:, 0].astype(float)
    np.testing.assert_allclose(state["weights"], 1 / density_of_ramp(1, 1)(x), rtol=0.02)
    assert (init(sampler, KEY)["weights"] == 1).all()


def test_candidates_without_residual_are_never_drawn_when_nothing_is_uniform():
    sampler = rad(offset=0.0)
    points = first(sampler, refreshed(sampler, peak))
    assert (np.abs(points - 0.3) < 0.0101).all()


@pytest.mark.parametrize("residuals", [nothing, broken])
def test_with_nothing_to_follow_the_density_is_uniform(residuals):
    sampler = rad()
    state = refreshed(sampler, residuals)
    assert (state["weights"] == 1).all()
    assert len(set(np.diff(np.asarray(state["cumulative"])))) == 1


def test_a_residual_that_is_not_finite_counts_as_zero():
    sampler = rad(offset=0.0)
    assert (first(sampler, refreshed(sampler, partly_broken)) >= 0.5).all()


def test_one_candidate_is_always_drawn():
    sampler = rad(num_candidates=1)
    assert len(np.unique(first(sampler, refreshed(sampler, ramp), 100))) == 1


def test_densities_are_whole_numbers_whose_sum_is_near_two_to_the_30():
    for residuals in (ramp, peak, nothing):
        cumulative = np.asarray(refreshed(rad(), residuals)["cumulative"])
        assert (np.diff(cumulative) >= 0).all() and abs(cumulative[-1] - 2**30) < 4096


def test_candidates_keep_the_fields_of_their_domain():
    domain = UniformDomainSampler([(0, 1)], {"targets": np.float32(3)})
    sampler = ResidualDistributionSampler(domain, 10, num_candidates=8)
    rows = draw(sampler, KEY, 4, init(sampler, KEY))
    assert sorted(rows) == ["inputs", "targets", "weights"]
    pool = RandomRowSampler({"inputs": np.arange(9, dtype=np.float32)[:, None]})
    assert sorted(ResidualDistributionSampler(pool, 10).contents()) == ["inputs"]


def test_a_domain_with_weights_of_its_own_is_rejected():
    domain = UniformDomainSampler([(0, 1)], {"weights": np.float32(3)})
    with pytest.raises(ValueError) as caught:
        ResidualDistributionSampler(domain, 10, num_candidates=8).init(KEY)
    assert str(caught.value) == (
        "domain must not give the field 'weights', which says how a point was drawn. Rename it."
    )


# The refinement


def test_the_set_grows_by_what_is_added_and_loses_nothing():
    sampler, state = rar(), init(rar(), KEY)
    for turn in range(1, 5):
        before = np.asarray(state["rows"]["inputs"])[: 32 + 8 * (turn - 1)]
        state = refresh(sampler, ramp, jax.random.fold_in(KEY, turn), state)
        assert int(state["count"]) == 32 + 8 * turn
        after = np.asarray(state["rows"]["inputs"])[: 32 + 8 * turn]
        np.testing.assert_array_equal(after[: len(before)], before)
        assert len(np.unique(after)) == len(after)


def test_a_full_set_stays_as_it_is_and_wants_no_more_residuals():
    sampler, state = rar(capacity=40), init(rar(capacity=40), KEY)
    assert sampler.due(10, state)
    state = refresh(sampler, ramp, KEY, state)
    assert not sampler.due(20, state)
    assert_trees_bitwise_equal(refresh(sampler, ramp, OTHER, state), state)


def test_places_that_are_not_filled_are_never_drawn():
    sampler = rar()
    state = refreshed(sampler, ramp)
    assert set(np.float32(first(sampler, state))) == set(np.asarray(state["rows"]["inputs"])[:40, 0])


def test_greedy_refinement_adds_the_largest_residuals():
    sampler = rar(method="greedy")
    added = np.asarray(refreshed(sampler, ramp)["rows"]["inputs"])[32:40, 0]
    # Eight of 1024 uniform points lie above 0.97 but about once in 1e7 (Poisson of mean 31).
    assert (added > 0.97).all() and (np.diff(added) < 0).all()


def test_refinement_by_distribution_adds_points_in_proportion_to_it():
    sampler = rar(capacity=32 + 512, num_added=512, num_candidates=2**15)
    added = np.asarray(refreshed(sampler, ramp)["rows"]["inputs"])[32:, 0].astype(float)
    # The density is 3 x**2; few of many candidates are taken, so they are nearly independent.
    assert stats.kstest(added**3, "uniform").pvalue > FALSE_ALARM
    assert stats.kstest(added, "uniform").pvalue < FALSE_ALARM


def test_added_points_differ_from_each_other_even_where_few_have_residuals():
    added = np.asarray(refreshed(rar(), peak)["rows"]["inputs"])[32:40, 0]
    assert len(np.unique(added)) == 8


# What is refused

REFUSED = {
    "a domain that cannot draw": (
        lambda: ResidualDistributionSampler(3, 10),
        TypeError,
        "domain must offer sample(key, size), got 3. Pass for example a geometry.",
    ),
    "a period of zero": (
        lambda: ResidualDistributionSampler(LINE, 0),
        ValueError,
        "refresh_every_n_steps must be in [1, 2**31), got 0. Pick a number inside the range.",
    ),
    "too many candidates": (
        lambda: rad(num_candidates=2**22 + 1),
        ValueError,
        "num_candidates must be in [1, 4194305), got 4194305. Pick a number inside the range.",
    ),
    "a negative offset": (
        lambda: rad(offset=-0.1),
        ValueError,
        "offset must not be negative, got -0.1. Use 0 or more.",
    ),
    "an exponent that is a word": (
        lambda: rad(exponent="two"),
        TypeError,
        "exponent must be one number, got 'two'. Pass floats.",
    ),
    "a start that is no step": (
        lambda: rad(refresh_start_step=-1),
        ValueError,
        "refresh_start_step must be in [0, 2**31), got -1. A step counts completed optimizer updates.",
    ),
    "names that are one word": (
        lambda: rad(residual_names="pde"),
        TypeError,
        "residual_names must be a sequence of names, got 'pde'. Pass a tuple of strings.",
    ),
    "more added than candidates": (
        lambda: rar(num_added=8, num_candidates=4),
        ValueError,
        "num_added must be at most the 4 candidates, got 8. Raise num_candidates.",
    ),
    "a capacity below the start": (
        lambda: rar(capacity=31),
        ValueError,
        "capacity must be num_initial and a multiple of num_added, got "
        "capacity=31, num_initial=32, num_added=8. Use for example capacity=40.",
    ),
    "an unknown method": (
        lambda: rar(method="largest"),
        ValueError,
        "method must be one of 'distribution', 'greedy', got 'largest'. Pick one of them.",
    ),
    "all points": (
        lambda: rad().sample(KEY, "all", init(rad(), KEY)),
        ValueError,
        "size='all' needs a finite pool; a continuous domain has none. Pass a positive int.",
    ),
}


@pytest.mark.parametrize(("build", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_make_no_sense_are_rejected(build, error, message):
    with pytest.raises(error) as caught:
        build()
    assert str(caught.value) == message


def test_a_geometry_of_any_shape_is_a_domain():
    disk = ResidualDistributionSampler(Ball((0.0, 0.0), 1.0), 10, num_candidates=64)
    rows = draw(disk, KEY, 8, init(disk, KEY))
    assert rows["inputs"].shape == (8, 2)
