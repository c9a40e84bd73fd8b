"""The map of the package shows what is there: files, wings and the imports between them."""

import re

import pytest

from tests._subprocess import ROOT
from tests.test_public_api import PACKAGE, WINGS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWING = PAGE.split("```text\n", 1)[1].split("```", 1)[0].splitlines()

# Which neighbors (row, column) a character of a line joins.
UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
JOINS = {
    **{"│": (UP, DOWN), "─": (LEFT, RIGHT), "▼": (UP,)},
    **{"┌": (DOWN, RIGHT), "┐": (DOWN, LEFT), "└": (UP, RIGHT), "┘": (UP, LEFT)},
    **{"├": (UP, DOWN, RIGHT), "┤": (UP, DOWN, LEFT), "┬": (DOWN, LEFT, RIGHT), "┴": (UP, LEFT, RIGHT)},
    "┼": (UP, DOWN, LEFT, RIGHT),
}
Point = tuple[int, int]


def character(point: Point) -> str:
    row, column = point
    inside = 0 <= row < len(DRAWING) and 0 <= column < len(DRAWING[row])
    return DRAWING[row][column] if inside else " "


def boxes() -> dict[Point, frozenset[str]]:
    """Every point of the drawing that belongs to a box, with the names in that box."""
    found: dict[Point, frozenset[str]] = {}
    for row, line in enumerate(DRAWING):
        for match in re.finditer(r"│ ([ a-z_]+) │", line):
            names = frozenset(match[1].split())
            if names <= set(WINGS) and names:
                columns = range(match.start(), match.end())
                found.update({(r, c): names for r in (row - 1, row, row + 1) for c in columns})
    return found


def arrows() -> set[tuple[frozenset[str], frozenset[str]]]:
    """From and to of every arrow: a line that leaves the bottom of a box reaches each of its heads."""
    inside = boxes()
    drawn = set()
    for start, names in inside.items():
        if character(start) != "┬":
            continue
        waiting, seen = [(start[0] + 1, start[1])], {start}
        while waiting:
            point = waiting.pop()
            if point in seen or point in inside:
                continue
            seen.add(point)
            if character(point) == "▼":
                drawn.add((names, inside[point[0] + 1, point[1]]))
            waiting += [(point[0] + r, point[1] + c) for r, c in JOINS[character(point)]]
    return drawn


def below(wing: str) -> set[str]:
    """All that can be reached from a wing along the arrows."""
    reached: set[str] = set()
    waiting = [wing]
    while waiting:
        name = waiting.pop()
        new = {other for start, end in arrows() if name in start for other in end} - reached
        reached |= new
        waiting += new
    return reached


def test_every_wing_is_drawn_once() -> None:
    wings = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    drawn = [name for names in set(boxes().values()) for name in names]
    assert len(wings) == 11
    assert sorted(drawn) == sorted(wings | {"keys", "shuffle", "state", "errors"})


def test_the_arrows_are_the_imports_that_are_allowed() -> None:
    for start, end in arrows():
        for wing in start:
            assert set(WINGS[wing]) & end or len(start) > 1
    for wing in {name for names in boxes().values() for name in names}:
        assert set(WINGS[wing]) - {"keys", "determinism"} <= below(wing)


def test_the_table_is_the_one_that_is_checked() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*)\|$", PAGE, re.MULTILINE)
    table = {wing: set(re.findall(r"\w+", cell)) for wing, cell in rows}
    expected = {wing: set(names) for wing, names in WINGS.items()} | {"testing": {"everything"}}
    assert table == expected


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))))
def test_a_file_on_the_page_exists(name: str) -> None:
    assert any((base / name).exists() for base in (PACKAGE, ROOT))


def test_every_file_of_a_wing_is_on_the_page() -> None:
    folders = set(re.findall(r"folder `([\w/]+)/`", PAGE))
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    missing = {
        file
        for file in files - named
        if not file.endswith("__init__.py") and not any(file.startswith(f"{folder}/") for folder in folders)
    }
    assert missing == set()
