"""Beside PhiJAX 0.2.0b5: the same keys, rows and losses, and each other's parts in place of one's own.

Everything is compared bit for bit unless a name says otherwise. PhiJAX is asked through its public
interface only.
"""

import contextlib
import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    LossModule,
    NamedBatchSource,
    PoolDataModule,
    SpaceTimeSampler,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
    initialize_train_state,
    keys,
)
from tests._bitwise import assert_trees_bitwise_equal, first_difference

phijax = pytest.importorskip(
    "phijax", reason="phijax is not installed; `make compare` has an environment with it"
)

SEED = 42
STEPS = (*range(196), 1000, 12345, 2**24 + 1, 2**31 - 1)
"""200 steps, the last as far as a step can be."""
SOME_STEPS = (*STEPS[::8], STEPS[-1])


# Keys and rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """Pools by their number of rows, and what is drawn from them."""

    rows: Mapping[str, int]
    sizes: Mapping[str, int | str]
    replace: bool = True
    sort_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def pools(self) -> dict[str, Any]:
        """PhiJAX's pools. The second column of inputs has ties, so that sorting must be stable."""
        rng = np.random.default_rng(7)
        return {name: self._pool(rng, count) for name, count in self.rows.items()}

    def _pool(self, rng: np.random.Generator, count: int) -> Any:
        inputs = np.stack([rng.standard_normal(count), rng.integers(0, 5, count)], axis=1)
        return phijax.data.HostPool(
            inputs.astype(np.float32),
            rng.standard_normal((count, 1)).astype(np.float32),
            aux={"number": np.arange(count, dtype=np.int32)},
        )

    def theirs(self, key: jax.Array) -> Any:
        source = phijax.data.NamedBatchSource.from_pools(
            self.pools, dict(self.sizes), key, replace=self.replace, sort_axes=dict(self.sort_axes)
        )
        return source.prepare(jax.local_devices()[0])

    def ours(self, key: jax.Array, **options: Any) -> NamedBatchSource:
        return NamedBatchSource.from_pools(
            self.pools,
            dict(self.sizes),
            key,
            **{"replace": self.replace, "method": "sort", "sort_axes": dict(self.sort_axes), **options},
        )


LAYOUTS = {
    "one pool": Layout({"pde": 64}, {"pde": 6}),
    "a pool of one row": Layout({"point": 1, "pde": 1000}, {"point": 3, "pde": 7}),
    "heat": Layout(
        {"initial": 256, "boundary": 256, "pde": 4096}, {"initial": 32, "boundary": 32, "pde": 64}
    ),
    "order of sizes, not of pools": Layout({"a": 64, "b": 512, "c": 10}, {"c": 4, "a": 6, "b": 5}),
    "all in the middle": Layout({"a": 64, "b": 10, "c": 512}, {"a": 6, "b": "all", "c": 5}),
    "all, sorted": Layout({"a": 64, "b": 300}, {"a": "all", "b": 5}, sort_axes={"a": 1}),
    "sorted": Layout({"a": 64, "b": 300}, {"a": 40, "b": 50}, sort_axes={"a": 1, "b": 0}),
    "without replacement": Layout({"a": 64, "b": 512}, {"a": 64, "b": 6}, replace=False),
    "without replacement, sorted": Layout(
        {"a": 64, "b": 512}, {"a": 20, "b": 100}, replace=False, sort_axes={"a": 1, "b": 1}
    ),
    "a large pool without replacement": Layout({"a": 20_000}, {"a": 8}, replace=False),
    "five pools": Layout({f"p{i}": 10 * i + 1 for i in range(5)}, {f"p{i}": i + 1 for i in range(5)}),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_rows_are_equal_over_200_steps(layout: Layout) -> None:
    key = keys.split_root(SEED).sampling
    assert first_differing_step(layout.ours(key), layout.theirs(key), STEPS) is None


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda layout, key: layout.ours(keys.split_root(SEED + 1).sampling), id="another seed"),
        pytest.param(lambda layout, key: layout.ours(keys.split_root(SEED).runtime), id="another stream"),
        pytest.param(lambda layout, key: shifted(layout.ours(key)), id="a step later"),
        pytest.param(
            lambda layout, key: layout.ours(key, names=("boundary", "initial", "pde")), id="another order"
        ),
        pytest.param(lambda layout, key: layout.ours(key, replace=False), id="without replacement"),
        pytest.param(lambda layout, key: layout.ours(key, sort_axes={"pde": 0}), id="sorted"),
    ],
)
def test_control_other_rows_are_noticed(changed: Callable[[Layout, jax.Array], Any]) -> None:
    layout, key = LAYOUTS["heat"], keys.split_root(SEED).sampling
    assert first_differing_step(changed(layout, key), layout.theirs(key), range(5)) is not None


def test_control_the_permutation_draws_other_rows_than_a_sort() -> None:
    layout, key = LAYOUTS["without replacement"], keys.split_root(SEED).sampling
    ours = layout.ours(key, method="permutation")
    assert first_differing_step(ours, layout.theirs(key), range(5)) is not None


class EchoSampler(phijax.data.BatchSampler):  # type: ignore[misc]
    """Gives back the key it is handed."""

    def prepare(self, device: Any) -> "EchoSampler":
        return self

    def sample(self, key: jax.Array, batch_size: int) -> dict[str, jax.Array]:
        return {"inputs": key}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_sampler_keys_are_equal_over_200_steps(count: int) -> None:
    layout = Layout({f"p{i}": 5 for i in range(count)}, {f"p{i}": 1 for i in range(count)})
    for seed in (0, SEED, 2**32 - 1):
        key = keys.split_root(seed).sampling
        ours = layout.ours(key)
        theirs = phijax.data.NamedBatchSource(
            {name: EchoSampler() for name in layout.rows}, layout.sizes, key
        )
        for step in STEPS:
            expected = {name: batch["inputs"] for name, batch in theirs(step).items()}
            assert_trees_bitwise_equal(ours.sampler_keys(step), expected)
        assert first_difference(ours.sampler_keys(3), ours.sampler_keys(4)) is not None  # control


def test_diagnostic_batches_are_equal() -> None:
    layout, streams = LAYOUTS["heat"], keys.split_root(SEED)
    ours, theirs = layout.ours(streams.sampling), layout.theirs(streams.sampling)
    sizes = {"initial": 5, "boundary": 3, "pde": "all"}
    key = jax.random.fold_in(streams.balancer, 0)
    assert_batches_equal(ours.sample(key, sizes), theirs.sample(key, sizes))
    other = jax.random.fold_in(streams.balancer, 1)
    assert batch_difference(ours.sample(other, sizes), theirs.sample(key, sizes)) is not None  # control


# Coordinates

SPANS_OF_TWO = {
    "unit box": ((0.0, 1.0), (0.0, 1.0)),
    "two axes": ((-1.0, 1.0), (0.5, 0.75)),
    "away from zero": ((3.0, 5.0), (-7.0, 1.0), (100.0, 100.125)),
}
OTHER_SPANS = {
    "0.6 and 3.4": ((0.1, 0.7), (-1.7, 1.7)),
    "five": ((-2.0, 3.0),),
    "away from zero": ((1000.0, 1000.3), (-0.01, 6.0)),
}


@pytest.mark.parametrize("bounds", SPANS_OF_TWO.values(), ids=SPANS_OF_TWO.keys())
@pytest.mark.parametrize("sort_axis", [None, 0])
def test_box_points_are_equal_for_spans_that_are_powers_of_two(bounds: Any, sort_axis: int | None) -> None:
    ours, theirs = box_sources(bounds, sort_axis)
    assert first_differing_step(ours, theirs, STEPS if sort_axis is None else SOME_STEPS) is None
    assert first_differing_step(shifted(ours), theirs, range(5)) is not None  # control


@pytest.mark.parametrize("bounds", OTHER_SPANS.values(), ids=OTHER_SPANS.keys())
def test_other_box_points_are_equal_within_one_rounding(bounds: Any) -> None:
    ours, theirs = box_sources(bounds)
    low, high = np.float32(bounds).T
    apart = [distance(ours, theirs, step) for step in SOME_STEPS]
    assert (np.max(apart, axis=(0, 1)) <= rounding(low, high)).all()
    assert (distance(shifted(ours), theirs, 3).max(axis=0) > rounding(low, high)).all()  # control


@pytest.mark.parametrize(
    ("time_axis", "sort_axis", "replace"),
    [(0, 0, True), (0, 1, False), (0, None, False), (1, 0, True), (1, 1, False)],
)
def test_space_time_points_are_equal_for_spans_that_are_powers_of_two(
    time_axis: int, sort_axis: int | None, replace: bool
) -> None:
    ours, theirs = space_time_sources((-1.0, 3.0), time_axis, sort_axis, replace)
    assert first_differing_step(ours, theirs, SOME_STEPS) is None
    assert first_differing_step(shifted(ours), theirs, range(5)) is not None  # control


@pytest.mark.parametrize("time_bounds", [(0.1, 0.7), (-1.7, 1.7), (0.0, 0.99)])
def test_other_space_time_points_are_equal_within_one_rounding(time_bounds: Any) -> None:
    # Sorted by place: two times a rounding apart may change places.
    ours, theirs = space_time_sources(time_bounds, time_axis=0, sort_axis=1, replace=True)
    for step in SOME_STEPS:
        mine, other = ours(step)["pde"], theirs(step)["pde"]
        assert_trees_bitwise_equal(mine["inputs"][:, 1], other["inputs"][:, 1])
        assert_trees_bitwise_equal(mine["number"], other["number"])
        assert distance(ours, theirs, step)[:, 0].max() <= rounding(*np.float32(time_bounds))
    assert distance(shifted(ours), theirs, 3)[:, 0].max() > 0.01  # control


def box_sources(bounds: Any, sort_axis: int | None = None) -> tuple[NamedBatchSource, Any]:
    key, template = keys.split_root(SEED).sampling, np.float32([2.0, 3.0])
    bounds = np.array(bounds)
    theirs = phijax.data.UniformDomainSampler(bounds, {"targets": template}, sort_axis=sort_axis)
    ours = UniformDomainSampler(bounds, {"targets": template}, sort_axis=sort_axis)
    return beside_another(ours, theirs, key)


def space_time_sources(
    time_bounds: Any, time_axis: int, sort_axis: int | None, replace: bool
) -> tuple[NamedBatchSource, Any]:
    rng = np.random.default_rng(8)
    places = rng.random((50, 2), dtype=np.float32)
    pool = phijax.data.HostPool(places, aux={"number": np.arange(50, dtype=np.int32)})
    options = {"time_axis": time_axis, "replace": replace, "sort_axis": sort_axis}
    theirs = phijax.data.SpaceTimeSampler(pool.fields(), time_bounds, **options)
    ours = SpaceTimeSampler(pool, time_bounds, method="sort", **options)
    return beside_another(ours, theirs, keys.split_root(SEED).sampling)


def beside_another(ours: Any, theirs: Any, key: jax.Array) -> tuple[NamedBatchSource, Any]:
    """Both samplers as the second of two, so that they are handed a key out of several."""
    pool = LAYOUTS["one pool"].pools["pde"]
    sizes = {"bc": 3, "pde": 33}
    first = phijax.data.RandomRowSampler(pool.fields())
    prepared = phijax.data.NamedBatchSource({"bc": first, "pde": theirs}, sizes, key)
    source = LAYOUTS["one pool"].ours(key).samplers["pde"]
    return (
        NamedBatchSource({"bc": source, "pde": ours}, sizes, key),
        prepared.prepare(jax.local_devices()[0]),
    )


def distance(ours: Any, theirs: Any, step: int) -> np.ndarray[Any, Any]:
    points = [np.asarray(source(step)["pde"]["inputs"], np.float64) for source in (ours, theirs)]
    return np.abs(points[0] - points[1])


def rounding(low: Any, high: Any) -> np.ndarray[Any, Any]:
    """The distance of neighbouring float32 where the box is widest."""
    return np.spacing(np.maximum(high - low, np.maximum(np.abs(low), np.abs(high))))


# The balancer


@pytest.mark.parametrize(
    ("wrap", "cases"),
    [
        pytest.param(lambda combine: combine, 100, id="eager"),
        pytest.param(jax.jit, 8, id="jitted"),  # compiled for each choice of weights
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_weighted_losses_are_summed_to_the_same_bits(
    count: int, wrap: Callable[..., Any], cases: int
) -> None:
    names = tuple(f"loss{i}" for i in range(count))
    for weights, losses in balancing_cases(names, cases):
        ours = StaticLossBalancer(names, weights=weights)
        theirs = phijax.balancers.StaticLossBalancer(names, weights=weights)
        expected = wrap(theirs.combine)(losses, theirs.initialize())
        assert_trees_bitwise_equal(wrap(ours.combine)(losses, ours.initialize()), expected)


def test_losses_without_a_balancer_are_summed_as_with_unit_weights() -> None:
    names = ("b", "a", "c")
    theirs = phijax.balancers.StaticLossBalancer(names)
    for _, losses in balancing_cases(names, 50):
        expected = theirs.combine(losses, theirs.initialize())
        assert_trees_bitwise_equal(StaticLossBalancer().combine(losses, {}), expected)


def test_control_another_order_of_losses_sums_to_other_bits() -> None:
    names = ("b", "a", "c")
    ours, theirs = StaticLossBalancer(names[::-1]), phijax.balancers.StaticLossBalancer(names)
    assert any(
        ours.combine(losses, ours.initialize()) != theirs.combine(losses, theirs.initialize())
        for _, losses in balancing_cases(names, 50)
    )


def balancing_cases(names: tuple[str, ...], count: int) -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    """Weights and losses over several orders of magnitude."""
    rng = np.random.default_rng(len(names))
    for _ in range(count):
        weights, losses = rng.lognormal(0, 2, len(names)), rng.lognormal(-2, 3, len(names))
        yield (
            dict(zip(names, weights.tolist(), strict=True)),
            dict(zip(names, losses.astype(np.float32), strict=True)),
        )


# Training: the heat equation u_t = u_xx / 10 in PhiJAX's words and in ours

NUM_STEPS = 20
LOSSES = ("initial", "boundary", "pde")
SIZES = {"initial": 16, "boundary": 16, "pde": 32}


def make_pools() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, t = rng.random((2, 128, 1), dtype=np.float32)
    zero = np.zeros_like(x)
    initial = phijax.data.HostPool(np.hstack([x, zero]), np.sin(np.pi * x))
    boundary = phijax.data.HostPool(np.hstack([np.round(x), t]), zero)
    return {
        "initial": initial,
        "boundary": boundary,
        "pde": phijax.data.HostPool(rng.random((1024, 2), dtype=np.float32)),
    }


def init(key: jax.Array) -> Any:
    widths = (2, 16, 16, 1)
    shapes = list(itertools.pairwise(widths))
    return [
        {"w": jax.random.normal(k, shape, jnp.float32) / math.sqrt(shape[0]), "b": jnp.zeros(shape[1])}
        for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    ]


def network(params: Any, point: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        point = jnp.tanh(point @ layer["w"] + layer["b"])
    return point @ params[-1]["w"] + params[-1]["b"]


def heat_losses(model_state: Any, batches: Any) -> dict[str, jax.Array]:
    def u(point: jax.Array) -> jax.Array:
        return network(model_state, point)[0]

    def residual(point: jax.Array) -> jax.Array:
        u_x, u_xx = jax.jvp(jax.grad(u), (point,), (jnp.array([1.0, 0.0]),))
        return u_x[1] - 0.1 * u_xx[0]

    losses = {
        name: jnp.mean((jax.vmap(u)(batches[name]["inputs"]) - batches[name]["targets"][:, 0]) ** 2)
        for name in ("initial", "boundary")
    }
    return {**losses, "pde": jnp.mean(jax.vmap(residual)(batches["pde"]["inputs"]) ** 2)}


class HeatObjective:
    """The losses as PhiJAX wants them."""

    loss_names = batch_keys = LOSSES

    def losses(self, model_apply: Any, model_state: Any, batches: Any) -> dict[str, jax.Array]:
        return heat_losses(model_state, batches)


class TheirData(phijax.DataModule):  # type: ignore[misc]
    """A data module of PhiJAX, with PhiJAX's source."""

    def setup(self, stage: str) -> None:
        self.pools = make_pools()

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        self.given = batch_keys, key
        return phijax.data.NamedBatchSource.from_pools(self.pools, SIZES, key, names=tuple(batch_keys))


class OurSourceInTheirs(TheirData):
    """A data module of PhiJAX, with our source."""

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        return NamedBatchSource.from_pools(self.pools, SIZES, key, names=tuple(batch_keys))


class DuckWithOurSource:
    """What PhiJAX's trainer asks of a data module, and no more."""

    def prepare_stage(self, stage: str) -> None: ...

    def teardown_stage(self, stage: str) -> None: ...

    def input_statistics(self) -> None: ...

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        return NamedBatchSource.from_pools(make_pools(), SIZES, key, names=tuple(batch_keys))


class ReorderedSource(TheirData):
    """Our source with its samplers in another order."""

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        return NamedBatchSource.from_pools(self.pools, SIZES, key, names=tuple(batch_keys)[::-1])


class Trace(phijax.callbacks.Callback):  # type: ignore[misc]
    """Runtime keys and losses after every step."""

    def __init__(self) -> None:
        self.rng_keys: list[jax.Array] = []
        self.losses: list[dict[str, float]] = []

    def on_train_batch_end(self, context: Any) -> bool:
        self.rng_keys.append(context.state.rng_key)
        names = {"total_loss": "train/loss", **{name: f"train/loss/{name}" for name in LOSSES}}
        self.losses.append({name: float(context.metrics[key]) for name, key in names.items()})
        return False


@dataclasses.dataclass(frozen=True)
class TheirRun:
    """A fit of PhiJAX's trainer and what was seen on the way."""

    state: Any
    losses: list[dict[str, float]]
    rng_keys: list[jax.Array]
    model_key: jax.Array
    datamodule: Any


def their_fit(datamodule: Any) -> TheirRun:
    trace, given = Trace(), []

    def factory(*, key: jax.Array, **_: Any) -> Any:
        given.append(key)
        return phijax.InitializedModel(apply=network, state=init(key))

    with contextlib.redirect_stdout(io.StringIO()):  # its constructor describes the machine
        trainer = phijax.Trainer(
            NUM_STEPS,
            accelerator="cpu",
            callbacks=(trace,),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )
    module = phijax.PhiModule(factory, HeatObjective())
    result = trainer.fit(module, datamodule=datamodule, optimizer=optax.adam(1e-2), seed=SEED)
    return TheirRun(result.state, trace.losses, trace.rng_keys, given[0], datamodule)


def our_fit(datamodule: Any, seed: int = SEED, **options: Any) -> Any:
    module = LossModule(init, heat_losses, batch_keys=LOSSES, loss_names=LOSSES)
    trainer = Trainer(
        options.pop("max_steps", NUM_STEPS),
        progress=False,
        log_every_n_steps=1,
        checkpoints=options.pop("checkpoints", None),
    )
    return trainer.fit(module, datamodule=datamodule, optimizer=optax.adam(1e-2), seed=seed, **options)


@pytest.fixture(scope="module")
def theirs() -> TheirRun:
    """PhiJAX's trainer with PhiJAX's source."""
    return their_fit(TheirData())


@pytest.fixture(scope="module")
def ours() -> Any:
    """Our trainer with our source."""
    return our_fit(PoolDataModule(make_pools(), SIZES))


def test_the_streams_of_a_fit_are_equal(theirs: TheirRun) -> None:
    streams = keys.split_root(SEED)
    batch_keys, sampling_key = theirs.datamodule.given
    assert batch_keys == LOSSES
    assert_trees_bitwise_equal(theirs.model_key, streams.model)
    assert_trees_bitwise_equal(sampling_key, streams.sampling)
    assert_trees_bitwise_equal(theirs.state.sampling_key, streams.sampling)
    assert_trees_bitwise_equal(theirs.state.balancer_key, streams.balancer)
    assert first_difference(theirs.model_key, streams.runtime) is not None  # control


def test_the_runtime_key_is_equal_after_every_step(theirs: TheirRun, ours: Any) -> None:
    state = initialize_train_state(init(keys.root_key(0)), optax.sgd(1.0), {}, keys.split_root(SEED))
    expected = list(runtime_keys(state.rng_key, NUM_STEPS))
    assert_trees_bitwise_equal(theirs.rng_keys, expected)
    assert_trees_bitwise_equal(ours.state.rng_key, theirs.state.rng_key)
    assert_trees_bitwise_equal(ours.state.sampling_key, theirs.state.sampling_key)
    assert_trees_bitwise_equal(ours.state.balancer_key, theirs.state.balancer_key)
    late = list(runtime_keys(expected[0], NUM_STEPS))
    assert first_difference(theirs.rng_keys, late) is not None  # control


def test_three_streams_from_one_key_are_equal() -> None:
    params, optimizer, key = {"w": jnp.ones(3)}, optax.adam(1e-2), jax.random.key(9)
    mine = initialize_train_state(params, optimizer, {}, key)
    other = phijax.training.initialize_train_state(params, optimizer, {}, key)
    for name in ("rng_key", "sampling_key", "balancer_key", "model_state", "optimizer_state"):
        assert_trees_bitwise_equal(getattr(mine, name), getattr(other, name))
    assert first_difference(mine.rng_key, other.sampling_key) is not None  # control


@pytest.mark.parametrize("datamodule", [OurSourceInTheirs, DuckWithOurSource])
def test_our_source_in_their_trainer_gives_their_losses_and_parameters(
    datamodule: Any, theirs: TheirRun
) -> None:
    run = their_fit(datamodule())
    assert len(run.losses) == NUM_STEPS
    assert_trees_bitwise_equal(run.losses, theirs.losses)
    assert_trees_bitwise_equal(run.state, theirs.state)


def test_control_reordered_samplers_in_their_trainer_are_noticed(theirs: TheirRun) -> None:
    run = their_fit(ReorderedSource())
    assert first_difference(run.losses, theirs.losses) is not None
    assert first_difference(run.state.model_state, theirs.state.model_state) is not None


def test_their_data_module_in_our_trainer_gives_the_bits_of_our_source(ours: Any) -> None:
    fed = our_fit(TheirData())
    assert_trees_bitwise_equal(fed.state, ours.state)
    assert_trees_bitwise_equal(fed.history, ours.history)
    assert len(fed.history) == NUM_STEPS


def test_their_data_module_in_our_trainer_resumes_to_the_same_bits(ours: Any, tmp_path: Any) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        our_fit(TheirData(), max_steps=7, checkpoints=checkpoints)
        resumed = our_fit(TheirData(), checkpoints=checkpoints, resume=True)
    assert resumed.iterations == NUM_STEPS - 7
    assert_trees_bitwise_equal(resumed.state, ours.state)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda: our_fit(TheirData(), seed=SEED + 1), id="another seed"),
        pytest.param(lambda: our_fit(ReorderedSource()), id="another order"),
    ],
)
def test_control_other_batches_in_our_trainer_are_noticed(changed: Callable[[], Any], ours: Any) -> None:
    assert first_difference(changed().state.model_state, ours.state.model_state) is not None


def test_both_trainers_follow_the_same_losses_up_to_rounding(theirs: TheirRun, ours: Any) -> None:
    names = ("total_loss", *LOSSES)
    mine = np.array([[entry[name] for name in names] for entry in ours.history])
    other = np.array([[entry[name] for name in names] for entry in theirs.losses])
    np.testing.assert_allclose(mine, other, rtol=1e-4)
    assert not np.allclose(mine[1:], other[:-1], rtol=1e-4)  # control: a step apart


# Comparing


def runtime_keys(key: jax.Array, count: int) -> Iterator[jax.Array]:
    for _ in range(count):
        key, _ = jax.random.split(key)
        yield key


def shifted(source: Any) -> Callable[[int], Any]:
    return lambda step: source(step + 1)


def batch_difference(ours: Any, theirs: Any) -> str | None:
    """The first difference; the names must stand in one order, the fields (which JAX sorts) need not."""
    if list(ours) != list(theirs):
        return f"names: {list(ours)} in ours, {list(theirs)} in theirs"
    return first_difference(ours, theirs, dict_order=False)


def assert_batches_equal(ours: Any, theirs: Any) -> None:
    assert batch_difference(ours, theirs) is None


def first_differing_step(ours: Any, theirs: Any, steps: Any) -> str | None:
    """A sentence on the first step whose batches differ, or `None`."""
    for step in steps:
        difference = batch_difference(ours(step), theirs(step))
        if difference is not None:
            return f"step {step}: {difference}"
    return None
