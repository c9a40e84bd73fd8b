"""The history of a run as a CSV file that goes on where the run goes on.

The file holds the rows of the history, byte for byte what a run that was never stopped would write: rows
behind the checkpoint that a killed process left are cut off, and rows that are missing are written again.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phijax_rng._base import validation
from phijax_rng.callbacks.history import History
from phijax_rng.callbacks.protocol import Event
from phijax_rng.devices import processes


@dataclasses.dataclass(frozen=True)
class CSVHistory:
    """A callback that keeps a CSV file of the history: `step`, then a column for each name.

    A cell is empty where a row has no such number. The last rows are written when the run ends. With several
    processes the first alone writes, and all remember the same.

    Attributes:
        path: the file; folders above it are made.
        every_n_steps: updates between two looks at the history.

    Raises:
        TypeError: `path` is not a path, or `every_n_steps` not a whole number.
        ValueError: `every_n_steps` is not positive.
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every_n_steps: int = 100

    def __post_init__(self) -> None:
        validation.path(self.path, "path", mend="Name the file.")
        validation.positive(self.every_n_steps, "every_n_steps")

    @property
    def name(self) -> str:
        """Its memory belongs to one file."""
        return f"CSVHistory/{os.fspath(self.path)}"

    def may_report(self, name: str) -> bool:
        """It reports nothing."""
        return False

    def check(self, memory: Mapping[str, Any]) -> None:
        """Raises if the file could not be written.

        Raises:
            OSError: something else is there, or the folder cannot be written to.
        """
        processes.first_does(functools.partial(_require_writable, Path(self.path).expanduser(), not memory))

    def __call__(self, event: Event) -> None:
        """Brings the file up to the history."""
        history, memory = event.history, event.memory
        kept, size = memory.get("rows", 0), memory.get("bytes", 0)
        # Another column is another header, and a comma more in every row.
        if not kept or memory.get("columns") != len(history.names):
            kept, size = 0, 0
        if processes.is_first():
            self._bring_up(history, kept, size, anew=not memory)
        # What is remembered follows from the history alone, so it is the same in every process. The last row
        # may still grow, and the next look begins with it.
        settled = max(len(history) - 1, 0)
        size += len(_lines(history, kept, settled).encode())
        memory.update(rows=settled, bytes=size, columns=len(history.names))

    def _bring_up(self, history: History, kept: int, size: int, *, anew: bool) -> None:
        """Writes the rows behind the first `kept`, which end at byte `size`; all, if these are not there."""
        path = Path(self.path).expanduser()
        if kept and not _goes_on(path, history, kept, size):
            kept, size = 0, 0
        if anew:
            _require_ours(path)
        _write(path, size, _lines(history, kept, len(history)).encode())

    def finish(self, event: Event) -> None:
        """Writes the last rows."""
        self(event)


def _lines(history: History, first: int, end: int) -> str:
    """These rows, and the header before the first of all."""
    rows = [history.csv_row(index) for index in range(first, end)]
    return "".join(rows if first else [history.csv_header(), *rows])


def _goes_on(path: Path, history: History, count: int, written: int) -> bool:
    """Whether the first `written` bytes of the file begin and end as the first `count` rows do."""
    first, last = history.csv_header().encode(), history.csv_row(count - 1).encode()
    try:
        with path.open("rb") as file:
            begins = file.read(len(first)) == first
            file.seek(max(written - len(last), 0))
            return begins and file.read(len(last)) == last
    except OSError:
        return False


def _require_writable(path: Path, anew: bool) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, and the history is a file. Name one in it.")
    if anew:
        _require_ours(path)
    validation.writable(path.parent)


def _require_ours(path: Path) -> None:
    """Raises if the file that would be written anew is not one of these."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        if file.read(5) != b"step,":
            raise FileExistsError(
                f"{path} holds something else than a history, which would be lost. Name another file."
            )


def _write(path: Path, keep: int, added: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if keep == 0:
        # Whole or not at all: whoever reads meanwhile sees the old file or the new one.
        beside = path.with_name(f"{path.name}.new")
        beside.write_bytes(added)
        beside.replace(path)
        return
    with path.open("r+b") as file:
        file.truncate(keep)
        file.seek(keep)
        file.write(added)
