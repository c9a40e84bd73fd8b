"""The promised names, where they are documented, and which module may import which."""

import ast
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import phijax_rng
from tests._subprocess import ROOT

PACKAGE = ROOT / "src" / "phijax_rng"
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))

# Who may import whom: a wing, or a module at the root, and what it may import besides itself.
_ROOT = ("keys", "shuffle", "errors", "state")
WINGS: dict[str, tuple[str, ...]] = {
    "_base": (),
    "errors": (),
    "determinism": (),
    "keys": ("_base",),
    "shuffle": ("_base",),
    "state": ("_base", "keys"),
    "sampling": ("_base", *_ROOT),
    "devices": ("_base", *_ROOT),
    "training": ("_base", *_ROOT, "sampling", "devices"),
    "checkpoints": ("_base", *_ROOT, "training", "sampling", "devices"),
    "callbacks": ("_base", *_ROOT, "training", "sampling", "devices"),
    "resume": ("_base", *_ROOT, "training", "sampling", "devices", "checkpoints"),
    "auditing": ("_base", "keys", "errors"),
    "trainer": (
        *("_base", *_ROOT, "training", "sampling", "devices", "checkpoints", "callbacks", "resume"),
        "auditing",
    ),
    "replay": (
        *("_base", *_ROOT, "training", "sampling", "devices", "checkpoints", "callbacks", "resume"),
        "auditing",
    ),
    "cli": (
        *("_base", *_ROOT, "determinism", "training", "sampling", "devices", "checkpoints", "callbacks"),
        *("resume", "auditing", "trainer", "replay"),
    ),
    "testing": ("*",),
}

# One engine, one home.
HOMES = {
    **{"optax": "training", "orbax": "checkpoints", "phijax": "interop", "pytest": "testing"},
    **{"tensorboardX": "callbacks", "wandb": "callbacks"},
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
    wing = top_module(path)
    tree = ast.parse(source)
    found = [
        f"{path}:{node.lineno}: TYPE_CHECKING hides a cycle"
        for node in ast.walk(tree)
        if "TYPE_CHECKING" in (getattr(node, "id", None), getattr(node, "attr", None))
    ]
    for line, name in imported_names(tree, ["phijax_rng", *path.split("/")[:-1]]):
        complaint = _complaint(wing, name.split("."), path)
        if complaint:
            found.append(f"{path}:{line}: {complaint}")
    return found


def top_module(path: str) -> str:
    """`keys` for `keys.py`, `interop` for `interop/phijax.py`."""
    return path.partition("/")[0].removesuffix(".py")


def _complaint(wing: str, name: list[str], path: str) -> str | None:
    engine, *inner = name
    if engine != "phijax_rng":
        if path == "sampling/pools.py" and engine in ("jax", "jaxlib"):
            return "pools is NumPy only"
        return f"{engine} belongs in {HOMES[engine]}" if HOMES.get(engine, wing) != wing else None
    if wing not in WINGS:
        return f"{wing} is no wing of WINGS; give it its place"
    allowed = WINGS[wing]
    if not inner or inner[0] not in WINGS:
        return None if allowed == ("*",) else "imports the package that imports it"
    if inner[0] != wing and inner[0] not in allowed and allowed != ("*",):
        return f"{wing} must not import {inner[0]}"
    return None


def source_files() -> list[str]:
    files = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
    return [path for path in files if path != "__init__.py"]


@pytest.mark.parametrize("path", source_files())
def test_imports_point_down(path: str) -> None:
    assert top_module(path) in WINGS, "give the wing its place in WINGS"
    assert violations((PACKAGE / path).read_text(encoding="utf-8"), path) == []


FORBIDDEN = {
    "upward": ("from phijax_rng import trainer", "keys.py"),
    "upward by name": ("from phijax_rng.trainer import Trainer", "keys.py"),
    "upward and relative": ("from .. import trainer", "sampling/rows.py"),
    "upward, relative, by name": ("from ..trainer import Trainer", "sampling/rows.py"),
    "upward as a module": ("import phijax_rng.trainer.trainer", "training/loop.py"),
    "upward inside a function": ("def f():\n    from phijax_rng import trainer", "keys.py"),
    "a sibling": ("from phijax_rng import shuffle", "keys.py"),
    "a sibling wing": ("from phijax_rng.devices.placement import resolve", "sampling/rows.py"),
    "the whole package": ("import phijax_rng", "keys.py"),
    "a name of the package": ("from phijax_rng import Trainer", "training/loop.py"),
    "everything": ("from phijax_rng import *", "training/loop.py"),
    "Optax elsewhere": ("import optax", "trainer/trainer.py"),
    "Orbax elsewhere": ("import orbax.checkpoint as ocp", "trainer/trainer.py"),
    "Orbax by name": ("from orbax.checkpoint import CheckpointManager", "resume/contract.py"),
    "JAX in pools": ("import jax.numpy as jnp", "sampling/pools.py"),
    "TYPE_CHECKING": ("import typing\nif typing.TYPE_CHECKING: import numpy", "keys.py"),
    "TYPE_CHECKING by name": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING: pass",
        "keys.py",
    ),
    "a wing without a place": ("from phijax_rng import keys", "unheard_of/rooms.py"),
}

ALLOWED = {
    "downward": ("from phijax_rng import keys\nimport numpy", "sampling/sources.py"),
    "downward by name": ("from phijax_rng.sampling.rows import Sampler", "training/prefetch.py"),
    "within a wing": ("from . import rows\nfrom .rows import RandomRowSampler", "sampling/sources.py"),
    "the whole package from the top": ("import phijax_rng", "testing.py"),
    "each engine at home": ("import optax", "training/optimizer_call.py"),
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


def directives(page: Path) -> list[str]:
    """What a page has mkdocstrings render: `::: phijax_rng.keys`."""
    return re.findall(r"^::: +(\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)


DOCUMENTED = {name for page in API_PAGES for name in directives(page)}
PROMISED = [name for name in phijax_rng.__all__ if not name.startswith("__")]
PACKAGES = [
    "phijax_rng",
    *(
        m.name
        for m in pkgutil.walk_packages(phijax_rng.__path__, "phijax_rng.")
        if m.ispkg and "jax_hooks" not in m.name
    ),
]


def exports() -> list[tuple[str, str]]:
    """Package and name of everything that a package lists."""
    listed = ((package, importlib.import_module(package)) for package in PACKAGES)
    return [(package, name) for package, module in listed for name in getattr(module, "__all__", ())]


@pytest.mark.parametrize(("package", "name"), exports())
def test_an_exported_name_is_on_an_api_page_and_has_a_docstring(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    if inspect.ismodule(value):
        assert f"{package}.{name}" in DOCUMENTED
        return
    shown = {f"{wing}.{name}" for wing, other in exports() if other == name} | {value.__module__}
    assert shown & DOCUMENTED or (value.__module__ == "phijax_rng" and f"phijax_rng.state.{name}" in _state())
    # A name without a docstring is left out of the API pages; dataclasses make up one of their own.
    assert (value.__doc__ or f"{name}(").startswith(f"{name}(") is False


def _state() -> set[str]:
    return {f"phijax_rng.state.{name}" for name in vars(phijax_rng.state) if not name.startswith("_")}


@pytest.mark.parametrize(("package", "name"), exports())
def test_an_exported_name_carries_the_module_users_import_it_from(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    if isinstance(value, (type, FunctionType)):
        home = "phijax_rng" if name in phijax_rng.__all__ else package
        assert value.__module__ == home
        assert getattr(importlib.import_module(home), name) is value


def test_the_package_shows_its_names_and_nothing_else() -> None:
    assert set(phijax_rng.__all__) < set(dir(phijax_rng))
    shown = {name for name in dir(phijax_rng) if not name.startswith("__")} - set(phijax_rng.__all__)
    assert all(inspect.ismodule(importlib.import_module(f"phijax_rng.{name}")) for name in shown)
    assert 35 <= len(phijax_rng.__all__) <= 45
    assert phijax_rng.__version__ == importlib.metadata.version("phijax-rng")


@pytest.mark.parametrize("page", API_PAGES, ids=lambda page: page.stem)
def test_an_api_page_shows_what_exists(page: Path) -> None:
    assert directives(page)
    for name in directives(page):
        home, _, last = name.rpartition(".")
        module = importlib.import_module(home)
        assert hasattr(module, last) or importlib.import_module(name)
