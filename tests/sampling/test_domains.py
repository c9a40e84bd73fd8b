"""Points of continuous domains: their bits are those of NumPy's two operations, in every program."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phijax_rng import HostPool, SpaceTimeSampler, UniformDomainSampler, shuffle
from phijax_rng._base import exact_math
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._subprocess import EIGHT_DEVICES, run_python

KEY = jax.random.key(11)
SIZE = 1000

# XLA flushes subnormal numbers to zero on CPUs and NumPy does not, so all magnitudes are normal.
SPANS = [
    (0.0, 0.6),
    (0.0, 3.4),
    (0.1, 0.7),
    (-1.7, 1.7),
    (1.0, 1.6),
    (-2.0, 2.0),
    (1e-6, 3e-6),
    (1e-30, 7e-30),
    (-1e6, 2.3e6),
    (-1e30, 3e37),
    (1e6, 1e6 + 0.7),
]
CONTRACTED = [(0.1, 0.7), (-1.7, 1.7)]
"""Spans at which a fused multiply-add shows among a thousand points."""


# Three ways to draw `size` points between two bounds.


def in_two_roundings(key, size, low, high):
    return exact_math.uniform(key, (size,), jnp.asarray(low), jnp.asarray(high))


def naively(key, size, low, high):
    return low + (high - low) * jax.random.uniform(key, (size,), jnp.float32)


def by_jax(key, size, low, high):
    return jax.random.uniform(key, (size,), jnp.float32, minval=low, maxval=high)


def by_numpy(key, size, low, high):
    """What is expected: product and sum, each rounded, on the host."""
    u = np.asarray(jax.random.uniform(key, (size,), np.float32))
    low, high = np.float32(low), np.float32(high)
    return low + (high - low) * u


# One draw in many programs; each draws from the second child of the key.


def alone(draw, key, low, high):
    return draw(jax.random.fold_in(key, 1), SIZE, low, high)


def in_a_while_loop(draw, key, low, high):
    def body(carry):
        step, _ = carry
        return step + 1, draw(jax.random.fold_in(key, step), SIZE, low, high)

    start = (0, jnp.zeros(SIZE, jnp.float32))
    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, start)[1]


def in_a_fori_loop(draw, key, low, high):
    def body(step, points):
        return points.at[step].set(draw(jax.random.fold_in(key, step), SIZE, low, high))

    return jax.lax.fori_loop(0, 3, body, jnp.zeros((3, SIZE), jnp.float32))[1]


def in_a_scan(draw, key, low, high):
    def body(_, step):
        return None, draw(jax.random.fold_in(key, step), SIZE, low, high)

    return jax.lax.scan(body, None, jnp.arange(3))[1][1]


def mapped_over_keys(draw, key, low, high):
    return jax.vmap(lambda key: draw(key, SIZE, low, high))(jax.random.split(key, 3))[1]


def mapped_over_bounds(draw, key, low, high):
    bounds = jnp.stack([low, low - 1]), jnp.stack([high, high + 1])
    return jax.vmap(lambda low, high: alone(draw, key, low, high))(*bounds)[0]


def as_a_prefix(draw, key, low, high):
    return draw(jax.random.fold_in(key, 1), 3 * SIZE + 5, low, high)[:SIZE]


def used_at_once(draw, key, low, high):
    points = alone(draw, key, low, high)
    return points, jnp.sum(jnp.sin(points) * points)


PROGRAMS = {
    "eager": alone,
    **{
        form.__name__.replace("_", " "): jax.jit(form, static_argnums=0)
        for form in (
            alone,
            in_a_while_loop,
            in_a_fori_loop,
            in_a_scan,
            mapped_over_keys,
            mapped_over_bounds,
            as_a_prefix,
        )
    },
    "used at once": lambda *arguments: jax.jit(used_at_once, static_argnums=0)(*arguments)[0],
}


def num_different(program, draw, low, high):
    low, high = np.float32(low), np.float32(high)
    expected = by_numpy(jax.random.fold_in(KEY, 1), SIZE, low, high)
    return int((np.asarray(program(draw, KEY, low, high)) != expected).sum())


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_coordinates_are_those_of_numpy_in_every_program(program):
    for low, high in np.float32(SPANS):
        expected = by_numpy(jax.random.fold_in(KEY, 1), SIZE, low, high)
        assert_trees_bitwise_equal(program(in_two_roundings, KEY, low, high), expected)


@pytest.mark.parametrize("draw", [naively, by_jax])
def test_without_the_second_rounding_a_compiled_program_draws_other_points(draw):
    for low, high in CONTRACTED:
        assert num_different(PROGRAMS["alone"], draw, low, high) > SIZE / 10
    # The naive formula moves between programs: eager, XLA sees one operation at a time.
    assert num_different(PROGRAMS["eager"], naively, *CONTRACTED[0]) == 0


def test_bounds_that_are_constants_of_the_program_move_nothing():
    for low, high in np.float32([(0.0, 0.6), (0.1, 0.7), (-1.7, 1.7)]):
        compiled = jax.jit(lambda key, low=low, high=high: in_two_roundings(key, SIZE, low, high))
        assert_trees_bitwise_equal(compiled(KEY), by_numpy(KEY, SIZE, low, high))


NORMAL = st.just(0.0) | st.floats(2.0**-100, 2.0**120, width=32).flatmap(
    lambda magnitude: st.sampled_from([magnitude, -magnitude])
)


@given(st.tuples(NORMAL, NORMAL).map(sorted), st.integers(0, 2**32 - 1))
def test_coordinates_are_those_of_numpy_between_any_bounds(bounds, seed):
    low, high = np.float32(bounds)
    if high - low < 2.0**-100:
        high = low + np.float32(1)
    key = jax.random.key(np.uint32(seed))
    expected = by_numpy(jax.random.fold_in(key, 1), SIZE, low, high)
    assert_trees_bitwise_equal(PROGRAMS["alone"](in_two_roundings, key, low, high), expected)


def draws_on_eight_devices():
    """Runs in a process with eight devices; prints how many points differ from NumPy's."""
    assert len(jax.devices()) == 8
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("points",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("points"))
    size = 60_000
    different = {"in two roundings": {}, "by jax": {}}
    for name, draw in (("in two roundings", in_two_roundings), ("by jax", by_jax)):

        @jax.jit
        def sharded(key, low, high, draw=draw):
            return jax.lax.with_sharding_constraint(draw(key, size, low, high), rows)

        for low, high in np.float32(SPANS):
            points = sharded(KEY, low, high)
            assert points.sharding.is_equivalent_to(rows, 1)
            expected = by_numpy(KEY, size, low, high)
            different[name][f"{low} to {high}"] = int((np.asarray(points) != expected).sum())
    print(json.dumps(different))


@pytest.mark.full
def test_coordinates_are_those_of_numpy_sharded_over_eight_devices():
    code = "from tests.sampling.test_domains import draws_on_eight_devices; draws_on_eight_devices()"
    different = json.loads(run_python(code, env=EIGHT_DEVICES).stdout)
    assert set(different["in two roundings"].values()) == {0}
    assert max(different["by jax"].values()) > 6_000, "the comparison would see nothing"


def test_coordinates_of_64_bits_are_those_of_numpy_too():
    with jax.enable_x64(True):
        sampler = UniformDomainSampler([(0.1, 0.7), (-1.7, 1.7)], dtype=np.float64)
        drawn = jax.jit(lambda sampler: sampler.sample(KEY, SIZE))(sampler)["inputs"]
        u = np.asarray(jax.random.uniform(KEY, (SIZE, 2), np.float64))
    low, high = np.array([(0.1, 0.7), (-1.7, 1.7)]).T
    assert_trees_bitwise_equal(drawn, low + (high - low) * u)


def test_coordinates_part_from_jax_by_at_most_one_rounding():
    for low, high in np.float32(SPANS):
        ours = np.asarray(in_two_roundings(KEY, SIZE, low, high))
        theirs = np.asarray(by_jax(KEY, SIZE, low, high))
        rounding = np.maximum(np.spacing(high - low), np.spacing(np.maximum(abs(ours), abs(theirs))))
        assert np.all(abs(ours.astype(np.float64) - theirs) <= rounding)


@pytest.mark.parametrize("span", [(0.0, 1.0), (-2.0, 2.0), (0.1, 0.6), (-1e6, -1e6 + 2.0**10), (3.0, 3.25)])
def test_coordinates_are_those_of_jax_where_the_span_is_a_power_of_two(span):
    low, high = np.float32(span)
    assert np.frexp(high - low)[0] == 0.5
    assert_trees_bitwise_equal(in_two_roundings(KEY, SIZE, low, high), by_jax(KEY, SIZE, low, high))


@pytest.mark.parametrize("span", SPANS)
def test_coordinates_lie_between_their_bounds(span):
    low, high = np.float32(span)
    drawn = np.asarray(in_two_roundings(KEY, 10 * SIZE, low, high))
    assert low <= drawn.min() <= low + (high - low) * np.float32(0.01)
    assert high >= drawn.max() >= low + (high - low) * np.float32(0.99)


# Boxes


BOX = [(0.1, 0.7), (-1.7, 1.7)]


def test_points_of_a_box_fill_one_array_row_by_row():
    drawn = UniformDomainSampler(BOX).sample(KEY, SIZE)
    u = np.asarray(jax.random.uniform(KEY, (SIZE, 2), np.float32))
    low, high = np.float32(BOX).T
    assert_trees_bitwise_equal(drawn, {"inputs": low + (high - low) * u})


def test_a_sorted_box_batch_holds_the_same_points_in_ascending_order():
    plain = np.asarray(UniformDomainSampler(BOX).sample(KEY, SIZE)["inputs"])
    ascending = UniformDomainSampler(BOX, sort_axis=1).sample(KEY, SIZE)["inputs"]
    assert_trees_bitwise_equal(ascending, plain[np.argsort(plain[:, 1], kind="stable")])
    assert first_difference(ascending, plain) is not None


def test_templates_are_repeated_for_every_point_in_their_dtype():
    templates = {"targets": np.float32(2), "normal": np.array([0, 1], np.int8), "x": jnp.ones((2, 1))}
    drawn = UniformDomainSampler(BOX, templates).sample(KEY, 3)
    assert list(drawn) == ["inputs", "targets", "normal", "x"]
    assert_trees_bitwise_equal(drawn["targets"], np.full(3, 2, np.float32))
    assert_trees_bitwise_equal(drawn["normal"], np.array([[0, 1]] * 3, np.int8))
    assert_trees_bitwise_equal(drawn["x"], np.ones((3, 2, 1), np.float32))


def test_the_bounds_are_copied():
    bounds = np.array(BOX)
    sampler = UniformDomainSampler(bounds)
    bounds[:] = 7
    assert_trees_bitwise_equal(sampler.bounds, np.array(BOX, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        sampler.bounds[0] = 0


def test_bounds_are_arguments_of_a_compiled_program():
    draw = jax.jit(lambda sampler: sampler.sample(KEY, 4))
    for box in (BOX, [(0.0, 1.0), (0.0, 1.0)]):
        assert_trees_bitwise_equal(draw(UniformDomainSampler(box)), UniformDomainSampler(box).sample(KEY, 4))
    assert draw._cache_size() == 1


DTYPE = "dtype of coordinates must be float32, or float64 with jax_enable_x64 on, got {}. Use float32."


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: UniformDomainSampler(5),
            TypeError,
            "bounds must be pairs (lo, hi), got 5. Pass one pair for each axis.",
        ),
        (
            lambda: UniformDomainSampler([("a", 1)]),
            TypeError,
            "bounds must be pairs of numbers, got [('a', 1)]. Pass one (lo, hi) for each axis.",
        ),
        (
            lambda: UniformDomainSampler([(0, 1), (1,)]),
            TypeError,
            "bounds must be pairs of numbers, got [(0, 1), (1,)]. Pass one (lo, hi) for each axis.",
        ),
        (
            lambda: UniformDomainSampler((0, 1)),
            ValueError,
            "bounds must have shape (axes, 2), got (2,). Pass one (lo, hi) for each axis.",
        ),
        (
            lambda: UniformDomainSampler(np.zeros((0, 2))),
            ValueError,
            "bounds must have shape (axes, 2), got (0, 2). Pass one (lo, hi) for each axis.",
        ),
        (
            lambda: UniformDomainSampler([(0, 1), (2, 1)]),
            ValueError,
            "bounds[1] must be finite with lo < hi in float32, got (2.0, 1.0). Pass (lo, hi).",
        ),
        (
            lambda: UniformDomainSampler([(0, float("nan"))]),
            ValueError,
            "bounds[0] must be finite with lo < hi in float32, got (0.0, nan). Pass (lo, hi).",
        ),
        (
            lambda: UniformDomainSampler([(1, 1 + 1e-9)]),
            ValueError,
            "bounds[0] must be finite with lo < hi in float32, got (1.0, 1.000000001). Pass (lo, hi).",
        ),
        (
            lambda: UniformDomainSampler([(-3e38, 3e38)]),
            ValueError,
            "bounds[0] must be finite with lo < hi in float32, got (-3e+38, 3e+38). Pass (lo, hi).",
        ),
        (
            lambda: UniformDomainSampler(BOX, dtype=np.float64),
            ValueError,
            DTYPE.format("<class 'numpy.float64'>"),
        ),
        (lambda: UniformDomainSampler(BOX, dtype="half"), ValueError, DTYPE.format("'half'")),
        (
            lambda: UniformDomainSampler(BOX, sort_axis=2),
            ValueError,
            "sort_axis must be in [0, 2), got 2. Pick a number inside the range.",
        ),
        (
            lambda: UniformDomainSampler(BOX, [1.0]),
            TypeError,
            "templates must be a mapping, got [1.0]. Pass a dict from field to one row.",
        ),
        (
            lambda: UniformDomainSampler(BOX, {"inputs": 1.0}),
            ValueError,
            "templates must not have the field 'inputs', which are the points themselves. Rename the field.",
        ),
        (
            lambda: UniformDomainSampler(BOX, {"label": "a"}),
            TypeError,
            "templates['label'] must hold numbers, got dtype <U1. Convert the rows to one numeric dtype.",
        ),
        (
            lambda: UniformDomainSampler(BOX).sample(KEY, "all"),
            ValueError,
            "size='all' needs a finite pool; a continuous domain has none. Pass a positive int.",
        ),
        (
            lambda: UniformDomainSampler(BOX).sample(KEY, True),
            TypeError,
            "size must be a positive int, got True. Pass how many points to draw.",
        ),
    ],
    ids=[
        "a number",
        "strings",
        "ragged",
        "one pair",
        "no axis",
        "out of order",
        "nan",
        "equal in float32",
        "span overflows",
        "float64 without x64",
        "no coordinate dtype",
        "no such axis",
        "templates a list",
        "inputs as template",
        "template of strings",
        "all",
        "size True",
    ],
)
def test_what_is_no_box_is_rejected_with_a_reason(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_a_box_describes_itself_in_plain_data():
    described = UniformDomainSampler([(0.0, 0.5)], {"targets": np.float32(0)}, sort_axis=0).describe()
    assert json.loads(json.dumps(described)) == {
        "kind": "UniformDomainSampler",
        "bounds": [[0.0, 0.5]],
        "templates": {"targets": ["float32", []]},
        "dtype": "float32",
        "sort_axis": 0,
    }


# Space and time


PLACES = {
    "inputs": np.array([[0, i, -i] for i in range(50)], np.float32),
    "index": np.arange(50, dtype=np.int32),
}


@pytest.mark.parametrize("time_axis", [0, 2])
def test_a_place_is_picked_and_its_time_drawn_afresh(time_axis):
    sampler = SpaceTimeSampler(PLACES, (0.1, 0.7), time_axis, sort_axis=None)
    drawn = sampler.sample(KEY, SIZE)
    row_key, time_key = jax.random.split(KEY)
    picked = np.asarray(jax.random.randint(row_key, (SIZE,), 0, 50, np.int32))
    inputs = PLACES["inputs"][picked]
    inputs[:, time_axis] = by_numpy(time_key, SIZE, 0.1, 0.7)
    assert_trees_bitwise_equal(drawn, {"inputs": inputs, "index": picked}, dict_order=False)


def test_points_are_sorted_by_the_first_column_unless_said_otherwise():
    plain = SpaceTimeSampler(PLACES, (0.0, 1.0), sort_axis=None).sample(KEY, SIZE)
    order = np.argsort(np.asarray(plain["inputs"][:, 0]), kind="stable")
    ascending = SpaceTimeSampler(PLACES, (0.0, 1.0)).sample(KEY, SIZE)
    assert_trees_bitwise_equal(ascending, jax.tree.map(lambda rows: rows[order], plain), dict_order=False)
    assert first_difference(ascending, plain, dict_order=False) is not None


def test_places_may_be_drawn_without_replacement():
    def drawn(**options):
        sampler = SpaceTimeSampler(PLACES, (0.0, 1.0), sort_axis=None, **options)
        return sampler.sample(KEY, 50)["index"]

    row_key, _ = jax.random.split(KEY)
    assert_trees_bitwise_equal(drawn(replace=False), shuffle.permute_index(row_key, jnp.arange(50), 50))
    assert_trees_bitwise_equal(drawn(replace=False, method="sort"), jax.random.permutation(row_key, 50))
    assert len(set(drawn().tolist())) < 50


def test_the_pool_of_places_is_not_written():
    before = PLACES["inputs"].copy()
    sampler = SpaceTimeSampler(HostPool(PLACES["inputs"]), (0.0, 1.0))
    sampler.sample(KEY, 10)
    assert_trees_bitwise_equal((PLACES["inputs"], np.asarray(sampler.fields["inputs"])), (before, before))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: SpaceTimeSampler({**PLACES, "targets": np.zeros((50, 1))}, (0, 1)),
            ValueError,
            "fields must not hold 'targets', which belong to the times of the pool. Drop them.",
        ),
        (
            lambda: SpaceTimeSampler(PLACES, (1, 0)),
            ValueError,
            "time_bounds[0] must be finite with lo < hi in float32, got (1.0, 0.0). Pass (lo, hi).",
        ),
        (
            lambda: SpaceTimeSampler(PLACES, (0, 1), 3),
            ValueError,
            "time_axis must be in [0, 3), got 3. Pick a number inside the range.",
        ),
        (
            lambda: SpaceTimeSampler({"inputs": np.zeros(3, np.float32)}, (0, 1)),
            ValueError,
            "time_axis=0 needs inputs of shape (rows, axes); they are of shape (3,). Drop it.",
        ),
        (
            lambda: SpaceTimeSampler(PLACES, (0, 1), sort_axis=-1),
            ValueError,
            "sort_axis must be in [0, 3), got -1. Pick a number inside the range.",
        ),
        (
            lambda: SpaceTimeSampler(PLACES, (0, 1), replace="no"),
            TypeError,
            "replace must be True or False, got 'no'. Pass a bool.",
        ),
        (
            lambda: SpaceTimeSampler(PLACES, (0, 1)).sample(KEY, "all"),
            ValueError,
            "size='all' needs a finite pool; a continuous domain has none. Pass a positive int.",
        ),
        (
            lambda: SpaceTimeSampler(PLACES, (0, 1), replace=False).sample(KEY, 51),
            ValueError,
            "size must be at most the 50 rows of the pool when replace=False, got 51. "
            "Use a smaller size, or replace=True.",
        ),
    ],
    ids=["targets", "bounds", "no such time axis", "flat", "sort axis", "replace", "all", "too many"],
)
def test_what_is_no_space_time_is_rejected_with_a_reason(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_places_without_targets_may_carry_an_empty_field_of_them():
    fields = {**PLACES, "targets": np.zeros((50, 0), np.float32)}
    assert SpaceTimeSampler(fields, (0, 1)).sample(KEY, 3)["targets"].shape == (3, 0)


def test_a_space_time_describes_itself_in_plain_data():
    described = SpaceTimeSampler(PLACES, (0, 1), 2, replace=False).describe()
    assert json.loads(json.dumps(described)) == {
        "kind": "SpaceTimeSampler",
        "num_rows": 50,
        "fields": {"index": ["int32", [50]], "inputs": ["float32", [50, 3]]},
        "time_bounds": [0.0, 1.0],
        "time_axis": 2,
        "replace": False,
        "method": "permutation",
        "sort_axis": 0,
    }
