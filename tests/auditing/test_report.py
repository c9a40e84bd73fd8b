"""Reports for people: text, terminal, page in a real browser, picture."""

import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import pytest

from phijax_rng import audit
from phijax_rng.auditing import AuditReport
from phijax_rng.auditing.report import tree_rows
from tests._faulty import FAULTS

pytestmark = pytest.mark.draws_twice

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)


def _program(key: jax.Array) -> None:
    FAULTS["a split and a fold"][1](key)
    for own in jax.random.split(jax.random.fold_in(key, 9), 20):
        jax.random.bernoulli(own, 0.5, (2,))
    jax.random.normal(jax.random.key(3), (4,))


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return audit(_program, jax.random.key(1), names={"<b>&": jax.random.fold_in(jax.random.key(1), 9)})


def test_the_text_says_all_of_it(report: AuditReport) -> None:
    lines = str(report).splitlines()
    assert lines[0] == "23 draws, from 24 keys, 1 fault, 1 note"
    assert lines[1].startswith("fault: one key is reached by two paths and used on both: key.split(2)[1]")
    assert [line.split()[0] for line in lines[2:7]] == ["derived", "derived", "used", "used", "fix"]
    assert sum("bernoulli" in line for line in lines) == 20


def test_a_terminal_shows_findings_tree_and_table(report: AuditReport) -> None:
    file = io.StringIO()
    report.show(file, width=200)
    shown = file.getvalue()
    assert shown.index("fault:") < shown.index("note:") < shown.index("└──") < shown.index("times")
    assert "… and 8 more" in shown
    assert "key.split(2)[1]" in shown


def test_a_wide_family_is_cut_and_a_fault_in_the_rest_still_shows(report: AuditReport) -> None:
    data = report.to_dict()
    for node in data["keys"]:
        if node["name"].endswith("[19]"):
            node["rank"] = "fault"
    rows = tree_rows(data)
    (cut,) = [row for row in rows if row.label.startswith("…")]
    assert (cut.label, cut.rank) == ("… and 8 more", "fault")
    assert all(row.parent is None or row.parent < index for index, row in enumerate(rows))


def test_the_page_needs_nothing_else_and_escapes_names(report: AuditReport, tmp_path: Path) -> None:
    page = report.html(tmp_path / "audit.html")
    assert (tmp_path / "audit.html").read_text(encoding="utf-8") == page
    assert re.findall(r"https?://|<link|src=|@import|url\(", page) == []
    assert "<b>&[" not in page
    assert "&lt;b&gt;&amp;.split(20)" in page or "&lt;b&gt;&amp;" in page


def test_the_picture_is_valid_and_shows_rank_in_words(report: AuditReport, tmp_path: Path) -> None:
    root = ET.fromstring(report.svg(tmp_path / "keys.svg"))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len(texts) == len(tree_rows(report.to_dict()))
    assert sum("[fault]" in text for text in texts) == 1
    assert root.get("width") == root.get("viewBox", "").split()[2]


def test_the_picture_as_png(report: AuditReport, tmp_path: Path) -> None:
    report.png(tmp_path / "keys.png")
    assert (tmp_path / "keys.png").read_bytes().startswith(b"\x89PNG")


def in_browser(page: Path, fragment: str, tmp_path: Path) -> str:
    """The page's elements after its script has run."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--virtual-time-budget=2000", "--dump-dom", f"{page.as_uri()}{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


# Without a browser there is nothing to open the page in; where there is one, this must hold.
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_browser_filters_the_table_and_folds_the_tree(report: AuditReport, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    report.html(page)
    whole = in_browser(page, "", tmp_path)
    assert '<output id="shown">23 of 23</output>' in whole
    assert whole.index("<h2>Findings") < whole.index("<h2>Keys") < whole.index("<h2>Draws")
    assert whole.count("<details open") == 2
    filtered = in_browser(page, "#bernoulli", tmp_path)
    assert '<output id="shown">20 of 23</output>' in filtered
    assert filtered.count('<tr hidden=""') == 3
    none = in_browser(page, "#bernoulli%20nowhere", tmp_path)
    assert '<output id="shown">0 of 23</output>' in none


def test_a_clean_report_says_so() -> None:
    report = audit(jax.random.normal, jax.random.key(0))
    assert str(report).splitlines()[0] == "1 draw, from 1 key, 0 faults, 0 notes"
    assert "<h1>Audit: clean</h1>" in report.html()
    assert "No findings." in report.html()


def test_what_was_not_seen_is_in_every_report() -> None:
    compiled = jax.jit(jax.random.normal).lower(jax.random.key(0)).compile()
    report = audit(lambda: compiled(jax.random.key(0)))
    file = io.StringIO()
    report.show(file, width=200)
    for text in (str(report), file.getvalue(), report.html(), json.dumps(report.to_dict())):
        assert "a compiled executable" in text
    assert "1 region not seen" in str(report)
    assert "<h1>Audit: not clean</h1>" in report.html()
