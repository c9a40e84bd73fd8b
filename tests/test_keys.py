"""Keys: the same from every spelling of a seed and under every setting; disjoint where they must be."""

import contextlib
import hashlib
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phijax_rng import keys
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._subprocess import run_python

IMPLEMENTATIONS = keys.TESTED_IMPLEMENTATIONS
MEND = "Pick a non-negative integer, or pass a key made by jax.random.key."
TESTED = "threefry2x32, threefry4x32, philox4x32, rbg"


@contextlib.contextmanager
def seed_offset():
    before = jax.config.jax_random_seed_offset
    jax.config.update("jax_random_seed_offset", 7)
    try:
        yield
    finally:
        jax.config.update("jax_random_seed_offset", before)


SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "another default implementation": lambda: jax.default_prng_impl("rbg"),
    "a seed offset": seed_offset,
}


def words(key):
    return tuple(int(word) for word in np.ravel(jax.random.key_data(key)))


# From a seed to the root


@pytest.mark.parametrize(
    "seed",
    [
        np.int32(5),
        np.uint64(5),
        np.array(5),
        jnp.int32(5),
        jnp.uint8(5),
        jax.random.key(5),
    ],
    ids=["int32", "uint64", "array", "jax int32", "jax uint8", "key"],
)
def test_all_spellings_of_one_seed_are_one_root(seed):
    assert_trees_bitwise_equal(keys.root_key(seed), keys.root_key(5))
    assert_trees_bitwise_equal(keys.split_root(seed), keys.split_root(5))


@given(st.integers(0, 2**32 - 1))
def test_below_2_to_32_the_root_is_the_key_of_jax(seed):
    assert_trees_bitwise_equal(keys.root_key(seed), jax.random.key(np.uint32(seed)))


@given(st.integers(2**32, 2**63 - 1))
def test_above_2_to_32_the_root_is_the_key_of_jax_under_x64(seed):
    root = keys.root_key(seed)
    with jax.enable_x64(True):
        assert_trees_bitwise_equal(root, jax.random.key(seed))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_seeds_that_differ_give_roots_that_differ(one, other):
    assert (words(keys.root_key(one)) == words(keys.root_key(other))) == (one == other)


def test_5_and_5_plus_2_to_32_are_two_seeds():
    assert words(keys.root_key(5)) != words(keys.root_key(5 + 2**32))
    # JAX alone takes them for one, which is why the words are wrapped here.
    assert words(jax.random.key(5)) == words(jax.random.key(5 + 2**32))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_no_process_setting_moves_a_key(setting):
    seed = 5 + 2**32
    expected = (keys.root_key(seed), keys.split_root(seed), keys.stream(keys.root_key(seed), "own"))
    plain = jax.random.key(seed)
    with setting():
        actual = (keys.root_key(seed), keys.split_root(seed), keys.stream(keys.root_key(seed), "own"))
        moved = jax.random.key(seed)
    assert_trees_bitwise_equal(actual, expected)
    assert first_difference(moved, plain) is not None, "the setting moves nothing"


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, f"seed must be in [0, 2**64), got -1. {MEND}"),
        (2**64, ValueError, f"seed must be in [0, 2**64), got 18446744073709551616. {MEND}"),
        (np.int64(-3), ValueError, f"seed must be in [0, 2**64), got -3. {MEND}"),
        (True, TypeError, f"seed must be a whole number, got True. {MEND}"),
        (np.True_, TypeError, f"seed must be a whole number, got np.True_. {MEND}"),
        (3.0, TypeError, f"seed must be a whole number, got 3.0. {MEND}"),
        (np.float32(3), TypeError, f"seed must be a whole number, got np.float32(3.0). {MEND}"),
        ("3", TypeError, f"seed must be a whole number, got '3'. {MEND}"),
        ((1, 2), TypeError, f"seed must be a whole number, got (1, 2). {MEND}"),
        (np.array([1, 2]), TypeError, f"seed must be a whole number, got int64[2]. {MEND}"),
        (
            jnp.array([1, 2]),
            TypeError,
            f"seed must be a whole number, got int32[2]. {MEND}",
        ),
        (
            jax.random.split(jax.random.key(0), 3),
            ValueError,
            "seed must be one key of shape (), got keys of shape (3,). Pick one, or use keys.exact_vmap.",
        ),
        (
            jax.random.key(0, impl="unsafe_rbg"),
            ValueError,
            f"seed must be a key of {TESTED}; got one of 'unsafe_rbg', rejected because its fold_in and "
            "split are not a hash, so keys of different steps collide. "
            "Make the key with jax.random.key(seed).",
        ),
        (
            jax.random.key(0, impl="philox2x32"),
            ValueError,
            f"seed must be a key of {TESTED}; got one of 'philox2x32', rejected because its keys have "
            "32 bits, so of 100000 steps two are more likely than not to share a key. "
            "Make the key with jax.random.key(seed).",
        ),
    ],
    ids=[
        "negative",
        "2**64",
        "negative int64",
        "True",
        "np.True_",
        "float",
        "float32",
        "string",
        "tuple",
        "array of two",
        "jax array of two",
        "batch of keys",
        "unsafe_rbg",
        "philox2x32",
    ],
)
def test_what_is_no_seed_is_rejected_with_a_fix(seed, error, message):
    for make in (keys.root_key, keys.split_root):
        with pytest.raises(error) as caught:
            make(seed)
        assert str(caught.value) == message


def test_a_traced_seed_is_rejected():
    with pytest.raises(TypeError) as caught:
        jax.jit(keys.root_key)(5)
    assert str(caught.value) == (
        "seed must be known before tracing, got a tracer. Make the root key outside jit."
    )


def test_a_seed_of_none_is_fresh_logged_and_readable_afterwards(caplog):
    with caplog.at_level(logging.WARNING, logger="phijax_rng"):
        root, other = keys.root_key(None), keys.root_key(None)
    seed = keys.seed_of(root)
    assert caplog.messages == [
        f"seed=None: drew seed {drawn}. Pass seed={drawn} to repeat this run."
        for drawn in (seed, keys.seed_of(other))
    ]
    assert_trees_bitwise_equal(keys.root_key(seed), root)
    assert words(other) != words(root)  # two draws of 64 bits are equal once in 2**64


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_legacy_key_is_wrapped_and_said_so(place, caplog):
    legacy = place(np.array([1, 42], np.uint32))
    with caplog.at_level(logging.WARNING, logger="phijax_rng"):
        root = keys.root_key(legacy)
    assert_trees_bitwise_equal(root, keys.root_key(2**32 + 42))
    assert caplog.messages == [
        "seed is a legacy uint32[2] key; it is used as a typed threefry2x32 key. "
        "Pass jax.random.key(...) to be explicit."
    ]


def test_a_seed_and_a_typed_key_are_taken_without_a_log_line(caplog):
    with caplog.at_level(logging.DEBUG, logger="phijax_rng"):
        keys.root_key(42), keys.root_key(jax.random.key(42))
    assert caplog.messages == []


@given(st.integers(0, 2**64 - 1))
def test_the_seed_can_be_read_off_the_root(seed):
    assert keys.seed_of(keys.root_key(seed)) == seed


def test_only_a_default_root_has_a_seed():
    assert keys.seed_of(jax.random.key(5, impl="rbg")) is None


# From the root to a step


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_streams_are_the_four_children_of_the_root_in_order(implementation):
    root = jax.random.key(42, impl=implementation)
    streams = keys.split_root(root)
    children = jax.random.split(root, 4)
    assert_trees_bitwise_equal(tuple(streams), tuple(children[i] for i in range(4)))
    assert_trees_bitwise_equal(
        (streams.model, streams.runtime, streams.sampling, streams.balancer), tuple(streams)
    )
    assert len({words(key) for key in streams}) == 4


def test_streams_pass_through_jax_and_stay_in_order():
    streams = keys.split_root(1)
    assert_trees_bitwise_equal(jax.jit(lambda s: s)(streams), streams)
    assert_trees_bitwise_equal(jax.tree.leaves(streams), list(streams))


STEPS = [0, 1, 12345, 2**31 - 1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_key_of_a_step_is_a_fold_of_the_sampling_key(implementation):
    key = jax.random.key(3, impl=implementation)
    for step in STEPS:
        expected = jax.random.fold_in(key, step)
        for spelled in (step, np.int64(step), jnp.int32(step)):
            assert_trees_bitwise_equal(keys.step_key(key, spelled), expected)
        assert_trees_bitwise_equal(jax.jit(keys.step_key)(key, step), expected)


def test_the_keys_of_steps_are_the_same_scanned_and_mapped():
    key, steps = keys.root_key(3), jnp.array(STEPS)
    alone = jnp.stack([keys.step_key(key, step) for step in STEPS])
    mapped = jax.vmap(keys.step_key, (None, 0))(key, steps)
    _, scanned = jax.lax.scan(lambda carry, step: (carry, keys.step_key(key, step)), None, steps)
    assert_trees_bitwise_equal((mapped, scanned), (alone, alone))


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (True, TypeError, "step must be a whole number, got True."),
        (1.5, TypeError, "step must be a whole number, got 1.5."),
        (-1, ValueError, "step must be in [0, 2**31), got -1."),
        (2**31, ValueError, "step must be in [0, 2**31), got 2147483648."),
        (np.int64(2**32 + 5), ValueError, "step must be in [0, 2**31), got 4294967301."),
    ],
)
def test_what_jax_would_truncate_silently_is_rejected(step, error, message):
    with pytest.raises(error) as caught:
        keys.step_key(keys.root_key(0), step)
    assert str(caught.value) == f"{message} A step counts completed optimizer updates."


@pytest.mark.parametrize(
    ("traced", "shown"),
    [(1.5, "float32[]"), (True, "bool[]"), (np.array([1, 2]), "int32[2]")],
    ids=["float", "bool", "array"],
)
def test_a_traced_step_must_be_a_whole_number_too(traced, shown):
    with pytest.raises(TypeError) as caught:
        jax.jit(keys.step_key)(keys.root_key(0), traced)
    assert str(caught.value) == (
        f"step must be a whole number of shape (), got a traced {shown}. Trace it as an integer."
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_coordinates_are_folded_in_one_after_the_other(implementation):
    key = jax.random.key(3, impl=implementation)
    expected = jax.random.fold_in(jax.random.fold_in(key, 7), 2**32 - 1)
    assert_trees_bitwise_equal(keys.fold_in(key, 7, 2**32 - 1), expected)
    assert_trees_bitwise_equal(jax.jit(lambda i: keys.fold_in(key, i, 2**32 - 1))(7), expected)
    assert first_difference(keys.fold_in(key, 2**32 - 1, 7), expected) is not None


@pytest.mark.parametrize(
    ("coordinates", "error", "message"),
    [
        ((), TypeError, "fold_in needs at least one coordinate, got none. Pass a step or an index."),
        (
            (1, 1.0),
            TypeError,
            "coordinates[1] must be a whole number, got 1.0. Pass an int or a NumPy integer.",
        ),
        (
            (2**32,),
            ValueError,
            "coordinates[0] must be in [0, 2**32), got 4294967296. Pick a number inside the range.",
        ),
        (
            (0, 0, -1),
            ValueError,
            "coordinates[2] must be in [0, 2**32), got -1. Pick a number inside the range.",
        ),
    ],
    ids=["none", "float", "too large", "negative"],
)
def test_a_coordinate_out_of_range_is_rejected_by_its_place(coordinates, error, message):
    with pytest.raises(error) as caught:
        keys.fold_in(keys.root_key(0), *coordinates)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "take",
    [lambda key: keys.step_key(key, 0), lambda key: keys.fold_in(key, 0), lambda key: keys.stream(key, "a")],
    ids=["step_key", "fold_in", "stream"],
)
def test_derivations_want_one_typed_key(take):
    name = "sampling_key" if take.__code__.co_names[-1] == "step_key" else "key"
    with pytest.raises(TypeError) as caught:
        take(42)
    assert str(caught.value) == (
        f"{name} must be one typed JAX key, got 42. Make one with keys.root_key(seed)."
    )
    with pytest.raises(ValueError) as caught:
        take(jax.random.split(keys.root_key(0), 2))
    assert str(caught.value) == (
        f"{name} must be one key of shape (), got keys of shape (2,). Pick one, or use keys.exact_vmap."
    )


def test_keys_of_one_state_are_of_one_implementation():
    threefry, rbg = jax.random.key(0), jax.random.key(0, impl="rbg")
    keys.require_same_implementation(rng_key=rbg, sampling_key=rbg)
    with pytest.raises(ValueError) as caught:
        keys.require_same_implementation(rng_key=threefry, sampling_key=rbg)
    assert str(caught.value) == (
        "the keys of one state must share an implementation; "
        "rng_key is 'threefry2x32', sampling_key is 'rbg'. Use one root."
    )


# Streams of the user's own


def test_a_stream_is_the_hash_of_its_path_behind_a_tag():
    path = b"".join(len(name).to_bytes(8, "big") + name for name in (b"evaluation", "rauschen-ü".encode()))
    digest = hashlib.sha256(path).digest()
    expected = keys.root_key(42)
    for word in (0xF17A0001, int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")):
        expected = jax.random.fold_in(expected, np.uint32(word))
    assert_trees_bitwise_equal(keys.stream(keys.root_key(42), "evaluation", "rauschen-ü"), expected)


def test_paths_that_spell_the_same_letters_are_different_streams():
    root = keys.root_key(0)
    paths = [("ab",), ("a", "b"), ("b", "a"), ("a",), ("a", "b", "c"), ("ab", "c"), ("a", "bc"), ("a\0b",)]
    assert len({words(keys.stream(root, *path)) for path in paths}) == len(paths)


def test_a_stream_is_the_same_inside_jit():
    root = keys.root_key(0)
    traced = jax.jit(lambda key: keys.stream(key, "evaluation"))(root)
    assert_trees_bitwise_equal(traced, keys.stream(root, "evaluation"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "stream needs at least one name, got none. Name the stream."),
        (("a", ""), "names[1] must be a non-empty string, got ''. Name the stream."),
        ((3,), "names[0] must be a non-empty string, got 3. Name the stream."),
    ],
    ids=["none", "empty", "number"],
)
def test_a_stream_without_a_name_is_rejected(names, message):
    with pytest.raises(TypeError) as caught:
        keys.stream(keys.root_key(0), *names)
    assert str(caught.value) == message


def all_words(batch):
    data = np.asarray(jax.random.key_data(batch))
    return set(map(tuple, data.reshape(-1, data.shape[-1]).tolist()))


@pytest.mark.parametrize(
    ("implementation", "count"),
    [("threefry2x32", 300), ("threefry4x32", 2), ("philox4x32", 300), ("rbg", 300)],
)
def test_a_stream_meets_no_step_key_and_no_child_of_a_split(implementation, count):
    key = jax.random.key(0, impl=implementation)
    steps = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))(key, jnp.arange(20_000))
    children = jax.random.split(key, 64)
    samplers = jax.vmap(jax.random.fold_in, (0, None))(steps[:5_000], np.uint32(1))
    taken = all_words(steps) | all_words(children) | all_words(samplers)
    own = {words(keys.stream(key, "sampler", f"pde{i}")) for i in range(count)}
    nested = {words(keys.stream(keys.stream(key, "a"), f"{i}")) for i in range(count)}
    assert len(own | nested) == 2 * count
    assert not taken & (own | nested)
    # The sets do meet where keys are equal, as a split made of folds does.
    assert words(keys.fold_in(key, 19_999)) in taken


def test_a_carried_and_a_folded_loop_from_one_base_share_a_key():
    """A trap of JAX itself since Threefry is partitionable; named streams keep out of it."""
    base = keys.root_key(0)
    folded = {words(keys.fold_in(base, step)) for step in range(100)}
    carried, key = set(), base
    for _ in range(100):
        key, drawn = jax.random.split(key)
        carried.add(words(drawn))
    assert folded & carried == {words(keys.fold_in(base, 1))}
    own = keys.stream(base, "evaluation")
    assert not {words(keys.fold_in(own, step)) for step in range(100)} & (folded | carried)


# Many keys at once


def draw(key):
    return jax.random.bits(key, (3,))


@pytest.mark.full
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "philox2x32", "unsafe_rbg"])
def test_every_key_of_an_exact_vmap_draws_what_it_draws_alone(implementation):
    batch = jax.random.split(jax.random.key(0, impl=implementation), 5)
    alone = jnp.stack([draw(key) for key in batch])
    assert_trees_bitwise_equal(keys.exact_vmap(draw)(batch), alone)
    assert_trees_bitwise_equal(jax.jit(keys.exact_vmap(draw))(batch), alone)


def test_a_plain_vmap_over_rbg_keys_draws_something_else():
    batch = jax.random.split(jax.random.key(0, impl="rbg"), 5)
    alone = jnp.stack([draw(key) for key in batch])
    assert first_difference(jax.vmap(draw)(batch), alone) is not None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_exact_vmap_maps_and_broadcasts_the_other_arguments(implementation):
    batch = jax.random.split(jax.random.key(0, impl=implementation), 3)
    mapped, shared = {"x": jnp.arange(3)}, jnp.arange(2)

    def shifted(key, mapped, shared):
        return {"sum": jax.random.bits(key, (2,)) + mapped["x"].astype(jnp.uint32), "shared": shared}

    actual = keys.exact_vmap(shifted, in_axes=(0, 0, None))(batch, mapped, shared)
    alone = [shifted(key, {"x": mapped["x"][i]}, shared) for i, key in enumerate(batch)]
    assert_trees_bitwise_equal(actual, jax.tree.map(lambda *rows: jnp.stack(rows), *alone), dict_order=False)


def test_rows_of_a_grid_of_keys_are_drawn_by_nesting():
    grid = jax.random.split(jax.random.key(0, impl="rbg"), (2, 3))
    alone = jnp.stack([jnp.stack([draw(key) for key in row]) for row in grid])
    assert_trees_bitwise_equal(keys.exact_vmap(keys.exact_vmap(draw))(grid), alone)


BATCH = jax.random.split(jax.random.key(0), 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: keys.exact_vmap(3), TypeError, "fn must be callable, got 3. Pass a function."),
        (
            lambda: keys.exact_vmap(draw)(5),
            TypeError,
            "keys must be an array of typed keys, got 5. Use jax.random.split.",
        ),
        (
            lambda: keys.exact_vmap(draw)(BATCH[0]),
            ValueError,
            "keys must have a leading axis, got one key. Split it first.",
        ),
        (
            lambda: keys.exact_vmap(draw, in_axes=1)(BATCH),
            ValueError,
            "in_axes must be 0 or None for each of 1 arguments and 0 for the keys, got 1. "
            "Use jax.vmap for other axes.",
        ),
        (
            lambda: keys.exact_vmap(draw, in_axes=(None, 0))(BATCH, BATCH),
            ValueError,
            "in_axes must be 0 or None for each of 2 arguments and 0 for the keys, got (None, 0). "
            "Use jax.vmap for other axes.",
        ),
        (
            lambda: keys.exact_vmap(draw, in_axes=(0, 0))(BATCH),
            ValueError,
            "in_axes must be 0 or None for each of 1 arguments and 0 for the keys, got (0, 0). "
            "Use jax.vmap for other axes.",
        ),
    ],
    ids=["no function", "no keys", "one key", "another axis", "keys not mapped", "too many axes"],
)
def test_what_cannot_be_mapped_exactly_is_rejected(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


# Keys for people, and for the host


def test_a_fingerprint_names_the_implementation_and_the_words():
    assert keys.fingerprint(keys.root_key(2**32 + 42)) == "threefry2x32:1-42"
    assert keys.fingerprint(jax.random.key(7, impl="rbg")) == "rbg:0-7-0-7"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_fingerprint_can_be_read_back(implementation):
    key = keys.fold_in(jax.random.key(7, impl=implementation), 3)
    assert_trees_bitwise_equal(keys.from_fingerprint(keys.fingerprint(key)), key)


def test_a_traced_key_has_no_fingerprint():
    with pytest.raises(TypeError) as caught:
        jax.jit(keys.fingerprint)(keys.root_key(0))
    assert str(caught.value) == (
        "key must be known to be shown, got a tracer. Take its fingerprint outside jit."
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "threefry2x32:",
        "unsafe_rbg:0-0-0-0",
        "threefry2x32:0",
        "threefry2x32:0-x",
        "threefry2x32:0--1",
        "threefry2x32:0-4294967296",
        "threefry2x32:0-1-2",
    ],
)
def test_what_is_no_fingerprint_is_rejected(text):
    with pytest.raises(ValueError) as caught:
        keys.from_fingerprint(text)
    assert str(caught.value) == (
        f"text must be a fingerprint such as 'threefry2x32:0-42', got {text!r}. Copy it whole."
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_host_generator_is_a_function_of_the_words_of_its_key(implementation):
    key = jax.random.key(7, impl=implementation)
    expected = np.random.Generator(np.random.PCG64(list(words(key)))).random(4)
    assert_trees_bitwise_equal(keys.host_rng(key).random(4), expected)
    other = keys.host_rng(keys.fold_in(key, 0)).random(4)
    assert first_difference(other, expected) is not None


def test_two_host_generators_of_one_key_repeat_each_other_and_share_nothing():
    key = keys.root_key(7)
    first, second = keys.host_rng(key), keys.host_rng(key)
    first.random(100)
    assert_trees_bitwise_equal(second.random(4), keys.host_rng(key).random(4))


def test_the_global_generators_of_python_and_numpy_are_neither_read_nor_written():
    # In a process of its own: the checks of annotations in this one draw from Python's generator.
    run_python(
        """
        import random
        import numpy as np
        import phijax_rng
        from phijax_rng import keys

        def calls():
            streams = keys.split_root(3)
            keys.root_key(None)
            keys.stream(streams.runtime, "own")
            box = phijax_rng.UniformDomainSampler([(0.0, 1.0)])
            pool = phijax_rng.RandomRowSampler({"inputs": np.zeros((9, 1), np.float32)}, replace=False)
            sizes = {"box": 2, "pool": 3}
            source = phijax_rng.NamedBatchSource({"box": box, "pool": pool}, sizes, streams.sampling)
            source.sample(streams.balancer)
            points = np.asarray(source(0)["box"]["inputs"]).tolist()
            return points, keys.host_rng(streams.model).random(4).tolist()

        def states():
            name, words, *rest = np.random.get_state()
            return random.getstate(), (name, words.tolist(), *rest)

        def seeded(seed):
            random.seed(seed), np.random.seed(seed)
            before = states()
            drawn = calls()
            assert states() == before
            return drawn

        assert seeded(1) == seeded(2)
        before = states()
        random.random()
        assert states() != before, "the comparison sees no draw of Python"
        np.random.random()
        assert states()[1] != before[1], "the comparison sees no draw of NumPy"
        """
    )


def test_a_stream_name_that_utf8_cannot_encode_is_rejected():
    message = "names[0] must be text that UTF-8 can encode, got '\\ud800'. Leave out lone surrogates."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        keys.stream(keys.root_key(0), "\ud800")


@pytest.mark.parametrize("implementation", ["threefry2x32", "threefry4x32", "philox4x32", "rbg"])
def test_settled_keys_are_those_keys(implementation):
    own = jax.random.split(jax.random.key(5, impl=implementation), 3)
    settled = jax.jit(keys.settled)(own)
    assert settled.dtype == own.dtype
    np.testing.assert_array_equal(jax.random.key_data(settled), jax.random.key_data(own))
    rows = jax.vmap(lambda key: jax.random.key_data(keys.settled(key)))(own)
    np.testing.assert_array_equal(rows, jax.random.key_data(own))


def test_the_repr_of_streams_shows_fingerprints_and_of_what_is_no_single_key_the_shape():
    streams = keys.split_root(0)
    assert repr(streams) == (
        f"StreamKeys(model={keys.fingerprint(streams.model)}, runtime={keys.fingerprint(streams.runtime)}, "
        f"sampling={keys.fingerprint(streams.sampling)}, balancer={keys.fingerprint(streams.balancer)})"
    )
    many = jax.tree.map(lambda key: key[None], streams)
    assert repr(many).startswith("StreamKeys(model=key<fry>[1], runtime=key<fry>[1]")


def test_the_repr_of_traced_and_of_deleted_streams_does_not_raise():
    shown = []
    jax.jit(lambda streams: shown.append(repr(streams)))(keys.split_root(0))
    assert shown[0].startswith("StreamKeys(model=key<fry>[], ")
    streams = keys.split_root(1)
    streams.model.delete()
    assert repr(streams).startswith("StreamKeys(model=key<fry>[], runtime=threefry2x32:")
