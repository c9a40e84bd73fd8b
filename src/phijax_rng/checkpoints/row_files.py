"""Tables of a run in files of their own, which no later save repeats.

    <directory>/rows/<SHA-256>.jsonl    some consecutive rows, each a JSON list in a line

The document of a step names the files of its tables in order, and has the last row itself, which may still
get numbers. A file never changes: one that was cut or edited is found by its digest, a branch that was left
keeps its own, and a reader of a running job finds what the document names.

A save writes the rows since its parent. Where the file before has no more rows than that, one new file has
the rows of both, so n rows are in about log n files, and each is written about log n times.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from phijax_rng.checkpoints import faults
from phijax_rng.errors import DamagedCheckpointError

TABLES = ("history", "timing")
"""The entries of a memory that are tables."""

Files: TypeAlias = list[list[Any]]
"""[SHA-256, number of rows, step of the last one] of each file of a table, in the order of the rows."""

# Then those that no document names are looked for. A table of a million rows has about twenty.
_MANY_FILES = 100


class Table(Protocol):
    """Rows of which all but the last are final."""

    def __len__(self) -> int: ...

    def plain(self, start: int = 0) -> dict[str, Any]:
        """`{"names": [...], "rows": [[step, a number or None for each name], ...]}` from this row on."""
        ...


def split(table: Table, before: Files) -> tuple[dict[str, Any], Files, dict[str, bytes]]:
    """A table as a save stores it.

    Args:
        table: all rows.
        before: the files of the step that the save continues.

    Returns:
        What stays in the document; the files of all other rows; and the text of the new one by its name.
    """
    files, final = list(before), max(len(table) - 1, 0)
    stored = sum(rows for _, rows, _ in files)
    # After damage, rows are missing that the files of the parent should have.
    if stored > final or (files and table.plain(stored - 1)["rows"][0][0] != files[-1][2]):
        files, stored = [], 0
    if final == stored:
        return table.plain(final), files, {}
    while files and files[-1][1] <= final - stored:
        stored -= files.pop()[1]
    rows = table.plain(stored)["rows"][: final - stored]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
    name = hashlib.sha256(text).hexdigest()
    return table.plain(final), [*files, [name, len(rows), rows[-1][0]]], {name: text}


class RowFiles:
    """The files in the directory of a run."""

    def __init__(self, directory: Path):
        self._folder = directory / "rows"

    def write(self, new: Mapping[str, bytes]) -> None:
        """Writes files, each whole or not at all."""
        for name, text in new.items():
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f"{name}.{os.getpid()}.tmp"
            with open(unfinished, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self._path(name))

    def joined(
        self, document: Mapping[str, Any], lost: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """The memory of a document with every row of its tables.

        Args:
            document: of a step.
            lost: called with the reason where a file is damaged, whose rows are then left out.

        Raises:
            DamagedCheckpointError: a file is damaged, without `lost`.
        """
        memory = dict(document["memory"])
        for table, files in document.get("tables", {}).items():
            rows: list[list[Any]] = []
            width = 1 + len(memory[table]["names"])
            for name, count, _ in files:
                try:
                    rows += self._read(name, count, width)
                except DamagedCheckpointError as error:
                    if lost is None:
                        raise
                    lost(str(error))
            memory[table] = {**memory[table], "rows": [*rows, *memory[table]["rows"]]}
        return memory

    def delete_unnamed(self, documents: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Deletes the files that no step names, where there are many.

        Args:
            documents: those of every step of the directory. Where one cannot be read, nothing is deleted.
        """
        with contextlib.suppress(OSError, DamagedCheckpointError):
            found = set(os.listdir(self._folder))
            if len(found) > _MANY_FILES:
                for name in found - {self._path(name).name for one in documents() for name in _names(one)}:
                    os.unlink(self._folder / name)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _read(self, name: str, count: int, width: int) -> list[list[Any]]:
        path = self._path(name)
        try:
            text = path.read_bytes()
        except OSError as error:
            if error.errno in faults.MISSING:
                raise DamagedCheckpointError(f"{path} with {count} rows of the history is missing.") from None
            raise
        if hashlib.sha256(text).hexdigest() != name:
            raise DamagedCheckpointError(
                f"{path} with {count} rows of the history does not match its SHA-256: "
                "it was damaged or edited."
            )
        rows = [json.loads(line) for line in text.splitlines()]
        if len(rows) != count or any(len(row) > width for row in rows):
            raise DamagedCheckpointError(f"{path} has {len(rows)} rows, and the checkpoint names {count}.")
        return [row + [None] * (width - len(row)) for row in rows]


def _names(document: Mapping[str, Any]) -> list[str]:
    return [name for files in document.get("tables", {}).values() for name, *_ in files]
