"""A batch is a function of key and step: in every program, through every carrier, under every setting."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phijax_rng import (
    NamedBatchSource,
    RandomRowSampler,
    SpaceTimeSampler,
    UniformDomainSampler,
    WeightedRowSampler,
    keys,
)
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import examples, mostly_full


def rows_of(n):
    return {"inputs": np.arange(n, dtype=np.float32)[:, None], "index": np.arange(n, dtype=np.int32)}


SAMPLERS = {  # not in alphabetical order
    "pde": UniformDomainSampler([(0.1, 0.7), (-1.7, 1.7)]),
    "walls": RandomRowSampler(rows_of(1000)),
    "corners": RandomRowSampler(rows_of(4)),
    "data": RandomRowSampler(rows_of(1000), replace=False),
    "moving": SpaceTimeSampler({"inputs": np.ones((9, 2), np.float32)}, (0.0, 0.6), sort_axis=None),
}
SIZES = {"pde": 17, "walls": 5, "corners": "all", "data": 8, "moving": 4}
NAMES = tuple(SAMPLERS)


def source(seed, names=NAMES):
    samplers = {name: SAMPLERS[name] for name in names}
    return NamedBatchSource(samplers, {name: SIZES[name] for name in names}, keys.root_key(seed))


def in_order(source, step):
    """The batches as a tuple: JAX would hand a dict back in sorted order."""
    batches = source(step)
    assert tuple(batches) == source.names
    return tuple(batches.values())


seeds = st.integers(0, 2**64 - 1)
steps = st.sampled_from([0, 1, 2**31 - 1]) | st.integers(0, 2**31 - 1)

# A few dozen examples meet every program; more only repeat the arithmetic.
few = settings(max_examples=25)


def same(actual, expected):
    assert_trees_bitwise_equal(actual, expected, dict_order=False)


# In every program


@jax.jit
def in_jit(source, step):
    return in_order(source, step)


@jax.jit
def in_scan(source, steps):
    return jax.lax.scan(lambda source, step: (source, in_order(source, step)), source, steps)[1]


@jax.jit
def in_vmap(source, steps):
    return jax.vmap(in_order, (None, 0))(source, steps)


@jax.jit
def in_vmap_over_sources(sources, step):
    return jax.vmap(in_order, (0, None))(sources, step)


@jax.jit
def in_while_loop(source, step):
    def body(carry):
        turn, _ = carry
        return turn + 1, in_order(source, step - 1 + turn)

    start = (0, jax.tree.map(lambda rows: jnp.zeros(rows.shape, rows.dtype), in_order(source, 0)))
    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, start)[1]


@pytest.mark.full
@few
@given(seeds, st.lists(steps, min_size=3, max_size=3))
def test_a_batch_is_the_same_eager_jitted_scanned_and_mapped(seed, steps):
    own = source(seed)
    eager = [in_order(own, step) for step in steps]
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *eager)
    same(in_jit(own, steps[0]), eager[0])
    same(in_scan(own, jnp.array(steps)), stacked)
    same(in_vmap(own, jnp.array(steps)), stacked)
    same(in_while_loop(own, steps[0]), eager[0])


@pytest.mark.full
@few
@given(st.lists(seeds, min_size=3, max_size=3), steps)
def test_a_batch_is_the_same_mapped_over_sources(seeds, step):
    sources = [source(seed, ("pde", "walls")) for seed in seeds]
    eager = jax.tree.map(lambda *rows: np.stack(rows), *[in_order(own, step) for own in sources])
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sources)
    same(in_vmap_over_sources(together, step), eager)


@given(seeds, steps)
def test_another_step_or_seed_is_another_batch(seed, step):
    batches = in_order(source(seed), step)
    other_step = in_order(source(seed), step - 1 if step else 1)
    other_seed = in_order(source(seed ^ 1), step)
    for other in (other_step, other_seed):
        for name, rows, moved in zip(NAMES, batches, other, strict=True):
            # Five rows of a thousand come again about once in 1e15 examples.
            assert (first_difference(rows, moved) is None) == (name == "corners")


@few
@given(seeds, st.lists(steps, min_size=2, max_size=6), seeds)
def test_a_batch_depends_on_nothing_that_was_asked_before(seed, visited, other_seed):
    expected = {step: in_order(source(seed), step) for step in visited}
    own, other = source(seed), source(other_seed)
    for step in [*visited, *reversed(visited)]:
        other(step)
        same(in_order(own, step), expected[step])


# Through every carrier


CARRIERS = {
    "pickle": lambda source: pickle.loads(pickle.dumps(source)),
    "deepcopy": copy.deepcopy,
    "tree.map": lambda source: jax.tree.map(lambda leaf: leaf, source),
    "jit": jax.jit(lambda source: source),
    "scan": jax.jit(lambda source: jax.lax.scan(lambda s, _: (s, None), source, None, 2)[0]),
    "vmap": jax.jit(
        lambda source: jax.tree.map(
            lambda leaf: leaf[0],
            jax.vmap(lambda s: s)(jax.tree.map(lambda leaf: jnp.stack([leaf]), source)),
        )
    ),
}


@few
@given(seeds, steps, st.lists(st.sampled_from(sorted(CARRIERS)), max_size=4), st.booleans())
def test_a_source_keeps_its_batches_and_their_order_through_any_chain_of_carriers(
    seed, step, carriers, called_before
):
    carried = source(seed)
    if called_before:
        carried(0)
    for name in carriers:
        carried = CARRIERS[name](carried)
    same(in_order(carried, step), in_order(source(seed), step))


@examples(1, 3)  # every order is a program of its own
@given(st.permutations(["walls", "corners", "pde"]), steps)
def test_the_order_is_that_of_the_declaration_and_part_of_the_run(order, step):
    batches = source(0, order)(step)
    assert tuple(batches) == tuple(order)
    places = jax.random.split(jax.random.fold_in(keys.root_key(0), step), len(order))
    for place, name in enumerate(order):
        same(batches[name], draw(SAMPLERS[name], places[place], SIZES[name]))
        elsewhere = draw(SAMPLERS[name], places[place - 1], SIZES[name])
        assert (first_difference(batches[name], elsewhere) is None) == (name == "corners")


# As a prefix


PREFIXED = {
    "rows with replacement": RandomRowSampler(rows_of(1000)),
    "rows by permutation": RandomRowSampler(rows_of(1000), replace=False),
    "rows by sorting": RandomRowSampler(rows_of(1000), replace=False, method="sort"),
    "weighted rows": WeightedRowSampler(rows_of(1000), np.arange(1000) % 7),
    "weighted rows, distinct": WeightedRowSampler(rows_of(1000), np.arange(1000) % 7, replace=False),
    "box": UniformDomainSampler([(0.1, 0.7), (-1.7, 1.7)]),
    "space-time": SpaceTimeSampler({"inputs": np.ones((9, 2), np.float32)}, (0.0, 0.6), sort_axis=None),
}
SMALL, LARGE = 33, 100
draw = jax.jit(lambda sampler, key, size: sampler.sample(key, size), static_argnums=2)


@pytest.mark.parametrize(
    "sampler", mostly_full(PREFIXED, everyday=["rows by permutation", "weighted rows, distinct", "box"])
)
@few
@given(seeds)
def test_a_row_does_not_depend_on_the_size_of_its_batch(sampler, seed):
    key = keys.root_key(seed)
    large = draw(sampler, key, LARGE)
    same(draw(sampler, key, SMALL), jax.tree.map(lambda rows: rows[:SMALL], large))


@few
@given(seeds)
def test_a_row_of_a_sorted_batch_does_depend_on_its_size(seed):
    key = keys.root_key(seed)
    sampler = RandomRowSampler(rows_of(1000), sort_axis=0)
    large = jax.tree.map(lambda rows: rows[:SMALL], draw(sampler, key, LARGE))
    assert first_difference(draw(sampler, key, SMALL), large) is not None


# Under every setting


@few
@given(seeds, steps)
def test_x64_moves_no_key_and_no_batch(seed, step):
    def everything():
        own = source(seed)
        return in_order(own, step), own.sampler_keys(step)

    plain = everything()
    with jax.enable_x64(True):
        same(everything(), plain)


def test_x64_does_move_draws_that_do_not_pin_their_dtype():
    key = keys.root_key(0)
    plain = jax.random.choice(key, 1000, (5,)), jax.random.uniform(key)
    with jax.enable_x64(True):
        wide = jax.random.choice(key, 1000, (5,)), jax.random.uniform(key)
    assert first_difference(np.asarray(wide[0], np.int32), plain[0]) is not None
    assert first_difference(np.asarray(wide[1], np.float32), plain[1]) is not None


# Steps


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1])
def test_the_first_and_the_last_step_have_batches_like_any_other(step):
    for spelled in (step, np.int64(step), np.uint32(step), jnp.int32(step)):
        same(in_order(source(0), spelled), in_jit(source(0), step))


REFUSED = {
    "True": (True, TypeError, "step must be a whole number, got True."),
    "1.5": (1.5, TypeError, "step must be a whole number, got 1.5."),
    "-1": (-1, ValueError, "step must be in [0, 2**31), got -1."),
    "2**31": (2**31, ValueError, "step must be in [0, 2**31), got 2147483648."),
    "beyond 32 bits": (
        np.int64(2**32 + 5),
        ValueError,
        "step must be in [0, 2**31), got 4294967301.",
    ),
}


@pytest.mark.parametrize(("step", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_step_is_refused_by_name(step, error, message):
    with pytest.raises(error) as caught:
        source(0)(step)
    assert str(caught.value) == f"{message} A step counts completed optimizer updates."


@given(st.integers(max_value=-1) | st.integers(min_value=2**31))
def test_no_step_outside_the_range_is_taken(step):
    with pytest.raises(ValueError) as caught:
        source(0)(step)
    assert str(caught.value) == (
        f"step must be in [0, 2**31), got {step}. A step counts completed optimizer updates."
    )
