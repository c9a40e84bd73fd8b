"""What changes numbers and is not in the user's code: versions, JAX's settings, the machine.

`describe(device)` returns plain data for the contract. It reads settings and changes none.
"""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

from phijax_rng._base.plain_data import plain

_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint", "phijax-rng")

# JAX settings that change which numbers a program computes; each is read under its own name.
_SETTINGS = (
    "jax_threefry_partitionable",
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_random_seed_offset",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_disable_jit",
)


def describe(device: jax.Device) -> dict[str, dict[str, Any]]:
    """`versions`, `settings` and `machine` of this process, for a run on `device`."""
    return {"versions": _versions(), "settings": _settings(), "machine": _machine(device)}


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _settings() -> dict[str, Any]:
    found = {name: plain(getattr(jax.config, name, None), str) for name in _SETTINGS}
    return {**found, "XLA_FLAGS": " ".join(os.environ.get("XLA_FLAGS", "").split())}


def _machine(device: jax.Device) -> dict[str, Any]:
    found = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": 1,
        "processes": jax.process_count(),
    }
    if device.platform != "cpu":
        return found
    # XLA splits work by the cores it may use and picks instructions by what the processor offers;
    # both move the last bits of parameters.
    return {**found, "cores": _cores(), "instruction_set": _instruction_set()}


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _instruction_set() -> str:
    """The architecture, and on Linux a digest of the processor's features."""
    name = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    words = " ".join(sorted(features.partition(":")[2].split()))
    return f"{name}:{hashlib.sha256(words.encode()).hexdigest()[:16]}" if words else name
