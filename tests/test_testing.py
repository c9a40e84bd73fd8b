"""The testing kit: each assertion holds for what is right, and fails for what is wrong in the way it says."""

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import Checkpoints, Trainer, testing
from tests._problems import dropout
from tests._subprocess import ROOT, child_environment

pytestmark = pytest.mark.draws_twice

Run = Callable[[int], Any]


def honest(directory: str, *, break_at: str = "") -> Run:
    """A loop of NumPy: weights, a momentum and a step, saved in one file."""
    file = Path(directory) / "state.npz"
    state = {"w": np.ones(3, np.float32), "m": np.zeros(3, np.float32), "step": np.int32(0)}
    if file.exists() and break_at != "restore":
        state = dict(np.load(file))
        if break_at == "momentum":
            state["m"] = np.zeros(3, np.float32)
        if break_at == "step":
            state["step"] = state["step"] - np.int32(1)

    def run(until: int) -> Any:
        while state["step"] < until:
            key = jax.random.fold_in(jax.random.key(3), int(state["step"]))
            noise = np.asarray(jax.random.bits(key, (3,), np.uint8)).astype(np.float32) / 256
            state["m"] = np.float32(0.5) * state["m"] + noise
            state["w"] = state["w"] - np.float32(0.25) * state["m"]
            state["step"] = state["step"] + np.int32(1)
        if break_at != "save":
            np.savez(file, **state)
        if break_at == "state":
            return {"name": "constant"}
        return dict(state)

    return run


def broken(where: str) -> Callable[[str], Run]:
    return lambda directory: honest(directory, break_at=where)


@pytest.mark.parametrize("cuts", [None, (1, 2), (2, 5, 8)])
def test_an_exact_loop_passes(cuts: Any) -> None:
    testing.assert_resume_exact(honest, 9, cuts=cuts)


@pytest.mark.full
def test_the_trainer_passes(tmp_path: Path) -> None:
    problem = dropout()

    def make_run(directory: str) -> Run:
        def run(until: int) -> Any:
            trainer = Trainer(until, checkpoints=Checkpoints(directory), progress=False)
            return trainer.fit(problem.module, **problem.arguments, seed=0, resume="auto").state

        return run

    testing.assert_resume_exact(make_run, 6, directory=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"whole", "cut-2", "resumed-4", "again"}


BROKEN = {
    "momentum": "resumed at step 3, at step 9: ['m']: 3 of 3 elements differ; the first at [0]: ",
    "step": "resumed at step 3, at step 9: ['m']: 3 of 3 elements differ; the first at [0]: ",
    "restore": (
        "a job that finds the checkpoint of step 6 and runs to step 3 returned the state of step 3: it "
        "started again at step 0. Restore the checkpoint in make_run."
    ),
    "save": (
        "run(3) left no file in its directory, so there is nothing to resume from. "
        "Save the state before run returns, and wait for the save."
    ),
    "state": (
        "run(3) and run(6) returned the same, {'name': 'constant'}. "
        "Return everything that training changes from run."
    ),
}


@pytest.mark.parametrize("where", BROKEN)
def test_a_loop_that_forgets_something_fails(where: str) -> None:
    with pytest.raises(AssertionError) as failure:
        testing.assert_resume_exact(broken(where), 9)
    assert str(failure.value).startswith(BROKEN[where])


def test_a_state_that_hides_what_training_changes_fails_by_the_control() -> None:
    def make_run(directory: str) -> Run:
        inner = honest(directory)

        def run(until: int) -> Any:
            state = inner(until)
            if until < int(state["step"]):
                raise ValueError("cannot go back")
            return {"late": until > 3}

        return run

    with pytest.raises(AssertionError) as failure:
        testing.assert_resume_exact(make_run, 9)
    assert str(failure.value) == (
        "the control was not caught: resumed from step 3 in place of 6, the run ends in the "
        "same state. Return everything that training changes from run."
    )


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ((3,), "cuts must be at least two different steps in ascending order, got (3,). "),
        ((5, 2), "cuts must be at least two different steps in ascending order, got (5, 2). "),
        ((3, 9), "cuts[1] must be in [1, 9), got 9. Pick a number inside the range."),
    ],
)
def test_cuts_are_checked(cuts: Any, message: str) -> None:
    with pytest.raises(ValueError) as failure:
        testing.assert_resume_exact(honest, 9, cuts=cuts)
    assert str(failure.value).startswith(message)


def addressable(step: Any) -> Any:
    return {"x": jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (2,))}


def test_a_source_that_follows_the_step_passes() -> None:
    testing.assert_step_addressable(addressable)
    testing.assert_step_addressable(dropout().source(), steps=(0, 5, 9))


class Counting:
    """A source that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: Any) -> Any:
        self.calls += 1
        return {"x": np.float32(step + self.calls)}


class Frozen:
    traceable = True
    rng = np.random.default_rng(0)

    def __call__(self, step: Any) -> Any:
        return {"x": step * 2 if isinstance(step, jax.core.Tracer) else np.int32(step) * 3}


class Fixed:
    fixed = True

    def __call__(self, step: Any) -> Any:
        return np.ones(2)


def test_a_fixed_source_that_says_so_passes() -> None:
    testing.assert_step_addressable(Fixed())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Counting(), "step 100 again, after later ones: ['x']: 1 of 1 elements differ"),
        (lambda step: np.ones(2), "steps 0 and 1 give the same batch. Draw from the step, or state that"),
        (lambda step: np.ones(2) * (step if type(step) is int else 0), "step 1 as np.int32: "),
        (Frozen(), "step 1 inside jax.jit: ['x']: 1 of 1 elements differ"),
    ],
    ids=["counts its calls", "fixed", "reads the type", "differs when traced"],
)
def test_a_source_that_follows_something_else_fails(source: Any, message: str) -> None:
    with pytest.raises(AssertionError) as failure:
        testing.assert_step_addressable(source)
    assert str(failure.value).startswith(message)


def test_vmap_over_threefry_is_exact_and_over_rbg_is_not() -> None:
    def draw(key: jax.Array) -> Any:
        return {"key": jax.random.fold_in(key, 1), "n": jax.random.normal(key, (3,))}

    testing.assert_vmap_exact(draw, jax.random.split(jax.random.key(0), 4))
    with pytest.raises(AssertionError, match=r"^row 1 of vmap, against the same key alone: \['n'\]: 3 of 3"):
        testing.assert_vmap_exact(draw, jax.random.split(jax.random.key(0, impl="rbg"), 4))


def test_vmap_may_round_floats_and_nothing_else() -> None:
    offsets = {"float": np.float32, "int": np.int32}

    def near(by: int, dtype: Any) -> Callable[[Any], Any]:
        def fn(key: jax.Array) -> Any:
            one = np.asarray(1, dtype).view(np.uint32)
            batched = isinstance(key, jax.core.Tracer)
            return jnp.asarray((one + np.uint32(by if batched else 0)).view(dtype)) + 0 * key[0].astype(dtype)

        return fn

    rows = jnp.array([[0.0], [1.0]])
    testing.assert_vmap_exact(near(4, np.float32), rows)
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        testing.assert_vmap_exact(near(5, np.float32), rows)
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        testing.assert_vmap_exact(near(1, np.int32), rows)
    assert offsets


def test_rows_that_differ_and_rows_that_do_not() -> None:
    testing.assert_rows_differ({"x": jnp.asarray([[1.0, 2.0], [1.0, 3.0]]), "y": jnp.asarray([0, 0])})
    testing.assert_rows_differ(jax.random.split(jax.random.key(0), 5))
    testing.assert_rows_differ(np.asarray([0.0, -0.0]))
    with pytest.raises(AssertionError) as failure:
        testing.assert_rows_differ(jnp.asarray([[1, 2], [3, 4], [1, 2]]))
    assert str(failure.value) == "rows 0 and 2 are the same. Give each row another key."
    with pytest.raises(AssertionError, match="x must have two rows to compare, got 1"):
        testing.assert_rows_differ(jnp.ones((1, 2)))
    with pytest.raises(AssertionError, match=r"one leading axis of rows, got \(\)"):
        testing.assert_rows_differ(jnp.ones(()))


def test_key_reuse_fails_with_the_report() -> None:
    def twice(key: jax.Array) -> Any:
        return jax.random.normal(key) + jax.random.uniform(key)

    report = testing.assert_no_key_reuse(jax.random.normal, jax.random.key(0))
    assert report.result == jax.random.normal(jax.random.key(0))
    with pytest.raises(AssertionError) as failure:
        testing.assert_no_key_reuse(twice, jax.random.key(0))
    assert "the audit is not clean: 2 draws, from 1 key, 1 fault, 0 notes" in str(failure.value)
    assert "fault: key is drawn from twice" in str(failure.value)
    testing.assert_no_key_reuse(twice, jax.random.key(0), allow="key")


def test_global_generators_are_watched() -> None:
    with testing.assert_global_rng_untouched():
        np.random.default_rng(0).normal()
        random.Random(0).random()
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        numpy_used = pytest.raises(AssertionError, match=r"^the global generator of NumPy was used\. Draw")
        with numpy_used, testing.assert_global_rng_untouched():
            np.random.rand()
        python_used = pytest.raises(AssertionError, match=r"^the global generator of Python was used")
        with python_used, testing.assert_global_rng_untouched():
            random.random()
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1}, {"a": 1.0}, "['a']: 1 here, 1.0 there"),
        (np.float32([0.0]), np.float32([-0.0]), "the value: 1 of 1 elements differ; the first at [0]: 0.0"),
        (np.ones(2), np.ones(3), "the value: float64[2] here, float64[3] there"),
        ([1], (1,), "the trees differ: "),
        (jax.random.key(0), jax.random.key(0), None),
        (jax.random.key(0), jax.random.key(1), "the value: 1 of 1 elements differ"),
        (np.complex64([1]), np.complex64([2]), "the value: 1 of 1 elements differ"),
        (np.complex128([1]), np.complex128([1]), None),
    ],
)
def test_the_first_difference_is_named(one: Any, other: Any, difference: str | None) -> None:
    found = testing.first_difference(one, other)
    assert found == difference if difference is None else found is not None and found.startswith(difference)


TESTS = """
    import jax, numpy as np, pytest

    KEY = jax.random.key(0)

    @pytest.mark.no_key_reuse
    def test_clean():
        jax.random.normal(KEY)

    @pytest.mark.no_key_reuse
    def test_reuse():
        jax.random.normal(KEY), jax.random.uniform(KEY)

    @pytest.mark.no_key_reuse(allow="*")
    def test_reuse_that_is_meant():
        jax.random.normal(KEY), jax.random.uniform(KEY)

    @pytest.mark.no_key_reuse
    def test_error():
        raise ValueError("mine")

    @pytest.mark.global_rng_untouched
    def test_global():
        np.random.rand()

    def test_not_marked():
        np.random.rand()

    def test_resume(resume_exact):
        def make_run(directory):
            def run(until):
                (open(directory + "/x", "w")).close()
                return until
            return run
        with pytest.raises(AssertionError, match="started again at step 0"):
            resume_exact(make_run, 6)
"""


def run_pytest(folder: Path, *options: str) -> str:
    (folder / "test_them.py").write_text(textwrap.dedent(TESTS), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "pytest_phijax_rng", "-q", "--strict-markers", "-rA"]
    environment = child_environment({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    run = subprocess.run(
        [*command, *options, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout + run.stderr


def test_the_plug_in_holds_tests_to_their_markers(tmp_path: Path) -> None:
    out = run_pytest(tmp_path)
    passed = {line.split("::")[1] for line in out.splitlines() if line.startswith("PASSED")}
    assert passed == {"test_clean", "test_reuse_that_is_meant", "test_not_marked", "test_resume"}, out
    assert "key threefry2x32:0-0" in out or "threefry2x32:0-0 is drawn from twice" in out
    assert "ValueError: mine" in out
    assert "the global generator of NumPy was used" in out


def test_the_option_holds_every_test_to_it(tmp_path: Path) -> None:
    out = run_pytest(tmp_path, "--global-rng-untouched", "-k", "not_marked or clean")
    assert "FAILED test_them.py::test_not_marked" in out, out
    assert "1 failed, 1 passed" in out


def test_the_plug_in_imports_nothing_before_a_test_asks() -> None:
    code = (
        "import sys, pytest_phijax_rng\n"
        "print([name for name in ('jax', 'numpy', 'phijax_rng') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_a_run_that_returns_nothing_is_told_so(tmp_path):
    def make_run(directory):
        def run(until):
            Path(directory, "state").write_text(str(until))

        return run

    with pytest.raises(AssertionError) as caught:
        testing.assert_resume_exact(make_run, steps=6)
    assert str(caught.value) == (
        "run(2) and run(4) returned the same, None. Return everything that training changes from run."
    )


@pytest.mark.parametrize("count", [1, 3])
def test_keys_that_could_not_differ_are_refused(count):
    one = jax.random.split(jax.random.key(0), 1)
    with pytest.raises(ValueError, match=r"^keys must be "):
        testing.assert_vmap_exact(jax.random.normal, jnp.repeat(one, count))


def test_numbers_have_no_rows():
    with pytest.raises(AssertionError, match=r"^x must be arrays with one leading axis of rows, "):
        testing.assert_rows_differ(3.0)
