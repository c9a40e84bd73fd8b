"""The machine of a measurement."""

import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", "phijax-rng", "phijax")


def description() -> str:
    """Processor, cores and versions, without a name or a date."""
    versions = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}; "
        f"Python {platform.python_version()}, {versions}"
    )


def load() -> str:
    """The load average over one, five and fifteen minutes."""
    return "load " + ", ".join(f"{value:.1f}" for value in os.getloadavg())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
