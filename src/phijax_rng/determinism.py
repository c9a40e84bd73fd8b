"""The two XLA flags that make a program on a GPU repeat itself bit for bit.

Keys and rows are exact without them. On a GPU, float sums differ between two runs of one program: XLA
times several kernels and keeps the fastest (autotuning), and some kernels add in the order in which their
threads arrive. The flags have no effect on CPU and TPU and cost speed on a GPU; a few operations have no
deterministic kernel and then fail to compile (https://openxla.org/xla/determinism). Another kind of GPU or
another release may still round differently.

XLA reads the environment variable `XLA_FLAGS` once per process, when JAX's backend starts. Nothing here
sets the variable or starts a backend: the user sets it, and the check says whether XLA reads it.

    os.environ["XLA_FLAGS"] = phijax_rng.determinism.deterministic_xla_flags()  # before the first array
    phijax_rng.determinism.require_deterministic_execution()

>>> deterministic_xla_flags("--xla_dump_to=/tmp/dump --xla_gpu_autotune_level=0")
'--xla_dump_to=/tmp/dump --xla_gpu_autotune_level=0 --xla_gpu_exclude_nondeterministic_ops=true'
"""

import os
import re
import shlex
import sys

DETERMINISTIC_GPU_FLAGS: tuple[str, str] = (
    "--xla_gpu_exclude_nondeterministic_ops=true",
    "--xla_gpu_autotune_level=0",
)
"""No kernel whose result depends on the order of its threads; no choice of kernels by timing."""

_NEEDED = {flag.partition("=")[0]: flag for flag in DETERMINISTIC_GPU_FLAGS}


def deterministic_xla_flags(existing: str | None = None) -> str:
    """A value for `XLA_FLAGS`: the existing flags and the two of determinism.

    Args:
        existing: flags to keep; `None` for those in the environment.

    Raises:
        ValueError: `existing` gives one of the two flags another value (XLA uses the last value of a
            repeated flag), or contains something other than flags, such as the path of a file.
    """
    if not isinstance(existing, str | None):
        raise TypeError(f"existing must be a string of flags, got {existing!r}. Join them by spaces.")
    source = "XLA_FLAGS" if existing is None else "existing"
    text = os.environ.get("XLA_FLAGS", "") if existing is None else existing
    flags = _parse(text, source)
    for name in _wrong(flags):
        if name in flags:
            raise ValueError(
                f"{source} has {f'{name}={flags[name]}'!r}, but deterministic execution needs "
                f"{_NEEDED[name]!r}. Remove the first flag, or do without the second."
            )
    return " ".join([text.strip(), *(flag for name, flag in _NEEDED.items() if name not in flags)]).strip()


def require_deterministic_execution() -> None:
    """Raises unless the two flags are in force, or will be once JAX's backend starts.

    Before the backend starts it checks the environment, afterwards what XLA has read. It checks flags, not
    devices, so a laptop without a GPU gets the same answer as the cluster. Options passed to single
    compilations (`jax.jit(..., compiler_options=...)`) are not checked.

    Raises:
        RuntimeError: a flag is absent, has another value, or was set after XLA had read its flags.
    """
    flags = _parse(os.environ.get("XLA_FLAGS", ""), "XLA_FLAGS")
    started, late = _backend_has_started(), ""
    if started and not _wrong(flags):
        late = ", although XLA_FLAGS has them now: they were set too late"
    if wrong := _wrong(_flags_in_force() if started else flags):
        where = "JAX's backend is running, and XLA" if started else "XLA_FLAGS"
        raise RuntimeError(f"{where} {' and '.join(wrong.values())}{late}. {_remedy(flags)}")


def _backend_has_started() -> bool:
    # JAX has no public way to ask. Where it has not been imported, nothing has started.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def _flags_in_force() -> dict[str, str]:
    """What XLA has read. Called after the start only: this call makes XLA read the environment."""
    import jax.extend.backend  # noqa: PLC0415 - the flags can be set up without importing JAX

    options = jax.extend.backend.get_compile_options(num_replicas=1, num_partitions=1)
    # Protocol-buffer text, one `name: value` a line; it may omit booleans that are false.
    found = dict(re.findall(r"^(\w+): (\S+)$", repr(options.executable_build_options.debug_options), re.M))
    if "xla_gpu_autotune_level" not in found:
        raise RuntimeError(
            "JAX's backend is running, and this version does not report which flags XLA has read. "
            "Call require_deterministic_execution() before the first array is made."
        )
    return {name: found.get(name.removeprefix("--"), "false") for name in _NEEDED}


def _parse(text: str, source: str) -> dict[str, str]:
    """Flag -> value, as XLA reads them: quotes as in a shell, and the last value of a repeated flag."""
    words = shlex.split(text)
    for word in words:
        if not word.startswith("-"):  # XLA would stop reading here without an error
            raise ValueError(f"{source} has {word!r}, which is not a flag. Begin every flag with --.")
    return {name: value if sign else "true" for name, sign, value in (word.partition("=") for word in words)}


def _wrong(flags: dict[str, str]) -> dict[str, str]:
    """What is wrong with each of the two flags, by name; empty if they are as needed."""
    wrong = {}
    for name, flag in _NEEDED.items():
        if name not in flags:
            wrong[name] = f"lacks {flag}"
        elif f"{name}={flags[name].lower().replace('1', 'true')}" != flag:  # XLA accepts 1 as true
            wrong[name] = f"has {name}={flags[name]}"
    return wrong


def _remedy(flags: dict[str, str]) -> str:
    kept = [shlex.quote(f"{name}={value}") for name, value in flags.items() if name not in _NEEDED]
    value = " ".join([*kept, *DETERMINISTIC_GPU_FLAGS])
    return (
        f"Start the program with\n    XLA_FLAGS={shlex.quote(value)} python ...\n"
        "or set it in Python before the first array is made:\n"
        f'    import os\n    os.environ["XLA_FLAGS"] = {value!r}'
    )
