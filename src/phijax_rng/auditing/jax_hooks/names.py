"""Every private name of JAX that the audit uses, in one table that is checked before the first use."""

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType

import jax
import jax.extend.core.primitives as jep

LAST_TESTED = "0.12"
"""The newest JAX that the audit was tested with."""

Modules = Mapping[str, ModuleType]
"""Modules of `jax._src` by name."""

PRIVATE_NAMES = {
    # Frames of `eval_jaxpr` have the equation that runs in a local variable, and the equation has its line.
    "core": ("eval_jaxpr.eqn", "EvalTrace.process_shard_map"),
    "dispatch": ("xla_primitive_callable",),
    "interpreters.ad": ("linearize", "jvp"),
    # What an instance of BatchTrace holds shows as the parameters of its initializer.
    "interpreters.batching": (
        *("BatchTrace.process_primitive", "BatchTrace.to_batch_info", "BatchTracer"),
        *("BatchTrace.__init__.axis_data", "BatchTrace.__init__.parent_trace"),
    ),
    # The bits of a key without a computation, which a trace around the draw would record.
    "random.prng": ("PRNGKeyArray._base_array", "PRNGKeyArray._impl", "random_wrap_p", "random_unwrap_p"),
    "random.core": ("random_clone_p",),
}
"""Names of `jax._src` by module."""

PRIMITIVES = {
    "random_seed_p": "seed",
    "random_split_p": "split",
    "random_fold_in_p": "fold_in",
    "random_bits_p": "bits",
    "random_gamma_p": "gamma",
}
"""Random primitives of `jax.extend.core.primitives`, and the kind of event that each one is recorded as."""

CONTROL_FLOW = ("while_p", "cond_p", "scan_p", "jit_p", "remat_p")
"""Primitives of the same module that run other equations."""


def private_modules() -> Modules:
    """The modules of the table, once every name in it is there.

    Raises:
        RuntimeError: JAX lacks a name, and which.
    """
    modules, missing = _looked_up()
    if missing:
        raise RuntimeError(
            f"JAX {jax.__version__} lacks private names that the audit uses: {', '.join(missing)}. "
            f"Use JAX 0.10.2 to {LAST_TESTED}, or a newer phijax_rng; training works without the audit."
        )
    return modules


def _looked_up() -> tuple[Modules, list[str]]:
    modules: dict[str, ModuleType] = {}
    missing = [f"jax.extend.core.primitives.{n}" for n in (*PRIMITIVES, *CONTROL_FLOW) if not hasattr(jep, n)]
    for module, names in PRIVATE_NAMES.items():
        try:
            modules[module] = importlib.import_module(f"jax._src.{module}")
        except ImportError:
            missing.append(f"jax._src.{module}")
            continue
        missing += [f"jax._src.{module}.{name}" for name in names if not _has(modules[module], name)]
    return modules, missing


def _has(module: ModuleType, dotted: str) -> bool:
    owner: object = module
    for name in dotted.split("."):
        # Attributes that only instances have are annotations of their class.
        if isinstance(owner, type) and name in inspect.get_annotations(owner):
            return True
        if inspect.isfunction(owner) and name in owner.__code__.co_varnames:
            return True
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
