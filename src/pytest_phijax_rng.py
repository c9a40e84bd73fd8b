"""The pytest plug-in of phijax_rng: two markers, one option and one fixture.

    @pytest.mark.no_key_reuse                 the test runs under an audit, which must be clean
    @pytest.mark.no_key_reuse(allow="eval")   findings of these keys are intended
    @pytest.mark.global_rng_untouched         the global generators of NumPy and Python must not change
    --global-rng-untouched                    the same for every test

    def test_mine(resume_exact):              assert_resume_exact, in the test's own tmp_path
        resume_exact(make_run, steps=20)

It is a module beside the package, because pytest loads it in every project of the environment: JAX and
phijax_rng are imported only when a test uses a marker or the fixture.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.getgroup("phijax_rng").addoption(
        "--global-rng-untouched",
        action="store_true",
        help="fail every test that uses the global generators of NumPy or Python",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The markers."""
    config.addinivalue_line("markers", "no_key_reuse(allow=()): run the test under an audit of its keys")
    config.addinivalue_line("markers", "global_rng_untouched: the global generators must not change")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Runs a marked test under the checks of its markers."""
    __tracebackhide__ = True
    reuse = pyfuncitem.get_closest_marker("no_key_reuse")
    untouched = pyfuncitem.get_closest_marker("global_rng_untouched")
    with contextlib.ExitStack() as stack:
        if untouched or pyfuncitem.config.getoption("--global-rng-untouched"):
            from phijax_rng.testing import assert_global_rng_untouched  # noqa: PLC0415 - only when used

            stack.enter_context(assert_global_rng_untouched())
        if reuse is None:
            return (yield)
        from phijax_rng.auditing.session import Session  # noqa: PLC0415

        session = Session(allow=_allowed(*reuse.args, **reuse.kwargs))
        with session.observing():
            result = yield
        report = session.report()
        if not report.clean:
            pytest.fail(f"the audit is not clean: {report}", pytrace=False)
        return result


def _allowed(allow: Iterable[str] = ()) -> Iterable[str]:
    """The one argument of the marker; a mistyped one is a TypeError."""
    return (allow,) if isinstance(allow, str) else allow


@pytest.fixture
def resume_exact(tmp_path: Path) -> Callable[..., Any]:
    """`phijax_rng.testing.assert_resume_exact` with its checkpoints in the test's directory."""
    from phijax_rng.testing import assert_resume_exact  # noqa: PLC0415

    numbers = itertools.count()

    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return assert_resume_exact(*args, **{"directory": tmp_path / f"resume-{next(numbers)}", **kwargs})

    return checked
