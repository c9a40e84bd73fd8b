"""What holds in every test: CPU, annotations checked, key reuse checked where keys are consumed."""

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

# JAX reads these once, at import.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax
import jaxtyping
import pytest

import tests._typechecks  # noqa: F401 - the hook knows it by name only
from tests._subprocess import COMPILATION_CACHE, SECONDS_WORTH_STORING, Servers, eight_devices

# The hook sees only what is imported after it.
assert "phijax_rng" not in sys.modules, "phijax_rng was imported before its annotations are checked"
# Only modules that speak of arrays: in the others it would find nothing, and slow every call down.
_SOURCES = Path(__file__).parent.parent / "src"
_SPEAKS_OF_ARRAYS = re.compile(r"^from jaxtyping import|\bKeyScalar\b", re.MULTILINE)
jaxtyping.install_import_hook(
    [
        ".".join(path.relative_to(_SOURCES).with_suffix("").parts)
        for path in (_SOURCES / "phijax_rng").rglob("*.py")
        if _SPEAKS_OF_ARRAYS.search(path.read_text(encoding="utf-8"))
    ],
    "tests._typechecks.checked",
)

KEY_REUSE_CHECKED = ("test_loop", "test_trainer", "test_donation")
"""Modules whose tests run under JAX's key-reuse checks; examples are given them by environment."""

# A compilation of seconds may fall into any example, so there is no deadline. The rest is what
# Hypothesis chose for this environment; under CI=true that includes a fixed choice of examples.
_chosen = hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name())
hypothesis.settings.register_profile("phijax_rng", _chosen, deadline=None)
hypothesis.settings.register_profile("full", _chosen, deadline=None)
hypothesis.settings.register_profile("campaign", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("phijax_rng")


# First, because xdist's processes inherit the environment.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get(COMPILATION_CACHE) or jax.config.jax_compilation_cache_dir
    if not folder:
        folder = tempfile.mkdtemp(prefix="compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ[COMPILATION_CACHE] = folder
    # A shell starts what it runs in the background with Ctrl-C ignored, and nohup with SIGHUP ignored; a run
    # then ignores them too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # XLA is a third of the time of all tests. JAX reports a program that it finds here as compiled too, so
    # tests that count compilations see no difference.
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SECONDS_WORTH_STORING)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    campaigns = Path(__file__).parent / "campaigns"
    for item in items:
        if campaigns in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def programs_are_kept() -> None:
    """Keeps more programs than a run does: tests share them."""
    from phijax_rng.training import compile_cache

    compile_cache._MAX_PROGRAMS = 32


@pytest.fixture(scope="module")
def in_eight() -> Iterator[Callable[..., str]]:
    """Runs a function of a test module in a process with eight devices; what it printed."""
    with contextlib.closing(Servers(eight_devices)) as servers:
        yield lambda function, *arguments: servers(function, *arguments)[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with contextlib.ExitStack() as settings:
        if item.path.stem in KEY_REUSE_CHECKED and not item.get_closest_marker("draws_twice"):
            settings.enter_context(jax.debug_key_reuse(True))
        if item.get_closest_marker("strict_promotion"):
            settings.enter_context(jax.numpy_dtype_promotion("strict"))
        return (yield)
