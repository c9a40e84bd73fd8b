"""Where points lie, what belongs to them, and what is refused; statistics are in statistics/."""

import functools
import itertools
import json
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import NamedBatchSource, UniformDomainSampler
from phijax_rng._base import exact_math
from phijax_rng.sampling.geometry import (
    Ball,
    Box,
    BoxEdges,
    BoxFaces,
    Geometry,
    InitialSlab,
    SpaceTimeCylinder,
    Sphere,
    Union,
    interval,
)
from tests._bitwise import assert_trees_bitwise_equal
from tests._selection import mostly_full

KEY = jax.random.key(7)
SIZE = 500
BOUNDS = np.float32([(0.1, 0.7), (-1.7, 1.7), (2.0, 5.0)])
CENTER = np.float32([0.3, -1.0, 2.0, 0.0, 5.0])


@functools.partial(jax.jit, static_argnums=2)
def _sampled(geometry, key, size):
    return geometry.sample(key, size)


def draw(geometry, key=KEY, size=SIZE):
    return jax.tree.map(np.asarray, _sampled(geometry, key, size))


@jax.jit
def placed(geometry, u):
    return geometry.place(u)


# Boxes


def test_a_box_has_the_points_of_a_uniform_domain_sampler():
    expected = UniformDomainSampler(BOUNDS).sample(KEY, SIZE)
    assert_trees_bitwise_equal(Box(BOUNDS).sample(KEY, SIZE), expected)
    assert_trees_bitwise_equal(interval(0.1, 0.7).sample(KEY, 9), Box([(0.1, 0.7)]).sample(KEY, 9))


@pytest.mark.parametrize("num_axes", mostly_full([1, 2, 3], everyday=[3]))
def test_points_of_faces_lie_on_the_face_that_their_normal_names(num_axes):
    bounds = BOUNDS[:num_axes]
    rows = draw(BoxFaces(bounds))
    faces = set()
    for point, normal in zip(rows["inputs"], rows["normals"], strict=True):
        (axis,) = np.flatnonzero(normal)
        assert abs(normal[axis]) == 1
        assert point[axis] == bounds[axis, int(normal[axis] > 0)]
        others = np.delete(np.arange(num_axes), axis)
        assert ((bounds[others, 0] <= point[others]) & (point[others] <= bounds[others, 1])).all()
        faces.add((axis, normal[axis]))
    assert len(faces) == 2 * num_axes


def test_chosen_faces_are_the_only_ones():
    rows = draw(BoxFaces(BOUNDS, faces=((1, "high"), (0, "low"))))
    assert {tuple(normal) for normal in rows["normals"].tolist()} == {(0, 1, 0), (-1, 0, 0)}


@pytest.mark.parametrize("num_axes", mostly_full([2, 3], everyday=[3]))
def test_points_of_edges_lie_on_both_faces_that_their_normals_name(num_axes):
    bounds = BOUNDS[:num_axes]
    rows = draw(BoxEdges(bounds))
    assert rows["normals"].shape == (SIZE, 2, num_axes)
    for point, normals in zip(rows["inputs"], rows["normals"], strict=True):
        axes = [int(np.flatnonzero(normal)[0]) for normal in normals]
        assert axes[0] < axes[1]
        for axis, normal in zip(axes, normals, strict=True):
            assert np.abs(normal).sum() == 1
            assert point[axis] == bounds[axis, int(normal[axis] > 0)]
    assert len({tuple(normal.ravel()) for normal in rows["normals"]}) == 4 * math.comb(num_axes, 2)


# Balls and spheres


@pytest.mark.parametrize("num_axes", mostly_full([1, 2, 3, 5], everyday=[2, 5]))
def test_points_of_a_sphere_are_a_radius_away_along_their_unit_normal(num_axes):
    center = CENTER[:num_axes]
    rows = draw(Sphere(center, 2.5))
    normals = rows["normals"].astype(float)
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, rtol=4e-7)
    np.testing.assert_allclose(rows["inputs"], center + 2.5 * normals, atol=2e-6)
    assert (normals.max(axis=0) > 0.5).all() and (normals.min(axis=0) < -0.5).all()


@pytest.mark.parametrize("num_axes", mostly_full([1, 2, 3, 5], everyday=[2, 5]))
def test_points_of_a_ball_fill_it_up_to_its_radius(num_axes):
    center = CENTER[:num_axes]
    distances = np.linalg.norm(draw(Ball(center, 2.5))["inputs"] - center, axis=1)
    assert distances.max() <= 2.5 * (1 + 1e-6)
    # The outermost of 500 points lies this far in with probability below 1e-10 (0.95 ** 500).
    assert distances.max() > 2.5 * 0.95 ** (1 / num_axes)
    assert distances.min() < 1.5


def test_zero_and_the_largest_uniform_number_have_their_points():
    for geometry in GEOMETRIES.values():
        for u in (0.0, 1 - 2.0**-24):
            rows = placed(geometry, jnp.full((1, geometry.num_uniforms), u, jnp.float32))
            assert all(np.isfinite(row).all() for row in rows.values())


def test_the_circle_and_the_cube_root_are_right_to_the_last_bits():
    u = (np.arange(2**16, dtype=np.float32) * 256 + 77) * np.float32(2.0**-24)
    cosine, sine = (np.asarray(part, float) for part in exact_math.circle(jnp.asarray(u)))
    exact = u.astype(float)
    np.testing.assert_allclose(cosine, np.cos(2 * np.pi * exact), atol=1.2e-7)
    np.testing.assert_allclose(sine, np.sin(2 * np.pi * exact), atol=1.2e-7)
    corners = exact_math.circle(jnp.float32([0, 0.25, 0.5, 0.75]))
    assert np.asarray(corners).tolist() == [[1, 0, -1, 0], [0, 1, 0, -1]]
    root = np.asarray(exact_math.cube_root(jnp.asarray(u)), float)
    np.testing.assert_allclose(root, np.cbrt(exact), rtol=2.4e-7)
    assert exact_math.cube_root(jnp.float32([0.0]))[0] == 0


# Composites


def test_a_union_takes_each_row_from_one_part_and_says_which():
    union = Union((Ball((0.0, 0.0), 1.0), Ball((9.0, 0.0), 2.0), Box([(-9, -8), (0, 1)])))
    rows = draw(union)
    x, y = rows["inputs"].T
    inside = [x**2 + y**2 <= 1.00001, (x - 9) ** 2 + y**2 <= 4.00001, (x <= -8) & (y >= 0) & (y <= 1)]
    assert (np.argmax(inside, axis=0) == rows["parts"]).all()
    assert set(rows["parts"]) == {0, 1, 2}


def test_a_part_of_weight_zero_is_never_drawn():
    parts = [Box([(i, i + 1)]) for i in range(4)]
    for zeros in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in (1, 2, 3)):
        weights = [0.0 if i in zeros else 0.1 for i in range(4)]
        union = Union(parts, weights)
        u = jnp.linspace(0, 1 - 2.0**-24, 4001, dtype=jnp.float32)
        parts_drawn = union.place(jnp.stack([u, u], axis=1))["parts"]
        assert set(np.asarray(parts_drawn)) == set(range(4)) - set(zeros)


def test_fields_of_the_parts_are_kept():
    walls = Union((Sphere((0.0, 0.0), 1.0), BoxFaces([(-5, 5), (-5, 5)])))
    rows = draw(walls)
    on_circle = rows["parts"] == 0
    np.testing.assert_array_equal(np.abs(rows["normals"][~on_circle]).sum(axis=1), 1)
    np.testing.assert_allclose(rows["inputs"][on_circle], rows["normals"][on_circle], atol=1e-6)


@pytest.mark.parametrize("axis", mostly_full([0, 1, 2], everyday=[1]))
def test_a_cylinder_is_its_space_with_a_column_of_times(axis):
    wall = SpaceTimeCylinder(BoxFaces(BOUNDS[:2]), (0.5, 1.5), time_axis=axis)
    rows = draw(wall)
    times = rows["inputs"][:, axis]
    assert 0.5 <= times.min() < 0.6 and 1.4 < times.max() <= 1.5
    u = jax.random.uniform(KEY, (SIZE, 3), dtype=jnp.float32)
    space = BoxFaces(BOUNDS[:2]).place(u[:, 1:])
    np.testing.assert_array_equal(np.delete(rows["inputs"], axis, axis=1), space["inputs"])
    np.testing.assert_array_equal(np.delete(rows["normals"], axis, axis=1), space["normals"])
    assert (rows["normals"][:, axis] == 0).all()


@pytest.mark.parametrize("axis", mostly_full([0, 1, 2], everyday=[1]))
def test_an_initial_slab_is_its_space_at_one_time(axis):
    slab = InitialSlab(Ball((0.0, 0.0), 1.0), time=0.1, time_axis=axis)
    rows = draw(slab)
    assert (rows["inputs"][:, axis] == np.float32(0.1)).all()
    space = draw(Ball((0.0, 0.0), 1.0))
    np.testing.assert_array_equal(np.delete(rows["inputs"], axis, axis=1), space["inputs"])


# All of them

GEOMETRIES = {
    "interval": interval(0.1, 0.7),
    "box": Box(BOUNDS),
    "ends": BoxFaces([(0.1, 0.7)]),
    "faces": BoxFaces(BOUNDS),
    "corners": BoxEdges(BOUNDS[:2]),
    "edges": BoxEdges(BOUNDS),
    "disk": Ball(CENTER[:2], 0.7),
    "ball": Ball(CENTER[:3], 0.7),
    "ball of five axes": Ball(CENTER, 0.7),
    "circle": Sphere(CENTER[:2], 0.7),
    "sphere": Sphere(CENTER[:3], 0.7),
    "sphere of five axes": Sphere(CENTER, 0.7),
    "union": Union((Ball((0.0, 0.0), 0.7), Box(BOUNDS[:2]))),
    "cylinder": SpaceTimeCylinder(Sphere(CENTER[:2], 0.7), (0.0, 0.6)),
    "slab": InitialSlab(Ball(CENTER[:2], 0.7)),
}
MEASURES = {
    "interval": (0.6, 1),
    "box": (0.6 * 3.4 * 3, 3),
    "ends": (2, 0),
    "faces": (2 * (0.6 * 3.4 + 3.4 * 3 + 0.6 * 3), 2),
    "corners": (4, 0),
    "edges": (4 * (0.6 + 3.4 + 3), 1),
    "disk": (math.pi * 0.49, 2),
    "ball": (4 / 3 * math.pi * 0.343, 3),
    "ball of five axes": (8 / 15 * math.pi**2 * 0.7**5, 5),
    "circle": (2 * math.pi * 0.7, 1),
    "sphere": (4 * math.pi * 0.49, 2),
    "sphere of five axes": (8 / 3 * math.pi**2 * 0.7**4, 4),
    "union": (math.pi * 0.49 + 0.6 * 3.4, 2),
    "cylinder": (2 * math.pi * 0.7 * 0.6, 2),
    "slab": (math.pi * 0.49, 2),
}
each = pytest.mark.parametrize("name", GEOMETRIES)


@each
def test_measures_are_those_of_the_textbooks(name):
    geometry, (measure, num_dimensions) = GEOMETRIES[name], MEASURES[name]
    assert geometry.measure == pytest.approx(measure, rel=1e-6)
    assert geometry.num_dimensions == num_dimensions


@each
def test_a_geometry_says_how_many_numbers_it_takes_and_gives(name):
    geometry = GEOMETRIES[name]
    assert isinstance(geometry, Geometry)
    rows = draw(geometry)
    assert rows["inputs"].shape == (SIZE, geometry.num_axes)
    u = jax.random.uniform(KEY, (SIZE, geometry.num_uniforms), jnp.float32)
    assert_trees_bitwise_equal(rows, jax.tree.map(np.asarray, placed(geometry, u)))
    assert {str(row.dtype) for row in rows.values()} <= {"float32", "int32"}


@each
def test_a_geometry_is_described_in_plain_data_and_survives_pickling(name):
    geometry = GEOMETRIES[name]
    described = geometry.describe()
    assert json.loads(json.dumps(described)) == described
    again = pickle.loads(pickle.dumps(geometry))
    assert again.describe() == described
    assert_trees_bitwise_equal(draw(again), draw(geometry))


def in_every_program(geometry):
    """The rows of one key: jitted, in a scan, mapped over keys, and as the beginning of a larger batch."""
    other = jax.random.fold_in(KEY, 1)
    both = jnp.stack([KEY, other])
    scanned = jax.lax.map(lambda key: _sampled(geometry, key, 33), both)
    mapped = jax.vmap(lambda key: _sampled(geometry, key, 33))(both)
    larger = jax.tree.map(lambda rows: rows[:33], _sampled(geometry, KEY, SIZE))
    first = [jax.tree.map(lambda rows: rows[0], rows) for rows in (scanned, mapped)]
    return [jax.tree.map(np.asarray, rows) for rows in (_sampled(geometry, KEY, 33), *first, larger)]


BY_QUANTILES = ("ball of five axes", "sphere of five axes")


@pytest.mark.parametrize(
    "name",
    mostly_full((n for n in GEOMETRIES if n not in BY_QUANTILES), everyday=["edges", "ball", "cylinder"]),
)
def test_points_are_the_same_bits_in_every_program_and_at_every_size(name):
    expected, *others = in_every_program(GEOMETRIES[name])
    for rows in others:
        assert_trees_bitwise_equal(rows, expected)


@pytest.mark.full
@pytest.mark.parametrize("name", mostly_full(BY_QUANTILES, everyday=["ball of five axes"]))
def test_points_by_quantiles_agree_to_within_four_ulp(name):
    expected, *others = in_every_program(GEOMETRIES[name])
    for rows in others:
        for field, values in rows.items():
            # Of the largest coordinate: what is added to the center is rounded at its magnitude.
            ulp = np.spacing(np.abs(values).max())
            np.testing.assert_allclose(values, expected[field], rtol=0, atol=4 * ulp)


def test_geometries_that_differ_have_descriptions_that_differ():
    assert len({json.dumps(geometry.describe()) for geometry in GEOMETRIES.values()}) == len(GEOMETRIES)


def test_a_geometry_is_a_sampler_of_a_source():
    source = NamedBatchSource({"wall": GEOMETRIES["faces"]}, {"wall": 4}, KEY)
    key = source.sampler_keys(3)["wall"]
    assert_trees_bitwise_equal(
        source(3)["wall"], jax.jit(lambda g, k: g.sample(k, 4))(GEOMETRIES["faces"], key), dict_order=False
    )
    with pytest.raises(ValueError) as caught:
        NamedBatchSource({"wall": GEOMETRIES["faces"]}, {"wall": "all"}, KEY)
    assert str(caught.value) == (
        "batch_sizes['wall']='all' needs a finite pool; a continuous domain has none. Pass a positive int."
    )


class Nowhere:
    """A geometry that is no pytree."""

    num_axes = num_uniforms = 1

    def place(self, u):
        return {"inputs": u}


NOWHERE = Nowhere()
REFUSED = {
    "a bound out of order": (
        lambda: Box([(0, 1), (1, 1)]),
        ValueError,
        "bounds[1] must be finite with lo < hi in float32, got (1.0, 1.0). Pass (lo, hi).",
    ),
    "faces that are a word": (
        lambda: BoxFaces([(0, 1)], "low"),
        TypeError,
        "faces must be pairs (axis, side), got 'low'. Pass for example ((0, 'low'),).",
    ),
    "a face that is a number": (
        lambda: BoxFaces([(0, 1)], (0,)),
        TypeError,
        "faces[0] must be a pair (axis, side), got 0. Pass for example (0, 'low').",
    ),
    "an axis that is not there": (
        lambda: BoxFaces([(0, 1)], ((1, "low"),)),
        ValueError,
        "faces[0][0] must be in [0, 1), got 1. Pick a number inside the range.",
    ),
    "a side that is not there": (
        lambda: BoxFaces([(0, 1)], ((0, "top"),)),
        ValueError,
        "faces[0][1] must be one of 'low', 'high', got 'top'. Pick one of them.",
    ),
    "a face twice": (
        lambda: BoxFaces([(0, 1)], ((0, "low"), (0, "low"))),
        ValueError,
        "faces must be distinct, at least one, got ((0, 'low'), (0, 'low')). Name each face once.",
    ),
    "no face": (
        lambda: BoxFaces([(0, 1)], ()),
        ValueError,
        "faces must be distinct, at least one, got (). Name each face once.",
    ),
    "edges of an interval": (
        lambda: BoxEdges([(0, 1)]),
        ValueError,
        "bounds must have two axes or more for two faces to meet, got one. "
        "Use BoxFaces for the ends of an interval.",
    ),
    "a center that is a word": (
        lambda: Ball("here", 1),
        TypeError,
        "center must be numbers of shape (n,), got 'here'. Pass floats.",
    ),
    "a center that is a number": (
        lambda: Ball(0.0, 1),
        ValueError,
        "center must be numbers of shape (n,), got shape (). Pass that shape.",
    ),
    "an infinite center": (
        lambda: Sphere([math.inf], 1),
        ValueError,
        "center must be finite in float32, got [inf]. Pass finite numbers.",
    ),
    "a radius of zero": (
        lambda: Sphere([0.0], 0),
        ValueError,
        "radius must be positive in float32, got 0. Pass more than 0.",
    ),
    "a radius for each axis": (
        lambda: Ball([0.0], [1.0]),
        ValueError,
        "radius must be one number, got shape (1,). Pass that shape.",
    ),
    "no parts": (
        lambda: Union(()),
        TypeError,
        "parts must be geometries, at least one, got (). Pass a tuple.",
    ),
    "a part that is no pytree": (
        lambda: Union((NOWHERE,)),
        TypeError,
        f"parts[0] must be a geometry, registered as a pytree, got {NOWHERE!r}. Pass for example a Box.",
    ),
    "parts of other spaces": (
        lambda: Union((Box([(0, 1)]), Sphere([0.0], 1))),
        ValueError,
        "parts must have the same fields; parts[0] has {'inputs': 'float32[1]'} and parts[1] has "
        "{'inputs': 'float32[1]', 'normals': 'float32[1]'}. "
        "Unite geometries of one space, all with normals or all without.",
    ),
    "parts of other dimensions": (
        lambda: Union((Sphere([0.0, 0.0], 1), InitialSlab(Sphere([0.0], 1)))),
        ValueError,
        "weights=None weighs parts by their measure, and the parts have dimensions [1, 0]. "
        "Pass a weight for each part.",
    ),
    "too few weights": (
        lambda: Union((Box([(0, 1)]),), (1, 2)),
        ValueError,
        "weights must be numbers of shape (1,), got shape (2,). Pass that shape.",
    ),
    "a negative weight": (
        lambda: Union((Box([(0, 1)]), Box([(0, 1)])), (1, -2)),
        ValueError,
        "weights must be non-negative and not all zero, got (1, -2). Fix them, or drop the part.",
    ),
    "no weight but zero": (
        lambda: Union((Box([(0, 1)]),), (0,)),
        ValueError,
        "weights must be non-negative and not all zero, got (0,). Fix them, or drop the part.",
    ),
    "times out of order": (
        lambda: SpaceTimeCylinder(Box([(0, 1)]), (1, 0)),
        ValueError,
        "time_bounds[0] must be finite with lo < hi in float32, got (1.0, 0.0). Pass (lo, hi).",
    ),
    "a space that is none": (
        lambda: SpaceTimeCylinder(3, (0, 1)),
        TypeError,
        "space must be a geometry, registered as a pytree, got 3. Pass for example a Box.",
    ),
    "a time axis that is not there": (
        lambda: InitialSlab(Box([(0, 1)]), time_axis=2),
        ValueError,
        "time_axis must be in [0, 2), got 2. Pick a number inside the range.",
    ),
    "a time that is a word": (
        lambda: InitialSlab(Box([(0, 1)]), "now"),
        TypeError,
        "time must be one number, got 'now'. Pass floats.",
    ),
    "a size of zero": (
        lambda: Box([(0, 1)]).sample(KEY, 0),
        ValueError,
        "size must be a positive int, got 0. Pass how many points to draw.",
    ),
    "all points": (
        lambda: Box([(0, 1)]).sample(KEY, "all"),
        ValueError,
        "size='all' needs a finite pool; a continuous domain has none. Pass a positive int.",
    ),
}


@pytest.mark.parametrize(("build", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_geometry_is_rejected(build, error, message):
    with pytest.raises(error) as caught:
        build()
    assert str(caught.value) == message


def test_the_weights_of_a_union_outlive_a_flattening():
    union = Union((Ball((0.0, 0.0), 1.0), Ball((3.0, 0.0), 0.5)), weights=(1, 3))
    rebuilt = jax.tree.map(lambda leaf: leaf, union)
    assert rebuilt.weights == union.weights == (1.0, 3.0)
