"""Who drew what from which key.

    report = audit(train_step, state, batch, names={"root": root})
    print(report)             # findings first, then every draw with the name of its key and its line
    assert report.clean

The function runs as it is, op by op, with JAX's random primitives observed: through `jit`, `grad`, `vmap`,
`scan`, `while_loop`, `cond`, `checkpoint` and custom derivatives, in whatever library. Keys are compared by
their bits, so that the same key under two names is seen for what it is. What could not be
observed is listed as not seen, and a report that has such a region is not clean.

Op by op is slow (a compile for every small operation, the first time): audit two or three small
steps. Nothing is replaced or slowed down before `audit` is called, and all is put back after it.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from phijax_rng._base import validation
from phijax_rng.auditing import report
from phijax_rng.auditing.events import Unseen
from phijax_rng.auditing.findings import Draw, Finding, KeyNode


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit saw.

    Attributes:
        draws: every draw, in order; the same draw by the same line is counted, not repeated.
        findings: faults first, then notes.
        unseen: regions that ran compiled, or in another thread, and may hold draws.
        keys: every key that was used, and those it came from, parents first.
        result: what the audited function returned.
    """

    draws: tuple[Draw, ...]
    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]
    keys: tuple[KeyNode, ...]
    result: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings that make numbers repeat, or that cannot be repeated."""
        return tuple(finding for finding in self.findings if finding.rank == "fault")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that are worth knowing and often meant."""
        return tuple(finding for finding in self.findings if finding.rank == "note")

    @property
    def clean(self) -> bool:
        """Whether there is no fault, and nothing that could not be seen."""
        return not self.faults and not self.unseen

    def __str__(self) -> str:
        """Findings, what was not seen, and the draws, as plain text."""
        return report.as_text(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists and dicts, fit for JSON."""
        return {
            "clean": self.clean,
            "findings": [_plain(finding) for finding in self.findings],
            "unseen": [_plain(region) for region in self.unseen],
            "draws": [_plain(draw) for draw in self.draws],
            "keys": [_plain(node) for node in self.keys],
        }

    def show(self, file: TextIO | None = None, *, width: int | None = None) -> None:
        """Prints the findings, the tree of keys and the table of draws, in color on a terminal.

        Args:
            file: where to; standard output for `None`.
            width: columns; those of the terminal for `None`.
        """
        report.show(self.to_dict(), file, width)

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs nothing else: findings, a tree that folds, a table that filters.

        Args:
            path: a file to write it to.

        Returns:
            The page.
        """
        return _written(report.as_html(self.to_dict()), path)

    def svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """The tree of keys as a picture: what came from what, what was drawn, where the faults are."""
        return _written(report.as_svg(self.to_dict()), path)

    def png(self, path: str | os.PathLike[str]) -> None:
        """The same picture as a PNG file; needs Matplotlib."""
        report.write_png(self.to_dict(), path)


def audit(
    fn: Callable[..., Any],
    *args: Any,
    names: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
) -> AuditReport:
    """Runs `fn(*args)` and reports every draw, with the name of its key and the line that asked for it.

    Keys among the arguments are named by their parameter (`key`, `state.rng_key`), keys that `fn` closes over
    by their variable, and all others by how they were derived: `key.split(3)[0].fold_in(7)`.

    Args:
        fn: any function; what it does happens once, as in an ordinary call.
        *args: its arguments.
        names: name -> key, array of keys, or pytree of keys, to be called so in the report.
        allow: names of keys whose findings are meant, with those of all keys that come from them; `*` stands
            for anything. Their findings become notes.

    Returns:
        The report; `report.result` is what `fn` returned.

    Raises:
        TypeError: `fn` is not callable, or `names` does not map names to keys.
        RuntimeError: another audit is open in this process, or JAX has moved what the audit looks through.
        Exception: whatever `fn` raises; JAX is as it was before.
    """
    # The recorder and the hooks into JAX load only here: they depend on private names of JAX, and an
    # `import phijax_rng` must not fail or slow down because of them.
    from phijax_rng.auditing.session import Session  # noqa: PLC0415

    session = Session(names=names, allow=allow)
    session.give(validation.function(fn, "fn"), args)
    with session.observing():
        result = fn(*args)
    return session.report(result)


def _plain(record: Any) -> dict[str, Any]:
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
