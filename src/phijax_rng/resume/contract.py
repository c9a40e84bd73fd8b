"""What must not change between a save and a resume, and which guarantee is lost when it does.

A contract is plain data, stored as canonical JSON with its own SHA-256 beside the state:

    schema, derivation             how to read the rest
    keys       root sampling balancer source   fingerprints; root is null where it is not known
    source     kind, samplers in order         names, kinds, sizes, dtypes, options
    contents   sampler name -> digest          what is in the pools
    canary     digest of the next batch        drawn again at a resume
    training   module losses balancer optimizer on_nonfinite program
    versions settings machine                  what changes numbers and is not in the user's code
    run        id, parent step, origin, changes: stored, never compared

`compare` names every difference with both values and the guarantee that survives it:

    exact > rounding > batches > keys > none

>>> saved = {"keys": {"sampling": "threefry2x32:0-1"}, "versions": {"jax": "0.10.2"}}
>>> now = {"keys": {"sampling": "threefry2x32:0-1"}, "versions": {"jax": "0.12.0"}}
>>> [(d.setting, d.survives) for d in compare(saved, now)]
[('versions.jax', 'rounding')]
"""

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from phijax_rng import keys
from phijax_rng._base.digests import digest_fields
from phijax_rng._base.plain_data import described, plain
from phijax_rng._base.types import KeyScalar
from phijax_rng.sampling.adapters import AdaptedSource, adapt_source

SCHEMA = 1
"""That of a contract; its document has one of its own."""

DERIVATION = "seed-split4-fold-split/1"
"""The derivation of keys from a seed; under another name the same seed draws other numbers."""

LEVELS = ("exact", "rounding", "batches", "keys", "none")
"""What is still guaranteed after a change, from everything to nothing."""

REFUSED_LEVELS = ("keys", "none")
"""Levels at which a resume raises unless `on_change="warn"`."""

COMPILER_SETTINGS = {
    "jax_disable_most_optimizations": False,
    "jax_compiler_enable_remat_pass": True,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_optimization_level": "UNKNOWN",
    "jax_memory_fitting_level": "O2",
    "jax_use_shardy_partitioner": True,
    "jax_xla_profile_version": 0,
    "jax_enable_pgle": False,
    "jax_cpu_collectives_implementation": "gloo",
}
"""JAX's settings that enter the options of the compiler, with the value under which none is stored."""

COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Variables of the process that compilers and libraries of kernels read."""

# The first prefix that fits a setting's path decides what survives its change, so a rule for one setting
# comes before the rule for its group. `jax_threefry_partitionable` gives other numbers for the same key; the
# settings of precision, of `jit` and of XLA leave every draw alone and round differently. What has `None` is
# not compared: contracts of 0.1.0 store the default of JAX's own keys, and nothing here draws from these.
_SURVIVES: tuple[tuple[str, str | None], ...] = (
    ("schema", "none"),
    ("derivation", "none"),
    ("keys.", "none"),
    ("source", "keys"),
    ("contents", "keys"),
    ("canary", "keys"),
    ("settings.jax_threefry_partitionable", "keys"),
    ("settings.jax_default_matmul_precision", "rounding"),
    ("settings.jax_disable_jit", "rounding"),
    ("settings.jax_default_prng_impl", None),
    ("settings.jax_random_seed_offset", None),
    *((f"settings.{name}", "rounding") for name in (*COMPILER_SETTINGS, *COMPILER_VARIABLES)),
    ("settings.", "batches"),
    ("training.on_host", None),
    ("training", "batches"),
    ("versions.", "rounding"),
    ("machine.", "rounding"),
)

# The text of an unchanged program differs when one of these changes, so its digest cannot show whether a
# learning rate or a loss changed as well.
_MOVES_PROGRAM = (
    *("versions.jax", "versions.phijax-rng", "settings.jax", "machine.platform", "source"),
    *("machine.devices", "machine.processes", "machine.mesh", "machine.shardings"),
    "machine.uneven",
)

# These change what the compiler makes of a program, and not its text.
_AFTER_PROGRAM = tuple(f"settings.{name}" for name in COMPILER_SETTINGS)

_ACCELERATOR = "versions.accelerator"

_HINTS = {
    "canary": " (the source returned another batch for this step, as a loader that shuffles by a state of "
    "its own does)",
    "training.program": " (another learning rate, loss, model or captured array)",
    "training.hyperparameters": " (on_change='warn' takes this run's, 'error' keeps the checkpoint's)",
}

_ABSENT = "(absent)"
_UNKNOWN = (None, _ABSENT)

# Unknown on one side: `fit_state` gets a state without its root; a save while compiling has no program yet;
# a source may end with the run and give no canary. None of these is a change.
_MAY_BE_UNKNOWN = ("keys.root", "keys.source", "training.losses", "training.program", "canary")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One setting that changed.

    Attributes:
        setting: dotted path in the contract, samplers by name: `source.samplers.pde.size`.
        saved: its value in the checkpoint.
        current: its value in this run.
        survives: what is still guaranteed, one of `LEVELS`.
    """

    setting: str
    saved: object
    current: object
    survives: str

    def __str__(self) -> str:
        both = f"{_formatted(self.saved)} in the checkpoint, {_formatted(self.current)} in this run"
        hint = next((hint for start, hint in _HINTS.items() if self.setting.startswith(start)), "")
        return f"{self.setting}: {both}{hint}"


def build(
    *,
    root: KeyScalar | None,
    sampling_key: KeyScalar,
    balancer_key: KeyScalar,
    source: object,
    training: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """The contract of a run, as plain data for JSON; without contents, canary, program and lineage.

    Args:
        root: the root key, or `None` where only the streams are known.
        sampling_key: typed key of shape `()`.
        balancer_key: typed key of shape `()`.
        source: the batch source, described by its `describe()` where it has one.
        training: what decides the update: module, losses, balancer, optimizer, on_nonfinite.
        environment: from `run_contract.describe_environment`.
    """
    adapted = adapt_source(source)
    return {
        "schema": SCHEMA,
        "derivation": DERIVATION,
        "keys": {
            "root": None if root is None else keys.fingerprint(root),
            "sampling": keys.fingerprint(sampling_key),
            "balancer": keys.fingerprint(balancer_key),
            **_own_key(adapted),
        },
        "source": adapted.describe(),
        "training": dict(training),
        **{name: dict(entries) for name, entries in environment.items()},
    }


def _own_key(source: AdaptedSource) -> dict[str, str]:
    """The key that the source itself draws from, where it has the attribute."""
    return {} if source.key is None else {"source": keys.fingerprint(source.key)}


# When a balancer is updated, and on what. They are arguments of the program and not in its digest.
_SCHEDULE = ("update_every_n_steps", "update_start_step", "diagnostic_batch_sizes")


def describe_part(part: object) -> dict[str, Any]:
    """Plain data of a source, sampler or balancer: its own `describe()`, else its class and settings."""
    schedule = {name: plain(getattr(part, name)) for name in _SCHEDULE if hasattr(part, name)}
    return {**schedule, **described(part, settings=True)}


def digest_contents(source: object) -> dict[str, str]:
    """The digest of the pool of each sampler; empty for a source without `contents`."""
    return {name: digest_fields(fields) for name, fields in adapt_source(source).contents().items()}


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Every setting that differs, the one with the most severe effect first."""
    before, now = dict(_flat(saved)), dict(_flat(current))
    # Contracts of 0.1.0 do not say which accelerator libraries there were.
    known = all(any(setting.startswith(_ACCELERATOR) for setting in side) for side in (before, now))
    # A source that is called on the host belongs to another program, of the same batches.
    moved = before.get("training.on_host") != now.get("training.on_host")
    skipped = (*(() if known else (_ACCELERATOR,)), *(("training.program",) if moved else ()))
    differences = []
    for setting in dict.fromkeys((*before, *now)):
        if setting.startswith(skipped):
            continue
        old, new = before.get(setting, _ABSENT), now.get(setting, _ABSENT)
        level = next((level for prefix, level in _SURVIVES if setting.startswith(prefix)), None)
        unknown = setting in _MAY_BE_UNKNOWN and (old in _UNKNOWN or new in _UNKNOWN)
        if level is not None and old != new and not unknown:
            differences.append(Difference(setting, old, new, level))
    differences = [_comparable(difference, differences) for difference in differences]
    return sorted(differences, key=lambda difference: -LEVELS.index(difference.survives))


def _comparable(difference: Difference, all_of_them: list[Difference]) -> Difference:
    """The difference, marked as not comparable if the program has to differ for another reason."""
    if difference.setting != "training.program":
        return difference
    movers = [
        d.setting
        for d in all_of_them
        if d.setting.startswith(_MOVES_PROGRAM) and d.setting not in _AFTER_PROGRAM
    ]
    if not movers:
        return difference
    reason = f"not comparable, since {movers[0]} differs"
    return Difference(difference.setting, difference.saved, reason, "rounding")


def surviving(differences: list[Difference]) -> str:
    """The level that is still guaranteed after all of these changes."""
    return max((d.survives for d in differences), key=LEVELS.index, default="exact")


def report(differences: list[Difference]) -> str:
    """The differences for a terminal, one line each, under the level that each leaves."""
    lines = []
    for level in reversed(LEVELS):
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


# Version 0.1.0 named balancers by the path of their class. Its runs must resume without a difference.
_FORMER_KINDS = {
    "phijax_rng.balancers.StaticLossBalancer": "StaticLossBalancer",
    "phijax_rng.gradnorm.GradNormBalancer": "GradNormBalancer",
    "phijax_rng.ntk.NTKBalancer": "NTKBalancer",
    "phijax_rng.relobralo.ReLoBRaLoBalancer": "ReLoBRaLoBalancer",
    "phijax_rng.uncertainty.UncertaintyBalancer": "UncertaintyBalancer",
}


def _flat(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and leaves; of a list of named entries also their order."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _flat(entry, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value and all(isinstance(e, Mapping) and "name" in e for e in value):
        yield f"{path}.order", [entry["name"] for entry in value]
        for entry in value:
            yield from _flat({k: v for k, v in entry.items() if k != "name"}, f"{path}.{entry['name']}")
    else:
        if isinstance(value, str) and path.endswith(".kind"):
            value = _FORMER_KINDS.get(value, value)
        if isinstance(value, str) and path == "settings.XLA_FLAGS":
            value = canonical_flags(value)
        yield path, list(value) if isinstance(value, tuple) else value


def canonical_flags(text: str) -> str:
    """XLA's flags in one order, as XLA takes them: the last value of a repeated one, and no dumps.

    >>> canonical_flags("--xla_b=2 --xla_dump_to=/tmp --xla_a --xla_b=1")
    '--xla_a=true --xla_b=1'
    """
    words = shlex.split(text)
    if not all(word.startswith("--") for word in words):  # the name of a file of flags, which XLA reads
        return text
    flags = {name: value if sign else "true" for name, sign, value in (word.partition("=") for word in words)}
    return " ".join(f"{name}={flags[name]}" for name in sorted(flags) if not name.startswith("--xla_dump"))


def _formatted(value: object) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= 64 else f"{text[:61]}..."
