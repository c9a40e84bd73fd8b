"""What decides the bits of a run on this machine, and what to change."""

import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from phijax_rng import determinism
from phijax_rng.checkpoints.lock import DirectoryLock
from phijax_rng.errors import DirectoryInUseError
from phijax_rng.resume.run_contract import describe_environment


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A machine as a run would find it.

    Attributes:
        versions: of Python, of JAX and of what decides numbers beside it.
        devices: what JAX computes on.
        settings: of JAX and XLA that move numbers, with their values.
        machine: what a contract says of it.
        directory: what a run directory allows; empty without one.
        advice: what to change, a sentence each.
    """

    versions: dict[str, Any]
    devices: tuple[str, ...]
    settings: dict[str, Any]
    machine: dict[str, Any]
    directory: dict[str, Any]
    advice: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """All of it as JSON can store it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        parts = {"versions": self.versions, "settings": self.settings, "machine": self.machine}
        lines = [f"devices: {', '.join(self.devices)}"]
        for title, values in {**parts, "directory": self.directory}.items():
            lines += [f"{title}:"] * bool(values)
            lines += [f"  {name} = {value}" for name, value in values.items()]
        return "\n".join([*lines, "advice:", *(f"  {one}" for one in self.advice or ("nothing to change",))])


def diagnose(directory: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Looks at this process and, if one is given, at a run directory, which need not exist.

    A lock is tried in a folder of its own, which is deleted.
    """
    device = jax.devices()[0]
    found = describe_environment(device)
    versions = {"python": sys.version.split()[0], **found["versions"]}
    place, advice = _look_at(Path(directory).expanduser()) if directory is not None else ({}, [])
    if device.platform != "cpu":
        try:
            determinism.require_deterministic_execution()
        except RuntimeError as error:
            advice.append(f"sums of floats on this device differ from run to run: {error}")
    if "--xla_cpu_enable_fast_math=true" in os.environ.get("XLA_FLAGS", ""):
        advice.append("remove --xla_cpu_enable_fast_math=true: it hides numbers that are not finite")
    return Diagnosis(
        versions,
        tuple(str(one) for one in jax.devices()),
        found["settings"],
        found["machine"],
        place,
        tuple(advice),
    )


def _look_at(path: Path) -> tuple[dict[str, Any], list[str]]:
    parent = next((one for one in (path, *path.absolute().parents) if one.is_dir()), Path("/"))
    free = shutil.disk_usage(parent).free
    place: dict[str, Any] = {"path": str(path), "exists": path.is_dir(), "free_bytes": free}
    advice = [f"only {free / 1e9:.2f} GB are free there"] if free < 1e9 else []
    if path.exists() and not path.is_dir():
        return place, [*advice, f"{path} is a file; name a directory"]
    if not os.access(parent, os.W_OK):
        return place, [*advice, f"{parent} cannot be written to; change its permissions, or name another"]
    # A directory of its own where there is none yet, so that nothing is left behind.
    with tempfile.TemporaryDirectory(dir=parent, prefix=".phijax-rng-doctor-") as scratch:
        lock, other = DirectoryLock(Path(scratch)), DirectoryLock(Path(scratch))
        try:
            lock.acquire()
            try:
                other.acquire()
                place["lock"] = "does not lock"
                advice.append("two jobs could write here at once; use another file system")
                other.release()
            except DirectoryInUseError:
                place["lock"] = "works"
            lock.release()
        except OSError as error:
            place["lock"] = f"fails: {error}"
            advice.append("no run with checkpoints can start here; use another file system")
    return place, advice
