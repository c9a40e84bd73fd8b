"""How the package is built, in numbers beside their bars: `python -m tests.structure`.

All is read from the source, but for the three walks of `docs/architecture.md`. These are run, and every file
of the package that a call enters on the way is counted once. `_base`, `errors`, `state` and `__init__` are
left out, because every walk uses these values and checks. The other walks end where they call a source,
because the rows of a step are a walk of their own:

    rows        a source of three pools is traced for one step
    checkpoint  a step is saved, from the session's `save` until it returns
    resume      what calls into the wing `resume` enter, in a fit that resumes with another setting; but for
                what these call of the trainer, which gives them functions that make the state and the source
"""

import ast
import dataclasses
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tests._subprocess import ROOT

PACKAGE = ROOT / "src" / "phijax_rng"
COMMENTED = ("training", "checkpoints", "resume", "auditing", "devices")
# Not counted on a walk: what every wing calls for keys, arrays, errors and the state. Drawing a batch is
# a walk of its own.
EVERYWHERE = ("_base/", "errors.py", "state.py", "keys.py", "devices/")

# Objects of JAX that no class describes: a name, or a folder, and why they are probed.
PROBES_OF_JAX = {
    "auditing/jax_hooks/": "traces and equations of JAX, whose attributes differ between its versions",
    "dtype": "leaves are arrays of JAX, of NumPy, of other libraries, or numbers",
    "shape": "the same",
    "sharding": "arrays of JAX have one, those of NumPy do not",
    "weak_type": "the same",
}


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number, its bar, and what is behind it."""

    name: str
    value: float
    least: float = 0
    most: float = float("inf")
    details: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        return self.least <= self.value <= self.most

    def __str__(self) -> str:
        bar = f"at most {self.most:g}" if self.least == 0 else f"at least {self.least:g}"
        if self.least and self.most < float("inf"):
            bar = f"{self.least:g} to {self.most:g}"
        return f"{self.name:<52} {self.value:>8.4g}   {bar:<14} {'met' if self.met else 'MISSED'}"


# The source


def files() -> dict[str, str]:
    """Path below the package and text of every module."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_name(path: str) -> str:
    return ".".join(["phijax_rng", *path.removesuffix(".py").removesuffix("/__init__").split("/")])


def imports(texts: dict[str, str]) -> dict[str, set[str]]:
    """For each module the modules of the package that it imports, inside functions too."""
    from tests.test_public_api import imported_names

    modules = {module_name(path): path for path in texts if path != "__init__.py"}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        named = (name for _, name in imported_names(ast.parse(texts[path]), module_parents(path)))
        reached = {_module_of(name, modules) for name in named}
        found[module] = {other for other in reached if other is not None and other != module}
    return found


def module_parents(path: str) -> list[str]:
    return ["phijax_rng", *path.split("/")[:-1]]


def _module_of(name: str, modules: dict[str, str]) -> str | None:
    """The module that gives an imported name: `a.b` itself, or `a` for its name `b`."""
    return next((part for part in (name, name.rpartition(".")[0]) if part in modules), None)


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other."""
    reach = {module: _reachable(graph, module) for module in graph}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return [set(group) for group in groups if group]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += graph.get(module, ())
    return seen


def probes(path: str, text: str) -> list[str]:
    """Calls of getattr and hasattr with a literal name, but for those of PROBES_OF_JAX."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]
            ) if name not in PROBES_OF_JAX and not path.startswith(tuple(PROBES_OF_JAX)):
                found.append(f"{path}:{node.lineno} {name}")
    return found


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def annotations(text: str) -> list[ast.expr]:
    """The annotations of all parameters."""
    found = []
    for function in functions(text):
        own = function.args
        extra = [argument for argument in (own.vararg, own.kwarg) if argument is not None]
        arguments = (*own.posonlyargs, *own.args, *own.kwonlyargs, *extra)
        found += [argument.annotation for argument in arguments if argument.annotation is not None]
    return found


def private_names(texts: dict[str, str]) -> set[str]:
    """Names of `jax._src`: imported, written as text, or in a table from its modules to their names."""
    found: set[str] = set()
    for path, text in texts.items():
        tree = ast.parse(text)
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.startswith("jax._src"):
                    found |= {f"{module}.{alias.name}" for alias in names}
                case ast.Import(names=names):
                    found |= {alias.name for alias in names if alias.name.startswith("jax._src")}
                case ast.Constant(value=str(name)) if re.fullmatch(r"jax\._src(\.\w+)+", name):
                    found.add(name)
                case ast.Dict(keys=keys, values=values) if path.startswith("auditing/"):
                    for key, value in zip(keys, values, strict=True):
                        found |= _listed(key, value)
    return found


def _listed(key: ast.expr | None, value: ast.expr) -> set[str]:
    """The names of one row of such a table: a module of `jax._src`, and a tuple of its names."""
    if not (isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Tuple)):
        return set()
    try:
        __import__(f"jax._src.{key.value}")
    except ImportError:
        return set()
    names = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return {f"jax._src.{key.value}.{name}" for name in names if isinstance(name, str)}


def comment_share(texts: dict[str, str], wing: str) -> float:
    """Lines of comment in a hundred lines of code; no docstring is either, nor is an order to a tool."""
    code = comments = 0
    for path, text in texts.items():
        if path.startswith(f"{wing}/"):
            inside = _docstring_lines(text)
            for number, line in enumerate(text.splitlines(), start=1):
                bare = line.strip()
                if not bare or number in inside:
                    continue
                behind = re.search(r"\s# +(?!noqa|type: ignore|pragma|fmt:)\S", line)
                if bare.startswith("#"):
                    comments += 1
                else:
                    code += 1
                    comments += behind is not None
    return 100 * comments / max(code, 1)


def _docstring_lines(text: str) -> set[int]:
    """Lines of strings that stand alone: docstrings of modules, classes, functions and constants."""
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


# The walks


Stack = list[tuple[str, str]]
"""File and function of the frames of the package, from the inside out."""


def entered(call: Callable[[], Any], inside: Callable[[Stack], bool]) -> tuple[str, ...]:
    """The files entered, in order, while the stack is one for which `inside` holds.

    `sys.monitoring` would be cheaper, but Python 3.11 has none.
    """
    files: dict[str, None] = {}
    prefix = f"{PACKAGE}/"

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            stack = [(code.co_filename.removeprefix(prefix), code.co_name) for code in _codes(frame, prefix)]
            if inside(stack):
                files[stack[0][0]] = None

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return tuple(f for f in files if not f.startswith(EVERYWHERE) and not f.endswith("__init__.py"))


def _codes(frame: FrameType | None, prefix: str) -> Iterator[Any]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(prefix):
            yield frame.f_code
        frame = frame.f_back


def _in_rows(stack: Stack) -> bool:
    return ("sampling/sources.py", "__call__") in stack


def _in_save(stack: Stack) -> bool:
    return ("trainer/session.py", "save") in stack and not _beneath_a_source(stack)


def _in_resume(stack: Stack) -> bool:
    wings = [path.partition("/")[0] for path, _ in stack]
    nearest = next((wing for wing in wings if wing in ("trainer", "resume")), None)
    return nearest == "resume" and not _beneath_a_source(stack)


def _beneath_a_source(stack: Stack) -> bool:
    return any(path.startswith("sampling/") for path, _ in stack)


def walks() -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Name, files and bar of each walk."""
    import jax

    from phijax_rng import Checkpoints, Trainer
    from tests import _problems

    problem = _problems.heat()
    source = problem.source()
    yield "rows of step k", entered(lambda: jax.make_jaxpr(source)(3), _in_rows), 4
    with tempfile.TemporaryDirectory() as folder:

        def fit(stop: int, **options: Any) -> None:
            kept = Checkpoints(folder, every_n_steps=2, asynchronous=False)
            trainer = Trainer(stop, checkpoints=kept, progress=False, chunk_size=2)
            trainer.fit(problem.module, seed=0, **{**problem.arguments, **options})

        yield "a step to its checkpoint", entered(lambda: fit(4), _in_save), 9
        module = dataclasses.replace(problem.module, batch_keys=("pde", "boundary", "initial"))
        other = dataclasses.replace(problem, module=module)

        def resume() -> None:
            kept = Checkpoints(folder, every_n_steps=2, asynchronous=False)
            trainer = Trainer(6, checkpoints=kept, progress=False, chunk_size=2)
            trainer.fit(other.module, seed=0, resume=True, on_change="warn", **other.arguments)

        with warnings.catch_warnings(record=True) as logged:
            warnings.simplefilter("always")
            files = entered(resume, _in_resume)
        assert any("source.samplers.order" in str(warning.message) for warning in logged), "nothing differed"
        yield "a resume to its differences", files, 8


# All of them


def measures() -> Iterator[Measure]:
    """Every measure of the source, then those of the walks."""
    yield from _of_source()
    for name, crossed, bar in walks():
        assert crossed, f"the walk '{name}' was not seen; has its entry another name?"
        yield Measure(f"files crossed by {name}", len(crossed), most=bar, details=crossed)


def _of_source() -> Iterator[Measure]:
    import phijax_rng
    from tests.test_public_api import violations

    texts = files()
    circles = cycles(imports(texts))
    yield Measure("import cycles", len(circles), most=0, details=tuple(str(sorted(c)) for c in circles))
    up = [found for path, text in texts.items() if path != "__init__.py" for found in violations(text, path)]
    yield Measure("imports up the wings", len(up), most=0, details=tuple(up))
    found = tuple(probe for path, text in texts.items() for probe in probes(path, text))
    yield Measure("getattr and hasattr with a literal name", len(found), most=40, details=found)
    every = [annotation for text in texts.values() for annotation in annotations(text)]
    plain = sum(isinstance(annotation, ast.Name) and annotation.id == "Any" for annotation in every)
    yield Measure("parameters annotated plain Any, %", 100 * plain / len(every), most=12)
    names = tuple(sorted(private_names(texts)))
    yield Measure("private names of JAX", len(names), most=20, details=names)
    yield Measure("lines", sum(len(text.splitlines()) for text in texts.values()), most=15_000)
    lengths = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{path} {node.name}")
        for path, text in texts.items()
        for node in functions(text)
    ]
    long = tuple(f"{place}: {length}" for length, place in sorted(lengths, reverse=True) if length > 60)
    yield Measure("lines of the longest function", max(lengths)[0], most=60, details=long)
    yield Measure("names in phijax_rng.__all__", len(phijax_rng.__all__), least=35, most=45)
    for wing in COMMENTED:
        share = comment_share(texts, wing)
        yield Measure(f"lines of comment per 100 of code in {wing}", share, least=5)


def main() -> None:
    for measure in measures():
        print(measure)
        if not measure.met or "-v" in sys.argv[1:]:
            for detail in measure.details:
                print(f"    {detail}")


if __name__ == "__main__":
    main()
