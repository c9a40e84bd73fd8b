import re
import unittest.mock

import pytest

from phijax_rng import determinism
from phijax_rng.determinism import (
    DETERMINISTIC_GPU_FLAGS,
    deterministic_xla_flags,
    require_deterministic_execution,
)
from tests._subprocess import run_python

OPS, LEVEL = DETERMINISTIC_GPU_FLAGS
BOTH = f"{OPS} {LEVEL}"
REMEDY = """Start the program with
    XLA_FLAGS='{0}' python ...
or set it in Python before the first array is made:
    import os
    os.environ["XLA_FLAGS"] = '{0}'"""


@pytest.fixture
def before_the_backend(monkeypatch):
    """As if JAX had not started here, with these flags in the environment."""
    monkeypatch.setattr(determinism, "_backend_has_started", lambda: False)
    return lambda flags: monkeypatch.setenv("XLA_FLAGS", flags)


@pytest.mark.parametrize(
    ("existing", "merged"),
    [
        ("", BOTH),
        ("  \n", BOTH),
        (BOTH, BOTH),
        (LEVEL, f"{LEVEL} {OPS}"),
        ("--xla_dump_to=/tmp/x", f"--xla_dump_to=/tmp/x {BOTH}"),
        ("--xla_dump_to='/tmp/a b'", f"--xla_dump_to='/tmp/a b' {BOTH}"),
        (
            f'--xla_dump_to="/tmp/\\"{LEVEL}\\""\n--xla_dump_hlo_as_text',
            f'--xla_dump_to="/tmp/\\"{LEVEL}\\""\n--xla_dump_hlo_as_text {BOTH}',
        ),
        (f"--xla_gpu_autotune_level=4 {LEVEL}", f"--xla_gpu_autotune_level=4 {LEVEL} {OPS}"),
        (
            "--xla_gpu_exclude_nondeterministic_ops",
            f"--xla_gpu_exclude_nondeterministic_ops {LEVEL}",
        ),
        (
            "--xla_gpu_exclude_nondeterministic_ops_2=false",
            f"--xla_gpu_exclude_nondeterministic_ops_2=false {BOTH}",
        ),
    ],
)
def test_existing_flags_are_retained_and_missing_ones_added(existing, merged):
    assert deterministic_xla_flags(existing) == merged
    assert deterministic_xla_flags(merged) == merged


def test_the_environment_is_read_and_never_written(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    assert deterministic_xla_flags() == f"--xla_dump_to=/tmp/x {BOTH}"
    assert determinism.os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/x"
    monkeypatch.delenv("XLA_FLAGS")
    assert deterministic_xla_flags() == BOTH
    assert "XLA_FLAGS" not in determinism.os.environ


@pytest.mark.parametrize(
    ("existing", "found", "needed"),
    [
        ("--xla_gpu_autotune_level=4", "--xla_gpu_autotune_level=4", LEVEL),
        (f"{BOTH} --xla_gpu_autotune_level='4'", "--xla_gpu_autotune_level=4", LEVEL),
        (
            "--xla_gpu_exclude_nondeterministic_ops=False",
            "--xla_gpu_exclude_nondeterministic_ops=False",
            OPS,
        ),
    ],
)
def test_a_flag_with_another_value_is_rejected_naming_both(existing, found, needed, monkeypatch):
    message = (
        f"{{}} has {found!r}, but deterministic execution needs {needed!r}. "
        "Remove the first flag, or do without the second."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message.format('existing'))}$"):
        deterministic_xla_flags(existing)
    monkeypatch.setenv("XLA_FLAGS", existing)
    with pytest.raises(ValueError, match=f"^{re.escape(message.format('XLA_FLAGS'))}$"):
        deterministic_xla_flags()


def test_text_that_is_not_a_flag_is_rejected():
    for stray, existing in [("and", f"--xla_dump_to=/tmp/x and {LEVEL}"), ("a/file", "a/file")]:
        message = f"existing has {stray!r}, which is not a flag. Begin every flag with --."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            deterministic_xla_flags(existing)
    number = "existing must be a string of flags, got 0. Join them by spaces."
    with pytest.raises(TypeError, match=f"^{re.escape(number)}$"):
        deterministic_xla_flags(0)


@pytest.mark.parametrize(
    "flags",
    [BOTH, f"{LEVEL}\t{OPS}", f"--xla_gpu_autotune_level=4 {BOTH}", BOTH.replace("true", "1")],
)
def test_flags_that_will_be_in_force_are_accepted(before_the_backend, flags):
    before_the_backend(flags)
    require_deterministic_execution()


@pytest.mark.parametrize(
    ("flags", "finding", "remedy"),
    [
        ("", f"lacks {OPS} and lacks {LEVEL}", BOTH),
        (OPS, f"lacks {LEVEL}", BOTH),
        (
            f"--xla_dump_to=/tmp/x {OPS} --xla_gpu_autotune_level=4",
            "has --xla_gpu_autotune_level=4",
            f"--xla_dump_to=/tmp/x {BOTH}",
        ),
        (
            f"{BOTH} --xla_gpu_exclude_nondeterministic_ops=0",
            "has --xla_gpu_exclude_nondeterministic_ops=0",
            BOTH,
        ),
    ],
)
def test_missing_or_contradicted_flags_are_rejected_with_the_line_to_use(
    before_the_backend, flags, finding, remedy
):
    before_the_backend(flags)
    message = f"XLA_FLAGS {finding}. {REMEDY.format(remedy)}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        require_deterministic_execution()
    before_the_backend(remedy)
    require_deterministic_execution()


def test_a_jax_that_does_not_report_its_flags_is_rejected(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", BOTH)
    monkeypatch.setattr(determinism, "_backend_has_started", lambda: True)
    monkeypatch.setattr("jax.extend.backend.get_compile_options", unittest.mock.MagicMock())
    with pytest.raises(RuntimeError, match="this version does not report which flags XLA has read"):
        require_deterministic_execution()


START = "import jax; jax.devices()\n"
CHECK = "from phijax_rng import determinism; determinism.require_deterministic_execution()\n"
SET = f"import os; os.environ['XLA_FLAGS'] = '{BOTH}'\n"
UNSET = "import os; del os.environ['XLA_FLAGS']\n"
NOT_STARTED = "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()\n"


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        (START + CHECK, BOTH),
        (SET + CHECK + NOT_STARTED + START + CHECK, ""),
        (SET + START + UNSET + CHECK, ""),
    ],
    ids=[
        "set by the shell",
        "set in Python, checked before and after the start",
        "set in Python, removed after the start",
    ],
)
def test_flags_that_xla_has_read_are_accepted(program, flags):
    run_python(program, env={"XLA_FLAGS": flags})


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "flags", "finding"),
    [
        (
            START + SET + CHECK,
            "",
            "has --xla_gpu_exclude_nondeterministic_ops=false and has --xla_gpu_autotune_level=4, "
            "although XLA_FLAGS has them now: they were set too late",
        ),
        (START + CHECK, OPS, "has --xla_gpu_autotune_level=4"),
    ],
    ids=["set after the start", "one missing at the start"],
)
def test_flags_that_xla_has_not_read_are_rejected(program, flags, finding):
    ended = run_python(program, env={"XLA_FLAGS": flags}, exit_code=1)
    message = f"RuntimeError: JAX's backend is running, and XLA {finding}. {REMEDY.format(BOTH)}\n"
    assert ended.stderr.endswith(message)


OTHER_LEVEL = "--xla_gpu_autotune_level=3"
NAME, _, _ = OPS.partition("=")


@pytest.mark.parametrize(
    "flags",
    [
        f"{LEVEL} {OTHER_LEVEL} {NAME}",
        f"{OTHER_LEVEL} {LEVEL}\n--xla_dump_to='/a b' {NAME}=TRUE",
        f'--xla_dump_to="/a\\" {LEVEL}" {OTHER_LEVEL} {NAME}=\'0\'',
    ],
    ids=["bare", "capitals", "quotes"],
)
def test_xla_reads_flags_as_we_do(flags):
    program = """
        import os
        from phijax_rng import determinism

        ours = determinism._parse(os.environ["XLA_FLAGS"], "XLA_FLAGS")
        xla = determinism._flags_in_force()
        assert determinism._wrong(ours).keys() == determinism._wrong(xla).keys(), (ours, xla)
        assert ours["--xla_gpu_autotune_level"] == xla["--xla_gpu_autotune_level"], (ours, xla)
    """
    run_python(program, env={"XLA_FLAGS": flags})
