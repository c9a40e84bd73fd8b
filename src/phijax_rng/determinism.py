"""The two XLA flags that make a program on a GPU repeat itself bit for bit.

Keys and rows are exact without them. What moves between two runs of one program on one GPU are
float sums: XLA times several kernels and keeps the fastest (autotuning), and some kernels add in
whatever order their threads arrive. XLA reads its flags from the environment variable `XLA_FLAGS`,
once per process, when JAX's backend starts. The flags do nothing on CPU and TPU and cost speed on a
GPU; a few operations have no deterministic kernel and then fail to compile
(https://openxla.org/xla/determinism). Another kind of GPU or another release may still round
differently.

The invariant: nothing here sets a process-wide option or starts a backend. The user sets the
variable, and the check says whether it arrived:

    import os
    import phijax_rng

    os.environ["XLA_FLAGS"] = phijax_rng.determinism.deterministic_xla_flags()  # before the first array
    phijax_rng.determinism.require_deterministic_execution()

>>> deterministic_xla_flags("--xla_dump_to=/tmp/dump --xla_gpu_autotune_level=0")
'--xla_dump_to=/tmp/dump --xla_gpu_autotune_level=0 --xla_gpu_exclude_nondeterministic_ops=true'
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

DETERMINISTIC_GPU_FLAGS: tuple[str, str] = (
    "--xla_gpu_exclude_nondeterministic_ops=true",
    "--xla_gpu_autotune_level=0",
)
"""No kernel whose result depends on the order of its threads; no choice of kernels by the clock."""

_WANTED = {
    "--xla_gpu_exclude_nondeterministic_ops": ("true", "1"),
    "--xla_gpu_autotune_level": ("0",),
}

# As XLA's own parser cuts the variable (xla/parse_flags_from_env.cc): flags between whitespace,
# the value of one perhaps in quotes. It stops without a word at the first thing that is no flag.
_SPACE = " \t\r\n"
_FLAG = re.compile(
    r"""
    (?P<name>-[-\w]*)
    (?: ="(?P<double>(?:\\.|[^"\\])*)"? | ='(?P<single>[^']*)'? | (?P<rest>[^ \t\r\n]*) )
    """,
    re.ASCII | re.DOTALL | re.VERBOSE,
)


class _Flag(NamedTuple):
    text: str
    name: str
    value: str


def deterministic_xla_flags(existing: str | None = None) -> str:
    """A value for `XLA_FLAGS`: the flags that are there, and the two of determinism.

    Args:
        existing: flags to keep; `None` for those in the environment. Like `XLA_FLAGS` itself it may
            be the name of a file with flags, whose contents are then taken over.

    Raises:
        ValueError: `existing` gives one of the two flags another value (of a repeated flag the last
            one counts, as for XLA), or holds what is no flag, behind which XLA reads nothing.
        FileNotFoundError: `existing` names a file that is not there.
    """
    if not isinstance(existing, str | None):
        raise TypeError(f"existing must be a string of flags, got {existing!r}. Join them by spaces.")
    source = "XLA_FLAGS" if existing is None else "existing"
    text = os.environ.get("XLA_FLAGS", "") if existing is None else existing
    flags = _parsed(text, source)
    for name, found in _effective(flags).items():
        if found.value.lower() not in _WANTED[name]:
            raise ValueError(
                f"{source} has {found.text!r}, and deterministic execution needs "
                f"{_needed(name)!r}. Remove the first, or do without the second."
            )
    return _merged(flags)


def require_deterministic_execution() -> None:
    """Raises unless the two flags are in force, or will be once JAX's backend starts.

    Call it after setting `XLA_FLAGS` and again, if you like, when the run has started: before the
    backend starts it looks at the environment, afterwards at what XLA has read. It looks at flags,
    not at devices, so it gives the same answer on a laptop without a GPU as on the cluster. Options
    given to single compilations (`jax.jit(..., compiler_options=...)`) are beyond it.

    Raises:
        RuntimeError: a flag is absent, has another value, or was set after XLA had read its flags.
            The message gives the line to start the program with.
        ValueError: `XLA_FLAGS` holds something that is no flag.
        FileNotFoundError: `XLA_FLAGS` names a file that is not there.
    """
    in_environment = _parsed(os.environ.get("XLA_FLAGS", ""), "XLA_FLAGS")
    wrong = _wrong({flag.name: flag.value for flag in _effective(in_environment).values()})
    if not _backend_has_started():
        if wrong:
            raise RuntimeError(f"XLA_FLAGS {_listed(wrong)}. {_mend(in_environment)}")
        return
    in_force = _flags_in_force()
    if in_force is None:
        raise RuntimeError(
            "JAX's backend is running, and this version does not say which flags XLA has read. "
            "Call require_deterministic_execution() before the first array is made."
        )
    if wrong_in_force := _wrong(in_force):
        late = "" if wrong else ", although XLA_FLAGS has them now: they were set too late"
        raise RuntimeError(
            f"JAX's backend is running, and XLA {_listed(wrong_in_force)}{late}. {_mend(in_environment)}"
        )


def _backend_has_started() -> bool:
    # There is no public way to ask. If JAX has not been imported, nothing has started.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def _flags_in_force() -> dict[str, str] | None:
    """What XLA has read, by name. Never call it earlier: asking makes XLA read the environment."""
    import jax.extend.backend  # noqa: PLC0415 - the flags can be set up without importing JAX

    options = jax.extend.backend.get_compile_options(num_replicas=1, num_partitions=1)
    # Protocol-buffer text, one `name: value` a line; booleans that are false may be left out.
    text = repr(options.executable_build_options.debug_options)
    found = dict(re.findall(r"^(\w+): (\S+)$", text, re.MULTILINE))
    if "xla_gpu_autotune_level" not in found:
        return None
    return {name: found.get(name.removeprefix("--"), "false") for name in _WANTED}


def _parsed(text: str, source: str) -> list[_Flag]:
    if text.strip(_SPACE) and not text.lstrip(_SPACE).startswith("-"):
        if not Path(text).is_file():
            raise FileNotFoundError(
                f"{source} is {text!r}, which XLA takes for the name of a file with flags, and "
                "there is no such file. Begin every flag with --."
            )
        source, text = f"the file {text!r}", Path(text).read_text()
    flags = []
    while text := text.lstrip(_SPACE):
        match = _FLAG.match(text)
        if match is None:
            raise ValueError(
                f"{source} has {text.split()[0]!r}, which is no flag, and XLA reads nothing "
                "behind it. Begin every flag with --."
            )
        flags.append(_flag(match))
        text = text[match.end() :]
    return flags


def _flag(match: re.Match[str]) -> _Flag:
    if match["double"] is not None:
        value = re.sub(r"\\(.)", r"\1", match["double"], flags=re.DOTALL)
    elif match["single"] is not None:
        value = match["single"]
    else:
        value = match["rest"].removeprefix("=") if match["rest"] else "true"
    return _Flag(match[0], match["name"], value)


def _effective(flags: list[_Flag]) -> dict[str, _Flag]:
    """Of each flag of determinism the last one, which is the one XLA obeys."""
    return {flag.name: flag for flag in flags if flag.name in _WANTED}


def _wrong(values: dict[str, str]) -> dict[str, str | None]:
    """The flags of determinism that are absent (`None`) or have another value."""
    found = {name: values.get(name) for name in _WANTED}
    return {n: v for n, v in found.items() if v is None or v.lower() not in _WANTED[n]}


def _listed(wrong: dict[str, str | None]) -> str:
    return " and ".join(
        f"lacks {_needed(name)}" if value is None else f"has {name}={value}" for name, value in wrong.items()
    )


def _needed(name: str) -> str:
    return next(flag for flag in DETERMINISTIC_GPU_FLAGS if flag.startswith(f"{name}="))


def _merged(flags: list[_Flag]) -> str:
    effective = _effective(flags)
    missing = [flag for flag in DETERMINISTIC_GPU_FLAGS if flag.partition("=")[0] not in effective]
    return " ".join([flag.text for flag in flags] + missing)


def _mend(flags: list[_Flag]) -> str:
    value = _merged([flag for flag in flags if flag.name not in _WANTED])
    return (
        "Start the program with\n"
        f"    XLA_FLAGS={shlex.quote(value)} python ...\n"
        "or set it in Python before the first array is made:\n"
        f'    import os\n    os.environ["XLA_FLAGS"] = {value!r}'
    )
