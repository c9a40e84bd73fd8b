"""The document beside the arrays of a step: canonical JSON, sealed with its own SHA-256.

Restoring reads a document only through `loads`, so that a changed or cut one is damage and never another run.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from phijax_rng.errors import DamagedCheckpointError

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
