"""Every snippet of the README and of the docs runs and prints what it is said to print."""

import re
import textwrap
from pathlib import Path

import pytest

from tests._pages import PageError, parse_page
from tests._selection import mostly_full
from tests._subprocess import ROOT, run_python

RUNNER = ROOT / "tests" / "_pages.py"
HAS_BLOCKS = re.compile(r"^\s*(`{3}|~{3})", re.MULTILINE)

README = ROOT / "README.md"
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if HAS_BLOCKS.search(page.read_text(encoding="utf-8"))
]
EVERYDAY = [ROOT / "docs" / f"{name}.md" for name in ("index", "streams")]


def run_page(path: Path, folder: Path) -> None:
    page = parse_page(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    if page.blocks:
        run_python(RUNNER, path, env=page.env, cwd=folder, timeout=600)


def test_the_readme_runs_as_written(tmp_path: Path) -> None:
    run_page(README, tmp_path)


@pytest.mark.parametrize(
    "path", mostly_full(PAGES, everyday=EVERYDAY), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_page_runs_as_written(path: Path, tmp_path: Path) -> None:
    run_page(path, tmp_path)


def test_the_readme_shows_a_run_and_its_output() -> None:
    blocks = parse_page(README.read_text(encoding="utf-8"), "README.md").blocks
    assert any(block.expected for block in blocks)


def run(text: str, tmp_path: Path) -> str:
    """Run a page made of this text, as the pages of the docs are run, and give what it printed."""
    path = tmp_path / "page.md"
    text = textwrap.dedent(text)
    path.write_text(text, encoding="utf-8")
    return run_python(RUNNER, path, env=parse_page(text, "page.md").env, cwd=tmp_path).stdout


def test_blocks_share_a_namespace_and_run_in_order(tmp_path: Path) -> None:
    page = """
        # A page

        ```python title="first"
        import pathlib
        x = [1]
        ```

        - In a list:

            ~~~python
            x.append(2)
            if True:
                print(x, __name__)
            ~~~

        ```bash
        exit 1
        ```
        """
    assert run(page, tmp_path) == "[1, 2] __main__\n"


def test_functions_and_classes_of_a_page_find_each_other(tmp_path: Path) -> None:
    page = """
        ```python
        import dataclasses, pickle
        @dataclasses.dataclass
        class Point:
            x: int
        def double(p):
            return Point(2 * p.x)
        ```
        ```python
        print(pickle.loads(pickle.dumps(double(Point(2)))))
        ```
        """
    assert run(page, tmp_path) == "Point(x=4)\n"


def test_a_failing_block_fails_with_page_and_line(tmp_path: Path) -> None:
    page = """
        ```python
        x = 1
        ```
        Some text.
        ```python
        y = x
        z = y / 0
        ```
        """
    with pytest.raises(AssertionError) as failure:
        run(page, tmp_path)
    assert f'File "{tmp_path}/page.md", line 8' in str(failure.value)
    assert "z = y / 0" in str(failure.value)
    assert "ZeroDivisionError" in str(failure.value)


def test_a_block_that_does_not_compile_fails_with_page_and_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r'(?s)page.md", line 3\n.*SyntaxError'):
        run("\n```python\nx = = 1\n```\n", tmp_path)


OUTPUT = """
    ```python
    print("loss", 0.25)
    print("done")
    ```

    <!-- output -->
    ```text
    {}
    ```
    """


@pytest.mark.parametrize("said", ["loss 0.25\n    done", "loss ...\n    done", "...\n    done"])
def test_the_output_a_page_shows_is_the_output(said: str, tmp_path: Path) -> None:
    assert run(OUTPUT.format(said), tmp_path) == "loss 0.25\ndone\n"


@pytest.mark.parametrize("said", ["loss 0.5\n    done", "loss 1...", "done", "", "loss  0.25\n    done"])
def test_another_output_fails_with_page_line_and_both_sides(said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)page.md:2: the output differs\n.*Got:\n    loss"):
        run(OUTPUT.format(said), tmp_path)


def test_a_block_marked_as_not_run_does_not_run(tmp_path: Path) -> None:
    page = """
        <!-- not run: needs a GPU -->

        ```python
        raise SystemExit(1)
        ```
        ```python
        print("ran")
        ```
        """
    assert run(page, tmp_path) == "ran\n"


def test_a_page_may_set_the_environment_of_its_process(tmp_path: Path) -> None:
    page = """
        <!-- env: XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false" -->
        <!-- env: A=1 B= -->
        ```python
        import os
        print(os.environ["XLA_FLAGS"].split(), os.environ["A"], repr(os.environ["B"]))
        ```
        """
    flags = ["--xla_force_host_platform_device_count=8", "--xla_cpu_enable_fast_math=false"]
    assert run(page, tmp_path) == f"{flags} 1 ''\n"


def test_a_page_runs_in_a_directory_of_its_own(tmp_path: Path) -> None:
    assert run("```python\nimport os; print(os.getcwd())\n```\n", tmp_path) == f"{tmp_path}\n"


def test_comments_inside_a_block_are_its_text() -> None:
    page = parse_page("````markdown\n<!-- output -->\n```python\n1/0\n```\n````\n", "p.md")
    assert page.blocks == ()


MALFORMED = {
    "a reason is missing": ("<!-- not run: -->\n```python\n1\n```\n", "p.md:1: 'not run' needs a"),
    "nothing is marked": ("<!-- not run: why -->\n", "p.md:1: a comment that marks no block"),
    "text in between": ("<!-- not run: why -->\nText.\n```python\n```\n", "p.md:2: text between"),
    "another language is marked": (
        "<!-- not run: why -->\n```bash\n```\n",
        "p.md:2: 'not run' wants",
    ),
    "output of nothing": ("<!-- output -->\n```text\n```\n", "p.md:1: 'output' must follow"),
    "output of what is not run": (
        "<!-- not run: why -->\n```python\n```\n<!-- output -->\n```text\n```\n",
        "p.md:4: 'output' must follow",
    ),
    "output after text": (
        "```python\n```\nText.\n<!-- output -->\n```text\n```\n",
        "p.md:4: 'output' must follow",
    ),
    "output in another language": (
        "```python\n```\n<!-- output -->\n```python\n```\n",
        "p.md:4: 'output' wants a text block",
    ),
    "two comments": (
        "<!-- not run: a -->\n<!-- not run: b -->\n```python\n```\n",
        "p.md:2: two comments",
    ),
    "an open block": ("Text.\n```python\n1\n", "p.md:2: a block that never closes"),
    "Python by another name": (
        "```pycon\n>>> 1\n```\n",
        "p.md:1: a block of pycon would never run",
    ),
    "no assignment": ("<!-- env: XLA_FLAGS -->\n", "p.md:1: 'env' wants NAME=VALUE"),
}


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_page_fails_with_page_and_line(text: str, message: str) -> None:
    with pytest.raises(PageError) as failure:
        parse_page(text, "p.md")
    assert str(failure.value).startswith(message)
