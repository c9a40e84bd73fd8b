"""Which key draws what, at which line.

    report = audit(train_step, state, batch, names={"root": root})
    print(report)             # findings first, then every draw with the name of its key and its line
    assert report.clean

The function runs op by op, as under `jax.disable_jit`, and every random primitive of JAX is recorded: through
`jit`, `grad`, `vmap`, `scan`, `while_loop`, `cond`, `checkpoint` and custom derivatives, in any library. Keys
are compared by their bits, so the audit recognizes one key under two names. A region that it cannot observe
is listed as not seen, and a report with such a region is not clean.

This is slow, because JAX compiles every small operation the first time: audit two or three small steps.
Nothing in JAX is replaced before `audit` is called, and everything is restored when it ends.
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


def audit(
    fn: Callable[..., Any],
    *args: Any,
    names: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
) -> AuditReport:
    """Runs `fn(*args)` and reports every draw, with the name of its key and the line of the call.

    Keys in the arguments have the name of their parameter (`key`, `state.rng_key`), keys that `fn` closes
    over that of their variable, and all others that of their derivation: `key.split(3)[0].fold_in(7)`.

    Args:
        fn: any function; it runs once, with its side effects.
        *args: its arguments.
        names: name -> key, array of keys, or pytree of keys; these names win in the report.
        allow: names of keys whose faults are intended and become notes, with those of every key derived
            from them; `*` matches anything.

    Returns:
        The report; `report.result` is what `fn` returned.

    Raises:
        TypeError: `fn` is not callable, or `names` does not map names to keys.
        RuntimeError: another audit runs in this process, or JAX lacks a private name that the audit uses.
        Exception: whatever `fn` raises, after JAX is restored.
    """
    # The recorder and the hooks into JAX load only here: they depend on private names of JAX, and an
    # `import phijax_rng` must not fail or slow down because of them.
    from phijax_rng.auditing.session import Session  # noqa: PLC0415

    session = Session(names=names, allow=allow)
    session.add_inputs(validation.function(fn, "fn"), args)
    with session.observing():
        result = fn(*args)
    return session.report(result)


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
