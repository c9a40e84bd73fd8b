"""The checks at the door: what each lets in, in which form, and the whole sentence it refuses with."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng._base import validation
from tests._subprocess import ROOT, run_python

MEND = "Pass an int or a NumPy integer."


@pytest.mark.parametrize(
    "value",
    [3, np.int8(3), np.uint64(3), jnp.int32(3), jnp.uint8(3), np.array(3)],
    ids=["int", "int8", "uint64", "jax int32", "jax uint8", "array of shape ()"],
)
def test_whole_numbers_of_python_numpy_and_jax_become_a_python_int(value):
    assert validation.is_whole(value)
    number = validation.whole_number(value, "count", 10)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "True"),
        (np.True_, "np.True_"),
        (jnp.bool_(True), "bool[]"),
        (3.0, "3.0"),
        (np.float32(3), "np.float32(3.0)"),
        (jnp.float32(3), "float32[]"),
        ("3", "'3'"),
        (None, "None"),
        ([3], "[3]"),
        (np.array([3]), "int64[1]"),
    ],
)
def test_what_is_not_a_whole_number_is_rejected_by_name(value, shown):
    assert not validation.is_whole(value)
    with pytest.raises(TypeError) as caught:
        validation.whole_number(value, "count", 10)
    assert str(caught.value) == f"count must be a whole number, got {shown}. {MEND}"


@pytest.mark.parametrize(
    ("value", "start", "stop", "message"),
    [
        (-1, 0, 10, "count must be in [0, 10), got -1. Pick a number inside the range."),
        (10, 0, 10, "count must be in [0, 10), got 10. Pick a number inside the range."),
        (0, 1, 10, "count must be in [1, 10), got 0. Pick a number inside the range."),
        (2**31, 0, 2**31, "count must be in [0, 2**31), got 2147483648. Pick a number inside the range."),
        (65535, 0, 65535, "count must be in [0, 65535), got 65535. Pick a number inside the range."),
        # JAX would cut the upper word off.
        (
            np.int64(2**32 + 5),
            0,
            2**32,
            "count must be in [0, 2**32), got 4294967301. Pick a number inside the range.",
        ),
    ],
)
def test_a_whole_number_out_of_range_is_rejected_with_the_range(value, start, stop, message):
    with pytest.raises(ValueError) as caught:
        validation.whole_number(value, "count", stop, start=start)
    assert str(caught.value) == message


def test_the_ends_of_the_range_are_inside_and_outside():
    assert validation.whole_number(1, "count", 2**16, start=1) == 1
    assert validation.whole_number(2**16 - 1, "count", 2**16, start=1) == 2**16 - 1


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1, np.int64(7)])
def test_steps_up_to_the_last_int32_are_steps(step):
    assert validation.step_number(step) == int(step)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (True, TypeError, "step must be a whole number, got True."),
        (1.5, TypeError, "step must be a whole number, got 1.5."),
        (-1, ValueError, "step must be in [0, 2**31), got -1."),
        (2**31, ValueError, "step must be in [0, 2**31), got 2147483648."),
    ],
)
def test_what_is_no_step_is_rejected_with_what_a_step_is(step, error, message):
    with pytest.raises(error) as caught:
        validation.step_number(step)
    assert str(caught.value) == f"{message} A step counts completed optimizer updates."


def test_a_count_of_one_is_positive_and_zero_is_not():
    assert validation.positive(np.int32(1), "max_steps") == 1
    with pytest.raises(ValueError) as caught:
        validation.positive(0, "max_steps")
    assert str(caught.value) == "max_steps must be in [1, 2**31), got 0. Pick a number inside the range."


@pytest.mark.parametrize(
    ("size", "held"), [(1, 1), (np.int64(64), 64), ("all", "all"), (np.str_("all"), "all")]
)
def test_sizes_are_positive_ints_or_the_word_all(size, held):
    checked = validation.batch_size(size, "size")
    assert checked == held
    assert type(checked) is type(held)


@pytest.mark.parametrize(
    ("size", "error", "shown"),
    [
        (0, ValueError, "0"),
        (-3, ValueError, "-3"),
        ("ALL", ValueError, "'ALL'"),
        (True, TypeError, "True"),
        (2.0, TypeError, "2.0"),
        (None, TypeError, "None"),
    ],
)
def test_what_is_no_size_is_rejected_with_what_a_size_is(size, error, shown):
    with pytest.raises(error) as caught:
        validation.batch_size(size, "batch_sizes['pde']")
    assert str(caught.value) == (
        f"batch_sizes['pde'] must be a positive int or 'all', got {shown}. "
        "Use 'all' to take every row of the pool."
    )


def test_a_size_beyond_int32_is_rejected():
    with pytest.raises(ValueError) as caught:
        validation.batch_size(2**31, "size")
    assert str(caught.value) == "size must be in [1, 2**31), got 2147483648. Pick a number inside the range."


def test_a_choice_is_taken_by_value_and_type():
    choices = (False, True, "auto")
    assert validation.one_of("auto", "resume", choices) == "auto"
    assert validation.one_of(True, "resume", choices) is True
    for other in (1, 0, np.array([1, 2]), "AUTO", None):
        with pytest.raises(ValueError) as caught:
            validation.one_of(other, "resume", choices)
        assert str(caught.value) == (
            f"resume must be one of False, True, 'auto', got {validation.formatted(other)}. Pick one of them."
        )


def test_flags_are_bools_only():
    assert validation.flag(np.True_, "replace") is True
    for other in (1, 0, "yes", None):
        with pytest.raises(TypeError) as caught:
            validation.flag(other, "replace")
        assert str(caught.value) == f"replace must be True or False, got {other!r}. Pass a bool."


def test_names_become_a_tuple_in_their_order():
    assert validation.names(["pde", "bc"], "names") == ("pde", "bc")
    assert validation.names((name for name in ("pde", "bc")), "names") == ("pde", "bc")
    with pytest.raises(TypeError, match=r"^names must be a sequence of names, got the mapping "):
        validation.names({"pde": 1, "bc": 2}, "names")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ("pde", TypeError, "names must be a sequence of names, got 'pde'. Pass a tuple of strings."),
        (3, TypeError, "names must be a sequence of names, got 3. Pass a tuple of strings."),
        (b"pde", TypeError, "names must be a sequence of names, got b'pde'. Pass a tuple of strings."),
        (
            np.float32(1),
            TypeError,
            "names must be a sequence of names, got np.float32(1.0). Pass a tuple of strings.",
        ),
        ({"a"}, TypeError, "names must be in an order, got the set {'a'}. Pass a tuple of strings."),
        (
            frozenset("a"),
            TypeError,
            "names must be in an order, got the set frozenset({'a'}). Pass a tuple of strings.",
        ),
        (("pde", 3), TypeError, "names[1] must be a non-empty string, got 3. Name it."),
        (("",), TypeError, "names[0] must be a non-empty string, got ''. Name it."),
        ((), ValueError, "names must name at least one entry, got (). Add a name."),
        (
            ("a", "b", "a"),
            ValueError,
            "names must not repeat a name, got ('a', 'b', 'a'). Drop the repeated one.",
        ),
    ],
    ids=[
        "one string",
        "a number",
        "bytes",
        "an array",
        "a set",
        "a frozen set",
        "a number inside",
        "an empty name",
        "none",
        "a repeated one",
    ],
)
def test_what_is_no_list_of_names_is_rejected(values, error, message):
    with pytest.raises(error) as caught:
        validation.names(values, "names")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1], TypeError, "pools must be a mapping, got [1]. Pass a dict keyed by name."),
        ({1: 2}, TypeError, "pools[0] must be a non-empty string, got 1. Name it."),
        ({}, ValueError, "pools must name at least one entry, got (). Add a name."),
    ],
    ids=["a list", "a number as key", "empty"],
)
def test_what_is_no_mapping_by_name_is_rejected(value, error, message):
    with pytest.raises(error) as caught:
        validation.mapping(value, "pools")
    assert str(caught.value) == message


def test_any_mapping_by_name_is_handed_back_as_it_is():
    view = types.MappingProxyType({"pde": 1})
    assert validation.mapping(view, "pools") is view


def test_what_cannot_be_called_is_rejected():
    assert validation.function(len, "losses") is len
    with pytest.raises(TypeError) as caught:
        validation.function(3, "losses")
    assert str(caught.value) == "losses must be callable, got 3. Pass a function."


def test_lists_in_messages_are_quoted_and_an_empty_one_is_called_nothing():
    assert validation.shown(["a", "b"]) == "'a', 'b'"
    assert validation.shown({}) == "nothing"


@pytest.mark.parametrize(
    ("value", "shape", "error", "message"),
    [
        ("a", (), TypeError, "center must be one number, got 'a'. Pass floats."),
        ([1, 2], (), ValueError, "center must be one number, got shape (2,). Pass that shape."),
        ([], (None,), ValueError, "center must be numbers of shape (n,), got shape (0,). Pass that shape."),
        ([1], (2,), ValueError, "center must be numbers of shape (2,), got shape (1,). Pass that shape."),
        ([1e39], (None,), ValueError, "center must be finite in float32, got [1e+39]. Pass finite numbers."),
    ],
)
def test_what_is_no_array_of_finite_numbers_is_rejected(value, shape, error, message):
    with pytest.raises(error) as caught:
        validation.finite_array(value, "center", shape)
    assert str(caught.value) == message


def test_finite_numbers_become_a_read_only_array_of_their_own():
    given = np.array([1.0, 2.0])
    held = validation.finite_array(given, "center", (None,))
    given[0] = 5
    assert held.tolist() == [1, 2] and held.dtype == np.float32
    assert not held.flags.writeable


@pytest.mark.parametrize("value", [1, np.int32(1)])
def test_a_number_of_points_is_a_size_that_is_not_all(value):
    assert validation.num_points(value, "size") == 1
    with pytest.raises(ValueError) as caught:
        validation.num_points("all", "size")
    assert str(caught.value) == (
        "size='all' needs a finite pool; a continuous domain has none. Pass a positive int."
    )


def test_the_checks_do_without_jax():
    run_python(
        """
        import runpy, sys
        checks = runpy.run_path(sys.argv[1])
        assert checks["whole_number"](3, "step", 10) == 3
        assert "jax" not in sys.modules
        """,
        ROOT / "src" / "phijax_rng" / "_base" / "validation.py",
    )


@pytest.mark.parametrize(
    ("check", "value", "error", "message"),
    [
        (validation.finite_number, True, TypeError, "eps must be a number, got True. Pass a float."),
        (validation.finite_number, "1", TypeError, "eps must be a number, got '1'. Pass a float."),
        (validation.finite_number, np.nan, ValueError, "eps must be finite, got nan. Pick a finite number."),
        (
            validation.at_least_zero,
            -1,
            ValueError,
            "eps must be finite and not negative, got -1. Pick a number of at least 0.",
        ),
        (
            validation.above_zero,
            np.inf,
            ValueError,
            "eps must be positive and finite, got inf. Pick a number above 0.",
        ),
    ],
)
def test_what_is_no_such_number_is_rejected(check, value, error, message):
    with pytest.raises(error) as caught:
        check(value, "eps")
    assert str(caught.value) == message


def test_numbers_come_back_as_floats():
    assert [validation.finite_number(v, "eps") for v in (-2, np.float32(0.5), np.int64(3))] == [
        -2.0,
        0.5,
        3.0,
    ]
    assert (validation.at_least_zero(0, "eps"), validation.above_zero(1, "eps")) == (0.0, 1.0)


def test_a_function_with_other_parameters_is_rejected():
    def own(state, *, rate=0.5):
        return state

    assert validation.takes(own, "own", "state") is own
    assert validation.takes(max, "max", "losses", "state") is max  # compiled code need not tell
    with pytest.raises(TypeError) as caught:
        validation.takes(own, "own", "losses", "state")
    assert str(caught.value) == (
        "own must take (losses, state), got (state, *, rate=0.5). Fix its parameters."
    )


def test_a_class_in_place_of_an_object_is_rejected():
    assert validation.instance(3, "balancer") == 3
    with pytest.raises(TypeError) as caught:
        validation.instance(int, "balancer")
    assert str(caught.value) == "balancer must be an object, got the class int. Call it: int(...)."


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    validation.writable(tmp_path / "new" / "newer")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as caught:
        validation.writable(tmp_path / "file" / "new")
    assert str(caught.value) == (
        f"{tmp_path / 'file'} is not a directory, so nothing can be written below it. Name another."
    )
    monkeypatch.setattr("os.access", lambda path, mode: False)  # to root, everything is writable
    with pytest.raises(PermissionError) as caught:
        validation.writable(tmp_path / "new")
    assert str(caught.value) == (
        f"{tmp_path} may not be written to. Name another place, or fix its permissions."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("a", "'a'"),
        (np.zeros((2, 3), np.float32), "float32[2, 3]"),
        (np.float32(1), "float32[]"),
        (jnp.ones(3), "float32[3]"),
        (jax.random.key(0), "key<fry>[]"),
        ((np.zeros(1), {"w": [None]}), "(float64[1], {'w': [None]})"),
        ((1,), "(1,)"),
        (int, "the class int"),
        ({1}, "a set"),
    ],
    ids=lambda value: "",
)
def test_messages_describe_arrays_without_their_numbers(value, text):
    assert validation.described(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    {
        "a number": (0.5, "0.5"),
        "text": ("all", "'all'"),
        "an array": (np.full((2, 3), 0.25, np.float32), "float32[2, 3]"),
        "an array without axes": (np.array(7), "int64[]"),
        "a NumPy number": (np.float32(0.5), repr(np.float32(0.5))),
        "arrays in a dict": ({"w": np.zeros(4), "n": 3}, "{'w': float64[4], 'n': 3}"),
        "arrays in a list and a tuple": ([(np.zeros(1),), 2], "[(float64[1],), 2]"),
        "an object with arrays in its repr": (types.SimpleNamespace(w=np.zeros(2)), "SimpleNamespace(...)"),
        "a long list": (list(range(100)), f"{str(list(range(100)))[:117]}..."),
        "a class": (np.ndarray, "<class 'numpy.ndarray'>"),
    }.values(),
)
def test_a_message_shows_dtype_and_shape_of_arrays_and_little_of_what_is_long(value, text):
    assert validation.formatted(value) == text
