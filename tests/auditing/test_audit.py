"""The audit: planted faults, correct programs, regions that are not seen, and JAX restored afterwards."""

import ast
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend.core.primitives as jep
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import audit, keys
from phijax_rng.auditing.findings import FIXES, NOTES
from phijax_rng.auditing.jax_hooks import names
from phijax_rng.auditing.session import Session
from tests._correct import PROGRAMS
from tests._faulty import FAULTS, marked_lines
from tests._selection import mostly_full
from tests._subprocess import run_python

pytestmark = pytest.mark.draws_twice

KEY = jax.random.key(11)


# Of the package, of every transformation of JAX and of one library.
EVERYDAY = (
    *(
        "our streams",
        "a scan that carries its key",
        "a key for every row and step",
    ),
    *(
        "a cond under vmap",
        "remat",
        "a gradient per loss term",
        "a custom derivative",
    ),
    *("a jacobian forward", "a hessian of a loss that draws", "a scan of no steps"),
)


@pytest.mark.parametrize("name", mostly_full(list(PROGRAMS), everyday=EVERYDAY))
def test_a_correct_program_is_clean(name: str) -> None:
    report = audit(PROGRAMS[name], KEY)
    assert report.clean, str(report)
    assert report.draws or name == "grain augmentation"


@pytest.mark.full
def test_an_audited_program_gives_its_usual_result() -> None:
    for name in (
        "a scan that carries its key",
        "a while loop with a trip count per row",
        "a cond under vmap",
    ):
        expected = jax.tree.leaves(PROGRAMS[name](KEY))
        audited = jax.tree.leaves(audit(PROGRAMS[name], KEY).result)
        for one, other in zip(audited, expected, strict=True):
            if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
                assert keys.fingerprint(one) == keys.fingerprint(other)
            else:
                np.testing.assert_allclose(one, other, rtol=1e-5)


_DEAR = ("one key for many rates", "rows without replacement from a key that stands still")


@pytest.mark.parametrize("name", mostly_full(list(FAULTS), everyday=[n for n in FAULTS if n not in _DEAR]))
def test_a_planted_fault_is_found_at_its_lines(name: str) -> None:
    kind, program = FAULTS[name]
    report = audit(program, KEY)
    found = [finding for finding in report.findings if finding.kind == kind]
    assert found, str(report)
    lines = {line.number for finding in found for line in finding.lines if line.file == __file_of(program)}
    assert marked_lines(program), "the fault is not marked"
    assert marked_lines(program) <= lines, str(report)
    assert report.clean is all(finding.rank == "note" for finding in found), str(report)
    assert report.clean is (kind in NOTES)


def __file_of(program: Callable[..., Any]) -> str:
    return program.__code__.co_filename


HAZARDS = {
    "drawn twice": "one key for two layers",
    "two paths": "a split and a fold",
    "drawn and split": "a draw before the split",
    "restarted": "a resumed run that begins with its seed",
    "broadcast": "a key closed over by vmap",
    "batched rbg": "rows of rbg at once",
    "constant seed": "a seed written into a function",
    "legacy key": "a legacy key",
}
"""The eight ways to ruin a key, each with the program that shows it."""


def seen_by_jax(program: Callable[..., Any]) -> bool:
    with jax.debug_key_reuse(True):
        for run in (program, jax.jit(program)):
            try:
                run(jax.random.key(11))  # a fresh array: JAX marks each as spent
            except jax.errors.KeyReuseError:
                return True
    return False


def test_the_audit_sees_eight_of_eight_hazards(capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = {}, {}
    for hazard, name in HAZARDS.items():
        kind, program = FAULTS[name]
        assert kind == hazard
        theirs[hazard] = seen_by_jax(program)
        ours[hazard] = any(finding.kind == kind for finding in audit(program, KEY).findings)
    with capsys.disabled():
        print(f"\n\nJAX {jax.__version__}    {'jax_debug_key_reuse':<21} audit")
        for hazard in HAZARDS:
            print(f"{hazard:<15}  {_word(theirs[hazard]):<21} {_word(ours[hazard])}")
        print(
            f"{'':<15}  {sum(theirs.values())} of {len(theirs)}{'':<16} {sum(ours.values())} of {len(ours)}"
        )
    assert all(ours.values())
    assert [hazard for hazard, seen in theirs.items() if seen] == ["drawn twice", "drawn and split"]


def _word(seen: bool) -> str:
    return "seen" if seen else "-"


def names_of(report: Any) -> list[str]:
    return [name for draw in report.draws for name in draw.keys]


def test_keys_are_named_by_parameter_path_variable_and_derivation() -> None:
    held = jax.random.key(5)

    def draw(key: jax.Array, state: dict[str, jax.Array]) -> Any:
        row = jax.random.split(state["keys"][1], (2, 3))[1, 2]
        return [
            jax.random.normal(own)
            for own in (key, jax.random.fold_in(held, 7), row, keys.stream(key, "a", "b"), keys.root_key(3))
        ]

    report = audit(draw, KEY, {"keys": jax.random.split(jax.random.key(1), 2)})
    assert names_of(report) == [
        "key",
        "held.fold_in(7)",
        "state['keys'][1].split(2, 3)[1, 2]",
        "key.stream('a', 'b')",
        "root_key(3)",
    ]


def test_names_passed_to_the_audit_win() -> None:
    names = {"root": jax.random.split(KEY, 4)[2], "layers": jax.random.split(jax.random.key(3), 2)}

    def draw(key: jax.Array) -> Any:
        other = jax.random.split(jax.random.key(3), 2)
        return jax.random.normal(jax.random.split(key, 4)[2]), jax.random.normal(other[1])

    assert names_of(audit(draw, KEY, names=names)) == ["root", "layers[1]"]


def test_a_draw_is_recorded_with_shape_dtype_line_and_count() -> None:
    def draw(key: jax.Array) -> Any:
        for _ in range(2):
            jax.random.normal(key, (2, 3), jnp.bfloat16)
        return jax.random.randint(jax.random.fold_in(key, 1), (4,), 0, 9)

    first, second = audit(draw, KEY).draws
    assert (first.primitive, first.shape, first.dtype, first.count) == ("normal", (2, 3), "bfloat16", 2)
    assert (second.primitive, second.shape, second.dtype, second.count) == ("randint", (4,), "int32", 1)
    assert first.place.line.number == draw.__code__.co_firstlineno + 2
    assert first.place.line.file == __file__
    assert second.place.line.function == "draw"


def test_a_draw_from_a_legacy_key_is_recorded_with_its_dtype() -> None:
    def draw(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return jax.random.normal(first), jax.random.uniform(second, (2,), jnp.float16)

    drawn = audit(draw, jax.random.PRNGKey(1)).draws
    assert [(draw.primitive, draw.dtype) for draw in drawn] == [("normal", "float32"), ("uniform", "float16")]


def test_an_import_of_the_package_loads_no_hooks_into_jax() -> None:
    code = """
        import sys
        import phijax_rng
        from phijax_rng.auditing import AuditReport, audit

        loaded = {name for name in sys.modules if name.startswith("phijax_rng.auditing.")}
        assert "phijax_rng.auditing.audit" in loaded  # the control
        hooks = {name for name in loaded if name.split(".")[2] in ("recorder", "session", "jax_hooks")}
        assert hooks == set(), hooks
        assert phijax_rng.audit is audit
        audit(lambda: None)
        assert "phijax_rng.auditing.jax_hooks.patches" in sys.modules
    """
    run_python(code)


def test_the_first_audit_of_a_process_is_clean() -> None:
    code = """
        import jax
        from phijax_rng import audit

        report = audit(lambda: jax.random.normal(jax.random.key(0)))
        assert len(report.draws) == 1 and report.clean, str(report)
    """
    run_python(code)


def test_a_finding_shows_both_derivations_both_lines_and_the_fix() -> None:
    finding, *rest = audit(FAULTS["a split and a fold"][1], KEY).faults
    assert rest == []
    assert [text.split(" at ")[0] for text in finding.derivations] == ["key.split(2)[1]", "key.fold_in(1)"]
    assert [text.split(" at ")[0] for text in finding.uses] == ["normal", "uniform"]
    assert len(set(finding.lines)) == 2
    assert finding.fix == FIXES["two paths"]
    assert str(finding).startswith(
        "fault: one key is reached by two paths and used on both: key.split(2)[1]\n"
    )


@pytest.mark.parametrize("pattern", ["key", "key*", "*", "key.split(2)[1]", "key.split(*)[1]"])
def test_a_fault_can_be_allowed_by_name(pattern: str) -> None:
    report = audit(FAULTS["a split and a fold"][1], KEY, allow=pattern)
    assert report.clean
    assert [finding.allowed for finding in report.notes] == [True]


@pytest.mark.parametrize("pattern", ["other", "ke", "key.split(2)[0]", "key.fold_in"])
def test_another_name_does_not_allow_the_fault(pattern: str) -> None:
    assert not audit(FAULTS["a split and a fold"][1], KEY, allow=(pattern,)).clean


def test_an_executable_compiled_ahead_of_time_is_not_seen_and_not_clean() -> None:
    compiled = jax.jit(jax.random.normal).lower(KEY).compile()
    report = audit(lambda key: [compiled(key)], KEY)
    assert not report.clean
    assert report.faults == ()
    assert [region.what for region in report.unseen] == ["a compiled executable"]
    assert report.unseen[0].place.line.file == __file__


def test_a_raw_generator_is_not_seen_and_not_clean() -> None:
    def draw(key: jax.Array) -> Any:
        return jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (2,))

    report = audit(draw, KEY)
    assert [region.what for region in report.unseen] == ["rng_bit_generator"]
    assert not report.clean


def test_code_that_a_program_compiles_on_purpose_is_not_seen_and_not_clean() -> None:
    def draw(key: jax.Array) -> Any:
        with jax.disable_jit(False):
            return jax.random.normal(key)

    before = jax.disable_jit
    report = audit(draw, KEY)
    assert [region.what for region in report.unseen] == ["jax.disable_jit(False)"]
    assert not report.clean
    assert jax.disable_jit is before


def test_a_function_that_ran_unobserved_before_is_recorded() -> None:
    session = Session(names={"key": KEY})
    noise = jax.jit(lambda key: jax.random.normal(jax.random.fold_in(key, 1)))
    with session.observing():
        with session.unobserved():
            noise(KEY), jax.random.fold_in(KEY, 2)
        noise(KEY), jax.random.normal(jax.random.fold_in(KEY, 2))
    assert names_of(session.report()) == ["key.fold_in(1)", "key.fold_in(2)"]


def test_code_compiled_on_purpose_in_one_audit_is_recorded_in_the_next() -> None:
    noise = jax.jit(lambda key: 2 * jax.random.normal(key))

    def draw(key: jax.Array) -> Any:
        with jax.disable_jit(False):
            return noise(key)

    assert audit(draw, KEY).draws == ()
    assert len(audit(noise, KEY).draws) == 1


def test_a_solve_that_draws_inside_is_seen_or_reported_as_not_seen() -> None:
    def draw(key: jax.Array) -> Any:
        def matvec(x: jax.Array) -> jax.Array:
            return x * (2 + jax.random.uniform(key))

        return jax.lax.custom_linear_solve(
            matvec, jnp.ones(2), lambda mv, b: b / 2 + 0 * mv(b), symmetric=True
        )

    report = audit(draw, KEY)
    assert report.draws or report.unseen


def test_a_shard_map_is_not_seen_and_gives_its_usual_result() -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("rows",))
    spec = jax.sharding.PartitionSpec("rows")

    def shard(x: jax.Array) -> jax.Array:
        return x + jax.random.normal(jax.random.fold_in(KEY, jax.lax.axis_index("rows")), x.shape)

    def draw(x: jax.Array) -> Any:
        return jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    x = jnp.zeros(2 * len(jax.devices()))
    report = audit(draw, x)
    assert not report.clean and report.draws == ()
    assert [region.what for region in report.unseen] == ["shard_map"]
    assert report.unseen[0].place.line.file == __file__
    np.testing.assert_array_equal(report.result, draw(x))


def test_a_thread_that_still_runs_is_not_seen_and_not_clean() -> None:
    done = threading.Event()

    def draw(key: jax.Array) -> threading.Thread:
        worker = threading.Thread(target=lambda: [done.wait(), jax.random.normal(key)], name="worker")
        worker.start()
        return worker

    report = audit(draw, KEY)
    done.set()
    report.result.join()
    assert report.draws == ()
    assert [region.what for region in report.unseen] == ["thread 'worker'"]
    assert not report.clean


@pytest.mark.parametrize("seen", [True, False])
def test_a_global_generator_of_numpy_that_moved_is_a_fault(seen: bool) -> None:
    state = np.random.get_state()
    try:
        report = audit(lambda: [np.random.normal() if seen else np.random.default_rng(3).normal()])
    finally:
        np.random.set_state(state)
    assert [finding.kind for finding in report.faults] == ["no key"] * seen
    if seen:
        assert report.faults[0].text == "the global generator of NumPy gave numbers without a key"
        assert report.faults[0].uses == ("the global generator of NumPy at an unknown line",)


def test_a_global_generator_of_python_that_moved_is_a_note() -> None:
    code = """
        import random, sys
        from phijax_rng import audit

        assert "beartype" not in sys.modules  # it draws from this generator, so nothing would be compared
        assert audit(lambda: None).findings == ()
        (note,) = audit(random.random).findings
        assert (note.kind, note.rank) == ("no key", "note")
        assert note.uses == ("the global generator of Python at an unknown line",)
    """
    run_python(code)


def test_a_key_shared_by_rows_around_a_forward_derivative_is_a_note() -> None:
    def mask(key: jax.Array, w: jax.Array) -> jax.Array:
        return w * jax.random.bernoulli(key, 0.5, (2,))

    def one(key: jax.Array) -> Any:
        return jax.jacfwd(lambda w: mask(key, w))(jnp.ones(2))

    def every_row(key: jax.Array) -> Any:
        return jax.vmap(lambda x: jax.jacfwd(lambda w: mask(key, w * x))(jnp.ones(2)))(jnp.ones((3, 2)))

    for program in (one, every_row):
        report = audit(program, KEY)
        assert report.clean, str(report)
        assert {(note.kind, note.rank) for note in report.notes} == {("broadcast", "note")}


def test_a_branch_not_taken_draws_nothing() -> None:
    def draw(key: jax.Array, taken: jax.Array) -> Any:
        return jax.lax.cond(taken, jax.random.normal, lambda key: 0.0, key)

    assert audit(draw, KEY, jnp.asarray(False)).draws == ()
    assert len(audit(draw, KEY, jnp.asarray(True)).draws) == 1


def test_a_loop_that_starts_over_is_counted_once() -> None:
    def row(stop: jax.Array, key: jax.Array) -> Any:
        # The first condition is known, the second depends on the row: Python's loop gives up in between.
        def body(carry: Any) -> Any:
            count, _, key, total = carry
            key, own = jax.random.split(key)
            return count + 1, stop, key, total + jax.random.normal(own)

        return jax.lax.while_loop(lambda carry: carry[0] < carry[1], body, (0, 5, key, 0.0))[3]

    def rows(keys_: jax.Array) -> Any:
        return jax.vmap(row)(jnp.asarray([1, 2]), keys_)

    report = audit(rows, jax.random.split(KEY, 2))
    assert report.clean, str(report)
    assert sum(draw.count for draw in report.draws) == 3
    np.testing.assert_allclose(report.result, rows(jax.random.split(KEY, 2)), rtol=1e-6)


def test_a_jaxpr_traced_before_the_audit_keeps_its_lines() -> None:
    def draw(key: jax.Array) -> Any:
        return jax.jit(jax.random.normal)(key)

    traced = jax.make_jaxpr(draw)(KEY)
    report = audit(jax.extend.core.jaxpr_as_fun(traced), KEY)
    assert [draw_.place.line.function for draw_ in report.draws] == ["draw"]
    assert report.draws[0].primitive == "normal"


def everything_replaced() -> dict[str, Any]:
    modules: dict[str, Any] = dict(names.private_modules())
    owners: list[Any] = [getattr(jep, name) for name in (*names.PRIMITIVES, *names.CONTROL_FLOW)]
    owners += [modules["core"], modules["core"].EvalTrace, modules["dispatch"], modules["interpreters.ad"]]
    owners += [modules["interpreters.batching"].BatchTrace, modules["random.prng"].random_wrap_p]
    owners += [modules["random.prng"].random_unwrap_p, modules["random.core"].random_clone_p]
    owners += [jax.stages.Compiled, jax, jax.lax]
    return {f"{owner}.{name}": value for owner in owners for name, value in vars(owner).items()}


def test_every_private_name_of_jax_is_in_the_table() -> None:
    used: set[str] = set()
    for path in Path(names.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Subscript(value=ast.Name(id="modules"), slice=ast.Constant(value=str(module))):
                    used.add(module)
                case ast.Import() | ast.ImportFrom():
                    assert "jax._src" not in ast.unparse(node), path
    assert used <= set(names.PRIVATE_NAMES)
    assert "interpreters.ad" in used  # the control
    assert sum(map(len, names.PRIVATE_NAMES.values())) <= 15


def test_jax_is_restored() -> None:
    before, settings = everything_replaced(), jax.config.values.copy()
    audit(PROGRAMS["remat"], KEY)
    assert changed(before, everything_replaced()) == []
    assert jax.config.values == settings


def test_jax_is_restored_after_an_error() -> None:
    before = everything_replaced()

    def fail(key: jax.Array) -> None:
        assert changed(before, everything_replaced()) != []  # the control
        jax.vmap(jax.random.normal)(jax.random.split(key))
        raise OSError("no such thing")

    with pytest.raises(OSError, match="no such thing"):
        audit(fail, KEY)
    assert changed(before, everything_replaced()) == []
    assert not jax.config.jax_disable_jit
    assert audit(PROGRAMS["remat"], KEY).clean


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) is not after.get(name)]


def test_a_second_audit_at_the_same_time_is_refused() -> None:
    message = (
        "an audit already runs in this process, and two would record each other's draws. "
        + "Run one after the other."
    )
    caught: list[BaseException] = []

    def other_thread() -> None:
        try:
            audit(jax.random.normal, KEY)
        except RuntimeError as error:
            caught.append(error)

    def both(key: jax.Array) -> None:
        with pytest.raises(RuntimeError) as nested:
            audit(jax.random.normal, key)
        assert str(nested.value) == message
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()

    audit(both, KEY)
    assert [str(error) for error in caught] == [message]
    assert audit(jax.random.normal, KEY).clean


def test_another_thread_computes_as_usual_during_an_audit() -> None:
    f = jax.jit(lambda key: jax.random.normal(key, (3,)))
    expected = f(KEY)
    answers: list[Any] = []

    def both(key: jax.Array) -> None:
        thread = threading.Thread(target=lambda: answers.extend([f(KEY), jax.config.jax_disable_jit]))
        thread.start()
        thread.join()

    audit(both, KEY)
    assert (answers[0] == expected).all()
    assert answers[1] is False


def test_a_missing_name_of_jax_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {**names.PRIVATE_NAMES, "core": ("eval_jaxpr", "moved_away"), "gone.entirely": ("x",)}
    monkeypatch.setattr(names, "PRIVATE_NAMES", needed)
    with pytest.raises(RuntimeError) as failure:
        audit(jax.random.normal, KEY)
    assert str(failure.value) == (
        f"JAX {jax.__version__} lacks private names that the audit uses: jax._src.core.moved_away, "
        "jax._src.gone.entirely. Use JAX 0.10.2 to 0.12, or a newer phijax_rng; "
        "training works without the audit."
    )
    monkeypatch.undo()
    assert audit(jax.random.normal, KEY).clean


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError) as failure:
        audit(3)  # type: ignore[arg-type]
    assert str(failure.value) == "fn must be callable, got 3. Pass a function."
    with pytest.raises(TypeError) as failure:
        audit(jax.random.normal, KEY, names={"root": 7})
    assert str(failure.value) == (
        "names['root'] must be a typed key or contain one, got 7. "
        "Make keys with keys.root_key or jax.random.key."
    )


def test_a_seed_that_is_an_argument_is_no_constant() -> None:
    assert audit(lambda seed: jax.random.normal(jax.random.key(seed)), 7).findings == ()
    assert audit(lambda seed: jax.random.normal(keys.root_key(seed)), np.int64(7)).findings == ()
    assert [f.kind for f in audit(lambda: jax.random.normal(keys.root_key(7))).findings] == ["constant seed"]


def test_the_finding_of_a_seed_above_32_bits_shows_the_bits_that_jax_uses() -> None:
    texts = [
        finding.text
        for finding in audit(lambda: jax.random.normal(jax.random.key(2**32 + 5))).notes
        if finding.kind == "constant seed"
    ]
    assert texts == ["a key is made from the seed 4294967301 here; JAX uses 32 bits of it, which are 5"]
    fits = audit(lambda: [jax.random.key(seed) for seed in (2**32 - 1, -1, 7)])
    assert not any("32 bits" in finding.text for finding in fits.findings)


def test_a_finding_names_the_line_around_the_line_that_draws() -> None:
    def draw(key: jax.Array) -> Any:
        return jax.random.normal(key)

    def both(key: jax.Array) -> Any:
        first = draw(key)
        return first + draw(key)

    (fault,) = audit(both, KEY).faults
    first = both.__code__.co_firstlineno
    assert [line.number for line in fault.lines if line.function == "both"] == [first + 1, first + 2]
    assert all("called from" in use for use in fault.uses)


def test_a_key_carried_through_many_splits_makes_a_report() -> None:
    def carry(key: jax.Array) -> jax.Array:
        for _ in range(1100):  # more than Python recurses
            key, _ = jax.random.split(key)
        return jax.random.bits(key)

    report = audit(carry, KEY)
    assert report.draws[0].keys[0].startswith("key.split(2)[0].split(2)[0]")
    assert len(report.keys) == 1101
    assert report.html().count("<details open") == 1100
    assert report.svg().count("<circle") == 1101


def test_the_finding_of_rows_drawn_from_one_key_names_it() -> None:
    report = audit(FAULTS["a key repeated for every row"][1], KEY)
    assert [fault.text for fault in report.faults] == [
        "one key, key, gives the same numbers to all 3 rows of a vmap"
    ]

    def two_of_three(key: jax.Array) -> Any:
        return jax.vmap(jax.random.normal)(jnp.stack([key, key, jax.random.fold_in(key, 1)]))

    texts = [fault.text for fault in audit(two_of_three, KEY).faults if fault.kind == "broadcast"]
    assert texts == ["3 rows are drawn from 2 different keys"]


def test_programs_compiled_before_an_audit_are_not_compiled_again_after_it() -> None:
    traced: list[int] = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traced.append(1)
        return x + 1

    f(1.0)
    audit(lambda: [f(1.0), f(2.0)])
    assert len(traced) == 3
    f(1.0)
    assert len(traced) == 3  # neither traced again nor run as Python


def test_a_clone_declares_intended_reuse() -> None:
    report = audit(lambda key: jax.random.normal(key) + jax.random.normal(jax.random.clone(key)), KEY)
    assert report.clean
    assert [finding.kind for finding in report.notes] == ["drawn twice"]


def test_a_wide_split_costs_little() -> None:
    report = audit(lambda key: jax.random.normal(jax.random.split(key, 1_000_000)[123_456]), KEY)
    assert names_of(report) == ["key.split(1000000)[123456]"]
    assert len(report.keys) == 2


def test_the_report_is_plain_data() -> None:
    report = audit(FAULTS["a split and a fold"][1], KEY)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["clean"] is False
    assert data["findings"][0]["kind"] == "two paths"
    assert {node["name"]: node["parent"] for node in data["keys"]} == {"key": None, "key.split(2)[1]": "key"}
    assert data["draws"][0]["keys"] == ["key.split(2)[1]"]


def test_cached_programs_of_jax_are_not_those_of_the_audit() -> None:
    block = jax.checkpoint(lambda x, keys: jnp.sum(x * jax.vmap(jax.random.normal)(keys)))

    def text() -> str:
        def program(key: jax.Array) -> Any:
            def row(key: jax.Array, stop: jax.Array) -> Any:
                body = lambda c: (c[0] + 1, c[1] + jax.random.normal(jax.random.fold_in(key, c[0])))  # noqa: E731
                return jax.lax.while_loop(lambda c: c[0] < stop, body, (0, 0.0))[1]

            rows = jax.vmap(row)(jax.random.split(key, 2), jnp.asarray([1, 2]))
            return rows, jax.grad(block)(jnp.ones(2), jax.random.split(jax.random.fold_in(key, 9), 2))

        audited.append(program)
        return jax.jit(program).lower(KEY).as_text()

    audited: list[Any] = []
    before = text()
    report = audit(audited[0], KEY)
    assert report.clean, str(report)
    assert report.draws
    assert text() == before
