"""What is no number, or none that fits, is refused at the door of every sampler and pool, in our words."""

import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import (
    DatasetSampler,
    HostPool,
    LatinHypercubeSampler,
    NamedBatchSource,
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    ShuffledRowSampler,
    SobolSampler,
    SpaceTimeSampler,
    UniformDomainSampler,
    WeightedRowSampler,
    keys,
)
from phijax_rng._base import validation
from phijax_rng.sampling import weighted_rows
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

KEY = keys.split_root(0).sampling
POOL = {"inputs": np.zeros((5, 2), np.float32)}
SQUARE = Box([(0, 1), (0, 1)])


def density(**options):
    return ResidualDistributionSampler(SQUARE, **({"refresh_every_n_steps": 5} | options))


def growing(**options):
    numbers = {"refresh_every_n_steps": 5, "capacity": 4, "num_initial": 2, "num_added": 2}
    return ResidualRefinementSampler(SQUARE, **(numbers | options))


REALS = {
    "density.exponent": lambda v: density(exponent=v),
    "density.offset": lambda v: density(offset=v),
    "growing.exponent": lambda v: growing(exponent=v),
    "growing.offset": lambda v: growing(offset=v),
    "box.bounds": lambda v: Box([(0, v)]),
    "faces.bounds": lambda v: BoxFaces([(0, v)]),
    "edges.bounds": lambda v: BoxEdges([(0, 1), (0, v)]),
    "interval": lambda v: interval(0, v),
    "domain.bounds": lambda v: UniformDomainSampler([(0, v)]),
    "places.time_bounds": lambda v: SpaceTimeSampler(POOL, (0, v)),
    "ball.center": lambda v: Ball((0, v), 1),
    "ball.radius": lambda v: Ball((0, 0), v),
    "sphere.radius": lambda v: Sphere((0, 0), v),
    "slab.time": lambda v: InitialSlab(SQUARE, v),
    "cylinder.time_bounds": lambda v: SpaceTimeCylinder(SQUARE, (0, v)),
    "union.weights": lambda v: Union((SQUARE, SQUARE), (1, v)),
    "rows.weights": lambda v: WeightedRowSampler(POOL, [1, 1, 1, 1, v]),
    "weighted_rows": lambda v: weighted_rows(KEY, [1, v], 1),
    "dataset.weights": lambda v: DatasetSampler([1.0, 2.0], weights=[1, v]),
}
WHOLE = {
    "density.num_candidates": lambda v: density(num_candidates=v),
    "density.every": lambda v: density(refresh_every_n_steps=v),
    "growing.capacity": lambda v: growing(capacity=v),
    "growing.num_initial": lambda v: growing(num_initial=v),
    "growing.num_added": lambda v: growing(num_added=v),
    "faces.axis": lambda v: BoxFaces([(0, 1)], faces=((v, "low"),)),
    "slab.time_axis": lambda v: InitialSlab(SQUARE, 0, v),
    "cylinder.time_axis": lambda v: SpaceTimeCylinder(SQUARE, (0, 1), v),
    "places.time_axis": lambda v: SpaceTimeSampler(POOL, (0, 1), v),
    "weighted_rows.size": lambda v: weighted_rows(KEY, [1.0, 1.0], v),
}
NO_REALS = {
    "text": "2",
    "bytes": b"2",
    "NumPy text": np.str_("2"),
    "an array of text": np.array("2"),
    "a complex number": 1 + 2j,
    "a complex number without imaginary part": np.complex64(2),
    "a date": np.datetime64("2020"),
    "nothing": None,
    "an object": object(),
    "NaN": float("nan"),
    "infinity": float("inf"),
}
NO_WHOLE = NO_REALS | {"a fraction": 1.5, "a flag": True, "a float": np.float64(2), "a negative number": -1}


def require_refused(make, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        make(value)
    message = str(caught.value)
    assert message.endswith("."), message
    assert ". " in message, "it says how to mend it"
    assert " must " in message or " takes " in message, "in the words of this package"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", NO_REALS.values(), ids=NO_REALS)
@pytest.mark.parametrize("make", REALS.values(), ids=REALS)
def test_what_is_no_finite_real_number_is_refused(make, value):
    make(2.5)
    require_refused(make, value)


@pytest.mark.parametrize("value", NO_WHOLE.values(), ids=NO_WHOLE)
@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_what_is_no_whole_number_is_refused(make, value):
    require_refused(make, value)


@pytest.mark.parametrize("value", [True, -1.0], ids=["a flag", "a negative number"])
@pytest.mark.parametrize("name", ["exponent", "offset"])
@pytest.mark.parametrize("make", [density, growing])
def test_exponents_and_offsets_are_numbers_from_zero_on(make, name, value):
    require_refused(lambda v: make(**{name: v}), value)
    assert getattr(make(**{name: np.float32(0)}), name) == 0.0


def test_text_is_no_exponent():
    with pytest.raises(TypeError) as caught:
        density(exponent="2")
    assert str(caught.value) == "exponent must be one number, got '2'. Pass floats."


SCALARS = {
    "dataset": (
        lambda: DatasetSampler(np.array(2.0)),
        "dataset must offer len(dataset) and dataset[i], got float64[]. "
        "Wrap an iterable in an IterableSource.",
    ),
    "names": (
        lambda: density(residual_names=np.array("pde")),
        "residual_names must be a sequence of names, got <U3[]. Pass a tuple of strings.",
    ),
}


@pytest.mark.parametrize(("make", "message"), SCALARS.values(), ids=SCALARS)
def test_an_array_without_axes_is_no_sequence(make, message):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == message


def test_an_element_without_fields_is_refused():
    with pytest.raises(ValueError) as caught:
        DatasetSampler([{}])
    assert str(caught.value) == ("dataset[0] must have at least one field, got {}. Name what it holds.")


def test_text_is_no_row():
    for make in (HostPool, lambda rows: RandomRowSampler({"inputs": rows}), DatasetSampler):
        require_refused(make, ["1", "2"])


# Sizes

CONTINUOUS = {
    "box": SQUARE,
    "domain": UniformDomainSampler([(0, 1)]),
    "Sobol": SobolSampler(SQUARE),
    "Latin": LatinHypercubeSampler(SQUARE),
    "places": SpaceTimeSampler(POOL, (0, 1), replace=False),
    "density": density(),
}
FINITE = {
    "rows": RandomRowSampler(POOL),
    "shuffled": ShuffledRowSampler(POOL),
    "weighted": WeightedRowSampler(POOL, np.ones(5)),
    "dataset": DatasetSampler([1.0, 2.0]),
}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-3, ValueError),
        ("8", ValueError),
        (2.0, TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
@pytest.mark.parametrize("sampler", CONTINUOUS.values(), ids=CONTINUOUS)
def test_all_is_not_offered_where_there_is_no_pool(sampler, value, error):
    with pytest.raises(error) as caught:
        NamedBatchSource({"pde": sampler}, {"pde": value}, KEY)
    assert str(caught.value) == (
        f"batch_sizes['pde'] must be a positive int, got {value!r}. Pass how many points to draw."
    )
    with pytest.raises(error, match=r"^size must be a positive int, got"):
        sampler.sample(KEY, value, None) if hasattr(sampler, "due") else sampler.sample(KEY, value)


@pytest.mark.parametrize("sampler", FINITE.values(), ids=FINITE)
def test_all_is_offered_where_there_is_a_pool(sampler):
    with pytest.raises(ValueError) as caught:
        NamedBatchSource({"data": sampler}, {"data": 0}, KEY)
    assert str(caught.value) == (
        "batch_sizes['data'] must be a positive int or 'all', got 0. Use 'all' to take every row of the pool."
    )
    assert len(NamedBatchSource({"data": sampler}, {"data": "all"}, KEY)(3)["data"]["inputs"]) in (2, 5)


def test_more_places_than_there_are_do_not_speak_of_all():
    with pytest.raises(ValueError) as caught:
        NamedBatchSource({"pde": CONTINUOUS["places"]}, {"pde": 6}, KEY)
    assert str(caught.value) == (
        "batch_sizes['pde'] must be at most the 5 rows of the pool when replace=False, got 6. "
        "Use a smaller size, or replace=True."
    )


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_the_refused_dtype_of_places_names_their_field(dtype):
    with pytest.raises(ValueError) as caught:
        SpaceTimeSampler({"inputs": np.zeros((5, 2), dtype)}, (0, 1))
    assert str(caught.value) == (
        "fields['inputs'] must be float32, or float64 with jax_enable_x64 on, got "
        f"{np.dtype(dtype)!r}. Pass dtype=float32."
    )


@pytest.mark.parametrize("dtype", [jnp.float32(2), "text"], ids=["an array", "text"])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(ValueError) as caught:
        UniformDomainSampler([(0, 1)], dtype=dtype)
    assert str(caught.value) == (
        "dtype of coordinates must be float32, or float64 with jax_enable_x64 on, got "
        f"{validation.formatted(dtype)}. Use float32."
    )
