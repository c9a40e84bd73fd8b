"""Whether points of geometries are uniform on them, and sequences as even as theory says.

Every statistic takes a sampling key and gives one p-value; its test uses a fixed key and fails below
`FALSE_ALARM`, which is therefore at least the probability that perfect draws would have failed here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from scipy.stats import qmc

from phijax_rng import LatinHypercubeSampler, NamedBatchSource, SobolSampler, keys
from phijax_rng.sampling.geometry import Ball, Box, BoxEdges, BoxFaces, SpaceTimeCylinder, Sphere, Union

pytestmark = pytest.mark.full  # many draws each

FALSE_ALARM = 1e-4
KEY = keys.split_root(41).sampling
NUM_STEPS, SIZE = 64, 256

CUBOID = np.array([(0.0, 1.0), (-1.0, 1.0), (0.0, 3.0)])
DISKS = ((0.0, 0.0), 1.0), ((4.0, 0.0), 2.0)
GEOMETRIES = {
    "faces": BoxFaces(CUBOID),
    "edges": BoxEdges(CUBOID),
    "disk": Ball((0.0, 0.0), 1.0),
    "ball": Ball((0.0, 0.0, 0.0), 1.0),
    "ball5": Ball(np.zeros(5), 1.0),
    "circle": Sphere((0.0, 0.0), 1.0),
    "sphere": Sphere((0.0, 0.0, 0.0), 1.0),
    "sphere5": Sphere(np.zeros(5), 1.0),
    "union": Union(tuple(Ball(center, radius) for center, radius in DISKS)),
    "weighted": Union(tuple(Ball(center, radius) for center, radius in DISKS), (3.0, 1.0)),
    "wall": SpaceTimeCylinder(Sphere((0.0, 0.0), 1.0), (0.0, 1.0)),
    "sobol": SobolSampler(Box([(0, 1)] * 2)),
    "sobol disk": SobolSampler(Ball((0.0, 0.0), 1.0)),
    "latin": LatinHypercubeSampler(Box([(0, 1)] * 2)),
}


@jax.jit
def _batches(key):
    source = NamedBatchSource(GEOMETRIES, dict.fromkeys(GEOMETRIES, SIZE), key)
    return jax.lax.map(source, jnp.arange(NUM_STEPS))


@functools.lru_cache(maxsize=2)
def _drawn(fingerprint):
    return jax.tree.map(np.asarray, _batches(keys.from_fingerprint(fingerprint)))


def batches(key, name):
    """Every batch of every step, leading axes (steps, rows)."""
    return _drawn(keys.fingerprint(key))[name]


def rows(key, name):
    """All rows of all steps."""
    return {field: values.reshape(-1, *values.shape[2:]) for field, values in batches(key, name).items()}


def points(key, name):
    return rows(key, name)["inputs"].astype(float)


def uniform(values):
    return stats.kstest(np.ravel(values), "uniform").pvalue


def counts(labels, shares):
    observed = np.bincount(labels, minlength=len(shares))
    return stats.chisquare(observed, np.asarray(shares) / np.sum(shares) * len(labels)).pvalue


def together(*p_values):
    """Of several tests of the same points, which depend on each other: Bonferroni's bound."""
    return min(1.0, len(p_values) * min(p_values))


def angle(x, y):
    return np.arctan2(y, x) / (2 * np.pi) % 1


def independent(left, right, count=8):
    """Two numbers that should be uniform on [0, 1) and independent of each other."""
    cells = np.minimum(left * count, count - 1).astype(int) * count
    cells += np.minimum(right * count, count - 1).astype(int)
    return counts(np.ravel(cells), np.ones(count * count))


def face(normals):
    return np.argmax(np.concatenate([normals == -1, normals == 1], axis=-1), axis=-1)


# The statistics


def faces_by_area(key):
    areas = [6, 3, 2]  # of the faces across each axis
    return counts(face(rows(key, "faces")["normals"]), areas + areas)


def places_on_faces(key):
    found = rows(key, "faces")
    unit = (found["inputs"].astype(float) - CUBOID[:, 0]) / np.diff(CUBOID)[:, 0]
    p_values = []
    for axis in range(3):
        on = np.abs(found["normals"][:, axis]) == 1
        left, right = np.delete(unit[on], axis, axis=1).T
        p_values.append(independent(left, right))
    return together(*p_values)


def edges_by_length(key):
    normals = rows(key, "edges")["normals"]
    free = np.argmin(np.abs(normals).sum(axis=1), axis=1)
    return counts(free, [1, 2, 3])


def corners_of_edges(key):
    """Which of the four edges of one direction, and the place along it."""
    found = rows(key, "edges")
    unit = (found["inputs"].astype(float) - CUBOID[:, 0]) / np.diff(CUBOID)[:, 0]
    p_values = []
    for axis in range(3):
        along = np.abs(found["normals"]).sum(axis=1)[:, axis] == 0
        others = np.delete(unit[along], axis, axis=1)
        place = np.minimum(unit[along][:, axis] * 8, 7).astype(int)
        labels = (others[:, 0] * 2 + others[:, 1]).astype(int) * 8 + place
        p_values.append(counts(labels, np.ones(32)))
    return together(*p_values)


def disk(key):
    x, y = points(key, "disk").T
    return together(uniform(x**2 + y**2), independent(x**2 + y**2, angle(x, y)))


def ball(key):
    x, y, z = points(key, "ball").T
    radius = np.sqrt(x**2 + y**2 + z**2)
    return together(uniform(radius**3), uniform(angle(x, y)), independent(radius**3, (z / radius + 1) / 2))


def ball_of_five_axes(key):
    found = points(key, "ball5")
    radius = np.linalg.norm(found, axis=1)
    return together(uniform(radius**5), independent(radius**5, coordinate_of_sphere(found / radius[:, None])))


def coordinate_of_sphere(directions):
    """The first coordinate of a uniform direction, through its distribution function."""
    x, num_axes = directions[:, 0], directions.shape[1]
    return special.betainc((num_axes - 1) / 2, (num_axes - 1) / 2, (x + 1) / 2)


def circle(key):
    return uniform(angle(*points(key, "circle").T))


def sphere(key):
    x, y, z = points(key, "sphere").T
    return together(
        independent((z + 1) / 2, angle(x, y)),
        uniform((x + 1) / 2),
        uniform((y + 1) / 2),
        uniform((z + 1) / 2),
    )


def sphere_of_five_axes(key):
    found = points(key, "sphere5")
    return together(*(uniform(coordinate_of_sphere(np.roll(found, n, axis=1))) for n in range(5)))


def union_by_area(key):
    return counts(rows(key, "union")["parts"], [1, 4])


def union_by_weight(key):
    return counts(rows(key, "weighted")["parts"], [3, 1])


def part_of_a_union(key):
    found = rows(key, "union")
    x, y = found["inputs"][found["parts"] == 1].astype(float).T
    return independent(((x - 4) ** 2 + y**2) / 4, angle(x - 4, y))


def wall(key):
    t, x, y = points(key, "wall").T
    return independent(np.minimum(t, 1 - 1e-9), angle(x, y))


def neighboring_steps(key):
    found = batches(key, "disk")["inputs"].astype(float)
    unit = (found**2).sum(axis=-1)
    return independent(unit[0::2], unit[1::2])


def neighboring_rows(key):
    found = batches(key, "disk")["inputs"].astype(float)
    return independent((found**2).sum(axis=-1)[:, 0::2], angle(*np.moveaxis(found, -1, 0))[:, 1::2])


def two_samplers(key):
    disk = points(key, "disk")
    sphere = points(key, "sphere")
    return independent((disk**2).sum(axis=1), (sphere[:, 2] + 1) / 2)


def neighboring_seeds(key):
    other = points(jax.random.fold_in(key, 1), "disk")
    return independent((points(key, "disk") ** 2).sum(axis=1), (other**2).sum(axis=1))


@functools.partial(jax.jit, static_argnums=1)
def _one_row_of_many_batches(key, name):
    step_keys = jax.vmap(lambda step: keys.step_key(key, step))(jnp.arange(2048))
    return jax.vmap(lambda key: GEOMETRIES[name].sample(key, 16)["inputs"][11])(step_keys)


def single_points(key, name):
    """One point of each batch: uniform, and independent of that of the next step."""
    x, y = np.asarray(_one_row_of_many_batches(key, name), float).T
    return together(uniform(x), independent(x[0::2], x[1::2], count=4), independent(x, y))


def means_of_sobol_batches(key):
    """Means over scrambled batches scatter around the true mean without bias."""
    found = batches(key, "sobol")["inputs"].astype(float)
    means = np.exp(found.sum(axis=-1)).mean(axis=1) - np.expm1(1) ** 2
    return stats.ttest_1samp(means, 0).pvalue


STATISTICS = {
    "faces by area": faces_by_area,
    "places on faces": places_on_faces,
    "edges by length": edges_by_length,
    "corners of edges": corners_of_edges,
    "disk": disk,
    "ball": ball,
    "ball of five axes": ball_of_five_axes,
    "circle": circle,
    "sphere": sphere,
    "sphere of five axes": sphere_of_five_axes,
    "union by area": union_by_area,
    "union by weight": union_by_weight,
    "part of a union": part_of_a_union,
    "wall of a cylinder": wall,
    "neighboring steps": neighboring_steps,
    "neighboring rows": neighboring_rows,
    "two samplers": two_samplers,
    "neighboring seeds": neighboring_seeds,
    "single points of Sobol batches": lambda key: single_points(key, "sobol"),
    "single points of Latin hypercubes": lambda key: single_points(key, "latin"),
    "means of Sobol batches": means_of_sobol_batches,
}


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
def test_points_are_uniform_and_independent(statistic):
    assert statistic(KEY) > FALSE_ALARM


@pytest.mark.slow
def test_over_a_hundred_keys_no_statistic_fails_more_often_than_it_says(capsys):
    p_values = {
        name: [statistic(jax.random.fold_in(KEY, n)) for n in range(100)]
        for name, statistic in STATISTICS.items()
    }
    for name, values in p_values.items():
        # Below one in twenty: about five of a hundred; sixteen or more once in 27 000.
        assert sum(value < 0.05 for value in values) < 16, name
    with capsys.disabled():
        below = {name: int(sum(value < 0.05 for value in values)) for name, values in p_values.items()}
        print(f"\nbelow 0.05, of 100 keys: {below}")


CONTROLS = {
    "a radius without its root": lambda key: uniform(np.sqrt((points(key, "disk") ** 2).sum(axis=1))),
    "faces by number": lambda key: counts(face(rows(key, "faces")["normals"]), np.ones(6)),
    "a height that is no sphere's": lambda key: uniform((points(key, "circle")[:, 0] + 1) / 2),
    "weights turned round": lambda key: counts(rows(key, "weighted")["parts"], [1, 3]),
    "one key for two steps": lambda key: independent(*[(points(key, "disk") ** 2).sum(axis=1)] * 2),
}


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_points_that_are_not_uniform_or_not_independent_are_seen(control):
    assert control(KEY) < FALSE_ALARM


# Discrepancy


def discrepancies(found):
    """The squared centered L2 discrepancy of each batch (Hickernell, 1998)."""
    return np.array([qmc.discrepancy(batch, method="CD") for batch in found.astype(float)])


def test_uniform_points_have_the_discrepancy_of_theory_and_sequences_far_less():
    found = jax.jit(jax.vmap(lambda key: Box([(0, 1)] * 2).sample(key, SIZE)["inputs"]))(
        jax.random.split(KEY, NUM_STEPS)
    )
    independent = discrepancies(np.asarray(found))
    # Its mean over independent points, from the variance of the kernel.
    theory = ((5 / 4) ** 2 - (13 / 12) ** 2) / SIZE
    error = independent.std(ddof=1) / np.sqrt(NUM_STEPS)
    assert abs(independent.mean() - theory) < stats.norm.isf(FALSE_ALARM / 2) * error
    latin = discrepancies(batches(KEY, "latin")["inputs"])
    sobol = discrepancies(batches(KEY, "sobol")["inputs"])
    assert latin.mean() < theory / 4
    assert sobol.mean() < theory / 50
    assert sobol.max() < independent.min()


def test_means_of_smooth_functions_scatter_far_less_over_sequences():
    def scatter(found, values):
        return values(found.astype(float)).mean(axis=1).std()

    # Of exp(x + y): the mean of its square less the square of its mean.
    by_chance = np.sqrt(((np.expm1(2) / 2) ** 2 - np.expm1(1) ** 4) / SIZE)
    sobol = scatter(batches(KEY, "sobol")["inputs"], lambda x: np.exp(x.sum(axis=-1)))
    assert sobol < by_chance / 30
    latin = scatter(batches(KEY, "latin")["inputs"], lambda x: np.exp(x.sum(axis=-1)))
    assert latin < by_chance / 2
    disk = scatter(batches(KEY, "sobol disk")["inputs"], lambda x: (x**2).sum(axis=-1))
    assert disk < np.sqrt(1 / 12 / SIZE) / 30
