"""The document of a step: JSON beside the arrays, sealed with its own SHA-256.

Orbax saves each item of a step through a handler; the one here digests the arrays and writes the document, in
the background of the same save. A restore does not need it: the document is a plain file, which is read only
through `loads`, so that a changed or cut one is damage and never another run.
"""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future as ocp_future

from phijax_rng.checkpoints import stored_leaves
from phijax_rng.checkpoints.stored_leaves import Arrays, Parts
from phijax_rng.devices import processes
from phijax_rng.errors import DamagedCheckpointError

DOCUMENT = "document"
DOCUMENT_FILE = "document.json"

SCHEMA = 1
"""Raised by one when a reader of older contracts would misread a new one."""


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
    """
    if not isinstance(data, Mapping) or set(data) != {"contract", "sha256"}:
        raise DamagedCheckpointError(
            f"the contract of {where} was not written by phijax_rng. Restore another step."
        )
    if _digest(data["contract"]) != data["sha256"]:
        raise DamagedCheckpointError(
            f"the contract of {where} does not match its SHA-256: it was damaged or edited. "
            "Restore another step."
        )
    contract = dict(data["contract"])
    # Behind the digest: only an undamaged document says reliably which version wrote it.
    if contract.get("schema") != SCHEMA:
        raise DamagedCheckpointError(
            f"the contract of {where} has schema {contract.get('schema')!r}, and this version "
            f"reads {SCHEMA}. "
            "Use the version of phijax_rng that wrote it."
        )
    return contract


def _digest(contract: object) -> str:
    # Every option is part of the format: another order, space or escape gives another digest.
    text = json.dumps(contract, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class DocumentHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Digests the arrays and writes the document."""

    @classmethod
    def typestr(cls) -> str:
        """The name that Orbax stores with every step; the class had it in version 0.1.0."""
        return "phijax_rng.checkpoints._DocumentHandler"

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

    def save(self, directory: Path, args: "SaveDocument") -> None:
        """Does the work at once."""
        # Every process calls this; two writers of one file on a shared disk could tear it.
        if args.is_writer:
            (directory / DOCUMENT_FILE).write_text(json.dumps(args.document()))

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
        contract: plain data.
        memory: plain data.
        returned: set when the call that started the save has returned.
        is_writer: whether this process writes the document.
    """

    parts: Parts
    arrays: Mapping[str, Arrays]
    contract: dict[str, Any]
    memory: dict[str, Any]
    returned: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_writer: bool = True

    def __post_init__(self) -> None:
        # A view of the host's memory on CPU, a copy from other devices; while it lives, XLA copies
        # the state instead of writing into it.
        self.arrays = {
            part: {name: np.asarray(array) for name, array in readable_arrays(stored).items()}
            for part, stored in self.arrays.items()
        }
        self.is_writer = processes.is_primary()

    def document(self) -> dict[str, Any]:
        """The document, sealed with its SHA-256."""
        saved = {"schema": SCHEMA, **stored_leaves.described(self.parts, self.arrays)}
        return dumps({**saved, "contract": self.contract, "memory": self.memory})


@ocp.args.register_with_handler(DocumentHandler, for_restore=True)
@dataclasses.dataclass
class RestoreDocument(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Orbax registers a handler only with arguments for both directions."""


def readable_arrays(arrays: Arrays) -> dict[str, Any]:
    """Arrays that this process can read; with several processes, each of them must call this."""
    return {name: processes.gather(array) for name, array in arrays.items()}
