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
    GradNormBalancer,
    LossModule,
    NamedBatchSource,
    PoolDataModule,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
    keys,
)
from phijax_rng.auditing import AuditReport
from phijax_rng.devices.placement import resolve
from phijax_rng.trainer.dry_run import dry_run
from phijax_rng.trainer.run_spec import FromSeed, RunSpec
from tests import _problems
from tests._selection import mostly_full

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


def test_the_keys_and_batches_of_a_dry_run_are_those_of_the_run(heat: AuditReport) -> None:
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


@pytest.mark.full
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
    spec = RunSpec(module=problem.module, initial=FromSeed(42), placement=resolve(), **problem.arguments)
    report = dry_run(spec, steps=2, make_refresh=lambda source, state: Refresh())
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


class Twin:
    """A sampler that follows the step, and draws two things from its one key."""

    def sample(self, key: jax.Array, size: Any) -> Any:
        return self.sample_at(key, 0, size)

    def sample_at(self, key: jax.Array, step: Any, size: Any) -> Any:
        place = jax.random.uniform(key, (size, 1))
        time = jax.random.uniform(key, (size, 1))
        return {"inputs": place + time * step}


@pytest.mark.draws_twice
def test_a_sampler_that_follows_the_step_draws_once_a_step() -> None:
    report = TRAINER.audit(
        module(lambda params, batches: {"fit": params * jnp.sum(batches["data"]["inputs"])}),
        datamodule=Points(data=Twin()),
        optimizer=optax.sgd(0.1),
        steps=2,
    )
    assert [fault.kind for fault in report.faults] == ["drawn twice"]
    assert report.faults[0].keys == ("root.sampling.stream('sampler', 'data')",)


SQUARE = UniformDomainSampler([(0.0, 1.0), (0.0, 1.0)])
TERMS = ("data", "pde")
FEW: dict[str, Any] = {"num_candidates": 8}
"""Options of adaptive samplers in these tests."""


def residuals_of_the_field(params: Any, batches: Any) -> dict[str, jax.Array]:
    points = batches["pde"]["inputs"]
    return {"pde": jnp.tanh(points @ params["w"]) - points[:, 0]}


def losses_of_the_field(params: Any, batches: Any) -> dict[str, jax.Array]:
    residual = residuals_of_the_field(params, batches)["pde"]
    return {"data": jnp.mean((batches["data"]["inputs"] @ params["w"]) ** 2), "pde": jnp.mean(residual**2)}


FIELD = LossModule(
    lambda key: {"w": jax.random.normal(key, (2,))},
    losses_of_the_field,
    batch_keys=TERMS,
    residuals=residuals_of_the_field,
)


def audited_field(pde: Any = SQUARE, balancer: Any = None) -> AuditReport:
    return TRAINER.audit(
        FIELD, datamodule=Points(data=SQUARE, pde=pde), optimizer=optax.sgd(0.1), balancer=balancer
    )


class Watching(StaticLossBalancer):
    """A balancer of a user that reads the batch of every step."""

    update_every_n_steps = 1
    update_start_step = 0

    def update(self, module: Any, model_state: Any, batches: Any, key: Any, state: Any) -> Any:
        module.evaluate(model_state, batches, key)
        return state


PARTS: dict[str, dict[str, Any]] = {
    "distribution": {"pde": ResidualDistributionSampler(SQUARE, 100, **FEW)},
    "distribution at every step": {"pde": ResidualDistributionSampler(SQUARE, 1, **FEW)},
    "refinement": {
        "pde": ResidualRefinementSampler(SQUARE, 100, capacity=8, num_initial=4, num_added=2, **FEW)
    },
    "refinement at every step": {
        "pde": ResidualRefinementSampler(SQUARE, 1, capacity=8, num_initial=4, num_added=2, **FEW)
    },
    "gradnorm at every step": {"balancer": GradNormBalancer(TERMS, update_every_n_steps=1)},
    "gradnorm at every second step": {"balancer": GradNormBalancer(TERMS, update_every_n_steps=2)},
    "gradnorm with diagnostics": {
        "pde": ResidualDistributionSampler(SQUARE, 1, **FEW),
        "balancer": GradNormBalancer(TERMS, update_every_n_steps=1, diagnostic_batch_sizes=2),
    },
    "a balancer of the user's own": {"balancer": Watching(TERMS)},
}


EVERYDAY = ("gradnorm at every second step",)


@pytest.mark.parametrize("name", mostly_full(list(PARTS), everyday=EVERYDAY))
def test_parts_that_ask_for_the_batch_of_the_step_once_more_are_clean(name: str) -> None:
    report = audited_field(**PARTS[name])
    assert report.clean, str(report)
    assert {note.kind for note in report.notes} <= {"replay"}


class Restarting:
    """A source of a user's own whose stream starts again at every second step."""

    traceable = True

    def __init__(self, source: NamedBatchSource):
        self.source = source

    def __call__(self, step: Any) -> Any:
        return self.source(step % 2)


class RestartingPoints(Points):
    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        return Restarting(super().train_batch_source(batch_keys, key))


def test_a_stream_that_starts_again_is_found_beside_a_balancer() -> None:
    report = TRAINER.audit(
        FIELD,
        datamodule=RestartingPoints(data=SQUARE, pde=SQUARE),
        optimizer=optax.sgd(0.1),
        balancer=Watching(TERMS),
    )
    assert {fault.kind for fault in report.faults} == {"restarted"}
    assert {key for fault in report.faults for key in fault.keys} == {
        f"root.sampling.step[0].split(2)[{index}]" for index in range(2)
    }


class DrawingAgain(Watching):
    """A balancer that draws from the key of a sampler, and does not ask the source."""

    def __init__(self, source: NamedBatchSource):
        super().__init__(TERMS)
        self.key = source.sampler_keys(1)["pde"]

    def update(self, module: Any, model_state: Any, batches: Any, key: Any, state: Any) -> Any:
        SQUARE.sample(self.key, 2)
        return state


@pytest.mark.draws_twice
def test_a_balancer_that_takes_the_key_of_a_sampler_is_found() -> None:
    source = Points(data=SQUARE, pde=SQUARE).train_batch_source(TERMS, keys.split_root(42).sampling)
    report = audited_field(balancer=DrawingAgain(source))
    assert report.faults
    assert {key for fault in report.faults for key in fault.keys} == {"root.sampling.step[1].pde"}


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
        assert str(failure.value) == (
            "the source that train_batch_source returns must be callable, got 3. Pass a function."
        )
