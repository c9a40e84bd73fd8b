"""Keys and rows as numbers, read from PhiJAX 0.2.0b5 and pinned from this package.

`phijax-0.2.0b5.json` was read from PhiJAX and is never edited: its users switch to this package without
moving a key or a row, and a value that no longer holds breaks that promise.

The pins below are our own. A change to one means that a run of an earlier version cannot be
continued or repeated: batches, streams or permutations of every user move. That takes a new derivation
scheme in the contract and an entry under **Moves random numbers** in the changelog, never a new pin alone.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    NamedBatchSource,
    RandomRowSampler,
    SpaceTimeSampler,
    UniformDomainSampler,
    advance,
    initialize_train_state,
    keys,
)
from tests._bitwise import assert_trees_bitwise_equal

PHIJAX = json.loads((Path(__file__).parent / "phijax-0.2.0b5.json").read_text())


def words(key):
    return jax.random.key_data(key).tolist()


def state(key):
    return initialize_train_state({"w": jnp.ones(2)}, optax.sgd(0.1), {}, key)


def source(case, **options):
    pools = {name: {"inputs": np.arange(n, dtype=np.float32)[:, None]} for name, n in case["pools"].items()}
    sampling_key = keys.split_root(case["seed"]).sampling
    return NamedBatchSource.from_pools(pools, case["batch_sizes"], sampling_key, **options)


def picked(batches):
    """The indices of the rows, which are their values."""
    return {name: rows["inputs"][:, 0].astype(int).tolist() for name, rows in batches.items()}


# Read from PhiJAX


@pytest.mark.parametrize("seed", PHIJAX["streams"]["by_seed"])
def test_the_streams_of_a_seed_are_those_of_phijax(seed):
    streams = keys.split_root(int(seed))
    assert [words(key) for key in streams] == PHIJAX["streams"]["by_seed"][seed]
    named = [words(getattr(streams, name)) for name in PHIJAX["streams"]["columns"]]
    assert named == PHIJAX["streams"]["by_seed"][seed]


def test_a_state_from_one_key_splits_it_as_phijax_does():
    case = PHIJAX["initialize_train_state"]
    assert case["key"] == "jax.random.key(9)"
    made = state(jax.random.key(9))
    held = [words(key) for key in (made.rng_key, made.sampling_key, made.balancer_key)]
    assert held == case["rng_key_sampling_key_balancer_key"]


def test_the_runtime_key_moves_as_in_phijax():
    case = PHIJAX["rng_key_after_step"]
    first, _ = advance(state(keys.split_root(case["seed"])))
    second, _ = advance(first)
    assert [words(first.rng_key), words(second.rng_key)] == case["steps_1_2"]


@pytest.mark.parametrize("step", PHIJAX["step_keys"]["by_step"])
def test_the_key_of_a_step_is_that_of_phijax(step):
    case = PHIJAX["step_keys"]
    sampling_key = keys.split_root(case["seed"]).sampling
    assert words(keys.step_key(sampling_key, int(step))) == case["by_step"][step]


@pytest.mark.parametrize("step", PHIJAX["rows"]["by_step"])
def test_the_rows_of_a_step_are_those_of_phijax(step):
    case = PHIJAX["rows"]
    batches = picked(source(case)(int(step)))
    assert batches == case["by_step"][step]
    assert list(batches) == list(case["batch_sizes"])
    assert picked(source(case)(int(step) + 1)) != batches


@pytest.mark.parametrize("step", PHIJAX["rows_without_replacement_by_sorting"]["by_step"])
def test_distinct_rows_by_sorting_are_those_of_phijax(step):
    case = PHIJAX["rows_without_replacement_by_sorting"]
    assert picked(source(case, replace=False, method="sort")(int(step))) == case["by_step"][step]
    assert picked(source(case, replace=False)(int(step))) != case["by_step"][step]


def test_points_of_a_box_are_those_of_phijax():
    case = PHIJAX["uniform_domain"]
    assert case["key"] == "jax.random.key(3)"
    drawn = UniformDomainSampler(case["bounds"]).sample(jax.random.key(3), case["size"])
    assert_trees_bitwise_equal(drawn, {"inputs": np.array(case["inputs"], np.float32)})


def test_points_in_space_and_time_are_those_of_phijax():
    case = PHIJAX["space_time"]
    assert case["key"] == "jax.random.key(7)"
    sampler = SpaceTimeSampler(
        {"inputs": np.array(case["inputs_pool"], np.float32)},
        case["time_bounds"],
        case["time_axis"],
        sort_axis=case["sort_axis"],
    )
    drawn = sampler.sample(jax.random.key(7), case["size"])
    assert_trees_bitwise_equal(drawn, {"inputs": np.array(case["inputs"], np.float32)})


def test_diagnostic_rows_are_those_of_phijax():
    case = PHIJAX["diagnostics"]
    assert case["key"] == "fold_in(balancer_key, 0)"
    balancer_key = keys.split_root(case["seed"]).balancer
    sizes = dict.fromkeys(case["batch_sizes"], "all")
    drawn = source({**case, "batch_sizes": sizes}).sample(keys.fold_in(balancer_key, 0), case["batch_sizes"])
    assert picked(drawn) == case["rows"]


def test_every_value_read_from_phijax_is_compared():
    compared = {
        "streams",
        "initialize_train_state",
        "rng_key_after_step",
        "step_keys",
        "rows",
        "rows_without_replacement_by_sorting",
        "uniform_domain",
        "space_time",
        "diagnostics",
    }
    assert set(PHIJAX) == compared | {"about"}


# Pinned from this package


@pytest.mark.parametrize(
    ("seed", "root", "sampling"),
    [
        (0, [0, 0], [4146024105, 2718843009]),
        (2**32 - 1, [0, 4294967295], [3122495753, 3444035234]),
        (2**32, [1, 0], [4096244215, 980767767]),
        (2**40 + 5, [256, 5], [2588430962, 3246284531]),
        (2**64 - 1, [4294967295, 4294967295], [399813750, 1719144391]),
    ],
)
def test_a_seed_keeps_its_root_and_its_streams(seed, root, sampling):
    assert words(keys.root_key(seed)) == root
    assert words(keys.split_root(seed).sampling) == sampling


@pytest.mark.parametrize(
    ("seed", "path", "expected"),
    [
        (0, ("evaluation",), [3980830134, 3246055121]),
        (42, ("evaluation", "noise"), [2427336719, 1241407831]),
        (2**32 + 42, ("ab",), [1888091966, 4120021519]),
        (42, ("a", "b"), [3820602508, 3067400381]),
        (42, ("sampler", "pde"), [3277494391, 236968937]),
        (7, ("grüße",), [1729157089, 2029554086]),
    ],
)
def test_a_named_stream_keeps_its_key(seed, path, expected):
    assert words(keys.stream(keys.root_key(seed), *path)) == expected


@pytest.mark.parametrize(
    ("seed", "coordinates", "expected"),
    [
        (0, (0,), [1797259609, 2579123966]),
        (42, (7, 3), [1418444265, 3390618313]),
        (42, (3, 7), [3534823363, 3798478818]),
        (42, (2**32 - 1,), [2398536845, 3890976714]),
        (2**63, (1, 2, 3), [2095943510, 1692030158]),
    ],
)
def test_coordinates_keep_their_key(seed, coordinates, expected):
    assert words(keys.fold_in(keys.root_key(seed), *coordinates)) == expected


@pytest.mark.parametrize(
    ("implementation", "step_9", "own", "sampling"),
    [
        ("threefry2x32", [3398425428, 3930978319], [3888315709, 1095180382], [1024511538, 2603795180]),
        (
            "threefry4x32",
            [391242374, 736450278, 3489491666, 336007505],
            [866269725, 2323757817, 2023201859, 807448019],
            [669528892, 3938190136, 529655310, 1599414321],
        ),
        ("philox4x32", [766225164, 451308953], [2025089068, 320523409], [769249501, 3389325889]),
        (
            "rbg",
            [3398425428, 3930978319, 3398425428, 3930978319],
            [3888315709, 1095180382, 3888315709, 1095180382],
            [1024511538, 2603795180, 1024511538, 2603795180],
        ),
    ],
)
def test_keys_of_every_implementation_keep_their_children(implementation, step_9, own, sampling):
    key = jax.random.key(3, impl=implementation)
    assert words(keys.step_key(key, 9)) == step_9
    assert words(keys.stream(key, "own")) == own
    assert words(keys.split_root(key).sampling) == sampling


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (10, [6, 9, 4, 7, 0, 2, 3, 8, 1, 5]),
        (10_000_000, [4084466, 8933390, 270137, 1104987, 878476]),
    ],
)
def test_distinct_rows_by_permutation_stay_the_same(n, expected):
    sampler = RandomRowSampler({"inputs": np.arange(n, dtype=np.int32)}, replace=False)
    assert sampler.sample(jax.random.key(3), len(expected))["inputs"].tolist() == expected


def test_points_of_a_box_keep_their_bits():
    drawn = UniformDomainSampler([(0.1, 0.7), (-1.7, 1.7)]).sample(jax.random.key(3), 3)["inputs"]
    assert np.asarray(drawn).view(np.uint32).tolist() == [
        [1041491421, 1069461040],
        [1056608065, 1070529922],
        [1049147320, 1049649388],
    ]


def test_a_host_generator_keeps_its_words():
    raw = keys.host_rng(keys.root_key(42)).bit_generator.random_raw(3)
    assert raw.tolist() == [17092674626777645933, 1284813577998095525, 16197520866583464070]
