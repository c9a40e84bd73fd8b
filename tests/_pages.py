"""Runs the Python of a Markdown page, as a reader who types it in block after block.

Every ```python block of a page is executed, in order, in one namespace. What a page can say, each
in an HTML comment that readers do not see:

    <!-- not run: reason -->       before a python block: leave it out
    <!-- output -->                after a python block, before a ```text block: what it prints,
                                   where `...` stands for anything, as in doctest
    <!-- env: NAME=VALUE ... -->   anywhere: environment of the process that runs the page

As a script, `python tests/_pages.py PAGE`, it exits with 1 and names page and line of a block that
raises or prints something else.
"""

import contextlib
import dataclasses
import doctest
import io
import re
import shlex
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_COMMENT = re.compile(r"^\s*<!--\s*(?P<word>not run|output|env)\b:?\s*(?P<rest>.*?)\s*-->\s*$")
_OTHER_NAMES_OF_PYTHON = ("py", "python3", "pycon", "ipython", "py3")


class PageError(ValueError):
    """A page that cannot be run as written; names page and line."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A python block: the line of its fence, its code, and what it must print, if said."""

    line: int
    code: str
    expected: str | None = None


@dataclasses.dataclass(frozen=True)
class Page:
    """The blocks of a page that run, and the environment they want."""

    name: str
    blocks: tuple[Block, ...]
    env: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Fence:
    line: int
    language: str
    code: str


@dataclasses.dataclass(frozen=True)
class _Comment:
    line: int
    word: str
    rest: str


def parse_page(text: str, name: str) -> Page:
    """The page's blocks and environment.

    Raises:
        PageError: a comment that marks nothing or lacks its reason, a block that never closes, or
            Python under a name that would escape execution.
    """
    blocks: list[Block] = []
    env: dict[str, str] = {}
    mark: _Comment | None = None  # a comment that waits for its block
    latest: Block | None = None  # the block directly before, if it runs
    for item in _items(text, name):
        if isinstance(item, _Comment) and item.word == "env":
            env |= _assignments(item, name)
        elif isinstance(item, _Comment):
            _require(mark is None, name, item.line, "two comments in a row mark the same block")
            _require_sense(item, latest, name)
            mark = item
        elif isinstance(item, _Fence):
            _require(
                item.language not in _OTHER_NAMES_OF_PYTHON,
                name,
                item.line,
                f"a block of {item.language} would never run; call it python",
            )
            word = mark.word if mark else ""
            wanted = {"not run": "python", "output": "text"}.get(word, item.language)
            _require(item.language == wanted, name, item.line, f"'{word}' wants a {wanted} block")
            if word == "output" and latest is not None:
                blocks[-1] = dataclasses.replace(latest, expected=item.code)
            runs = item.language == "python" and not word
            latest = Block(item.line, item.code) if runs else None
            if latest is not None:
                blocks.append(latest)
            mark = None
        else:
            _require(mark is None, name, item, "text between a comment and the block it marks")
            latest = None
    _require(mark is None, name, mark.line if mark else 0, "a comment that marks no block")
    return Page(name, tuple(blocks), env)


def run_page(page: Page) -> None:
    """Execute the page's blocks here, in one namespace that takes the place of `__main__`.

    Raises:
        PageError: a block printed something else than the page says.
        Exception: whatever a block raises; its traceback names the page and the page's line.
    """
    # Pickle and dataclasses look classes up in their module.
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    for block in page.blocks:
        printed = io.StringIO()
        # Empty lines in front make the line numbers of tracebacks those of the page.
        code = compile("\n" * block.line + block.code, page.name, "exec", dont_inherit=True)
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, vars(module))
        finally:
            sys.stdout.write(printed.getvalue())
        if block.expected is not None:
            difference = _output_difference(block.expected, printed.getvalue())
            _require(not difference, page.name, block.line, f"the output differs\n{difference}")


def _items(text: str, name: str) -> Iterator[_Fence | _Comment | int]:
    """Blocks and comments in order; any other line with something on it as its number."""
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if fence := _FENCE.match(line):
            code = []
            for _, inner in lines:
                if re.fullmatch(rf"\s*{fence['fence'][0]}{{{len(fence['fence'])},}}\s*", inner):
                    break
                code.append(inner)
            else:
                raise PageError(f"{name}:{number}: a block that never closes")
            # A block inside a list or a note is indented as a whole.
            yield _Fence(number, fence["language"], textwrap.dedent("\n".join(code)) + "\n")
        elif comment := _COMMENT.match(line):
            yield _Comment(number, comment["word"], comment["rest"])
        elif line.strip():
            yield number


def _require_sense(comment: _Comment, latest: Block | None, name: str) -> None:
    if comment.word == "not run":
        _require(comment.rest, name, comment.line, "'not run' needs a reason: <!-- not run: why -->")
    else:
        directly_after = latest is not None
        _require(directly_after, name, comment.line, "'output' must follow a python block that runs")


def _assignments(comment: _Comment, name: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in shlex.split(comment.rest)]
    right = pairs and all(variable and equals for variable, equals, _ in pairs)
    _require(right, name, comment.line, "'env' wants NAME=VALUE: <!-- env: NAME=VALUE -->")
    return {variable: value for variable, _, value in pairs}


def _output_difference(expected: str, printed: str) -> str:
    """What doctest says about the two outputs; empty if they agree."""
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
    expected, printed = (_without_trailing_space(side) for side in (expected, printed))
    if checker.check_output(expected, printed, flags):
        return ""
    return checker.output_difference(doctest.Example("", expected), printed, flags)


def _without_trailing_space(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def _require(condition: object, name: str, line: int, message: str) -> None:
    if not condition:
        raise PageError(f"{name}:{line}: {message}")


def main() -> None:
    path = Path(sys.argv[1])
    try:
        run_page(parse_page(path.read_text(encoding="utf-8"), str(path)))
    except PageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
