"""The children that other tests start: what they see, and that no failure of theirs goes unseen."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests._subprocess import EIGHT_DEVICES, Servers, eight_devices, run_python, start_python, wait_for_line


def test_a_child_runs_on_the_forced_devices_whatever_the_caller_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--not_a_flag_of_xla")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    child = run_python(
        "import jax; print(jax.devices()[0].platform, jax.device_count(), jax.numpy.ones(1).dtype)",
        env=EIGHT_DEVICES,
    )
    assert child.stdout == "cpu 8 float32\n"


def test_a_child_finds_the_package_and_the_helpers_of_the_tests() -> None:
    child = run_python("""
        import tests._subprocess
        from importlib.util import find_spec
        print(find_spec("phijax_rng").origin)
        """)
    assert child.stdout.endswith("src/phijax_rng/__init__.py\n")


def test_a_script_gets_its_arguments_and_working_directory(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.getcwd())")
    child = run_python(script, "--seed", 3, cwd=tmp_path)
    assert child.stdout == f"['--seed', '3'] {tmp_path}\n"


def test_a_failure_shows_both_streams() -> None:
    with pytest.raises(AssertionError) as failure:
        run_python("print('so far'); raise SystemExit('so bad')")
    assert str(failure.value) == ("exit code 1 instead of 0\n--- stdout\nso far\n\n--- stderr\nso bad\n")


def test_an_expected_exit_code_is_expected() -> None:
    assert run_python("raise SystemExit(143)", exit_code=143).returncode == 143
    assert run_python("raise SystemExit(3)", exit_code=None).returncode == 3
    with pytest.raises(AssertionError, match="exit code 0 instead of 143"):
        run_python("pass", exit_code=143)


def test_a_child_that_does_not_end_is_killed_and_its_output_shown() -> None:
    with pytest.raises(AssertionError, match=r"no end after 2 s\n--- stdout\nwaiting\n"):
        run_python("print('waiting'); import signal; signal.pause()", timeout=2)


def test_a_signal_reaches_a_child_that_has_said_it_is_ready() -> None:
    with start_python("import signal; print('warming up\\nready'); signal.pause()") as child:
        assert wait_for_line(child, "read") == "ready"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == -signal.SIGTERM


def test_no_child_outlives_its_block() -> None:
    with start_python("import signal; signal.pause()") as child:
        assert child.poll() is None
    assert child.returncode == -signal.SIGKILL


def test_children_of_a_child_are_killed_with_it() -> None:
    pause = "import signal; signal.pause()"
    with pytest.raises(AssertionError, match="no end after 2 s"):
        run_python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {pause!r}])", timeout=2)


def test_waiting_for_a_line_has_an_end() -> None:
    with (
        start_python("import signal; print('one'); signal.pause()") as child,
        pytest.raises(AssertionError, match=r"a line on 'two' within 1 s\n--- stdout\none\n"),
    ):
        wait_for_line(child, "two", timeout=1)


def test_waiting_for_a_line_that_never_comes_shows_what_came() -> None:
    with (
        start_python("print('one'); print('two')", stderr=subprocess.STDOUT) as child,
        pytest.raises(
            AssertionError,
            match=r"ended without a line on 'three' within 300 s\n--- stdout\none\ntwo",
        ),
    ):
        wait_for_line(child, "three")


def shown(word: str) -> None:
    print(word, end="")


def failing() -> None:
    print("so far")
    raise ValueError("so bad")


def dying() -> None:
    print("so far")
    os._exit(7)


def test_a_server_runs_one_function_after_the_other_and_outlives_those_that_fail() -> None:
    with contextlib.closing(Servers(eight_devices)) as servers:
        assert servers(shown, "one") == ["one"]
        with pytest.raises(AssertionError, match=r"(?s)failing\(\).*failed in process 0\nso far\n.*so bad"):
            servers(failing)
        with pytest.raises(AssertionError, match=r"dying\(\)\n--- died with 7 in process 0\nso far\n"):
            servers(dying)
        with pytest.raises(AssertionError, match=r"waiting\(\)\n--- died with -9 in process 0\n"):
            servers(waiting, timeout=1)
        assert servers(shown, "two\n") == ["two\n"]


def waiting() -> None:
    signal.pause()
