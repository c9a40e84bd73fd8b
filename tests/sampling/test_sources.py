"""From a step to named batches: the derivation, the order, the protocols, and what is refused."""

import copy
import dataclasses
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import (
    DataModule,
    HostPool,
    NamedBatchSource,
    PoolDataModule,
    RandomRowSampler,
    TrainingBatchSource,
    UniformDomainSampler,
    keys,
)
from tests._bitwise import assert_trees_bitwise_equal, first_difference

KEY = keys.split_root(0).sampling


def rows_of(n):
    """Rows that hold their own index."""
    return {"inputs": np.arange(n, dtype=np.float32)[:, None], "targets": np.arange(n, dtype=np.int32)}


POOLS = {"pde": rows_of(500), "bc": rows_of(10), "ic": rows_of(60)}  # not in alphabetical order
SIZES = {"pde": 6, "bc": "all", "ic": 4}


def source(**options):
    return NamedBatchSource.from_pools(POOLS, SIZES, options.pop("key", KEY), **options)


# The derivation


@pytest.mark.parametrize("step", [0, 7, 2**31 - 1])
def test_every_sampler_draws_from_its_place_in_the_split_step_key(step):
    places = jax.random.split(jax.random.fold_in(KEY, step), 3)
    expected = {
        "pde": RandomRowSampler(POOLS["pde"]).sample(places[0], 6),
        "bc": POOLS["bc"],
        "ic": RandomRowSampler(POOLS["ic"]).sample(places[2], 4),
    }
    assert_trees_bitwise_equal(source()(step), expected)


def test_sampler_keys_of_a_step_are_those_by_name():
    places = jax.random.split(jax.random.fold_in(KEY, 7), 3)
    named = source().sampler_keys(7)
    assert_trees_bitwise_equal(named, dict(zip(("pde", "bc", "ic"), places, strict=True)))
    traced = jax.jit(lambda step: tuple(source().sampler_keys(step).values()))(7)
    assert_trees_bitwise_equal(traced, tuple(named.values()))


def test_appending_a_sampler_leaves_the_batches_of_the_others():
    longer = NamedBatchSource.from_pools({**POOLS, "new": rows_of(9)}, {**SIZES, "new": 2}, KEY)
    batches = longer(5)
    assert list(batches) == ["pde", "bc", "ic", "new"]
    batches.pop("new")
    assert_trees_bitwise_equal(batches, source()(5))


def test_reordering_samplers_moves_their_batches():
    reordered = source(names=("ic", "pde", "bc"))(5)
    assert list(reordered) == ["ic", "pde", "bc"]
    assert_trees_bitwise_equal(reordered["bc"], source()(5)["bc"])
    for name in ("pde", "ic"):
        assert first_difference(reordered[name], source()(5)[name]) is not None


def test_diagnostics_are_drawn_from_an_explicit_key_in_sizes_of_their_own():
    drawn = source().sample(keys.fold_in(KEY, 5))
    assert_trees_bitwise_equal(drawn, source()(5))
    other = source().sample(keys.fold_in(KEY, 5), {"ic": 9, "bc": 2})
    assert {name: len(rows["inputs"]) for name, rows in other.items()} == {"pde": 6, "bc": 2, "ic": 9}
    assert_trees_bitwise_equal(other["pde"], drawn["pde"])
    assert_trees_bitwise_equal(jax.tree.map(lambda rows: rows[:4], other["ic"]), drawn["ic"])


def test_options_reach_every_sampler():
    for options in ({}, {"replace": False}, {"replace": False, "method": "sort"}):
        samplers = {name: RandomRowSampler(pool, **options) for name, pool in POOLS.items()}
        assert source(**options).describe() == NamedBatchSource(samplers, SIZES, KEY).describe()
    distinct = NamedBatchSource.from_pools({"bc": rows_of(10)}, {"bc": 10}, KEY, replace=False)
    assert len(set(distinct(5)["bc"]["targets"].tolist())) == 10


def test_batches_are_sorted_by_the_column_that_is_named_for_them():
    ascending = source(sort_axes={"pde": 0})(5)
    assert_trees_bitwise_equal(ascending["pde"]["targets"], jnp.sort(source()(5)["pde"]["targets"]))
    assert_trees_bitwise_equal(ascending["ic"], source()(5)["ic"])


def test_pools_and_mappings_of_arrays_give_the_same_rows():
    pools = {name: HostPool(pool["inputs"], targets=pool["targets"]) for name, pool in POOLS.items()}
    assert_trees_bitwise_equal(NamedBatchSource.from_pools(pools, SIZES, KEY)(5), source()(5))


# The order


CARRIERS = {
    "tree.map": lambda source: jax.tree.map(lambda leaf: leaf, source),
    "flatten and unflatten": lambda source: jax.tree.unflatten(*jax.tree.flatten(source)[::-1]),
    "jit": jax.jit(lambda source: source),
    "scan": lambda source: jax.lax.scan(lambda s, _: (s, None), source, None, 2)[0],
    "pickle": lambda source: pickle.loads(pickle.dumps(source)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "prepare": lambda source: source.prepare(),
    "device_put": jax.device_put,
    "vmap": lambda source: jax.tree.map(
        lambda leaf: leaf[1],
        jax.vmap(lambda s: s)(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), source)),
    ),
}


@pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS)
@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called before"])
def test_a_source_keeps_its_order_and_its_batches_through(carry, called):
    original = source()
    if called:
        original(0)
    carried = carry(original)
    assert list(carried(5)) == list(carried.samplers) == list(carried.batch_sizes) == ["pde", "bc", "ic"]
    assert carried.names == ("pde", "bc", "ic")
    assert_trees_bitwise_equal(carried(5), source()(5))


def test_a_plain_dict_does_not_keep_its_order_through_jax():
    assert list(jax.tree.map(lambda size: size, SIZES)) == ["bc", "ic", "pde"]


@pytest.mark.parametrize("implementation", keys.TESTED_IMPLEMENTATIONS)
def test_a_pickled_source_keeps_the_implementation_of_its_key(implementation):
    original = source(key=jax.random.key(3, impl=implementation))
    carried = pickle.loads(pickle.dumps(original))
    assert_trees_bitwise_equal(carried.key, original.key)


def test_names_are_in_order_inside_a_traced_program_too():
    seen = []

    def traced(source, step):
        seen.append(list(source(step)))
        return source(step)["pde"]["targets"]

    drawn = jax.jit(traced)(source(), 5)
    assert seen == [["pde", "bc", "ic"]]
    assert_trees_bitwise_equal(drawn, source()(5)["pde"]["targets"])


# Called from everywhere


def test_a_source_is_compiled_once_whatever_the_step():
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
    )
    try:
        first, second = source(key=keys.root_key(1)), source(key=keys.root_key(2))
        steps = (1, np.int64(2), jnp.int32(3), 2**31 - 1)
        first(0)
        compilations.clear()
        for step in steps:
            first(step)
        second(0)  # another source of the same structure
        assert compilations == []
        NamedBatchSource.from_pools(POOLS, {**SIZES, "pde": 17}, KEY)(0)
        assert compilations, "the listener hears nothing"
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize(
    "inside",
    [
        lambda draw: jax.jit(draw)(1.0),
        lambda draw: jax.eval_shape(draw, 1.0),
        lambda draw: jax.grad(draw)(1.0),
        lambda draw: jax.lax.scan(lambda total, x: (total + draw(x), None), 0.0, jnp.ones(2)),
    ],
    ids=["jit", "eval_shape", "grad", "scan"],
)
def test_a_source_first_called_inside_a_traced_function_works_afterwards(inside):
    fresh = source()
    inside(lambda x: x * fresh(3)["pde"]["inputs"].sum())
    assert_trees_bitwise_equal(fresh(5), source()(5))


def test_a_source_can_be_differentiated_through():
    def loss(scale):
        scaled = jax.tree.map(lambda leaf: leaf * scale if leaf.dtype == jnp.float32 else leaf, source())
        return scaled(5)["pde"]["inputs"].sum()

    assert_trees_bitwise_equal(jax.grad(loss)(1.0), source()(5)["pde"]["inputs"].sum())


class OnDisk:
    """What an HDF5 or Zarr data set offers."""

    chunks = (1, 1)

    def __init__(self, rows):
        self._rows = rows
        self.shape, self.dtype = rows.shape, rows.dtype

    def __getitem__(self, where):
        return self._rows[where]

    def __len__(self):
        return len(self._rows)

    def __array__(self, dtype=None, copy=None):
        return np.array(self._rows, dtype)


@pytest.mark.parametrize(
    "draw",
    [lambda s: s(5), lambda s: s.prepare()(5), lambda s: s.sample(keys.step_key(KEY, 5))],
    ids=["call", "prepare", "sample"],
)
def test_rows_may_be_on_disk(draw):
    pools = {name: HostPool(OnDisk(p["inputs"]), targets=OnDisk(p["targets"])) for name, p in POOLS.items()}
    assert_trees_bitwise_equal(draw(NamedBatchSource.from_pools(pools, SIZES, KEY)), source()(5))


def test_rows_may_be_mapped_from_a_file(tmp_path):
    for name, array in POOLS["pde"].items():
        np.save(tmp_path / f"{name}.npy", array)
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in POOLS["pde"]}
    pools = {**POOLS, "pde": mapped}
    assert_trees_bitwise_equal(NamedBatchSource.from_pools(pools, SIZES, KEY)(5), source()(5))


# Samplers of one's own


@dataclasses.dataclass(frozen=True)
class Plain:
    """A sampler that is no pytree."""

    low: float = 0.25

    def sample(self, key, size):
        return {"inputs": self.low + jax.random.uniform(key, (size, 1))}


@pytest.mark.parametrize(
    "draw",
    [lambda s: s(5), lambda s: s.sample(keys.step_key(KEY, 5)), lambda s: s.prepare()(5)],
    ids=["call", "sample", "prepare"],
)
def test_a_sampler_need_not_be_a_pytree(draw):
    mixed = NamedBatchSource({"own": Plain(), "bc": RandomRowSampler(POOLS["bc"])}, {"own": 4, "bc": 3}, KEY)
    places = jax.random.split(jax.random.fold_in(KEY, 5), 2)
    expected = {
        "own": Plain().sample(places[0], 4),
        "bc": RandomRowSampler(POOLS["bc"]).sample(places[1], 3),
    }
    assert_trees_bitwise_equal(draw(mixed), expected)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """A `StepSampler`: walks through its rows, shifted by its key."""

    rows: Any

    num_rows = 100

    def sample_at(self, key, step, size):
        start = jax.random.randint(key, (), 0, 100) + 3 * step
        return {"inputs": self.rows[(start + jnp.arange(size)) % 100]}

    def sample(self, key, size):
        return self.sample_at(key, 0, size)


def windowed():
    samplers = {"walk": Window(jnp.arange(100.0)), "bc": RandomRowSampler(POOLS["bc"])}
    return NamedBatchSource(samplers, {"walk": 5, "bc": 3}, KEY)


def test_a_sampler_by_step_gets_the_same_key_at_every_step_and_the_step():
    key = keys.stream(KEY, "sampler", "walk")
    for step in (0, 1, 33):
        batches = windowed()(step)
        expected = Window(jnp.arange(100.0)).sample_at(key, step, 5)
        assert_trees_bitwise_equal(batches["walk"], expected)
        # The others keep their places.
        place = jax.random.split(jax.random.fold_in(KEY, step), 2)[1]
        assert_trees_bitwise_equal(batches["bc"], RandomRowSampler(POOLS["bc"]).sample(place, 3))
    assert first_difference(windowed()(0)["walk"], windowed()(1)["walk"]) is not None


def test_a_sampler_by_step_draws_the_same_traced():
    steps = jnp.array([0, 1, 33])
    alone = jnp.stack([windowed()(step)["walk"]["inputs"] for step in steps])
    mapped = jax.vmap(lambda step: windowed()(step)["walk"]["inputs"])(steps)
    _, scanned = jax.lax.scan(lambda s, step: (s, s(step)["walk"]["inputs"]), windowed(), steps)
    assert_trees_bitwise_equal((mapped, scanned), (alone, alone))


def test_a_sampler_by_step_serves_diagnostics_from_an_explicit_key():
    place = jax.random.split(keys.fold_in(KEY, 5), 2)[0]
    drawn = windowed().sample(keys.fold_in(KEY, 5))["walk"]
    assert_trees_bitwise_equal(drawn, Window(jnp.arange(100.0)).sample(place, 5))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hardest:
    """An `AdaptiveSampler`: picks the rows with the largest residuals, from a random start."""

    rows: Any

    def init(self, key):
        return jax.random.uniform(key, (len(self.rows),))

    def sample(self, key, size, state):
        order = jnp.argsort(-state)[:size]
        return {"inputs": self.rows[order], "jitter": jax.random.uniform(key, (size,))}

    def due(self, step, state):
        return step > 0

    def refresh(self, key, state, residuals):
        return jnp.maximum(state, residuals({"inputs": self.rows}))


def adaptive():
    samplers = {"hard": Hardest(jnp.arange(20.0)), "bc": RandomRowSampler(POOLS["bc"])}
    return NamedBatchSource(samplers, {"hard": 5, "bc": 3}, KEY)


def test_an_adaptive_sampler_draws_from_its_state_and_its_place():
    sampler = Hardest(jnp.arange(20.0))
    state = sampler.init(jax.random.key(1))
    place = jax.random.split(jax.random.fold_in(KEY, 7), 2)[0]
    drawn = adaptive()(7, {"hard": state})
    assert_trees_bitwise_equal(drawn["hard"], sampler.sample(place, 5, state))
    later = sampler.refresh(jax.random.key(2), state, lambda rows: rows["inputs"])
    moved = adaptive()(7, {"hard": later})
    assert_trees_bitwise_equal(moved["hard"]["inputs"], jnp.array([19.0, 18.0, 17.0, 16.0, 15.0]))
    assert_trees_bitwise_equal(moved["hard"]["jitter"], drawn["hard"]["jitter"])
    assert_trees_bitwise_equal(moved["bc"], drawn["bc"])


def test_an_adaptive_sampler_draws_the_same_traced():
    state = {"hard": Hardest(jnp.arange(20.0)).init(jax.random.key(1))}
    expected = tuple(adaptive()(7, state).values())
    traced = jax.jit(lambda source, step, state: tuple(source(step, state).values()))
    assert_trees_bitwise_equal(traced(adaptive(), 7, state), expected)


@pytest.mark.parametrize("state", [None, {}, {"bc": 1}], ids=["none", "empty", "another"])
def test_an_adaptive_sampler_without_its_state_is_rejected(state):
    held = "'bc'" if state else "nothing"
    with pytest.raises(ValueError) as caught:
        adaptive()(7, state)
    assert str(caught.value) == (
        f"sampler 'hard' draws from a state, and sampler_state has {held}. "
        "Pass sampler_state={'hard': sampler.init(key)}."
    )


def test_diagnostics_of_an_adaptive_sampler_are_drawn_from_its_state():
    source, state = adaptive(), {"hard": Hardest(jnp.arange(20.0)).init(jax.random.key(1))}
    step_key = keys.step_key(source.key, 7)
    assert_trees_bitwise_equal(source.sample(step_key, sampler_state=state), source(7, state))
    with pytest.raises(ValueError) as caught:
        source.sample(KEY)
    assert str(caught.value) == (
        "sampler 'hard' draws from a state, and sampler_state has nothing. "
        "Pass sampler_state={'hard': sampler.init(key)}."
    )


# What is refused


BC = RandomRowSampler(POOLS["bc"])
BOX = UniformDomainSampler([(0.0, 1.0)])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: NamedBatchSource([BC], {"bc": 1}, KEY),
            TypeError,
            "samplers must be a mapping, got [RandomRowSampler(...)]. Pass a dict keyed by name.",
        ),
        (
            lambda: NamedBatchSource({}, {}, KEY),
            ValueError,
            "samplers must name at least one entry, got (). Add a name.",
        ),
        (
            lambda: NamedBatchSource({"bc": BC}, [1], KEY),
            TypeError,
            "batch_sizes must be a mapping, got [1]. Pass a dict keyed by name.",
        ),
        (
            lambda: NamedBatchSource({"pde": BC, "bc": BC}, {"bc": 1}, KEY),
            ValueError,
            "no batch size for sampler 'pde'; batch_sizes has 'bc'. "
            "Add batch_sizes['pde'] or drop the sampler.",
        ),
        (
            lambda: NamedBatchSource({"bc": BC}, {"bc": 1, "ic": 2}, KEY),
            ValueError,
            "batch_sizes names 'ic', but there is only 'bc'. Drop it, or add what it names.",
        ),
        (
            lambda: NamedBatchSource({"bc": BC}, {"bc": 0}, KEY),
            ValueError,
            "batch_sizes['bc'] must be a positive int or 'all', got 0. "
            "Use 'all' to take every row of the pool.",
        ),
        (
            lambda: NamedBatchSource({"bc": BC}, {"bc": True}, KEY),
            TypeError,
            "batch_sizes['bc'] must be a positive int or 'all', got True. "
            "Use 'all' to take every row of the pool.",
        ),
        (
            lambda: NamedBatchSource({"bc": 3}, {"bc": 1}, KEY),
            TypeError,
            "samplers['bc'] must offer sample(key, size), got 3. Pass a sampler of phijax_rng or your own.",
        ),
        (
            lambda: NamedBatchSource({"box": BOX}, {"box": "all"}, KEY),
            ValueError,
            "batch_sizes['box']='all' needs a finite pool; a continuous domain has none. "
            "Pass a positive int.",
        ),
        (
            lambda: NamedBatchSource({"own": Plain()}, {"own": "all"}, KEY),
            ValueError,
            "batch_sizes['own']='all' needs a sampler with num_rows; Plain(low=0.25) has none. "
            "Pass a positive int.",
        ),
        (
            lambda: NamedBatchSource({"bc": BC}, {"bc": 1}, 42),
            TypeError,
            "key must be one typed JAX key, got 42. Make one with keys.root_key(seed).",
        ),
        (
            lambda: NamedBatchSource.from_pools(POOLS, {"bc": 1}, KEY),
            ValueError,
            "no batch size for sampler 'pde'; batch_sizes has 'bc'. "
            "Add batch_sizes['pde'] or drop the sampler.",
        ),
        (
            lambda: source(names=("bc", "wall")),
            ValueError,
            "pools has no entry 'wall'; it has 'pde', 'bc', 'ic'. Add pools['wall'] or drop the name.",
        ),
        (
            lambda: NamedBatchSource.from_pools(POOLS, {"bc": 1}, KEY, names=("pde",)),
            ValueError,
            "batch_sizes has no entry 'pde'; it has 'bc'. Add batch_sizes['pde'] or drop the name.",
        ),
        (
            lambda: source(names=("bc", "bc")),
            ValueError,
            "names must not repeat a name, got ('bc', 'bc'). Drop the repeated one.",
        ),
        (
            lambda: source(sort_axes={"wall": 0}),
            ValueError,
            "sort_axes names 'wall', but there is only 'pde', 'bc', 'ic'. Drop it, or add what it names.",
        ),
        (
            lambda: NamedBatchSource.from_pools(POOLS, {**SIZES, "bc": 11}, KEY, replace=False),
            ValueError,
            "batch_sizes['bc'] must be at most the 10 rows of the pool when replace=False, got 11. "
            "Use 'all', a smaller size, or replace=True.",
        ),
        (
            lambda: source().sample(KEY, {"wall": 1}),
            ValueError,
            "batch_sizes names 'wall', but there is only 'pde', 'bc', 'ic'. Drop it, or add what it names.",
        ),
        (
            lambda: source().sample(42),
            TypeError,
            "key must be one typed JAX key, got 42. Make one with keys.root_key(seed).",
        ),
    ],
    ids=[
        "samplers a list",
        "no sampler",
        "sizes a list",
        "no size",
        "no sampler for a size",
        "size 0",
        "size True",
        "no sampler",
        "all of a box",
        "all of an own sampler",
        "a seed as key",
        "pool without size",
        "name without pool",
        "name without size",
        "name twice",
        "sorting an unknown pool",
        "more rows than there are",
        "diagnostic size of an unknown pool",
        "diagnostics from a seed",
    ],
)
def test_names_sizes_and_keys_are_checked_at_the_door(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (True, TypeError, "step must be a whole number, got True."),
        (1.5, TypeError, "step must be a whole number, got 1.5."),
        (np.float32(1), TypeError, "step must be a whole number, got np.float32(1.0)."),
        ("1", TypeError, "step must be a whole number, got '1'."),
        (-1, ValueError, "step must be in [0, 2**31), got -1."),
        (2**31, ValueError, "step must be in [0, 2**31), got 2147483648."),
        (np.int64(2**32 + 5), ValueError, "step must be in [0, 2**31), got 4294967301."),
    ],
)
@pytest.mark.parametrize("ask", [source(), lambda step: source().sampler_keys(step)], ids=["call", "keys"])
def test_what_is_no_step_is_rejected(ask, step, error, message):
    with pytest.raises(error) as caught:
        ask(step)
    assert str(caught.value) == f"{message} A step counts completed optimizer updates."


def test_a_concrete_step_is_checked_inside_a_traced_program_too():
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda source: source(1.5)["pde"])(source())
    assert str(caught.value) == (
        "step must be a whole number, got 1.5. A step counts completed optimizer updates."
    )


# What it says of itself


def test_a_source_describes_its_samplers_in_order_and_plain_data():
    own = NamedBatchSource({"own": Plain(), "bc": BC}, {"own": 4, "bc": "all"}, KEY)
    assert json.loads(json.dumps(own.describe())) == {
        "kind": "NamedBatchSource",
        "samplers": [
            {"name": "own", "size": 4, "kind": f"{__name__}.Plain"},
            {"name": "bc", "size": "all", **BC.describe()},
        ],
    }
    assert repr(source()) == "NamedBatchSource(pde=6, bc='all', ic=4)"


def test_a_source_is_what_the_trainer_needs_and_may_be_traced():
    assert isinstance(source(), TrainingBatchSource)
    assert source().traceable is True


# The usual data module


def test_a_pool_data_module_makes_the_source_of_the_batch_keys():
    module = PoolDataModule(POOLS, SIZES, replace=False, sort_axes={"ic": 0})
    assert isinstance(module, DataModule)
    made = module.train_batch_source(("ic", "pde"), KEY)
    assert made.names == ("ic", "pde")
    expected = source(names=("ic", "pde"), replace=False, sort_axes={"ic": 0})
    assert made.describe() == expected.describe()
    assert_trees_bitwise_equal(made.key, KEY)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: PoolDataModule([1], SIZES),
            TypeError,
            "pools must be a mapping, got [1]. Pass a dict keyed by name.",
        ),
        (
            lambda: PoolDataModule(POOLS, {"pde": 1}),
            ValueError,
            "no batch size for sampler 'bc'; batch_sizes has 'pde'. "
            "Add batch_sizes['bc'] or drop the sampler.",
        ),
        (
            lambda: PoolDataModule(POOLS, SIZES).train_batch_source(("wall",), KEY),
            ValueError,
            "pools has no entry 'wall'; it has 'pde', 'bc', 'ic'. Add pools['wall'] or drop the name.",
        ),
    ],
    ids=["pools a list", "no size", "a batch without pool"],
)
def test_a_pool_data_module_is_checked_at_the_door(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def many(number, **options):
    """A source of so many pools that choose alike, and two that do not."""
    pools = {f"pool{i}": {"inputs": np.arange(9.0)[::-1, None].astype(np.float32) + i} for i in range(number)}
    pools |= {"other": rows_of(20), "all": rows_of(3)}
    sizes = dict.fromkeys(pools, 5) | {"all": "all"}
    return NamedBatchSource.from_pools(pools, sizes, options.pop("key", KEY), **options)


@pytest.mark.parametrize(
    ("implementation", "options"),
    [("threefry2x32", {"sort_axes": {"pool3": 0}}), pytest.param("rbg", {}, marks=pytest.mark.full)],
)
def test_many_samplers_that_choose_alike_draw_what_each_draws_alone(implementation, options):
    key = jax.random.key(3, impl=implementation)
    drawing = many(16, key=key, **options)
    places = drawing.sampler_keys(7)
    alone = {}
    for name, sampler in drawing.samplers.items():
        alone[name] = sampler.sample(jax.random.clone(places[name]), drawing.batch_sizes[name])
    assert_trees_bitwise_equal(drawing(7), alone)
    shifted = alone | {"pool0": alone["pool1"]}
    assert first_difference(drawing(7), shifted) is not None


def test_the_program_of_many_samplers_has_one_loop_for_those_that_choose_alike():
    def draws(number):
        return str(jax.make_jaxpr(many(number))(jnp.int32(7))).count("name=_randint")

    assert [draws(number) for number in (15, 16, 32)] == [16, 2, 2]
