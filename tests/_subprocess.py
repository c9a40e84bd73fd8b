"""Python in a process of its own: for settings JAX reads once, forced devices, signals and kills.

The child does not depend on who runs the tests: settings of JAX and XLA in the caller's environment
are left out, and `src` and the repository root come first on its path. It starts no shell and forks
without `preexec_fn`, which JAX's threads would make unsafe. The children of one session of pytest share
what XLA compiled.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
"""Environment that gives a child eight CPU devices."""

COMPILATION_CACHE = "TESTED_COMPILATION_CACHE"
"""Variable with the folder in which the processes of a session share what XLA compiled; set in conftest."""

SECONDS_WORTH_STORING = 0.05  # what one entry costs to write and to read; JAX's own bound is a second

_END = "=== the call has"

_FOREIGN = ("JAX_", "XLA_", "TF_", "PHIJAX_RNG_", "PYTHON")


def run_python(
    code_or_path: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300,
    exit_code: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run code (a string) or a script (a `Path`) to its end, with stdout and stderr as text.

    Args:
        code_or_path: source, dedented; or a file.
        *args: `sys.argv[1:]` of the child.
        env: variables over those of `child_environment`.
        cwd: its working directory.
        timeout: seconds after which it is killed.
        exit_code: what it must end with, `-signal` if by a signal; `None` for whatever.

    Raises:
        AssertionError: another exit code, or the time ran out; shows stdout and stderr.
    """
    __tracebackhide__ = True
    with start_python(code_or_path, *args, env=env, cwd=cwd, stderr=subprocess.PIPE) as child:
        try:
            stdout, stderr = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(child)
            stdout, stderr = child.communicate()
            raise AssertionError(_report(f"no end after {timeout} s", stdout, stderr)) from None
    if exit_code is not None and child.returncode != exit_code:
        what = f"exit code {child.returncode} instead of {exit_code}"
        raise AssertionError(_report(what, stdout, stderr))
    return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)


def serve_calls() -> None:
    """Runs, in a child, the functions that its caller names on standard input, until that is closed."""
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        ended = "ended"
        try:
            getattr(importlib.import_module(module), name)(*arguments)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            ended = "failed"
        print(f"\n{_END} {ended}", flush=True)


class Servers:
    """Children that run `serve_calls`: each call runs one function of a test module in all of them.

    Python, JAX and the package are imported once, and what one scenario compiled serves the next. A child
    that dies is replaced at the next call, so one scenario that crashes fails alone.
    """

    def __init__(self, start: Callable[[contextlib.ExitStack], list[subprocess.Popen[str]]]):
        self._start = start
        self._stack = contextlib.ExitStack()
        self._children: list[subprocess.Popen[str]] = []

    def __call__(self, function: Callable[..., None], *arguments: object, timeout: float = 300) -> list[str]:
        """What the function printed in each child.

        Raises:
            AssertionError: it raised, its process died, or the time ran out; names the function.
        """
        __tracebackhide__ = True
        if not self._children:
            self._children = self._start(self._stack)
        # pytest may shorten the name of a module that it imported by its path.
        path = Path(function.__code__.co_filename).relative_to(ROOT).with_suffix("")
        request = [".".join(path.parts), function.__name__, [_plain(argument) for argument in arguments]]
        for child in self._children:
            assert child.stdin is not None
            print(json.dumps(request), file=child.stdin, flush=True)
        answers = [_answer(child, timeout) for child in self._children]
        if any(end != "ended" for _, end in answers):
            self.close()
            ends = "\n".join(f"--- {end} in process {i}\n{text}" for i, (text, end) in enumerate(answers))
            raise AssertionError(f"{function.__name__}{(*arguments,)}\n{ends}")
        return [text for text, _ in answers]

    def close(self) -> None:
        """Kills the children."""
        self._children = []
        self._stack.close()


def eight_devices(stack: contextlib.ExitStack) -> list[subprocess.Popen[str]]:
    """A server with eight devices."""
    code = "from tests._subprocess import serve_calls; serve_calls()"
    # What XLA notes there would come between the lines that a test compares.
    notes = subprocess.DEVNULL
    return [stack.enter_context(start_python(code, env=EIGHT_DEVICES, stdin=subprocess.PIPE, stderr=notes))]


def _plain(argument: object) -> object:
    return str(argument) if isinstance(argument, Path) else argument


def _answer(child: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What a server printed up to the end of a call, and how that ended."""
    assert child.stdout is not None
    watch = threading.Timer(timeout, _kill, [child])
    watch.start()
    lines: list[str] = []
    try:
        for line in child.stdout:
            if line.startswith(_END):
                return "".join(lines).removesuffix("\n"), line.split()[-1]
            lines.append(line)
    finally:
        watch.cancel()
    return "".join(lines), f"died with {child.wait()}"


@contextlib.contextmanager
def start_python(
    code_or_path: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stderr: int = subprocess.STDOUT,
    stdin: int = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[str]]:
    """A running child, to signal or kill; it and its children are killed when the block ends.

    Its output arrives line by line in `child.stdout`, so a test waits for a line and never sleeps:

        with start_python(SCRIPT) as child:
            wait_for_line(child, "step 100")
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=60) == 143
    """
    source = [str(code_or_path)]
    if not isinstance(code_or_path, Path):
        source = ["-c", textwrap.dedent(code_or_path)]
    child = subprocess.Popen(
        [sys.executable, "-u", "-X", "faulthandler", *source, *map(str, args)],
        env=child_environment(env),
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    with child:  # closes the pipes and waits
        try:
            yield child
        finally:
            _kill(child)


def wait_for_line(child: subprocess.Popen[str], text: str, timeout: float = 300) -> str:
    """Read the child's output up to the first line that contains `text`, and return that line.

    Raises:
        AssertionError: the child ended before, or was killed after `timeout` seconds.
    """
    __tracebackhide__ = True
    assert child.stdout is not None
    watch = threading.Timer(timeout, _kill, [child])
    watch.start()
    try:
        seen = []
        for line in child.stdout:
            if text in line:
                return line.rstrip("\n")
            seen.append(line)
    finally:
        watch.cancel()
    what = f"the child ended without a line on {text!r} within {timeout} s"
    raise AssertionError(_report(what, "".join(seen), ""))


def child_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: ours without settings of JAX and Python, on CPU, with `src`."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    own = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"}
    if folder := os.environ.get(COMPILATION_CACHE):
        own["JAX_COMPILATION_CACHE_DIR"] = folder
        own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(SECONDS_WORTH_STORING)
    return inherited | own | dict(changes or {})


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and its own children, who would hold its pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _report(what: str, stdout: str, stderr: str) -> str:
    return f"{what}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
