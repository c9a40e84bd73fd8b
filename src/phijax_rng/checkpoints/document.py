"""The document of a step: JSON beside the arrays, sealed with its own SHA-256, and the rows of the history.

It is a plain file, which is read only through `loads`, so that a changed or cut one is damage and never
another run.

    <directory>/rows/<SHA-256>.jsonl    some consecutive rows, each a JSON list in a line

The document names the files of its tables in order, and has the last row itself, which may still get numbers.
A file never changes: one that was cut or edited is found by its digest, a branch that was left keeps its own,
and a reader of a running job finds what the document names. A save writes the rows since its parent. Where
the file before has no more rows than that, one new file has the rows of both, so n rows are in about log n
files, and each is written about log n times.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from phijax_rng._base.shapes import Row, mistake
from phijax_rng.checkpoints import faults
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError

DOCUMENT = "document"
DOCUMENT_FILE = "document.json"

HANDLER = "phijax_rng.checkpoints._DocumentHandler"
"""The name that Orbax stores with every step; the class had it in version 0.1.0."""

SCHEMA = 2
"""Raised by one when a reader of older documents would misread a new one.

Before 2, all rows of the history are in the memory of each document.
"""

_NUMBER = (int, float)
_LEAVES, _ANY = [Row((str, str, [int]))], object
_OBJECT: dict[Any, Any] = {...: _ANY}
_TABLE = {"names?": [str], "rows?": [[(*_NUMBER, None)]]}
_SHAPE: dict[Any, Any] = {
    "schema": int,
    "leaves": {"model_state": _LEAVES, "rest": _LEAVES},
    "digests": {"model_state": str, "rest": str},
    "tiles?": {"model_state": {...: [int]}, "rest": {...: [int]}},
    "contract": {
        "keys?": {"root?": (str, None), ...: _ANY},
        **dict.fromkeys(("source?", "training?", "versions?", "settings?", "machine?", "contents?"), _OBJECT),
        "run?": {
            "id?": str,
            "parent_step?": (int, None),
            "origin?": (_OBJECT, None),
            "changes?": [_OBJECT],
        },
        ...: _ANY,
    },
    "memory": {
        "metrics?": {...: _NUMBER},
        "end?": {"metrics?": {...: _NUMBER}, ...: _ANY},
        "keep_best?": {"metric": str, "count": int, "mode": str, "every_n_steps": int},
        "history?": _TABLE,
        "timing?": _TABLE,
        "interval?": ({"count": int, "sums": {...: _NUMBER}}, None),
        "seconds?": _NUMBER,
        "skipped?": Row((int, int)),
        "pending?": [str],
        "callbacks?": _OBJECT,
        ...: _ANY,
    },
    # Since version 0.2.0. Of each table the files with its rows: see above.
    "tables?": {...: [Row((str, int, int))]},
    "step?": int,
    "parent?": ({"step": int, "sha256": (str, None)}, None),
    "sha256": str,
    ...: _ANY,
}
"""What a document is; see `shapes.mistake`."""


def require_shape(document: Mapping[str, Any], where: str) -> None:
    """Checks everything that a restore relies on, so that nothing behind it meets another type.

    Raises:
        DamagedCheckpointError: a part is missing, or of another type or length; the message names it.
    """
    wrong = mistake(document, _SHAPE) or _wrong_counts(document)
    if wrong is not None:
        raise DamagedCheckpointError(
            f"the {DOCUMENT} of {where} was edited, or not written by phijax_rng: {wrong}. "
            "Restore another step."
        )


def _wrong_counts(document: Mapping[str, Any]) -> str | None:
    """What `_SHAPE` cannot say: numbers that must not be negative, and lists that belong together."""
    for part, leaves in document["leaves"].items():
        for index, (_, _, shape) in enumerate(leaves):
            if any(size < 0 for size in shape):
                return f"leaves.{part}[{index}][2] has a negative size"
        if len({path for path, *_ in leaves}) < len(leaves):
            return f"leaves.{part} names one path twice"
    for table in ("history", "timing"):
        known = document["memory"].get(table, {})
        rows, width = known.get("rows", []), 1 + len(known.get("names", []))
        if any(len(row) != width or not isinstance(row[0], int) for row in rows):
            return f"memory.{table}.rows has a row that is not a step and {width - 1} numbers"
    if document["schema"] > 1 and "tables" not in document:
        return "tables is missing"
    for table, files in document.get("tables", {}).items():
        if any(rows < 1 for _, rows, _ in files) or table not in document["memory"]:
            return f"tables.{table} has a file without rows, or is no table of the memory"
    return None


def require_contract(contract: Mapping[str, Any], memory: Mapping[str, Any]) -> None:
    """Checks at the save what `require_shape` checks at the restore.

    Raises:
        TypeError: a part that restores rely on has another type.
    """
    metrics = {"metrics": memory["metrics"]} if "metrics" in memory else {}
    wrong = mistake(contract, _SHAPE["contract"], "contract") or mistake(metrics, _SHAPE["memory"], "memory")
    if wrong is not None:
        raise TypeError(f"{wrong}. Leave it out, or store it under another name.")


def run_of(document: Mapping[str, Any]) -> str | None:
    """The id of the run that a step was saved in; `None` for a state that was saved without a contract."""
    known: str | None = document["contract"].get("run", {}).get("id")
    return known


def dumps(contract: Mapping[str, Any]) -> dict[str, Any]:
    """The contract with its SHA-256 over its canonical JSON, as `loads` checks it."""
    return {"contract": contract, "sha256": _digest(contract)}


def loads(data: object, where: str) -> dict[str, Any]:
    """The contract out of what `dumps` made.

    Args:
        data: parsed JSON.
        where: the file's place, for messages.

    Raises:
        DamagedCheckpointError: it is not such data, or its digest is wrong.
        CheckpointMismatchError: a newer version wrote it.
    """
    if not isinstance(data, Mapping) or set(data) != {"contract", "sha256"}:
        raise DamagedCheckpointError(
            f"the contract of {where} was not written by phijax_rng. Restore another step."
        )
    contract = data["contract"]
    if _digest(contract) != data["sha256"]:
        raise DamagedCheckpointError(
            f"the contract of {where} does not match its SHA-256: it was damaged or edited. "
            "Restore another step."
        )
    if not isinstance(contract, Mapping):
        raise DamagedCheckpointError(f"the contract of {where} is not an object. Restore another step.")
    # Behind the digest: only an undamaged document says reliably which version wrote it.
    schema = contract.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise CheckpointMismatchError(
            f"{where} was written by a newer version of phijax_rng, with schema {schema}; this version reads "
            f"1 to {SCHEMA}. Update phijax_rng, or name an older step."
        )
    if isinstance(schema, bool) or schema not in range(1, SCHEMA + 1):
        raise DamagedCheckpointError(
            f"the contract of {where} has schema {schema!r}, and this version reads 1 to {SCHEMA}. "
            "Restore another step."
        )
    return dict(contract)


def _digest(contract: object) -> str:
    # Every option is part of the format: another order, space or escape gives another digest.
    text = json.dumps(contract, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


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


class Parents:
    """The steps that one object saved or restored: the seals of their documents, and their tables."""

    def __init__(self, read: Callable[[int], Mapping[str, Any]]):
        self._read = read
        self._last: int | None = None
        self._known: dict[int, Mapping[str, Any]] = {}

    def saw(self, step: int, document: Mapping[str, Any]) -> None:
        """Remembers a step that was saved or restored.

        Args:
            step: its number.
            document: `sha256`, `contract` and `tables`; only the first process knows the seal of a save.
        """
        self._last = step
        if document["sha256"] is not None:
            self._known[step] = _essence(document)

    def forget_after(self, step: int) -> None:
        """Forgets later steps, which were set aside and may be saved again."""
        self._known = {found: known for found, known in self._known.items() if found <= step}

    def of(self, contract: Mapping[str, Any]) -> dict[str, Any] | None:
        """Number and seal of the step that a save with this contract continues."""
        step = contract["run"].get("parent_step") if "run" in contract else self._last
        return None if step is None else {"step": step, "sha256": self._of(step).get("sha256")}

    def tables(self, contract: Mapping[str, Any]) -> Mapping[str, Files]:
        """The files of the tables of that step, if it is of the same run."""
        run = contract.get("run", {})
        known = self._of(run["parent_step"]) if run.get("parent_step") is not None else {}
        same = known.get("run") == run.get("id") is not None
        return known.get("tables", {}) if same else {}

    def _of(self, step: int) -> Mapping[str, Any]:
        if step not in self._known:
            with contextlib.suppress(DamagedCheckpointError, OSError):
                self._known[step] = _essence(self._read(step))
        return self._known.get(step, {})


def _essence(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"sha256": document["sha256"], "tables": document.get("tables", {}), "run": run_of(document)}
