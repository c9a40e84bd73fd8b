"""Formats of an audit for people: text, terminal, HTML page, picture.

All of them read the plain data of `AuditReport.to_dict`. The page needs no other file and no network; SVG and
PNG share one layout.

The tree shows the first children of a key and the number of the others. The table of the page and the plain
data have all of them.
"""

import dataclasses
import html
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TextIO

_MOST_CHILDREN = 12  # about a screen with their draws; a split of a thousand rows would hide the rest
_MARKS = {"fault": "✗", "note": "·", None: " "}
_COLORS = {"fault": "#b3261e", "note": "#8a6d00", "drawn": "#1b5e20", None: "#5f6368"}
_STYLES = {"fault": "bold red", "note": "yellow", None: ""}

Data = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the tree of keys, as the picture shows it."""

    depth: int
    parent: int | None  # index of the parent's row
    label: str
    detail: str
    rank: str | None


def summary(data: Data) -> str:
    """One line: the numbers of draws, keys, faults, notes and regions that were not seen."""
    faults = sum(finding["rank"] == "fault" for finding in data["findings"])
    notes = len(data["findings"]) - faults
    draws = sum(draw["count"] for draw in data["draws"])
    parts = [
        _counted(draws, "draw"),
        f"from {_counted(len(data['keys']), 'key')}",
        _counted(faults, "fault"),
        _counted(notes, "note"),
    ]
    if data["unseen"]:
        parts.append(f"{_counted(len(data['unseen']), 'region')} not seen")
    return ", ".join(parts)


def as_text(data: Data) -> str:
    """Summary, findings, regions that were not seen, and draws."""
    lines = [summary(data)]
    for finding in data["findings"]:
        lines += [f"{finding['rank']}: {finding['text']}{_allowed(finding)}"]
        lines += [f"    {label:<8} {text}" for label, text in _details(finding)]
    lines += [f"not seen: {region['what']} at {region['place']}" for region in data["unseen"]]
    lines += [f"{_keys(draw)}: {_drawn(draw)} at {draw['place']}" for draw in data["draws"]]
    return "\n".join(lines)


def show(data: Data, file: TextIO | None = None, width: int | None = None) -> None:
    """Prints findings, tree and table with Rich."""
    import rich.console  # noqa: PLC0415 - an import of the package would wait for it
    import rich.table  # noqa: PLC0415
    import rich.text  # noqa: PLC0415
    import rich.tree  # noqa: PLC0415

    console = rich.console.Console(file=file, width=width, highlight=False)
    console.print(rich.text.Text(summary(data), style="bold"))
    for finding in data["findings"]:
        style = _STYLES[finding["rank"]]
        console.print(rich.text.Text(f"{finding['rank']}: {finding['text']}{_allowed(finding)}", style=style))
        for label, text in _details(finding):
            console.print(rich.text.Text(f"    {label:<8} {text}"))
    for region in data["unseen"]:
        console.print(rich.text.Text(f"not seen: {region['what']} at {region['place']}", style="bold red"))
    tree = rich.tree.Tree("keys", hide_root=True)
    branches: list[Any] = []
    for row in tree_rows(data):
        above: Any = tree if row.parent is None else branches[row.parent]
        branch = rich.text.Text(row.label, style=_STYLES[row.rank])
        if row.detail:
            branch.append(f"  {row.detail}", style="dim")
        branches.append(above.add(branch))
    console.print(tree)
    table = rich.table.Table("key", "draw", "line", "times", box=None, header_style="bold")
    for draw in data["draws"]:
        # Text, because Rich reads the brackets of a name as markup.
        table.add_row(*map(rich.text.Text, (_keys(draw), _drawn(draw), draw["place"], str(draw["count"]))))
    console.print(table)


def tree_rows(data: Data) -> list[Row]:
    """The tree of keys, parents before children, long lists of children cut."""
    children: dict[str | None, list[Data]] = defaultdict(list)
    known = {node["name"] for node in data["keys"]}
    for node in data["keys"]:
        children[node["parent"] if node["parent"] in known else None].append(node)
    rows: list[Row] = []
    # No recursion: a loop that carries its key makes a tree as deep as its steps.
    waiting: list[tuple[Data | Row, int, int | None]] = [
        (node, 0, None) for node in reversed(children.pop(None, []))
    ]
    while waiting:
        node, depth, parent = waiting.pop()
        if isinstance(node, Row):
            rows.append(node)
            continue
        label = node["name"] if parent is None or _renamed(node) else node["how"]
        rows.append(Row(depth, parent, label, "; ".join(node["draws"]), node["rank"]))
        own = len(rows) - 1
        below = children.pop(node["name"], [])
        if len(below) > _MOST_CHILDREN:
            waiting.append((_rest(below[_MOST_CHILDREN:], depth + 1, own), depth + 1, own))
        waiting += [(child, depth + 1, own) for child in reversed(below[:_MOST_CHILDREN])]
    return rows


def _rest(cut: list[Data], depth: int, parent: int) -> Row:
    """One row for the children that are cut."""
    rank = "fault" if any(child["rank"] == "fault" for child in cut) else None
    return Row(depth, parent, f"… and {len(cut)} more", "", rank)


def as_html(data: Data) -> str:
    """The page."""
    findings = "".join(map(_finding_html, data["findings"])) or "<p>No findings.</p>"
    findings += "".join(
        f'<div class="finding fault"><b>not seen</b> {_e(region["what"])} at {_e(region["place"])}</div>'
        for region in data["unseen"]
    )
    rows = "".join(_draw_html(draw) for draw in data["draws"])
    return _PAGE.format(
        summary=_e(summary(data)),
        verdict="clean" if data["clean"] else "not clean",
        findings=findings,
        tree="".join(_tree_html(data)),
        rows=rows,
    )


def as_svg(data: Data) -> str:
    """The picture of the tree of keys."""
    rows = tree_rows(data)
    width, height = _size(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="ui-monospace, monospace" font-size="12">',
        f"<title>{_e(summary(data))}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, row in enumerate(rows):
        x, y = _position(row, index)
        if row.parent is not None:
            above_x, above_y = _position(rows[row.parent], row.parent)
            parts.append(f'<path d="M{above_x} {above_y + 6} V{y} H{x - 6}" fill="none" stroke="#9aa0a6"/>')
        color = _color(row)
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 4}" fill="{color}">{_e(_caption(row))}</text>')
    return "\n".join([*parts, "</svg>\n"])


def write_png(data: Data, path: str | os.PathLike[str]) -> None:
    """The picture as a PNG file.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = tree_rows(data)
    width, height = _size(rows)
    figure = Figure(figsize=(width / 100, height / 100), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for index, row in enumerate(rows):
        x, y = _position(row, index)
        if row.parent is not None:
            above_x, above_y = _position(rows[row.parent], row.parent)
            axes.plot([above_x, above_x, x - 6], [above_y + 6, y, y], color="#9aa0a6", linewidth=0.8)
        axes.plot([x], [y], "o", color=_color(row), markersize=4)
        axes.text(x + 10, y, _caption(row), color=_color(row), family="monospace", fontsize=7, va="center")
    figure.savefig(path, facecolor="white")


def _position(row: Row, index: int) -> tuple[int, int]:
    return 16 + 24 * row.depth, 20 + 20 * index


def _size(rows: list[Row]) -> tuple[int, int]:
    # A monospaced letter of 12 px is 7.3 px wide.
    widest = max((40 + 24 * row.depth + int(7.3 * len(_caption(row))) for row in rows), default=0)
    return max(widest, 200), 20 + 20 * max(len(rows), 1)


def _caption(row: Row) -> str:
    rank = f"  [{row.rank}]" if row.rank else ""
    detail = f"  {row.detail}" if row.detail else ""
    return f"{row.label}{rank}{detail}"


def _color(row: Row) -> str:
    return _COLORS["drawn" if row.rank is None and row.detail else row.rank]


def _renamed(node: Data) -> bool:
    return node["name"] != f"{node['parent']}{node['how']}"


def _tree_html(data: Data) -> Iterator[str]:
    rows = tree_rows(data)
    parents = {row.parent for row in rows}
    open_at: list[int] = []
    for index, row in enumerate(rows):
        while open_at and rows[open_at[-1]].depth >= row.depth:
            open_at.pop()
            yield "</details>"
        line = (
            f'<span class="{row.rank or "plain"}">{_MARKS[row.rank]} {_e(row.label)}</span> '
            f"<small>{_e(row.detail)}</small>"
        )
        if index in parents:
            yield f"<details open><summary>{line}</summary>"
            open_at.append(index)
        else:
            yield f'<div class="leaf">{line}</div>'
    yield "</details>" * len(open_at)


def _finding_html(finding: Data) -> str:
    details = "".join(f"<dt>{label}</dt><dd>{_e(text)}</dd>" for label, text in _details(finding))
    return (
        f'<div class="finding {finding["rank"]}"><b>{finding["rank"]}</b> '
        f"{_e(finding['text'])}{_allowed(finding)}<dl>{details}</dl></div>"
    )


def _draw_html(draw: Data) -> str:
    cells = (_keys(draw), draw["primitive"], str(tuple(draw["shape"])), draw["dtype"])
    return f"<tr>{''.join(f'<td>{_e(c)}</td>' for c in (*cells, draw['place'], str(draw['count'])))}</tr>"


def _details(finding: Data) -> Iterator[tuple[str, str]]:
    yield from (("derived", text) for text in finding["derivations"])
    yield from (("used", text) for text in finding["uses"])
    yield "fix", finding["fix"]


def _allowed(finding: Data) -> str:
    return " (allowed)" if finding["allowed"] else ""


def _keys(draw: Data) -> str:
    first, *others = draw["keys"]
    return first if not others else f"{first} and {len(others)} more"


def _drawn(draw: Data) -> str:
    times = f", {draw['count']} times" if draw["count"] > 1 else ""
    return f"{draw['primitive']} {draw['dtype']}{list(draw['shape'])}{times}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _e(text: str) -> str:
    return html.escape(str(text))


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Audit: {summary}</title>
<style>
:root {{ color-scheme: light dark; }}
:root {{ --fault: light-dark(#b3261e, #f2b8b5); --note: light-dark(#7a5f00, #e6c35c); }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
.finding {{ border-left: 4px solid; padding: .2rem .8rem; margin: .8rem 0; }}
.fault {{ color: var(--fault); }}
.note {{ color: var(--note); }}
dl {{ color: CanvasText; display: grid; grid-template-columns: 5rem 1fr; margin: .2rem 0; }}
dd {{ margin: 0; }}
dd, td, summary, .leaf {{ font-family: ui-monospace, monospace; font-size: 13px; }}
details, .leaf {{ margin-left: 1.2rem; }}
small {{ opacity: .7; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; overflow-wrap: anywhere; }}
tr {{ border-bottom: 1px solid #8884; }}
input {{ font: inherit; padding: .3rem; width: 20rem; max-width: 100%; }}
</style>
<h1>Audit: {verdict}</h1>
<p id="summary">{summary}</p>
<h2>Findings</h2>
<section id="findings">{findings}</section>
<h2>Keys</h2>
<section id="tree">{tree}</section>
<h2>Draws</h2>
<p><label>Filter <input id="filter" type="search" placeholder="a key, a line, a function"></label>
<output id="shown"></output></p>
<table id="draws"><thead><tr><th>key<th>draw<th>shape<th>dtype<th>line<th>times</thead>
<tbody>{rows}</tbody></table>
<script>
const filter = document.getElementById("filter"), rows = [...document.querySelectorAll("#draws tbody tr")];
function apply() {{
  const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {{
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
    shown += !row.hidden;
  }}
  document.getElementById("shown").textContent = shown + " of " + rows.length;
}}
filter.addEventListener("input", apply);
// A link may carry a filter: page.html#normal
filter.value = decodeURIComponent(location.hash.slice(1));
apply();
</script>
</html>
"""
