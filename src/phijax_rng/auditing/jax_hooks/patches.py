"""What is replaced in JAX while a watcher is active, and put back after it."""

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core.primitives as jep

from phijax_rng.auditing.jax_hooks import beyond, boundaries, primitives, transforms
from phijax_rng.auditing.jax_hooks.swaps import WATCHED, Internals, Swaps, disable_jit
from phijax_rng.auditing.jax_hooks.walks import KINDS, WALKS
from phijax_rng.auditing.jax_hooks.watcher import Watcher, activate

LAST_TESTED = "0.12"
"""The newest JAX that the audit was tested with."""

_NEEDED = {
    "core": (
        *("eval_jaxpr", "NamedAxisEffect", "Trace.process_primitive", "Tracer", "trace_ctx.trace"),
        *("eval_trace", "EvalTrace.process_primitive", "EvalTrace.process_shard_map"),
        *("set_current_trace", "typeof", "is_concrete", "to_concrete_value"),
    ),
    "dispatch": ("xla_primitive_callable",),
    "stages": ("Compiled.__call__",),
    "ad_checkpoint": ("remat_p.impl",),
    "api": ("argnums_partial2",),
    "config": (
        *("_check_vma", "disable_jit.value", "scan3.value", "jax_xla_profile_version.value"),
        *("trace_context", "config_ext.Config"),
    ),
    "lib": ("jax_jit.set_disable_jit_state",),
    "pjit": ("_infer_params", "_run_python_pjit"),
    "lax.control_flow.loops": ("scan", "scan3"),
    "source_info_util": ("user_context", "current_name_stack", "current"),
    "interpreters.ad": (
        *("linearize", "jvp", "backward_pass3", "ct_check"),
        *("JVPTrace.process_primitive", "JVPTrace.to_primal_tangent_pair"),
    ),
    "interpreters.batching": ("BatchTrace.process_primitive", "BatchTrace.to_batch_info", "BatchTracer"),
    "random.prng": ("random_wrap_p.impl", "random_unwrap_p.impl", "PRNGKeyArray"),
    "random.core": ("random_clone_p.impl",),
    "shard_map": ("shard_map_p",),
}
"""Every name of `jax._src` that this folder uses, by module."""


_lock = threading.Lock()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tells `watcher` of every random primitive that this thread runs inside the block.

    Raises:
        RuntimeError: another audit is open in this process, or JAX has moved what is needed here.
    """
    source = _jax_internals()
    jax.devices()  # JAX starts a thread of its own when it first looks for devices
    if not _lock.acquire(blocking=False):
        raise RuntimeError(
            "an audit is open in this process already, and two would see each other's draws. "
            "Run one after the other."
        )
    with contextlib.ExitStack() as stack:
        stack.callback(_lock.release)
        swaps = Swaps()
        stack.callback(swaps.restore)
        _install(swaps, source)
        _enter_open_jit(stack, source)
        stack.enter_context(jax.debug_key_reuse(False))  # it would raise where we report
        activate(watcher)
        stack.callback(activate, None)
        yield


def _enter_open_jit(stack: contextlib.ExitStack, source: Internals) -> None:
    """Runs what JAX would compile op by op, by way of its Python code, where `boundaries` waits for it.

    `jax.disable_jit` is read twice: by JAX's Python code, and by its C++ code, which would call the
    function at once. The C++ code keeps programs by a key of its own, see `swaps.WATCHED`.
    """
    config, jax_jit = source["config"], source["lib"].jax_jit
    stack.enter_context(disable_jit())
    stack.enter_context(config.jax_xla_profile_version(WATCHED))
    stack.enter_context(config.scan3(True))
    stack.callback(jax_jit.set_disable_jit_state, config.disable_jit)
    jax_jit.set_disable_jit_state(_never(config))


@functools.cache
def _never(config: Any) -> Any:
    """A setting that is false, in every thread."""
    return config.config_ext.Config(
        "phijax_rng_never", False, include_in_jit_key=False, include_in_trace_context=False
    )


def _jax_internals() -> Internals:
    """The modules of `jax._src` by name, every needed name checked."""
    found = {}
    missing = [f"jax.extend.core.primitives.{name}" for name in (*KINDS, *WALKS) if not hasattr(jep, name)]
    for module, names in _NEEDED.items():
        try:
            found[module] = importlib.import_module(f"jax._src.{module}")
        except ImportError:
            missing.append(f"jax._src.{module}")
            continue
        missing += [f"jax._src.{module}.{name}" for name in names if not _has(found[module], name)]
    if missing:
        raise RuntimeError(
            f"JAX {jax.__version__} has moved what the audit looks through: {', '.join(missing)}. "
            f"Use JAX 0.10.2 to {LAST_TESTED}, or a newer phijax_rng; training does not need the audit."
        )
    return found


def _has(owner: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _install(swaps: Swaps, source: Internals) -> None:
    for part in (boundaries, primitives, transforms, beyond):
        part.install(swaps, source)
