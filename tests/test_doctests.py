"""Every `>>>` of the package's docstrings gives what is written below it."""

import doctest
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import phijax_rng

PROMPT = re.compile(r"^\s*>>> ", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
OPTIONAL = ("phijax",)  # what a module may need and a plain installation has not


class Finder(doctest.DocTestFinder):
    """Finds what is wrapped, too: `jit` and the annotation checks of the tests hide functions."""

    def _from_module(self, module: ModuleType | None, object: object) -> bool:
        if inspect.isclass(object) and module is not None:
            # An exported class carries the module that users import it from.
            return f"class {object.__name__}" in inspect.getsource(module)
        return super()._from_module(module, inspect.unwrap(object))


def count_prompts(module_name: str) -> int:
    """How many examples the source holds, found without importing the module."""
    spec = importlib.util.find_spec(module_name)
    assert spec is not None
    assert spec.origin is not None
    return len(PROMPT.findall(Path(spec.origin).read_text(encoding="utf-8")))


def modules_with_doctests() -> list[str]:
    below = pkgutil.walk_packages(phijax_rng.__path__, "phijax_rng.")
    return [name for name in ["phijax_rng", *(m.name for m in below)] if count_prompts(name)]


def test_there_are_doctests() -> None:
    assert modules_with_doctests()


@pytest.mark.parametrize("name", modules_with_doctests())
def test_the_examples_of_a_module_hold(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {missing.name}")
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for examples in Finder(exclude_empty=True).find(module):
        runner.run(examples)
    failed, attempted = runner.summarize(verbose=False)
    assert failed == 0  # what failed is on stdout
    assert attempted == count_prompts(name), "a `>>>` outside of what doctest finds was not run"
