"""Whether batches look like independent uniform draws: over rows, axes, steps and samplers.

Every statistic takes a sampling key and gives one p-value; its test uses a fixed key and fails below
`FALSE_ALARM`, which is therefore the probability that perfect draws would have failed here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from phijax_rng import (
    NamedBatchSource,
    RandomRowSampler,
    SpaceTimeSampler,
    UniformDomainSampler,
    keys,
)

pytestmark = pytest.mark.full  # many draws each

FALSE_ALARM = 1e-4
KEY = keys.split_root(31).sampling
NUM_STEPS = 2_000
SIZE = 40
NUM_ROWS = 50
BOX = np.float32([(0.1, 0.7), (-1.7, 1.7)])
TIMES = np.float32([0.0, 0.6])

INDEX = np.arange(NUM_ROWS, dtype=np.int32)
PLACES = {"inputs": np.zeros((NUM_ROWS, 2), np.float32), "index": INDEX}
SAMPLERS = {
    "box": UniformDomainSampler(BOX),
    "other box": UniformDomainSampler(BOX),
    "rows": RandomRowSampler({"index": INDEX}),
    "other rows": RandomRowSampler({"index": INDEX}),
    "distinct rows": RandomRowSampler({"index": INDEX}, replace=False),
    "sorted out": RandomRowSampler({"index": INDEX}, replace=False, method="sort"),
    "places": SpaceTimeSampler(PLACES, TIMES, sort_axis=None),
}


@jax.jit
def _batches(key):
    source = NamedBatchSource(SAMPLERS, dict.fromkeys(SAMPLERS, SIZE), key)
    return jax.lax.map(source, jnp.arange(NUM_STEPS))


_drawn = {}


def batches(key):
    """Every batch of every step, leading axes (steps, rows); drawn once for each key."""
    name = keys.fingerprint(key)
    if name not in _drawn:
        _drawn.clear()
        _drawn[name] = jax.tree.map(np.asarray, _batches(key))
    return _drawn[name]


def index(key, name):
    return batches(key)[name]["index"]


def unit(key, name):
    """The coordinates of a box on [0, 1]."""
    return (batches(key)[name]["inputs"].astype(float) - BOX[:, 0]) / (BOX[:, 1] - BOX[:, 0])


def bins(points, count=10):
    return np.minimum((points * count).astype(int), count - 1)


def times(key):
    return batches(key)["places"]["inputs"][..., 0].astype(float) / TIMES[1]


# The statistics


def row_frequencies(key, name):
    return stats.chisquare(np.bincount(index(key, name).ravel(), minlength=NUM_ROWS)).pvalue


def distinct_row_frequencies(key, name):
    """Rows of a batch without replacement avoid each other, which shrinks the variance of counts."""
    counts = np.bincount(index(key, name).ravel(), minlength=NUM_ROWS)
    expected = NUM_STEPS * SIZE / NUM_ROWS
    statistic = ((counts - expected) ** 2 / expected).sum() * (NUM_ROWS - 1) / (NUM_ROWS - SIZE)
    return stats.chi2.sf(statistic, NUM_ROWS - 1)


def distinct_places(key, name):
    """The first row of a batch without replacement, and the last, are uniform by themselves."""
    first, last = index(key, name)[:, 0], index(key, name)[:, -1]
    counts = np.bincount(first, minlength=NUM_ROWS), np.bincount(last, minlength=NUM_ROWS)
    return stats.combine_pvalues([stats.chisquare(count).pvalue for count in counts]).pvalue


def coordinates(key, axis):
    return stats.kstest(unit(key, "box")[..., axis].ravel(), "uniform").pvalue


def time_coordinates(key):
    return stats.kstest(times(key).ravel(), "uniform").pvalue


def joint(left, right, count=10):
    """Two labels in range(count) that should be uniform and independent of each other."""
    cells = np.ravel(left) * count + np.ravel(right)
    return stats.chisquare(np.bincount(cells, minlength=count * count)).pvalue


def neighboring_steps_of_points(key):
    points = bins(unit(key, "box")[..., 0])
    return joint(points[0::2], points[1::2])


def neighboring_steps_of_rows(key):
    rows = index(key, "rows") % 10
    return joint(rows[0::2], rows[1::2])


def neighboring_rows(key):
    points = bins(unit(key, "box")[..., 0])
    return joint(points[:, 0::2], points[:, 1::2])


def axes_of_one_point(key):
    points = bins(unit(key, "box"))
    return joint(points[..., 0], points[..., 1])


def two_boxes(key):
    return joint(bins(unit(key, "box")[..., 0]), bins(unit(key, "other box")[..., 0]))


def two_pools(key):
    return joint(index(key, "rows") % 10, index(key, "other rows") % 10)


def box_and_pool(key):
    return joint(bins(unit(key, "box")[..., 0]), index(key, "rows") % 10)


def place_and_time(key):
    return joint(index(key, "places") % 10, bins(times(key)))


def batch_means(key):
    """The mean of a batch scatters from step to step as the mean of independent points does."""
    means = unit(key, "box")[..., 0].mean(axis=1)
    return stats.kstest((means - 0.5) * np.sqrt(12 * SIZE), "norm").pvalue


STATISTICS = {
    "frequencies of rows": lambda key: row_frequencies(key, "rows"),
    "frequencies of places": lambda key: row_frequencies(key, "places"),
    "frequencies of distinct rows": lambda key: distinct_row_frequencies(key, "distinct rows"),
    "frequencies of rows sorted out": lambda key: distinct_row_frequencies(key, "sorted out"),
    "first and last distinct row": lambda key: distinct_places(key, "distinct rows"),
    "first and last row sorted out": lambda key: distinct_places(key, "sorted out"),
    "first coordinate": lambda key: coordinates(key, 0),
    "second coordinate": lambda key: coordinates(key, 1),
    "times": time_coordinates,
    "points of neighboring steps": neighboring_steps_of_points,
    "rows of neighboring steps": neighboring_steps_of_rows,
    "neighboring rows": neighboring_rows,
    "axes of one point": axes_of_one_point,
    "two boxes": two_boxes,
    "two pools": two_pools,
    "a box and a pool": box_and_pool,
    "place and time": place_and_time,
    "means of batches": batch_means,
}


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
def test_batches_look_like_independent_uniform_draws(statistic):
    assert statistic(KEY) > FALSE_ALARM


CONTROLS = {
    "one key for two samplers": lambda drawn: joint(drawn, drawn),
    "one row left out": lambda drawn: stats.chisquare(np.bincount(drawn[drawn > 0], minlength=10)).pvalue,
    "two rows of forty repeated in the next step": lambda drawn: joint(
        drawn[0::2], np.where(np.arange(SIZE) % 20 == 0, drawn[0::2], drawn[1::2])
    ),
}


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_draws_that_are_not_independent_or_not_uniform_are_seen(control):
    assert control(index(KEY, "rows") % 10) < FALSE_ALARM


def test_coordinates_that_miss_a_hundredth_of_their_span_are_seen():
    assert stats.kstest(unit(KEY, "box")[..., 0].ravel() * 0.99, "uniform").pvalue < FALSE_ALARM
