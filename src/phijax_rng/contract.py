"""What must not change between a save and a resume, and which guarantee falls when it does.

A contract is plain data, kept as canonical JSON with its own SHA-256 beside the state:

    schema, derivation             how to read the rest
    keys       root sampling balancer           fingerprints; root is null where it is not known
    source     kind, samplers in order          names, kinds, sizes, options
    losses     names, in order
    versions   jax jaxlib optax numpy orbax phijax_rng
    run        id, parent step, origin, changes

`compare` names every difference with both values and the guarantee that survives it:

    exact > rounding > batches > keys > none

>>> saved = {"keys": {"sampling": "threefry2x32:0-1"}, "versions": {"jax": "0.10.2"}}
>>> now = {"keys": {"sampling": "threefry2x32:0-1"}, "versions": {"jax": "0.12.0"}}
>>> [(d.setting, d.survives) for d in compare(saved, now)]
[('versions.jax', 'rounding')]
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from typing import Any

from phijax_rng import keys
from phijax_rng.errors import DamagedCheckpointError

SCHEMA = 1
"""Raised when a reader of older contracts would misread a new one."""

DERIVATION = "seed-split4-fold-split/1"
"""Names the derivation of keys; another name means that the same seed draws other numbers."""

LEVELS = ("exact", "rounding", "batches", "keys", "none")
"""What still holds after a change, from everything to nothing."""

REFUSED_LEVELS = ("keys", "none")
"""Levels at which a resume is refused unless `on_change="warn"`."""

# The first prefix that fits a setting's path decides what survives its change.
_SURVIVES = (
    ("schema", "none"),
    ("derivation", "none"),
    ("keys.", "none"),
    ("source", "keys"),
    ("losses", "batches"),
    ("versions.", "rounding"),
)

_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint", "phijax-rng")

_ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One setting that changed.

    Attributes:
        setting: dotted path in the contract, samplers by name: `source.samplers.pde.size`.
        saved: its value in the checkpoint.
        current: its value in this run.
        survives: the level that still holds, one of `LEVELS`.
    """

    setting: str
    saved: Any
    current: Any
    survives: str

    def __str__(self) -> str:
        return f"{self.setting}: {_shown(self.saved)} in the checkpoint, {_shown(self.current)} in this run"


def build(
    *,
    root: Any,
    sampling_key: Any,
    balancer_key: Any,
    source: Any,
    loss_names: tuple[str, ...] | None,
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """The contract of a run, as plain data that JSON can hold.

    Args:
        root: the root key, or `None` where only the streams are known.
        sampling_key: typed key of shape `()`.
        balancer_key: typed key of shape `()`.
        source: the batch source; its `describe()` is asked where it has one.
        loss_names: the losses in the order they are summed, `None` where a custom step decides.
        run: identity and lineage, carried and never compared.
    """
    return {
        "schema": SCHEMA,
        "derivation": DERIVATION,
        "keys": {
            "root": None if root is None else keys.fingerprint(root),
            "sampling": keys.fingerprint(sampling_key),
            "balancer": keys.fingerprint(balancer_key),
        },
        "source": _described_source(source),
        "losses": None if loss_names is None else list(loss_names),
        "versions": {name: _version(name) for name in _PACKAGES},
        "run": dict(run),
    }


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Every setting that differs, the gravest first."""
    before, now = dict(_flat(saved)), dict(_flat(current))
    differences = []
    for setting in dict.fromkeys((*before, *now)):
        old, new = before.get(setting, _ABSENT), now.get(setting, _ABSENT)
        level = next((level for prefix, level in _SURVIVES if setting.startswith(prefix)), None)
        unknown_root = setting == "keys.root" and None in (old, new)
        if level is not None and old != new and not unknown_root:
            differences.append(Difference(setting, old, new, level))
    return sorted(differences, key=lambda difference: -LEVELS.index(difference.survives))


def surviving(differences: list[Difference]) -> str:
    """The level that still holds after all of these changes."""
    return max((d.survives for d in differences), key=LEVELS.index, default="exact")


def report(differences: list[Difference]) -> str:
    """The differences for a terminal, one line each, under the level that each leaves."""
    lines = []
    for level in LEVELS:
        named = [difference for difference in differences if difference.survives == level]
        if named:
            lines.append(f"  {_MEANS[level]}:")
            lines += [f"    {difference}" for difference in named]
    return "\n".join(lines)


_MEANS = {
    "exact": "nothing is lost",
    "rounding": "the parameters may differ in their last bits",
    "batches": "the batches stay, the training differs",
    "keys": "the keys stay, the batches differ",
    "none": "this is another run",
}


def dumps(contract: Mapping[str, Any]) -> dict[str, Any]:
    """The contract with its SHA-256 over its canonical JSON, as `loads` checks it."""
    return {"contract": contract, "sha256": _digest(contract)}


def loads(data: Any, where: str) -> dict[str, Any]:
    """The contract out of what `dumps` made.

    Raises:
        DamagedCheckpointError: it is not such data, or its digest is wrong.
    """
    if not isinstance(data, Mapping) or set(data) != {"contract", "sha256"}:
        raise DamagedCheckpointError(
            f"the contract of {where} is not one of phijax_rng. Restore another step."
        )
    if _digest(data["contract"]) != data["sha256"]:
        raise DamagedCheckpointError(
            f"the contract of {where} does not match its SHA-256: it was damaged or edited. "
            "Restore another step."
        )
    contract = dict(data["contract"])
    if contract.get("schema") != SCHEMA:
        raise DamagedCheckpointError(
            f"the contract of {where} has schema {contract.get('schema')!r}, and this version "
            f"reads {SCHEMA}. "
            "Use the version of phijax_rng that wrote it."
        )
    return contract


def _digest(contract: Any) -> str:
    text = json.dumps(contract, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _described_source(source: Any) -> dict[str, Any]:
    if callable(getattr(source, "describe", None)):
        return dict(source.describe())
    return {"kind": f"{type(source).__module__}.{type(source).__qualname__}"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and leaves; a list of named entries is also compared by its order."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _flat(entry, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value and all(isinstance(e, Mapping) and "name" in e for e in value):
        yield f"{path}.order", [entry["name"] for entry in value]
        for entry in value:
            yield from _flat({k: v for k, v in entry.items() if k != "name"}, f"{path}.{entry['name']}")
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
