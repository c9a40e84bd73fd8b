"""Points in float64: by default where x64 is on, right to the last bits, the same bits in every program."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import NamedSharding, PartitionSpec

from phijax_rng import (
    LatinHypercubeSampler,
    NamedBatchSource,
    ResidualDistributionSampler,
    SobolSampler,
    SpaceTimeSampler,
    UniformDomainSampler,
)
from phijax_rng._base import coordinates, exact_math
from phijax_rng.sampling.geometry import (
    Ball,
    Box,
    BoxEdges,
    BoxFaces,
    InitialSlab,
    SpaceTimeCylinder,
    Sphere,
    Union,
    interval,
)
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full
from tests._subprocess import EIGHT_DEVICES, run_python

KEY = jax.random.key(5)
SIZE = 64
BOUNDS = [(0.1, 0.7), (-1.7, 1.6)]
LINE = np.linspace(0.1, 0.7, 9)[:, None] * [[1.0, 1.0]]

SAMPLERS = {
    "uniform": lambda: UniformDomainSampler(BOUNDS),
    "box": lambda: Box(BOUNDS),
    "faces": lambda: BoxFaces(BOUNDS),
    "edges": lambda: BoxEdges(BOUNDS),
    "disk": lambda: Ball((0.3, -1.0), 0.7),
    "circle": lambda: Sphere((0.3, -1.0), 0.7),
    "slab": lambda: InitialSlab(interval(0.1, 0.7), 0.3),
    "cylinder": lambda: SpaceTimeCylinder(interval(0.1, 0.7), (0, 0.3)),
    "wall": lambda: SpaceTimeCylinder(Sphere((0.3,), 0.7), (0, 0.3)),
    "union": lambda: Union((Ball((0.3, -1.0), 0.7), Box(BOUNDS))),
    "Sobol": lambda: SobolSampler(Ball((0.3, -1.0), 0.7)),
    "Latin hypercube": lambda: LatinHypercubeSampler(Box(BOUNDS)),
    "space-time": lambda: SpaceTimeSampler({"inputs": LINE}, (0, 0.3)),
}
DEEP = {
    "ball of three axes": lambda: Ball((0.3, -1.0, 2.0), 0.7),
    "ball of five axes": lambda: Ball((0.3, -1.0, 2.0, 0.0, 5.0), 0.7),
    "sphere of four axes": lambda: Sphere((0.3, -1.0, 2.0, 0.0), 0.7),
}


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@functools.partial(jax.jit, static_argnums=2)
def draw(sampler, key, size):
    return sampler.sample(key, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """A geometry that declares no dtype."""

    corner: jax.Array
    num_axes = num_uniforms = 1

    def place(self, u):
        return {"inputs": u + self.corner[None]}


# Which dtype


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ([(0, 1)], "float64"),
        ([(0.0, 1.0)], "float64"),
        (np.array([(0, 1)]), "float64"),
        (np.array([(0.0, 1.0)]), "float64"),
        (np.float32([(0, 1)]), "float32"),
        ([(np.float32(0), np.float32(1))], "float32"),
        (np.float16([(0, 1)]), "float32"),
        (jnp.asarray([(0, 1)], jnp.bfloat16), "float32"),
    ],
    ids=["ints", "floats", "int64", "float64", "float32", "float32 scalars", "float16", "bfloat16"],
)
def test_points_have_the_precision_of_the_bounds(given, dtype):
    for make in (UniformDomainSampler, Box, BoxFaces):
        assert make(given).dtype == dtype
    assert SobolSampler(Box(given)).dtype == dtype
    assert InitialSlab(SpaceTimeCylinder(Box(given), (0, 1)), 0.5).dtype == dtype
    with jax.enable_x64(False):
        assert Box(given).dtype == np.float32
        assert Box(given, dtype=np.float32).dtype == np.float32


def test_python_numbers_beside_an_array_have_its_precision():
    assert Ball(np.float32([1, 2]), 0.5).dtype == Ball([1, 2], np.float32(0.5)).dtype == np.float32
    assert Sphere(np.float32([1, 2]), np.float64(0.5)).dtype == np.float64
    assert Ball(np.float32([1, 2]), 0.5, dtype="float64").radius.dtype == np.float64


@pytest.mark.parametrize("name", mostly_full(list(SAMPLERS), everyday=["faces", "wall", "space-time"]))
def test_the_exact_heat_solution_leaves_no_residual_at_the_points(name):
    def solution(point):
        return jnp.exp(-(jnp.pi**2) * point[0]) * jnp.sin(jnp.pi * point[1])

    @jax.jit
    @jax.vmap
    def residual(point):
        curvature = jax.hessian(solution)(point)[1, 1]
        return jax.grad(solution)(point)[0] - curvature

    rows = draw(SAMPLERS[name](), KEY, SIZE)
    floats = {str(row.dtype) for row in rows.values() if row.dtype.kind == "f"}
    assert floats == {"float64"}
    points = jnp.abs(rows["inputs"])  # a negative time would let the solution grow
    assert np.abs(residual(points)).max() < 1e-13
    assert np.abs(residual(points.astype(jnp.float32))).max() > 1e-9, "float32 would pass too"


def test_candidates_of_an_adaptive_sampler_and_their_weights_are_float64():
    sampler = ResidualDistributionSampler(Box(BOUNDS), 10, num_candidates=8)
    state = jax.jit(sampler.init)(KEY)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float64", "int32"}


def test_a_geometry_of_your_own_gives_float64_points_where_its_numbers_are_float64():
    for dtype in ("float64", "float32"):
        own = Own(np.ones(1, dtype))
        assert SobolSampler(own).dtype == SpaceTimeCylinder(own, (0, 1)).dtype == dtype
        assert SobolSampler(own).sample(KEY, 2)["inputs"].dtype == dtype
    assert SpaceTimeCylinder(own, (0, 1), dtype="float64").time_bounds.dtype == np.float64


# Right, and the same in every program


def programs(sampler, key=KEY):
    """The same batch by several programs."""
    keys = jnp.stack([key, *jax.random.split(key, 2)])
    first = functools.partial(jax.tree.map, lambda rows: rows[0])
    return {
        "constants": jax.jit(lambda key: sampler.sample(key, SIZE))(key),
        "mapped": first(jax.jit(jax.vmap(lambda key: sampler.sample(key, SIZE)))(keys)),
        "looped": first(jax.jit(lambda: jax.lax.map(lambda key: sampler.sample(key, SIZE), keys))()),
        "source": NamedBatchSource({"p": sampler}, {"p": SIZE}, key).sample(key)["p"],
    }


EVERY = {**SAMPLERS, **DEEP}


@pytest.mark.parametrize("name", mostly_full(list(EVERY), everyday=["wall"]))
def test_a_batch_is_the_same_bits_in_every_program(name):
    sampler = EVERY[name]()
    batch = draw(sampler, KEY, SIZE)
    ways = programs(sampler)
    split = jax.random.split(KEY, 1)[0]
    assert_trees_bitwise_equal(ways.pop("source"), draw(sampler, split, SIZE), dict_order=False)
    for way, rows in ways.items():
        assert first_difference(rows, batch) is None, way
    if name not in ("Latin hypercube", "space-time"):
        assert_trees_bitwise_equal(draw(sampler, KEY, 7), jax.tree.map(lambda rows: rows[:7], batch))


@pytest.mark.full
def test_batches_are_the_same_bits_eagerly():
    for name in ("faces", "sphere of four axes", "Sobol"):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            assert_trees_bitwise_equal(EVERY[name]().sample(KEY, SIZE), draw(EVERY[name](), KEY, SIZE))


def differences_on_eight_devices():
    """Prints how many samplers draw other bits over eight devices, with a control by JAX's normal."""
    jax.config.update("jax_enable_x64", True)
    over_eight = NamedSharding(jax.make_mesh((8,), ("rows",)), PartitionSpec("rows"))
    sharded = jax.jit(lambda sampler, key: sampler.sample(key, 4096), out_shardings=over_eight)
    names = ("wall", "union", "Sobol", "Latin hypercube", "ball of five axes")
    different = [
        name
        for name in names
        if first_difference(sharded(EVERY[name](), KEY), draw(EVERY[name](), KEY, 4096)) is not None
    ]
    print(json.dumps(different))


@pytest.mark.full
def test_points_are_the_same_bits_over_eight_devices():
    code = "from tests.sampling.test_float64 import differences_on_eight_devices as run; run()"
    assert json.loads(run_python(code, env=EIGHT_DEVICES).stdout) == []


def test_circle_roots_and_quantiles_are_right_to_the_last_bits():
    u = np.append(np.random.default_rng(0).random(20_000), [2.0**-52, 1 - 2.0**-52, 0.25, 0.5, 0.75])
    wide = u.astype(np.longdouble)
    angle = 2 * np.longdouble("3.14159265358979323846264338327950288") * wide
    cosine, sine, cube, fifth, quantile = jax.jit(
        lambda u: (
            *exact_math.circle(u),
            *(exact_math.root(u, d) for d in (3, 5)),
            exact_math.normal_quantile(u),
        )
    )(u)
    np.testing.assert_allclose(np.asarray(cosine), np.cos(angle).astype(float), atol=2.3e-16, rtol=0)
    np.testing.assert_allclose(np.asarray(sine), np.sin(angle).astype(float), atol=2.3e-16, rtol=0)
    for found, degree in ((cube, 3), (fifth, 5)):
        exact = wide ** (np.longdouble(1) / degree)
        assert (np.abs(np.asarray(found) - exact) <= 1.5 * np.spacing(exact.astype(float))).all()
    np.testing.assert_allclose(np.asarray(quantile), scipy.special.ndtri(u), rtol=3e-15, atol=1e-17)
    assert float(exact_math.root(jnp.zeros(1), 3)[0]) == 0


@pytest.mark.parametrize("num_axes", mostly_full([1, 2, 3, 4, 6], everyday=[4]))
def test_a_sphere_is_met_to_two_ulp(num_axes):
    points = np.asarray(draw(Sphere(np.zeros(num_axes), 1.0), KEY, 4096)["inputs"]).astype(np.longdouble)
    assert np.abs(np.sqrt((points**2).sum(axis=1)) - 1).max() <= 2 * np.finfo(float).eps


def test_float64_points_of_sobol_have_the_bits_of_float32_points_and_more():
    narrow, wide = (
        np.asarray(draw(SobolSampler(Box([(0, 1)] * 3, dtype=dtype)), KEY, 256)["inputs"], float)
        for dtype in ("float32", "float64")
    )
    np.testing.assert_array_equal(np.floor(wide * 2**24) / 2**24, narrow)
    below = wide * 2**24 % 1
    assert abs(below.mean() - 0.5) < 0.05  # 5 standard deviations of 768 uniform numbers
    assert len(np.unique(below)) == below.size


# Refused


def message(make):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    return str(caught.value)


def test_float64_without_x64_is_refused_before_it_is_traced():
    made = Box(BOUNDS), SobolSampler(Box(BOUNDS)), LatinHypercubeSampler(Box(BOUNDS))
    with jax.enable_x64(False):
        for make in (UniformDomainSampler, Box, BoxEdges):
            assert message(lambda make=make: make(BOUNDS, dtype=np.float64)) == (
                "dtype of coordinates must be float32, or float64 with jax_enable_x64 on, got "
                "<class 'numpy.float64'>. Use float32."
            )
        for sampler in made:
            assert message(lambda sampler=sampler: sampler.sample(KEY, 4)) == (
                "the points of this sampler are float64, and jax_enable_x64 is off now. "
                "Leave it on, or make the sampler with dtype=float32."
            )


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.int32, np.complex64, np.longdouble])
def test_no_other_dtype_can_hold_points(dtype):
    wanted = "dtype of coordinates must be float32, or float64 with jax_enable_x64 on, got "
    assert message(lambda: Ball((0, 0), 1, dtype=dtype)).startswith(wanted)
    assert message(lambda: InitialSlab(Box(BOUNDS), dtype=dtype)).startswith(wanted)


def test_what_is_made_of_a_geometry_has_its_dtype():
    narrow = Box(BOUNDS, dtype="float32")
    for make in (
        lambda: InitialSlab(narrow, dtype="float64"),
        lambda: SpaceTimeCylinder(narrow, (0, 1), dtype="float64"),
    ):
        assert message(make) == (
            "dtype must be that of space, float32, got float64. Pass dtype=float64 to space itself."
        )
    assert message(lambda: Union((narrow, Box(BOUNDS)))).startswith("parts must have the same fields; ")


def test_the_contract_names_the_dtype():
    for sampler in (Box(BOUNDS), SobolSampler(Box(BOUNDS)), InitialSlab(Box(BOUNDS))):
        assert json.loads(json.dumps(sampler.describe()))["dtype"] == "float64"
    assert coordinates.resolved(None, BOUNDS) == np.float64
