"""One table: everything that can change between a save and a resume, and what is said of it."""

import contextlib
import dataclasses
import re
import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest

import phijax_rng.resume.run_contract
from phijax_rng import (
    Checkpoints,
    HostPool,
    LossModule,
    PoolDataModule,
    RandomRowSampler,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
    keys,
)
from phijax_rng.errors import CheckpointMismatchError, RunChangedError
from phijax_rng.resume import contract
from phijax_rng.resume.plan import ResumePlan
from tests._bitwise import assert_trees_bitwise_equal
from tests._fit import Samplers
from tests._selection import mostly_full

ROWS = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)


def _init(key: jax.Array, width: int = 3) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (2, width), dtype=np.float32)}


def _losses(model_state: Any, batches: Any) -> dict[str, jax.Array]:
    return {
        name: jax.numpy.mean((batches[name]["inputs"] @ model_state["w"] - 1) ** 2) for name in ("a", "b")
    }


def _renamed_losses(model_state: Any, batches: Any) -> dict[str, jax.Array]:
    return {f"{name}_loss": loss for name, loss in _losses(model_state, batches).items()}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything a fit is given, as a test changes it."""

    module: LossModule
    datamodule: Any
    optimizer: Any
    seed: Any = 0
    balancer: Any = None
    on_nonfinite: str = "raise"
    environment: Any = contextlib.nullcontext

    def fit(self, folder: Any, stop: int, **words: Any) -> Any:
        trainer = Trainer(
            stop,
            checkpoints=Checkpoints(folder, asynchronous=False),
            progress=False,
            on_nonfinite=self.on_nonfinite,
        )
        with self.environment():
            return trainer.fit(
                self.module,
                datamodule=self.datamodule,
                optimizer=self.optimizer,
                seed=self.seed,
                balancer=self.balancer,
                **words,
            )


BASE = Setup(
    LossModule(_init, _losses, batch_keys=("a", "b")),
    PoolDataModule({"a": HostPool(ROWS), "b": HostPool(-ROWS)}, {"a": 4, "b": 2}),
    optax.sgd(0.1),
)
BOX = UniformDomainSampler([(-1, 1), (0, 1)])


def pools(a: Any, b: Any = -ROWS, sizes: Any = None, **options: Any) -> PoolDataModule:
    return PoolDataModule({"a": HostPool(a), "b": HostPool(b)}, sizes or {"a": 4, "b": 2}, **options)


def one_value_changed() -> np.ndarray[Any, Any]:
    rows = ROWS.copy()
    rows[7, 1] = np.nextafter(rows[7, 1], np.float32(2))
    return rows


def config(name: str, value: Any) -> Any:
    @contextlib.contextmanager
    def changed() -> Any:
        before = jax.config.values[name]  # some have no attribute
        jax.config.update(name, value)
        try:
            yield
        finally:
            jax.config.update(name, before)

    return changed


def faked(section: str, name: str, value: Any) -> Any:
    """The environment as another machine would describe it."""

    @contextlib.contextmanager
    def changed() -> Any:
        describe = phijax_rng.resume.run_contract.describe_environment
        with pytest.MonkeyPatch.context() as patch:

            def other(device: Any) -> Any:
                found = describe(device)
                return {**found, section: {**found[section], name: value}}

            patch.setattr(phijax_rng.resume.run_contract, "describe_environment", other)
            yield

    return changed


def reordered() -> Any:
    samplers = {"b": RandomRowSampler({"inputs": -ROWS}), "a": RandomRowSampler({"inputs": ROWS})}
    return Samplers(samplers, {"b": 2, "a": 4})


def with_sampler(sampler: Any) -> Samplers:
    return Samplers({"a": sampler, "b": RandomRowSampler({"inputs": -ROWS})}, {"a": 4, "b": 2})


def appended() -> Any:
    samplers = {
        "a": RandomRowSampler({"inputs": ROWS}),
        "b": RandomRowSampler({"inputs": -ROWS}),
        "c": RandomRowSampler({"inputs": ROWS}),
    }
    return Samplers(samplers, {"a": 4, "b": 2, "c": 1})


# name, what the saved run had, what this run has, the setting that is named, what survives
CHANGES = [
    ("seed", {}, {"seed": 1}, "keys.root", "none"),
    ("sampler order", {}, {"datamodule": reordered()}, "source.samplers.order", "keys"),
    ("appended sampler", {}, {"datamodule": appended()}, "source.samplers.order", "keys"),
    ("sampler kind", {}, {"datamodule": with_sampler(BOX)}, "source.samplers.a.kind", "keys"),
    ("batch size", {}, {"datamodule": pools(ROWS, sizes={"a": 5, "b": 2})}, "source.samplers.a.size", "keys"),
    (
        "bounds",
        {"datamodule": with_sampler(BOX)},
        {"datamodule": with_sampler(UniformDomainSampler([(-1, 1), (0, 2)]))},
        "source.samplers.a.bounds",
        "keys",
    ),
    (
        "sort axis",
        {},
        {"datamodule": pools(ROWS, sort_axes={"a": 1})},
        "source.samplers.a.sort_axis",
        "keys",
    ),
    ("replace", {}, {"datamodule": pools(ROWS, replace=False)}, "source.samplers.a.replace", "keys"),
    ("pool shape", {}, {"datamodule": pools(ROWS[:-1])}, "source.samplers.a.num_rows", "keys"),
    (
        "pool dtype",
        {},
        {"datamodule": pools(ROWS.astype(np.float16))},
        "source.samplers.a.fields.inputs",
        "keys",
    ),
    ("one value of a pool", {}, {"datamodule": pools(one_value_changed())}, "contents.a", "keys"),
    (
        "loss names",
        {},
        {
            "module": LossModule(
                _init, _renamed_losses, batch_keys=("a", "b"), loss_names=("a_loss", "b_loss")
            )
        },
        "training.losses",
        "batches",
    ),
    (
        "balancer kind",
        {},
        {"balancer": StaticLossBalancer(("a", "b"), weights={"a": 2.0})},
        "training.balancer",
        "batches",
    ),
    (
        "balancer weights",
        {"balancer": StaticLossBalancer(("a", "b"), weights={"a": 2.0})},
        {"balancer": StaticLossBalancer(("a", "b"), weights={"a": 3.0})},
        "training.balancer.weights.a",
        "batches",
    ),
    ("learning rate", {}, {"optimizer": optax.sgd(0.2)}, "training.program", "batches"),
    ("non-finite policy", {}, {"on_nonfinite": "skip"}, "training.on_nonfinite", "batches"),
    (
        "Threefry mode",
        {},
        {"environment": config("jax_threefry_partitionable", False)},
        "settings.jax_threefry_partitionable",
        "none",
    ),
    ("x64", {}, {"environment": config("jax_enable_x64", True)}, "settings.jax_enable_x64", "batches"),
    (
        "fewer optimizations",
        {},
        {"environment": config("jax_disable_most_optimizations", True)},
        "settings.jax_disable_most_optimizations",
        "rounding",
    ),
    (
        "injected rate",
        {"optimizer": optax.inject_hyperparams(optax.sgd)(0.1)},
        {"optimizer": optax.inject_hyperparams(optax.sgd)(0.25)},
        "training.hyperparameters.learning_rate: 0.1 in the checkpoint, 0.25 in this run",
        "batches",
    ),
    (
        "matmul precision",
        {},
        {"environment": config("jax_default_matmul_precision", "highest")},
        "settings.jax_default_matmul_precision",
        "rounding",
    ),
    ("JAX version", {}, {"environment": faked("versions", "jax", "0.0.1")}, "versions.jax", "rounding"),
    ("device count", {}, {"environment": faked("machine", "devices", 4)}, "machine.devices", "rounding"),
    ("platform", {}, {"environment": faked("machine", "platform", "gpu")}, "machine.platform", "rounding"),
    ("cores", {}, {"environment": faked("machine", "cores", 64)}, "machine.cores", "rounding"),
    (
        "XLA flags",
        {},
        {"environment": faked("settings", "XLA_FLAGS", "--xla_cpu_max_isa=AVX")},
        "settings.XLA_FLAGS",
        "rounding",
    ),
]
# Of every section one setting or more, and of every level.
EVERYDAY = (
    *("seed", "sampler order", "batch size", "replace", "one value of a pool", "loss names", "learning rate"),
    *("balancer weights", "non-finite policy", "x64", "injected rate", "JAX version", "cores", "XLA flags"),
)


@pytest.mark.parametrize(
    ("saved", "current", "setting", "level"),
    mostly_full({row[0]: row[1:] for row in CHANGES}, everyday=EVERYDAY),
)
def test_no_change_passes_unnoticed(tmp_path, saved, current, setting, level):
    dataclasses.replace(BASE, **saved).fit(tmp_path, 4)
    resumed = dataclasses.replace(BASE, **{**saved, **current})
    if level in contract.REFUSED_LEVELS:
        with pytest.raises(RunChangedError, match=re.escape(f"    {setting}")) as refused:
            resumed.fit(tmp_path, 6, resume=True)
        assert str(refused.value).startswith("resuming at step 4 changes the run:\n")
        assert Checkpoints(tmp_path).steps == (4,), "a refused resume must leave the directory as it was"
    with pytest.warns(UserWarning, match=re.escape(f"    {setting}")):
        resumed.fit(tmp_path, 6, resume=True, on_change="warn")
    (change,) = Checkpoints(tmp_path).contract(6)["run"]["changes"]
    assert (change["step"], change["survives"]) == (4, level)
    assert setting.partition(":")[0] in {entry["setting"] for entry in change["settings"]}


def test_an_unchanged_run_resumes_without_a_word(tmp_path):
    BASE.fit(tmp_path / "cut", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = BASE.fit(tmp_path / "cut", 6, resume=True)
    assert_trees_bitwise_equal(resumed.state, BASE.fit(tmp_path / "whole", 6).state)
    assert Checkpoints(tmp_path / "cut").contract(6)["run"]["changes"] == []


SILENT = {
    "rows on the host": ({}, {"datamodule": pools(ROWS, resident=False)}),
    "rows on the device": ({"datamodule": pools(ROWS, resident=False)}, {}),
    "default implementation": ({}, {"environment": config("jax_default_prng_impl", "rbg")}),
    "seed offset": ({}, {"environment": config("jax_random_seed_offset", 7)}),
    "reordered flags": (
        {"environment": faked("settings", "XLA_FLAGS", "--xla_b --xla_a=2 --xla_dump_to=/tmp")},
        {"environment": faked("settings", "XLA_FLAGS", "--xla_a=2 --xla_b=true")},
    ),
    "accelerator libraries that were not recorded": (
        {},
        {"environment": faked("versions", "accelerator", {"driver": "550.54"})},
    ),
}


@pytest.mark.parametrize(
    ("saved", "current"), mostly_full(SILENT, everyday=("rows on the host", "seed offset", "reordered flags"))
)
def test_what_moves_no_number_passes_without_a_word(tmp_path, saved, current):
    dataclasses.replace(BASE, **saved).fit(tmp_path / "cut", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = dataclasses.replace(BASE, **{**saved, **current}).fit(tmp_path / "cut", 6, resume=True)
    assert Checkpoints(tmp_path / "cut").contract(6)["run"]["changes"] == []
    assert_trees_bitwise_equal(resumed.state, BASE.fit(tmp_path / "whole", 6).state)


@pytest.mark.parametrize("on_change", ["error", "warn"])
def test_an_injected_rate_is_the_checkpoint_s_or_with_a_word_this_call_s(tmp_path, on_change):
    def injected(rate):
        return dataclasses.replace(BASE, optimizer=optax.inject_hyperparams(optax.sgd)(rate))

    injected(0.1).fit(tmp_path / "cut", 4)
    with pytest.warns(UserWarning, match="learning_rate: 0.1 in the checkpoint, 0.25 in this run"):
        resumed = injected(0.25).fit(tmp_path / "cut", 6, resume=True, on_change=on_change)
    rate = resumed.state.optimizer_state.hyperparams["learning_rate"]
    assert float(rate) == np.float32(0.1 if on_change == "error" else 0.25)
    whole = injected(0.1).fit(tmp_path / "whole", 6).state
    same = np.array_equal(whole.model_state["w"], resumed.state.model_state["w"])
    assert same == (on_change == "error")
    # Named as long as the run is given another one than it has.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        injected(0.25).fit(tmp_path / "cut", 8, resume=True)
    assert len(caught) == (on_change == "error")


def test_a_seed_and_its_key_are_the_same_run(tmp_path):
    BASE.fit(tmp_path, 4)
    dataclasses.replace(BASE, seed=jax.random.key(0)).fit(tmp_path, 6, resume=True)
    assert Checkpoints(tmp_path).contract(6)["run"]["changes"] == []


def test_a_changed_canary_is_refused(tmp_path, monkeypatch):
    BASE.fit(tmp_path, 4)
    restore = ResumePlan.restore

    def other(plan, fresh):
        restored = restore(plan, fresh)
        return dataclasses.replace(restored, contract={**restored.contract, "canary": "0" * 64})

    monkeypatch.setattr(ResumePlan, "restore", other)
    with pytest.raises(RunChangedError, match=r"    canary: 0{61}"):
        BASE.fit(tmp_path, 6, resume=True)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": optax.adam(0.1)},
        {"module": LossModule(lambda key: _init(key, 5), _losses, batch_keys=("a", "b"))},
        {"seed": jax.random.key(0, impl="rbg")},
    ],
    ids=["another optimizer", "a wider model", "another implementation of keys"],
)
def test_a_state_of_another_structure_is_refused_with_both_sides(tmp_path, change):
    BASE.fit(tmp_path, 4)
    with pytest.raises(CheckpointMismatchError, match=r"in the checkpoint: .*\n    in this run: "):
        dataclasses.replace(BASE, **change).fit(tmp_path, 6, resume=True)


def test_a_program_that_had_to_change_is_said_not_to_be_comparable(tmp_path):
    BASE.fit(tmp_path, 4)
    moved = dataclasses.replace(BASE, optimizer=optax.sgd(0.2), environment=faked("versions", "jax", "0.0.1"))
    with pytest.warns(UserWarning, match="training.program: .* not comparable, since versions.jax differs"):
        moved.fit(tmp_path, 6, resume=True)


def test_a_chain_of_resumes_keeps_its_history(tmp_path):
    BASE.fit(tmp_path, 2)
    with pytest.warns(UserWarning):
        dataclasses.replace(BASE, optimizer=optax.sgd(0.2)).fit(tmp_path, 4, resume=True)
    with pytest.warns(UserWarning):
        dataclasses.replace(BASE, seed=1).fit(tmp_path, 6, resume=True, on_change="warn")
    changes = Checkpoints(tmp_path).contract(6)["run"]["changes"]
    assert [(change["step"], change["survives"]) for change in changes] == [(2, "batches"), (4, "none")]


def test_a_changed_seed_that_is_let_pass_draws_from_the_new_seed(tmp_path):
    BASE.fit(tmp_path, 4)
    with pytest.warns(UserWarning):
        result = dataclasses.replace(BASE, seed=1).fit(tmp_path, 6, resume=True, on_change="warn")
    assert keys.fingerprint(result.state.sampling_key) == keys.fingerprint(keys.split_root(1).sampling)
