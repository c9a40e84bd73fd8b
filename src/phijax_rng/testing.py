"""Assertions for tests of anything random in JAX: loops, sources, samplers, models.

None of them needs another part of this package; a loop in plain Optax, Flax or Equinox needs no change.
Each raises an `AssertionError` that says what differs and where. Floats are compared bit by bit, unless the
call has a tolerance in ulp.

    assert_resume_exact(make_run, steps=20)      a killed and resumed run ends in the same bits
    assert_step_addressable(source)              a batch depends on its step alone
    assert_vmap_exact(fn, keys)                  every row draws what it would draw alone
    assert_rows_differ(x)                        no two rows are the same
    assert_no_key_reuse(fn, *args)               the audit finds nothing
    assert_global_rng_untouched()                NumPy's and Python's global generators stay as they are

With pytest, the plug-in of this package adds the markers `no_key_reuse` and `global_rng_untouched`.
"""

import contextlib
import functools
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng.auditing.audit import audit
from phijax_rng.auditing.audit_report import AuditReport
from phijax_rng.sampling.adapters import adapt_source

MakeRun = Callable[[str], Callable[[int], Any]]
"""`make_run(directory)` gives a run that keeps its checkpoints there; `run(until)` trains to a step."""


def assert_resume_exact(
    make_run: MakeRun,
    steps: int,
    *,
    cuts: Sequence[int] | None = None,
    directory: str | Path | None = None,
) -> None:
    """A run that is stopped and started again ends in the same bits as one that is not.

    `make_run(directory)` is the start of a job: it makes model, optimizer and data from scratch and restores
    the checkpoint in `directory`, if there is one. The `run(until)` that it returns trains up to that step,
    saves a checkpoint in `directory`, and returns the state, any pytree. It is called once for each job.

    The check uses real files: a stop at every cut; a resume of a resume, through all cuts; and two controls,
    without which the comparison would prove nothing. A job that finds a checkpoint must not start at step 0;
    and a state that was resumed from the previous cut must differ from one resumed from the right cut.

    Args:
        make_run: see above.
        steps: the step at which the run ends; at least 3.
        cuts: where to stop, ascending, in [1, steps); a third and two thirds of the way for `None`.
        directory: where to keep the checkpoints; a temporary directory for `None`.

    Raises:
        AssertionError: with the cut, and the first leaf that differs by its path.
        ValueError: cuts that are out of order or out of range.
    """
    __tracebackhide__ = True
    stops = _checked_cuts(cuts, validation.whole_number(steps, "steps", 2**31, start=3))
    with contextlib.ExitStack() as stack:
        root = Path(directory or stack.enter_context(tempfile.TemporaryDirectory()))
        whole = make_run(_fresh(root / "whole"))(steps)
        states, folders = {}, {}
        for cut in stops:
            folders[cut] = root / f"cut-{cut}"
            states[cut] = make_run(_fresh(folders[cut]))(cut)
            _require_files(folders[cut], cut)
        _require_moving(states, stops)
        _require_resumes(make_run, root, folders, states, stops)
        _require_distinguished(make_run, root, folders, stops, steps=steps, whole=whole)
        for cut in stops:
            resumed = make_run(_copy(folders[cut], root / f"resumed-{cut}"))(steps)
            _require_equal(resumed, whole, f"resumed at step {cut}, at step {steps}")
        again = _copy(folders[stops[0]], root / "again")
        for cut in stops[1:]:
            state = make_run(again)(cut)
            _require_equal(state, states[cut], f"resumed at step {stops[0]}, at step {cut}")
        _require_equal(make_run(again)(steps), whole, f"resumed at steps {_listed(stops)}, at step {steps}")


def assert_step_addressable(source: Callable[[Any], Any], steps: Iterable[int] = (0, 1, 2, 7, 100)) -> None:
    """The batch of a step depends on the step alone: not on the order of calls, nor on earlier calls.

    A source with the attribute `traceable = True` is called inside `jax.jit` as well. Steps must give
    different batches, unless the source has `fixed = True`.

    Args:
        source: `source(step) -> batch`, any pytree of arrays.
        steps: which steps to draw, at least two.

    Raises:
        AssertionError: with the step and the first leaf that differs.
    """
    __tracebackhide__ = True
    chosen = tuple(steps)
    if len(set(chosen)) < 2:
        raise ValueError(f"steps must be at least two different ones, got {chosen!r}. Pass two or more.")
    adapted = adapt_source(source)
    first = {step: _on_host(source(step)) for step in chosen}
    for step in reversed(chosen):
        _require_equal(_on_host(source(step)), first[step], f"step {step} again, after later ones")
    for step in chosen:
        _require_equal(_on_host(source(np.int32(step))), first[step], f"step {step} as np.int32")
    if adapted.traceable:
        traced = jax.jit(functools.partial(source))
        for step in chosen:
            _require_equal(_on_host(traced(step)), first[step], f"step {step} inside jax.jit")
    if adapted.fixed:
        return
    for one, other in itertools.combinations(chosen, 2):
        if first_difference(first[one], first[other]) is None:
            raise AssertionError(
                f"steps {one} and {other} give the same batch. Draw from the step, "
                "or state that it is meant with an attribute fixed = True."
            )


def assert_vmap_exact(fn: Callable[[Any], Any], keys: jax.Array, *, max_ulp: int = 4) -> None:
    """`jax.vmap(fn)(keys)` draws row by row what `fn` draws from each key alone.

    Integers, booleans and keys are compared bit by bit; floats may differ by `max_ulp` units in
    the last place, because XLA rounds differently in loops of different shapes.

    Raises:
        AssertionError: with the row and the first leaf that differs.
    """
    __tracebackhide__ = True
    if not np.shape(keys) or keys.shape[0] < 2:
        raise ValueError(f"keys must be an array of at least two, got shape {np.shape(keys)}. Split one.")
    if len(np.unique(_bits(_on_host(keys)).reshape(keys.shape[0], -1), axis=0)) < 2:
        raise ValueError("keys must be at least two different ones, got one alone. Split it.")
    mapped = _on_host(jax.vmap(fn)(keys))
    for index in range(keys.shape[0]):
        alone = _on_host(fn(keys[index]))
        row = jax.tree.map(lambda leaf, index=index: leaf[index], mapped)
        difference = first_difference(row, alone, max_ulp=max_ulp)
        if difference is not None:
            raise AssertionError(f"row {index} of vmap, against the same key alone: {difference}")


def assert_rows_differ(x: object) -> None:
    """No two rows (along the first axis, in every leaf together) have the same bits.

    Raises:
        AssertionError: with the first two rows that are the same.
    """
    __tracebackhide__ = True
    leaves = [_bits(np.asarray(leaf)) for leaf in jax.tree.leaves(_on_host(x))]
    if not leaves or any(leaf.ndim == 0 or len(leaf) != len(leaves[0]) for leaf in leaves):
        raise AssertionError(f"x must be arrays with one leading axis of rows, got {_shapes(x)}.")
    if len(leaves[0]) < 2:
        raise AssertionError(f"x must have two rows to compare, got {len(leaves[0])}.")
    seen: dict[bytes, int] = {}
    for index in range(len(leaves[0])):
        bits = b"".join(np.ascontiguousarray(leaf[index]).tobytes() for leaf in leaves)
        if bits in seen:
            raise AssertionError(f"rows {seen[bits]} and {index} are the same. Give each row another key.")
        seen[bits] = index


def assert_no_key_reuse(
    fn: Callable[..., Any], *args: Any, names: Mapping[str, Any] | None = None, allow: Iterable[str] = ()
) -> AuditReport:
    """The audit of `fn(*args)` is clean: no fault, and nothing that could not be seen.

    Args:
        fn: any function.
        *args: its arguments.
        names: as in `phijax_rng.audit`.
        allow: names of keys whose findings are meant.

    Returns:
        The report; `report.result` is what `fn` returned.

    Raises:
        AssertionError: with every finding, its lines and the fix.
    """
    __tracebackhide__ = True
    report = audit(fn, *args, names=names, allow=allow)
    if not report.clean:
        raise AssertionError(f"the audit is not clean: {report}")
    return report


@contextlib.contextmanager
def assert_global_rng_untouched() -> Iterator[None]:
    """A `with` block in which nothing reads or seeds the global generators of NumPy and Python.

    Raises:
        AssertionError: naming the generator, at the end of the block.
    """
    __tracebackhide__ = True
    before = _global_states()
    yield
    for name, state in _global_states().items():
        if state != before[name]:
            raise AssertionError(
                f"the global generator of {name} was used. Draw from a key, or from keys.host_rng(key)."
            )


def first_difference(actual: object, expected: object, *, max_ulp: int = 0) -> str | None:
    """A sentence on the first leaf that differs between two pytrees, or `None`.

    Typed keys are compared by implementation and bits, arrays by dtype, shape and bits (NaN payloads and the
    sign of zero count), numbers of Python by type and bits, everything else by type and value.
    """
    ours, theirs = (jax.tree_util.tree_flatten_with_path(tree) for tree in (actual, expected))
    if str(ours[1]) != str(theirs[1]):
        return f"the trees differ: {ours[1]} here, {theirs[1]} there"
    for (path, one), (_, other) in zip(ours[0], theirs[0], strict=True):
        difference = _leaf_difference(one, other, max_ulp)
        if difference is not None:
            return f"{jax.tree_util.keystr(path) or 'the value'}: {difference}"
    return None


def _leaf_difference(actual: object, expected: object, max_ulp: int) -> str | None:
    one, other = _on_host(actual), _on_host(expected)
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        same = type(one) is type(other) and bool(_comparable(one) == _comparable(other))
        return None if same else f"{one!r} here, {other!r} there"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype}{list(one.shape)} here, {other.dtype}{list(other.shape)} there"
    apart = _bits(one) != _bits(other)
    if max_ulp and apart.any() and np.issubdtype(one.dtype, np.floating):
        apart = _ulps(one, other) > max_ulp
    if not apart.any():
        return None
    first = tuple(int(i) for i in np.argwhere(apart)[0])
    return (
        f"{int(apart.sum())} of {apart.size} elements differ; the first at {list(first)}: "
        f"{one[first]!s} here, {other[first]!s} there"
    )


def _comparable(value: object) -> object:
    # `==` knows no sign of zero, and no NaN equals itself.
    return np.asarray(value).tobytes() if isinstance(value, (float, complex)) else value


def _on_host(tree: object) -> Any:
    """The same tree with NumPy arrays, keys as records of their uint32 words."""

    def leaf(value: object) -> object:
        if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(value))
            kind = np.dtype([(str(jax.random.key_impl(value)), data.dtype, data.shape[-1:])])
            return np.ascontiguousarray(data).view(kind).reshape(value.shape)
        return np.asarray(value) if isinstance(value, (jax.Array, np.generic)) else value

    return jax.tree.map(leaf, tree)


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One opaque item for each element, equal where all bits are."""
    size = array.dtype.itemsize
    kind = f"u{size}" if size in (1, 2, 4, 8) else f"V{size}"
    # NumPy makes a row of a scalar here.
    return np.ascontiguousarray(array).view(kind).reshape(np.shape(array))


def _ulps(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many floats are between two; enormous between NaN and a number."""
    sides = []
    for side in (one, other):
        bits = _bits(side).astype(object)  # Python's integers do not overflow
        top = 1 << (8 * side.dtype.itemsize - 1)
        sides.append(np.where(bits >= top, top - bits, bits))
    return np.asarray(np.abs(sides[0] - sides[1]))


def _require_equal(actual: object, expected: object, what: str) -> None:
    __tracebackhide__ = True
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"{what}: {difference}")


def _require_files(folder: Path, cut: int) -> None:
    if not any(path.is_file() for path in folder.rglob("*")):
        raise AssertionError(
            f"run({cut}) left no file in its directory, so there is nothing to resume from. "
            "Save the state before run returns, and wait for the save."
        )


def _require_moving(states: Mapping[int, object], stops: tuple[int, ...]) -> None:
    early, late = stops[0], stops[-1]
    if first_difference(states[early], states[late]) is None:
        raise AssertionError(
            f"run({early}) and run({late}) returned the same, {validation.formatted(states[late])}. "
            "Return everything that training changes from run."
        )


def _require_resumes(
    make_run: MakeRun,
    root: Path,
    folders: Mapping[int, Path],
    states: Mapping[int, object],
    stops: tuple[int, ...],
) -> None:
    """A job that finds the checkpoint of the last cut must not train to an earlier one again."""
    early, late = stops[0], stops[-1]
    probe = _copy(folders[late], root / "probe")
    try:
        state = make_run(probe)(early)
    except Exception:  # an error on the way back shows that the job has seen the checkpoint
        return
    if first_difference(state, states[early]) is None:
        raise AssertionError(
            f"a job that finds the checkpoint of step {late} and runs to step {early} returned the "
            f"state of step {early}: it started again at step 0. Restore the checkpoint in make_run."
        )


def _require_distinguished(
    make_run: MakeRun,
    root: Path,
    folders: Mapping[int, Path],
    stops: tuple[int, ...],
    *,
    steps: int,
    whole: object,
) -> None:
    """The control: as many updates as the right resume makes, from the cut before, give another state."""
    early, late = stops[0], stops[-1]
    wrong = make_run(_copy(folders[early], root / "control"))(steps - (late - early))
    if first_difference(wrong, whole) is None:
        raise AssertionError(
            f"the control was not caught: resumed from step {early} in place of {late}, the run ends in the "
            "same state. Return everything that training changes from run."
        )


def _checked_cuts(cuts: Sequence[int] | None, steps: int) -> tuple[int, ...]:
    if cuts is None:
        return (steps // 3, max(2 * steps // 3, steps // 3 + 1))
    stops = tuple(validation.whole_number(cut, f"cuts[{i}]", steps, start=1) for i, cut in enumerate(cuts))
    if len(stops) < 2 or list(stops) != sorted(set(stops)):
        raise ValueError(
            f"cuts must be at least two different steps in ascending order, got {tuple(cuts)!r}. "
            "The control resumes from an earlier cut."
        )
    return stops


def _fresh(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(folder)


def _copy(folder: Path, to: Path) -> str:
    shutil.copytree(folder, to)
    return str(to)


def _listed(stops: tuple[int, ...]) -> str:
    return " and ".join(map(str, stops))


def _shapes(x: object) -> str:
    return ", ".join(str(np.shape(leaf)) for leaf in jax.tree.leaves(x)) or "nothing"


def _global_states() -> dict[str, Any]:
    kind, words, *rest = np.random.get_state()
    return {"NumPy": (kind, np.asarray(words).tobytes(), *rest), "Python": random.getstate()}
