"""The promised names, where they are documented, and which module may import which."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import phijax_rng
from tests._subprocess import ROOT

PACKAGE = ROOT / "src" / "phijax_rng"
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))

# From the bottom up. Modules import from lower rows only; those on one row do not know each other.
LAYERS = (
    (
        "_checks",
        "_types",
        "_pytrees",
        "errors",
        "determinism",
        "_internals",
        "reports",
        "_threefry",
        "executables",
    ),
    ("_reachable", "_places"),  # what a computation under the eyes of an audit can see; whose a line is
    (
        *("keys", "shuffle", "pools", "digest", "document", "environment", "_coordinates", "_words", "_lock"),
        *("history", "retention", "_observe"),
    ),
    # What the samplers of a later row share, and what an audit finds.
    ("_rows", "_weights", "geometries", "findings", "masks"),
    ("_history",),  # what was done with each key
    ("_examination",),  # and what of it is wrong
    (
        *("samplers", "domains", "boxes", "balls", "composites", "sequences", "adaptive"),
        "balancers",
        *("module", "state", "contract", "auditing"),
    ),
    ("hosted",),  # samplers of the row before, with their rows on the host
    ("_held", "_draws", "_entries", "_ask"),  # what a source of the next rows is made of, and how it is asked
    ("manifest", "folder", "results", "processes"),  # how the checkpoints of the next row store a state
    ("shares", "trial"),  # which rows lie on which device; balancers held to their protocol
    (
        *("sources", "iterables", "step", "checkpoints", "callbacks", "arguments", "placement"),
        *("gradnorm", "ntk", "relobralo", "uncertainty"),  # balancers that adapt
    ),
    ("chunks",),  # what the loop of the next row gives back
    (
        *("loop", "refresh", "feeds", "starts", "purity", "signals", "progress"),
        *("rebalancing", "predict"),
        *("stopping", "evaluation", "csv_history", "loggers"),  # callbacks
    ),
    ("record", "run"),  # what a run promises, and what it is held to
    ("looks", "rehearsal"),  # what the trainer does between two chunks of the loop; first steps in the open
    ("trainer",),
    ("cli", "__main__", "testing", "interop"),
)
ROW = {module: row for row, modules in enumerate(LAYERS) for module in modules}
TOP_ROW = len(LAYERS) - 1

# One engine, one home.
HOMES = {
    **{"optax": "step", "orbax": "checkpoints", "phijax": "interop", "pytest": "testing"},
    **{"tensorboardX": "loggers", "wandb": "loggers"},
}


def imported_names(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` inside phijax_rng.interop means phijax_rng.interop.x.
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*origin, alias.name])) for alias in node.names)


def violations(source: str, path: str) -> list[str]:
    """What the module at this path (below src/phijax_rng) imports and may not."""
    module = top_module(path)
    tree = ast.parse(source)
    found = [
        f"{path}:{node.lineno}: TYPE_CHECKING hides a cycle"
        for node in ast.walk(tree)
        if "TYPE_CHECKING" in (getattr(node, "id", None), getattr(node, "attr", None))
    ]
    for line, name in imported_names(tree, ["phijax_rng", *path.split("/")[:-1]]):
        complaint = _complaint(module, name.split("."))
        if complaint:
            found.append(f"{path}:{line}: {complaint}")
    return found


def top_module(path: str) -> str:
    """`keys` for `keys.py`, `interop` for `interop/phijax.py`."""
    return path.partition("/")[0].removesuffix(".py")


def _complaint(module: str, name: list[str]) -> str | None:
    engine, *inner = name
    if engine != "phijax_rng":
        if module == "pools" and engine in ("jax", "jaxlib"):
            return "pools is NumPy only"
        return f"{engine} belongs in {HOMES[engine]}" if HOMES.get(engine, module) != module else None
    if module not in ROW:
        return f"{module} is on no row of LAYERS; give it its place"
    if not inner or inner[0] not in ROW:
        # The package as a whole stands below the top row and above all others.
        return None if ROW[module] == TOP_ROW else "imports the package that imports it"
    if inner[0] != module and ROW[inner[0]] >= ROW[module]:
        return f"{module} must not know {inner[0]}"
    return None


def source_files() -> list[str]:
    files = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
    return [path for path in files if path != "__init__.py"]


@pytest.mark.parametrize("path", source_files())
def test_imports_point_down(path: str) -> None:
    assert top_module(path) in ROW, "give the module its place in LAYERS"
    assert violations((PACKAGE / path).read_text(encoding="utf-8"), path) == []


FORBIDDEN = {
    "upward": ("from phijax_rng import trainer", "keys.py"),
    "upward by name": ("from phijax_rng.trainer import Trainer", "keys.py"),
    "upward and relative": ("from . import trainer", "keys.py"),
    "upward, relative, by name": ("from .trainer import Trainer", "keys.py"),
    "upward as a module": ("import phijax_rng.trainer", "keys.py"),
    "upward inside a function": ("def f():\n    from phijax_rng import trainer", "keys.py"),
    "upward to an extension": ("from phijax_rng.interop.phijax import adapt", "trainer.py"),
    "a sibling": ("from phijax_rng import shuffle", "keys.py"),
    "the whole package": ("import phijax_rng", "keys.py"),
    "a name of the package": ("from phijax_rng import Trainer", "loop.py"),
    "everything": ("from phijax_rng import *", "loop.py"),
    "Optax elsewhere": ("import optax", "trainer.py"),
    "Orbax elsewhere": ("import orbax.checkpoint as ocp", "trainer.py"),
    "Orbax by name": ("from orbax.checkpoint import CheckpointManager", "contract.py"),
    "JAX in pools": ("import jax.numpy as jnp", "pools.py"),
    "TYPE_CHECKING": ("import typing\nif typing.TYPE_CHECKING: import numpy", "keys.py"),
    "TYPE_CHECKING by name": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING: pass",
        "keys.py",
    ),
    "a folder, upward": ("from .. import testing", "interop/phijax.py"),
    "a module without a row": ("from phijax_rng import keys", "unheard_of.py"),
}

ALLOWED = {
    "downward": ("from phijax_rng import _checks, keys\nimport numpy", "sources.py"),
    "downward by name": ("from phijax_rng.samplers import Sampler", "sources.py"),
    "downward and relative": ("from . import keys\nfrom .keys import fold_in", "sources.py"),
    "a folder, downward and itself": (
        "from .. import keys\nfrom . import _shim",
        "interop/phijax.py",
    ),
    "the whole package from the top": ("import phijax_rng", "testing.py"),
    "each engine at home": ("import optax", "step.py"),
}


@pytest.mark.parametrize(("source", "path"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_an_import_that_points_elsewhere_is_found(source: str, path: str) -> None:
    assert violations(source, path)


@pytest.mark.parametrize(("source", "path"), ALLOWED.values(), ids=ALLOWED)
def test_an_import_that_points_down_is_not_complained_of(source: str, path: str) -> None:
    assert violations(source, path) == []


def test_every_promised_name_is_importable_and_promised_once() -> None:
    assert [name for name in phijax_rng.__all__ if not hasattr(phijax_rng, name)] == []
    assert len(set(phijax_rng.__all__)) == len(phijax_rng.__all__)


def test_every_public_name_is_promised() -> None:
    here = {
        name
        for name, value in vars(phijax_rng).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert here - set(phijax_rng.__all__) == set()


def directives(page: Path) -> list[str]:
    """What a page has mkdocstrings render: `::: phijax_rng.keys`."""
    return re.findall(r"^::: +(\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)


DOCUMENTED = {name for page in API_PAGES for name in directives(page)}
PROMISED = [name for name in phijax_rng.__all__ if not name.startswith("__")]


def qualified_name(name: str) -> str:
    value = getattr(phijax_rng, name)
    home = getattr(value, "__module__", "phijax_rng")
    return f"phijax_rng.{name}" if inspect.ismodule(value) else f"{home}.{name}"


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_name_is_on_an_api_page(name: str) -> None:
    qualified = qualified_name(name)
    assert {qualified, qualified.rpartition(".")[0]} & DOCUMENTED, f"no page in docs/api shows {name}"


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_name_has_a_docstring(name: str) -> None:
    value = getattr(phijax_rng, name)
    # A name without a docstring is left out of the API pages; dataclasses make up one of their own.
    assert (value.__doc__ or f"{name}(").startswith(f"{name}(") is False


@pytest.mark.parametrize("page", API_PAGES, ids=lambda page: page.stem)
def test_an_api_page_shows_a_module_that_exists(page: Path) -> None:
    assert directives(page) == [f"phijax_rng.{page.stem}"]
    assert (PACKAGE / f"{page.stem}.py").exists()
