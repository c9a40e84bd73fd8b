"""What an audit returns: draws, findings, keys and what was not seen, as plain data and as pages."""

import dataclasses
import os
from typing import Any, TextIO

from phijax_rng.auditing import report
from phijax_rng.auditing.events import Unseen
from phijax_rng.auditing.findings import Draw, Finding, KeyNode


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit recorded.

    Attributes:
        draws: every draw, in order; repetitions of a draw at one line have one entry with a count.
        findings: faults first, then notes.
        unseen: regions that ran compiled, or in another thread, and may contain draws.
        keys: every key that was used, and the keys it was derived from, parents first.
        result: what the audited function returned.
    """

    draws: tuple[Draw, ...]
    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]
    keys: tuple[KeyNode, ...]
    result: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings whose numbers repeat, or cannot be reproduced."""
        return tuple(finding for finding in self.findings if finding.rank == "fault")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that are often intended."""
        return tuple(finding for finding in self.findings if finding.rank == "note")

    @property
    def clean(self) -> bool:
        """Whether there is neither a fault nor a region that was not seen."""
        return not self.faults and not self.unseen

    def __str__(self) -> str:
        """Findings, regions that were not seen, and draws, as plain text."""
        return report.as_text(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Strings, numbers, lists and dicts, for JSON."""
        return {
            "clean": self.clean,
            "findings": [_plain(finding) for finding in self.findings],
            "unseen": [_plain(region) for region in self.unseen],
            "draws": [_plain(draw) for draw in self.draws],
            "keys": [_plain(node) for node in self.keys],
        }

    def show(self, file: TextIO | None = None, *, width: int | None = None) -> None:
        """Prints the findings, the tree of keys and the table of draws, with color on a terminal.

        Args:
            file: standard output for `None`.
            width: columns; the terminal's width for `None`.
        """
        report.show(self.to_dict(), file, width)

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One HTML page without other files: findings, a foldable tree of keys, a table with a filter.

        Args:
            path: the file to write; none for `None`.

        Returns:
            The page.
        """
        return _written(report.as_html(self.to_dict()), path)

    def svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """The tree of keys as SVG: derivations, draws and faults."""
        return _written(report.as_svg(self.to_dict()), path)

    def png(self, path: str | os.PathLike[str]) -> None:
        """Writes the same picture as a PNG file; needs Matplotlib."""
        report.write_png(self.to_dict(), path)


def _plain(record: Draw | Finding | Unseen | KeyNode) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name == "place":
            plain[field.name] = str(value)
        elif isinstance(value, tuple):
            plain[field.name] = [item if isinstance(item, (int, str)) else str(item) for item in value]
        else:
            plain[field.name] = value
    return plain


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text
