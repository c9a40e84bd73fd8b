"""What a contract says of the process, and of the numbers that an optimizer keeps in its state."""

import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import Trainer
from phijax_rng.resume import contract, run_contract
from tests import _problems

CPU = jax.devices("cpu")[0]


def test_every_setting_that_jax_gives_to_the_compiler_is_recorded():
    from jax._src import compiler, config

    body = inspect.getsource(compiler.get_compile_options)
    holders = {id(holder): name for name, holder in config.config._value_holders.items()}
    read = {getattr(config, name) for name in re.findall(r"config\.(\w+)\.value", body)}
    read |= {getattr(compiler, name) for name in re.findall(r"(_[A-Z_]+)\.value", body)}
    names = {holders[id(holder)] for holder in read}
    assert {"jax_disable_most_optimizations", "jax_optimization_level"} <= names
    # Where compiled programs are kept, which changes none.
    assert names - {"jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches"} <= {
        *contract.COMPILER_SETTINGS
    }


def test_a_setting_is_stored_only_where_it_is_not_the_usual_one(monkeypatch):
    settings = run_contract.describe_environment(CPU)["settings"]
    assert not set(settings) & set(contract.COMPILER_SETTINGS)
    before = jax.config.values["jax_memory_fitting_level"]
    jax.config.update("jax_memory_fitting_level", "O0")
    try:
        changed = run_contract.describe_environment(CPU)["settings"]
    finally:
        jax.config.update("jax_memory_fitting_level", before)
    assert changed == {**settings, "jax_memory_fitting_level": "O0"}
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    changed = run_contract.describe_environment(CPU)["settings"]
    (difference,) = contract.compare({"settings": settings}, {"settings": changed})
    assert (difference.setting, difference.survives) == ("settings.NVIDIA_TF32_OVERRIDE", "rounding")


def test_a_setting_of_the_compiler_does_not_hide_another_rate():
    saved = {"settings": {}, "training": {"program": "1"}}
    now = {"settings": {"jax_optimization_level": "O1"}, "training": {"program": "2"}}
    assert [(d.setting, d.survives) for d in contract.compare(saved, now)] == [
        ("training.program", "batches"),
        ("settings.jax_optimization_level", "rounding"),
    ]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("--xla_b --xla_a=1", "--xla_a=1 --xla_b=true"),
        ("--xla_a=1 --xla_a=2", "--xla_a=2"),
        ("--xla_dump_to=/tmp/x --xla_a='b c'", "--xla_a=b c"),
        ("/path/of/flags", "/path/of/flags"),
    ],
)
def test_flags_have_one_order_and_the_last_value_counts(text, canonical):
    assert contract.canonical_flags(text) == canonical


def test_an_accelerator_names_its_libraries_and_a_cpu_none(monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX  550.54\nGCC version: 12")
    monkeypatch.setattr(run_contract, "_DRIVERS", (str(tmp_path / "none"), str(driver)))
    packages = [
        types.SimpleNamespace(metadata={"Name": name}, version=version)
        for name, version in (("nvidia-cudnn-cu12", "9.1"), ("jax-cuda12-plugin", "0.10"), ("numpy", "2"))
    ]
    monkeypatch.setattr(run_contract.importlib.metadata, "distributions", lambda: packages)
    gpu = types.SimpleNamespace(
        platform="gpu",
        device_kind="H",
        client=types.SimpleNamespace(platform_version="PJRT C API\ncuda 12090"),
    )
    found = run_contract.describe_environment(gpu)["versions"]
    assert found["accelerator"] == {
        "driver": "NVRM version: NVIDIA UNIX 550.54",
        "jax-cuda12-plugin": "0.10",
        "nvidia-cudnn-cu12": "9.1",
        "runtime": "PJRT C API cuda 12090",
    }
    assert "accelerator" not in run_contract.describe_environment(CPU)["versions"]
    older = {"versions": {**found, "accelerator": {**found["accelerator"], "nvidia-cudnn-cu12": "9.0"}}}
    (difference,) = contract.compare(older, {"versions": found})
    assert difference.setting == "versions.accelerator.nvidia-cudnn-cu12"
    without = {"versions": {name: value for name, value in found.items() if name != "accelerator"}}
    assert (
        contract.compare(without, {"versions": found}) == contract.compare({"versions": found}, without) == []
    )


def test_hyperparameters_are_the_constants_and_not_the_schedules():
    optimizer = optax.chain(
        optax.clip(1.0),
        optax.inject_hyperparams(optax.sgd)(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    )
    given = optimizer.init({"hyperparams": jnp.ones(2)})
    assert run_contract.hyperparameters(given) == {"1.momentum": 0.9}
    stored = jax.tree.map(lambda leaf: leaf + 1, given)
    taken = run_contract.with_hyperparameters_of(given, stored)
    assert run_contract.hyperparameters(taken) == {"1.momentum": 0.9}
    assert int(taken[1].count) == 1
    np.testing.assert_array_equal(taken[1].inner_state[0].trace["hyperparams"], np.ones(2))
    assert run_contract.hyperparameters(optax.adam(0.1).init({"w": jnp.ones(2)})) == {}


@pytest.mark.parametrize("flag", ["--xla_cpu_enable_fast_math", "--xla_cpu_enable_fast_math=True"])
def test_fast_math_is_refused_where_numbers_are_tested(monkeypatch, flag):
    problem = _problems.dropout()
    monkeypatch.setenv("XLA_FLAGS", flag)
    message = (
        r"^XLA_FLAGS has --xla_cpu_enable_fast_math=true, with which XLA removes tests for NaN and infinity, "
        r"and on_nonfinite='skip' needs them\. Remove the flag, or pass on_nonfinite='ignore'\.$"
    )
    with pytest.raises(ValueError, match=message):
        Trainer(2, on_nonfinite="skip").fit(problem.module, seed=0, **problem.arguments)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    trainer = Trainer(1, progress=False)
    assert trainer.fit(problem.module, seed=0, **problem.arguments).iterations == 1
