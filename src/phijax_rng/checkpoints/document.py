"""The document of a step: JSON beside the arrays, sealed with its own SHA-256.

Orbax saves each item of a step through a handler; the one here digests the arrays and writes the document, in
the background of the same save. A restore does not need it: the document is a plain file, which is read only
through `loads`, so that a changed or cut one is damage and never another run.
"""

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future as ocp_future

from phijax_rng.checkpoints import stored_leaves
from phijax_rng.checkpoints.row_files import Files, RowFiles
from phijax_rng.checkpoints.stored_leaves import Arrays, Parts
from phijax_rng.devices import processes
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError

DOCUMENT = "document"
DOCUMENT_FILE = "document.json"

HANDLER = "phijax_rng.checkpoints._DocumentHandler"
"""The name that Orbax stores with every step; the class had it in version 0.1.0."""

SCHEMA = 2
"""Raised by one when a reader of older documents would misread a new one.

Before 2, all rows of the history are in the memory of each document.
"""


class Row(tuple[Any, ...]):
    """The shapes of the entries of a list of fixed length."""


_NUMBER = (int, float)
_LEAVES, _ANY = [Row((str, str, [int]))], object
_OBJECT: dict[Any, Any] = {...: _ANY}
_TABLE = {"names?": [str], "rows?": [[(*_NUMBER, None)]]}
_SHAPE: dict[Any, Any] = {
    "schema": int,
    "leaves": {"model_state": _LEAVES, "rest": _LEAVES},
    "digests": {"model_state": str, "rest": str},
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
    # Since version 0.2.0. Of each table the files with its rows: see `checkpoints.row_files`.
    "tables?": {...: [Row((str, int, int))]},
    "step?": int,
    "parent?": ({"step": int, "sha256": (str, None)}, None),
    "sha256": str,
    ...: _ANY,
}
"""What a document is: types, `None`, alternatives in a tuple, `[each]`, and `{name: shape}`, where a name
that ends with `?` may be missing and `...` stands for every other name."""


def mistake(value: object, shape: Any, path: str = "") -> str | None:
    """What is wrong with plain data that should have this shape: a sentence, or `None`."""
    if isinstance(shape, Row):
        return _mistake_in_row(value, shape, path)
    if isinstance(shape, tuple):
        found = [mistake(value, one, path) for one in shape]
        return None if None in found else found[0]
    if isinstance(shape, list) and isinstance(value, list):
        return _first(mistake(entry, shape[0], f"{path}[{i}]") for i, entry in enumerate(value))
    if isinstance(shape, dict) and isinstance(value, Mapping):
        return _mistake_in_names(value, shape, path)
    kind = shape if isinstance(shape, type) else type(shape)
    if isinstance(value, kind) and (kind is _ANY or not isinstance(value, bool)):
        return None
    return f"{path or 'it'} is {_kind(value)}, not {_KINDS[kind]}"


def _mistake_in_row(value: object, shape: Row, path: str) -> str | None:
    if not isinstance(value, list) or len(value) != len(shape):
        return f"{path} is not a list of {len(shape)} entries"
    return _first(mistake(entry, shape[i], f"{path}[{i}]") for i, entry in enumerate(value))


def _mistake_in_names(value: Mapping[str, Any], shape: dict[Any, Any], path: str) -> str | None:
    known = {name.removesuffix("?"): name for name in shape if name is not ...}
    for name, spelled in known.items():
        if name not in value and name == spelled:
            return f"{_below(path, name)} is missing"
    if ... not in shape:
        unknown = next((name for name in value if name not in known), None)
        if unknown is not None:
            return f"{_below(path, unknown)} is not known"
    return _first(
        mistake(entry, shape[known[name]] if name in known else shape[...], _below(path, name))
        for name, entry in value.items()
    )


_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    bool: "a truth value",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _first(mistakes: Iterator[str | None]) -> str | None:
    return next((one for one in mistakes if one is not None), None)


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


class DocumentHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Digests the arrays and writes the document."""

    @classmethod
    def typestr(cls) -> str:
        """The name that Orbax stores with every step."""
        return HANDLER

    async def async_save(self, directory: Path, args: "SaveDocument") -> list[ocp_future.Future]:
        """Starts the work; Orbax waits for it before it makes the step visible."""
        return [
            ocp_future.CommitFutureAwaitingContractedSignals(
                self._write(directory, args), name="phijax_rng_document"
            )
        ]

    async def _write(self, directory: Path, args: "SaveDocument") -> None:
        # Hashing takes every core, so it starts only when `save` has returned and training continues.
        args.returned.wait()
        self.save(directory, args)
        if args.abandoned:
            raise InterruptedError("the run left before this save was complete")

    def save(self, directory: Path, args: "SaveDocument") -> None:
        """Does the work at once."""
        # Every process calls this; two writers of one file on a shared disk could tear it.
        if args.is_writer:
            # First: what a document names is there before it.
            args.row_files.write(args.rows)
            (directory / DOCUMENT_FILE).write_text(json.dumps(args.document()))
        args.release()

    def restore(self, directory: Path, args: object = None) -> object:
        """Reads the document; Orbax calls it for whoever restores the item through its own manager."""
        return json.loads((directory / DOCUMENT_FILE).read_text())


@ocp.args.register_with_handler(DocumentHandler, for_save=True)
@dataclasses.dataclass
class SaveDocument(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What the document is made of. Holding the arrays keeps their bits from being donated away.

    Attributes:
        parts: the leaves of the state.
        arrays: the stored arrays of each part, by number.
        stored: the same, as the state has them.
        step: the number of the step.
        parent: number and SHA-256 of the document that this step continues, or `None`.
        contract: plain data.
        memory: plain data, with the last row of each table.
        tables: the files with the other rows of each table.
        rows: the text of those files that are new, by name.
        row_files: where they are written.
        sha256: the seal, once the document is written.
        returned: set when the call that started the save has returned.
        is_writer: whether this process writes the document.
        abandoned: whether the save is not to become visible any more.
    """

    parts: Parts
    arrays: Mapping[str, Arrays]
    step: int
    parent: dict[str, Any] | None
    contract: dict[str, Any]
    memory: dict[str, Any]
    tables: dict[str, Files]
    rows: dict[str, bytes]
    row_files: RowFiles
    sha256: str | None = None
    returned: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_writer: bool = True
    abandoned: bool = False
    stored: Mapping[str, Arrays] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored = self.arrays
        # A view of the host's memory on CPU, a copy from other devices; while it lives, XLA copies
        # the state instead of writing into it.
        self.arrays = {
            part: {name: np.asarray(array) for name, array in stored_leaves.readable(stored).items()}
            for part, stored in self.arrays.items()
        }
        self.is_writer = processes.is_primary()

    def document(self) -> dict[str, Any]:
        """The document, sealed with its SHA-256."""
        described = stored_leaves.described(self.parts, self.arrays)
        bound = {
            "schema": SCHEMA,
            "step": self.step,
            "parent": self.parent,
            **described,
            "tables": self.tables,
        }
        document = dumps({**bound, "contract": self.contract, "memory": self.memory})
        self.sha256 = document["sha256"]
        return document

    def release(self) -> None:
        """Lets go of arrays and rows: the seal is needed until the next save, and they are large."""
        self.parts, self.arrays, self.rows = {}, {}, {}


@ocp.args.register_with_handler(DocumentHandler, for_restore=True)
@dataclasses.dataclass
class RestoreDocument(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Orbax registers a handler only with arguments for both directions."""


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
