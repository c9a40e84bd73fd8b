"""`Trainer.audit`: the first steps of a run, every key by the name the documentation gives it."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    AuditReport,
    LossModule,
    NamedBatchSource,
    PoolDataModule,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
    keys,
)
from phijax_rng.rehearsal import rehearse
from tests import _problems

TRAINER = Trainer(10, progress=False)


@pytest.fixture(scope="module")
def heat() -> AuditReport:
    problem = _problems.heat()
    balancer = StaticLossBalancer(("pde", "initial", "boundary"))
    return TRAINER.audit(problem.module, **problem.arguments, balancer=balancer, seed=7)


def test_the_heat_problem_is_clean_and_every_key_has_its_name(heat: AuditReport) -> None:
    assert heat.clean
    assert heat.findings == ()
    names = [name for draw in heat.draws for name in draw.keys]
    assert names == [
        "root.model.split(2)[0]",
        "root.model.split(2)[1]",
        *(f"root.sampling.step[{s}].{name}" for s in range(3) for name in ("initial", "boundary", "pde")),
    ]


def test_the_rehearsed_keys_and_batches_are_those_of_the_run(heat: AuditReport) -> None:
    problem = _problems.heat()
    fitted = Trainer(3, progress=False).fit(problem.module, **problem.arguments, seed=7).state
    state = heat.result
    for name in ("rng_key", "sampling_key", "balancer_key"):
        assert keys.fingerprint(getattr(state, name)) == keys.fingerprint(getattr(fitted, name))
    for one, other in zip(
        jax.tree.leaves(state.model_state), jax.tree.leaves(fitted.model_state), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_dropout_draws_from_the_runtime_key_of_each_step() -> None:
    problem = _problems.dropout()
    report = TRAINER.audit(problem.module, **problem.arguments, steps=2)
    assert report.clean
    drawn = [draw for draw in report.draws if draw.primitive == "bernoulli"]
    assert [draw.keys for draw in drawn] == [("root.runtime.step[0]",), ("root.runtime.step[1]",)]
    assert {draw.place.line.file for draw in drawn} == {_problems.__file__}


def test_every_micro_batch_has_a_key_of_its_own() -> None:
    problem = _problems.dropout()
    report = Trainer(10, progress=False, microbatches=2).audit(problem.module, **problem.arguments, steps=1)
    assert report.clean, str(report)
    drawn = [key for draw in report.draws if draw.primitive == "bernoulli" for key in draw.keys]
    assert drawn == [f"root.runtime.step[0].split(2)[{index}]" for index in range(2)]


def losses_that_share_a_key(params: Any, batches: Any, key: jax.Array) -> dict[str, jax.Array]:
    x = batches["data"]["inputs"]
    noise = jax.random.normal(key, x.shape)
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    return {"fit": jnp.sum(params * mask * (x + noise))}


class CorrelatedSampler:
    """A sampler of a user's own that draws place and time from one key."""

    def sample(self, key: jax.Array, size: Any) -> Any:
        place = jax.random.uniform(key, (size,))
        time = jax.random.uniform(key, (size,))
        return {"inputs": jnp.stack([place, time], 1)}


class Points:
    def __init__(self, **samplers: Any):
        self.samplers = samplers

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> NamedBatchSource:
        return NamedBatchSource(self.samplers, dict.fromkeys(self.samplers, 2), key)


def module(losses: Any, batch: str = "data", init: Any = None) -> LossModule:
    return LossModule(init or (lambda key: jnp.ones(())), losses, batch_keys=(batch,))


@pytest.mark.draws_twice
def test_a_model_that_shares_a_key_is_found() -> None:
    data = Points(data=UniformDomainSampler([(0.0, 1.0)]))
    report = TRAINER.audit(
        module(losses_that_share_a_key), datamodule=data, optimizer=optax.sgd(0.1), steps=1
    )
    (fault,) = report.faults
    assert (fault.kind, fault.keys) == ("drawn twice", ("root.runtime.step[0]",))
    first = losses_that_share_a_key.__code__.co_firstlineno
    assert [line.number - first for line in fault.lines if line.function == "losses_that_share_a_key"] == [
        2,
        3,
    ]


@pytest.mark.draws_twice
def test_a_sampler_that_draws_twice_is_found() -> None:
    report = TRAINER.audit(
        module(lambda params, batches: {"fit": params * jnp.sum(batches["data"]["inputs"])}),
        datamodule=Points(data=CorrelatedSampler()),
        optimizer=optax.sgd(0.1),
        steps=2,
    )
    (fault,) = report.faults
    assert fault.keys == ("root.sampling.step[0].data", "root.sampling.step[1].data")
    assert [place.line.function for place in fault.places] == ["sample", "sample"]


@pytest.mark.draws_twice
def test_a_model_that_keeps_its_key_is_found() -> None:
    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key), "key": key}

    def losses(state: Any, batches: Any) -> Any:
        return {"fit": state["w"] * jnp.sum(batches["data"]["inputs"]) * jax.random.normal(state["key"])}

    data = Points(data=UniformDomainSampler([(0.0, 1.0)]))
    report = TRAINER.audit(module(losses, init=init), datamodule=data, optimizer=optax.sgd(0.1), steps=2)
    assert [fault.kind for fault in report.faults] == ["drawn twice"]
    assert report.faults[0].keys == ("root.model",)
    allowed = TRAINER.audit(
        module(losses, init=init), datamodule=data, optimizer=optax.sgd(0.1), steps=2, allow=("root.model",)
    )
    assert allowed.clean


def test_a_refresh_runs_before_the_batch_and_its_draws_are_named() -> None:
    @dataclasses.dataclass(frozen=True)
    class Refresh:
        def __call__(self, state: Any, source: Any) -> Any:
            noise = jax.random.normal(keys.fold_in(keys.stream(state.balancer_key, "update"), state.step))
            return state.replace(balancer_state={"noise": noise})

    problem = _problems.statistics()
    report = rehearse(
        problem.module, **problem.arguments, steps=2, make_refresh=lambda source, state: Refresh()
    )
    assert report.clean
    names = [name for draw in report.draws for name in draw.keys if "balancer" in name]
    assert names == [f"root.balancer.stream('update').fold_in({step})" for step in range(2)]


def test_a_sampler_that_follows_the_step_may_keep_its_key() -> None:
    class Turning:
        def sample(self, key: jax.Array, size: Any) -> Any:
            return self.sample_at(key, 0, size)

        def sample_at(self, key: jax.Array, step: Any, size: Any) -> Any:
            return {"inputs": (jax.random.uniform(key, (size, 1)) + 0.1 * step) % 1.0}

    report = TRAINER.audit(
        module(lambda params, batches: {"fit": params * jnp.sum(batches["data"]["inputs"])}),
        datamodule=Points(data=Turning()),
        optimizer=optax.sgd(0.1),
        steps=2,
    )
    assert report.clean, str(report)
    assert [(f.kind, f.allowed) for f in report.notes] == [("restarted", True)]
    assert report.draws[0].keys == ("root.sampling.stream('sampler', 'data')",)


def test_arguments_are_checked_as_those_of_fit() -> None:
    problem = _problems.statistics()
    with pytest.raises(TypeError, match="module must be a LossModule, got 3"):
        TRAINER.audit(3, **problem.arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"steps must be in \[1, 2\*\*31\), got 0"):
        TRAINER.audit(problem.module, **problem.arguments, steps=0)
    with pytest.raises(TypeError, match="datamodule must offer train_batch_source"):
        TRAINER.audit(problem.module, datamodule=3, optimizer=problem.optimizer)  # type: ignore[arg-type]


def test_the_hooks_of_a_data_module_are_called_around_it() -> None:
    calls: list[str] = []
    problem = _problems.statistics()

    class Hooked(PoolDataModule):
        def setup(self, stage: str) -> None:
            calls.append(f"setup {stage}")

        def teardown(self, stage: str) -> None:
            calls.append(f"teardown {stage}")

    data = Hooked(problem.datamodule.pools, problem.datamodule.batch_sizes)
    TRAINER.audit(problem.module, datamodule=data, optimizer=problem.optimizer, steps=1)
    assert calls == ["setup fit", "teardown fit"]


class Batches:
    """A data module whose source is a plain iterable."""

    def __init__(self, names: tuple[str, ...] = ("data",), count: int = 5):
        self.names, self.count = names, count

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        return [
            {name: {"inputs": np.full((2, 1), step, np.float32)} for name in self.names}
            for step in range(self.count)
        ]


def losses_with_noise(params: Any, batches: Any, key: jax.Array) -> dict[str, jax.Array]:
    x = batches["data"]["inputs"]
    return {"fit": jnp.sum(params * (x + jax.random.normal(key, x.shape)))}


def test_an_iterable_source_is_audited_as_it_is_trained() -> None:
    report = TRAINER.audit(module(losses_with_noise), datamodule=Batches(), optimizer=optax.sgd(0.1), steps=2)
    assert report.clean, str(report)
    assert [draw.keys for draw in report.draws] == [(f"root.runtime.step[{step}]",) for step in range(2)]


def test_what_fit_refuses_is_refused_with_the_same_words() -> None:
    arguments: dict[str, Any] = {"datamodule": Points(other=CorrelatedSampler()), "optimizer": optax.sgd(0.1)}
    for ask in (TRAINER.audit, TRAINER.fit):
        with pytest.raises(ValueError) as failure:
            ask(module(losses_with_noise), seed=1, **arguments)
        assert str(failure.value) == (
            "the source has no batch 'data'; it has 'other', and the module's batch_keys are 'data'. "
            "Make them agree."
        )
    arguments["datamodule"] = types.SimpleNamespace(train_batch_source=lambda batch_keys, key: 3)
    for ask in (TRAINER.audit, TRAINER.fit):
        with pytest.raises(TypeError) as failure:
            ask(module(losses_with_noise), seed=1, **arguments)
        assert str(failure.value) == "source must be callable, got 3. Pass a function."
