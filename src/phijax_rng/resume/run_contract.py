"""The contract of one run: built when it starts, completed when it is compiled, saved with every checkpoint.

at the start       keys, source, training, environment, lineage      compared at once
while compiling    the digest of the pools, in another thread
before step one    the program's digest and the canary               compared then
at each save       the canary of the next batch, and the parent step
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from phijax_rng._base.background import Worker
from phijax_rng._base.digests import digest
from phijax_rng._base.plain_data import plain
from phijax_rng._base.types import KeyScalar
from phijax_rng.devices import processes
from phijax_rng.devices.placement import Placement
from phijax_rng.errors import RunChangedError
from phijax_rng.resume import contract
from phijax_rng.sampling.adapters import AdaptedSource
from phijax_rng.state import TrainState
from phijax_rng.training.averaging import AveragedState

# The field of Optax's record.
_INJECTED = "hyperparams"

_log = logging.getLogger("phijax_rng")


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Which run this is, and what it comes from; stored, never compared.

    Attributes:
        id: the run's name, the same after every resume.
        origin: the other run that it started from, as plain data; `None` without one.
        parent_step: the step that it continues; `None` for a fresh run.
        changes: the changes that former resumes let pass.
    """

    id: str
    origin: dict[str, Any] | None
    parent_step: int | None
    changes: list[dict[str, Any]]


class RunContract:
    """The contract of this run, and that of the run it continues.

    Attributes:
        may_save: whether what changed since the checkpoint has been compared, so that a new save records it.
        changes: the changes that each resume let pass: step, surviving level, settings with both values.
    """

    def __init__(
        self,
        base: dict[str, Any],
        source: AdaptedSource,
        *,
        saved: Mapping[str, Any],
        lineage: "Lineage",
        on_change: str,
    ):
        """Starts to digest the pools.

        Args:
            base: from `build`.
            source: the prepared source.
            saved: the contract of the run that continues; empty for a fresh run.
            lineage: which run this is.
            on_change: `"error"` or `"warn"`.
        """
        self._id, self._origin, self._parent = lineage.id, lineage.origin, lineage.parent_step
        self.changes = lineage.changes
        self._saving: int | None = None
        self._base = base
        self._on_change = on_change
        self._source = source
        self._saved = saved
        self.may_save = not saved
        # Digesting a pool of gigabytes takes seconds; compiling leaves a core idle meanwhile.
        worker = Worker("phijax_rng-digest")
        self._contents = worker.submit(contract.digest_contents, source)
        worker.end()

    def compare_before_compiling(self) -> None:
        """Compares what is known before anything is compiled, so that a wrong key costs no compilation.

        Raises:
            RunChangedError: the keys or the source changed, with `on_change="error"`.
        """
        if self._saved and self._on_change == "error":
            known = {name: value for name, value in self._saved.items() if name in self._base}
            current = {name: value for name, value in self._base.items() if name in known}
            _require_unchanged(contract.compare(_without_program(known), current), self._step)

    def compare_compiled(
        self, state: TrainState, program: str | None, loss_names: tuple[str, ...] = ()
    ) -> None:
        """Compares everything: raises for, or warns of and records, what changed.

        Args:
            state: what the run starts from.
            program: the program's digest; `None` if there is nothing left to run.
            loss_names: the losses that the program records.

        Raises:
            RunChangedError: keys or batches would not be those of the saved run, with `on_change="error"`.
        """
        if program is not None:
            training = {**self._base["training"], "program": program}
            training["losses"] = training.get("losses") or list(loss_names)
            self._base = {**self._base, "training": training}
        if not self._saved:
            return
        self._compare(state, program)
        self.may_save = True

    def _compare(self, state: TrainState, program: str | None) -> None:
        saved = dict(self._saved)
        current = {name: value for name, value in self._complete().items() if name in saved}
        if program is None:
            # Nothing was compiled, and the source may end where the run does.
            saved = _without_program({name: value for name, value in saved.items() if name != "canary"})
        elif "canary" in saved:
            current["canary"] = self._canary(state)
        differences = contract.compare(saved, current)
        if not differences:
            return
        if self._on_change == "error":
            _require_unchanged(differences, self._step)
        level = contract.surviving(differences)
        settings = [dataclasses.asdict(difference) for difference in differences]
        self.changes.append({"step": self._step, "survives": level, "settings": settings})
        if processes.is_primary():
            # 9 is the line that calls `fit`. In between: compare_compiled, ResumedRun.commit, and of the
            # trainer _compile_and_run, _train, _fit, fit and its `door`.
            warnings.warn(_message(differences, self._step), UserWarning, stacklevel=9)

    def for_save(self, state: TrainState) -> dict[str, Any]:
        """The contract to save with this state; that of a later step will name it as its parent."""
        step = int(state.step)
        if self._saving not in (None, step):
            self._parent = self._saving
        # Asked for twice where a save was interrupted, and a step is not its own parent.
        self._saving = step
        lineage = {
            "id": self._id,
            "parent_step": self._parent,
            "origin": self._origin,
            "changes": self.changes,
        }
        return {**self._complete(), "canary": self._canary(state), "run": lineage}

    @property
    def _step(self) -> int:
        return self._parent if self._parent is not None else self._origin["step"] if self._origin else 0

    def _complete(self) -> dict[str, Any]:
        return {**self._base, "contents": self._contents.result()}

    def _canary(self, state: TrainState) -> str | None:
        """The digest of the batch that comes next; `None` if the source cannot give it."""
        # A source may end where training does, and a save must not fail for it.
        try:
            batch = self._source(int(state.step), processes.to_local(state.sampler_state))
        except Exception as error:  # a user's source may raise anything
            _log.info(
                "the source gave no batch for step %d, so the save has no canary: %r", state.step, error
            )
            return None
        return digest(batch)


def build(
    state: TrainState,
    source: AdaptedSource,
    *,
    streams: TrainState,
    root: KeyScalar | None,
    training: Mapping[str, Any],
    placement: Placement,
) -> dict[str, Any]:
    """The contract of a run as far as it is known before it compiles.

    Args:
        state: what the run starts from.
        source: the prepared source.
        streams: a state with the keys and hyperparameters of this call; those of a checkpoint may differ.
        root: the root key; `None` where only the streams are known.
        training: from `describe_training`.
        placement: where the run trains.
    """
    on_host, _ = source.host_and_device_parts()
    if on_host is not None:
        training = {**training, "on_host": list(on_host.names)}
    if given := hyperparameters(streams.optimizer_state):
        training = {**training, "hyperparameters": given}
    described = describe_environment(placement.host_device)
    described["machine"] = {**described["machine"], **placement.describe_state(state)}
    return contract.build(
        root=root,
        sampling_key=streams.sampling_key,
        balancer_key=streams.balancer_key,
        source=source,
        training=training,
        environment=described,
    )


def optimizer_kinds(optimizer_state: object) -> list[str]:
    """The names of the records in an optimizer's state, from the outside in."""
    if isinstance(optimizer_state, Mapping):
        return [kind for entry in optimizer_state.values() for kind in optimizer_kinds(entry)]
    if not isinstance(optimizer_state, (tuple, list)):
        return []
    if isinstance(optimizer_state, AveragedState):
        return [AveragedState.__name__, *optimizer_kinds(optimizer_state.optimizer_state)]
    kinds = [type(optimizer_state).__name__] if hasattr(optimizer_state, "_fields") else []
    # Below the records are the user's parameters, which the restore compares leaf by leaf.
    return kinds or [kind for entry in optimizer_state for kind in optimizer_kinds(entry)]


def hyperparameters(optimizer_state: object) -> dict[str, Any]:
    """The constants that `optax.inject_hyperparams` stores in the optimizer's state, by path; plain data.

    A schedule gives its value anew at every update; it is part of the program and not among them.
    """
    leaves = jax.tree_util.tree_flatten_with_path(processes.to_local(optimizer_state))[0]
    constant = _constants(optimizer_state)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").replace(f"{_INJECTED}.", ""): _number(leaf)
        for path, leaf in leaves
        if path in constant
    }


def _number(leaf: object) -> Any:
    value = np.asarray(leaf)
    if value.ndim:
        return f"{value.dtype}{list(value.shape)} {digest(value)[:16]}"
    # The shortest text of a float32 is what the user typed.
    return value.item() if value.dtype.kind in "iub" else float(str(value[()]))


def with_hyperparameters_of(given: object, stored: object) -> Any:
    """The optimizer state `stored` with the constants of `given`."""
    constant = _constants(stored)
    return jax.tree_util.tree_map_with_path(
        lambda path, old, new: new if path in constant else old, stored, given
    )


def _constants(optimizer_state: object) -> set[tuple[Any, ...]]:
    """The paths of the constants among injected hyperparameters."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(optimizer_state)[0]]
    fields = {
        (path[:at], key.name, path[at + 1])
        for path in paths
        for at, key in enumerate(path[:-1])
        if isinstance(key, jax.tree_util.GetAttrKey)
    }
    own = {(above, name) for above, field, name in fields if field == _INJECTED}
    scheduled = {(above, name) for above, field, name in fields if field == f"{_INJECTED}_states"}
    return {(*above, jax.tree_util.GetAttrKey(_INJECTED), name) for above, name in own - scheduled}


def _without_program(saved: Mapping[str, Any]) -> dict[str, Any]:
    if "training" not in saved:
        return dict(saved)
    training = {name: value for name, value in saved["training"].items() if name != "program"}
    return {**saved, "training": training}


def _require_unchanged(differences: list[contract.Difference], step: int) -> None:
    if contract.surviving(differences) in contract.REFUSED_LEVELS:
        raise RunChangedError(
            f"{_message(differences, step)}\n"
            "Undo the change, pass on_change='warn' to continue with it, or start a fresh run."
        )


def _message(differences: list[contract.Difference], step: int) -> str:
    return f"resuming at step {step} changes the run:\n{contract.report(differences)}"


# What changes numbers and is not in the user's code: versions, JAX's settings, the machine.

_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint", "phijax-rng")

# JAX settings that change which numbers a program computes; each is read under its own name.
_SETTINGS = (
    "jax_threefry_partitionable",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_disable_jit",
)

# The same, stored only with another value than this one: contracts of 0.1.0 have none of them.
_RARE_SETTINGS = {
    **contract.COMPILER_SETTINGS,
    "jax_accurate_erf_inv": False,
    "jax_high_dynamic_range_gumbel": False,
    "jax_softmax_custom_jvp": False,
    "jax_allow_f16_reductions": True,
    "jax_bcoo_cusparse_lowering": False,
    "jax_use_direct_linearize": True,
    "jax_use_hlo_logistic_lowering": False,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_ragged_dot_use_ragged_dot_instruction": True,
}

# Parts of the names of packages whose versions change kernels.
_KERNELS = re.compile(r"(jax[-_](cuda|rocm|metal)|nvidia|libtpu|intel.*openxla)", re.IGNORECASE)
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


def describe_environment(device: jax.Device) -> dict[str, dict[str, Any]]:
    """`versions`, `settings` and `machine` of this process, for a run on `device`; plain data."""
    return {"versions": _versions(device), "settings": _settings(), "machine": _machine(device)}


def _versions(device: jax.Device) -> dict[str, Any]:
    versions = {name: _version(name) for name in _PACKAGES}
    # Looking at every package takes tens of milliseconds, and on CPU none of them counts.
    return versions if device.platform == "cpu" else {**versions, "accelerator": _accelerator(device)}


def _accelerator(device: jax.Device) -> dict[str, str]:
    """Runtime, driver, plug-in and libraries of kernels, as far as they can be read."""
    found = {"runtime": " ".join(str(device.client.platform_version).split())}
    for package in importlib.metadata.distributions():
        name = str(package.metadata["Name"])
        if _KERNELS.match(name):
            found[name] = package.version
    for path in _DRIVERS:
        with contextlib.suppress(OSError):
            found["driver"] = " ".join(Path(path).read_text().partition("\n")[0].split())
    return dict(sorted(found.items()))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _settings() -> dict[str, Any]:
    found = {name: plain(getattr(jax.config, name, None), str) for name in _SETTINGS}
    for name, usual in _RARE_SETTINGS.items():
        value = plain(jax.config.values.get(name, usual), str)
        if value is not None and value != usual:  # None: JAX decides, as it does where nothing is set
            found[name] = value
    variables = {name: os.environ[name] for name in contract.COMPILER_VARIABLES if name in os.environ}
    return {**found, **variables, "XLA_FLAGS": " ".join(variables.get("XLA_FLAGS", "").split())}


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
