"""What tests of several devices run in a process of its own, with eight CPU devices or with two processes."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from phijax_rng import (
    Checkpoints,
    EarlyStopping,
    Evaluate,
    GradNormBalancer,
    HostPool,
    LossModule,
    NamedBatchSource,
    NTKBalancer,
    PoolDataModule,
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    SpaceTimeSampler,
    Trainer,
    TrainLoop,
    TrainState,
    UniformDomainSampler,
    initialize_train_state,
    keys,
    masked_mean,
    masked_sum,
)
from phijax_rng._base.digests import digest
from phijax_rng.devices import processes
from phijax_rng.devices.placement import DATA_AXIS
from phijax_rng.training.prefetch import open_source
from tests import _problems

STEPS = 50


class Normal:
    """Points that have gone through a function that rounds."""

    def sample(self, key: Any, size: int) -> dict[str, Any]:
        return {"inputs": jax.random.normal(key, (size, 2), jnp.float32)}


class NoOptimizer:
    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, gradients: Any, optimizer_state: Any, params: Any = None) -> tuple[Any, Any]:
        return gradients, optimizer_state


@functools.cache
def source(size: int = 48) -> NamedBatchSource:
    """One batch for every kind of sampler."""
    rows = np.arange(3 * 100, dtype=np.float32).reshape(100, 3)
    pool = HostPool(rows, rows[:, :1] * 2)
    samplers = {
        "rows": RandomRowSampler(pool),
        "distinct": RandomRowSampler(pool, replace=False),
        "sorted": RandomRowSampler(pool, sort_axis=0),
        "shuffled": RandomRowSampler(pool, replace=False, method="sort"),
        "box": UniformDomainSampler([(0.1, 0.7), (-3.0, 1.0)], {"speed": np.float32(2)}),
        "times": SpaceTimeSampler({"inputs": rows}, (0.3, 0.9)),
        "normal": Normal(),
    }
    return NamedBatchSource(samplers, dict.fromkeys(samplers, size), keys.split_root(5).sampling)


@dataclasses.dataclass(frozen=True)
class Keep:
    """A train step that keeps the batch it was given as its model state."""

    def __call__(self, state: TrainState, batches: Any, key: Any) -> tuple[TrainState, dict[str, Any]]:
        return state.replace(model_state=batches, step=state.step + 1), {"fit": jnp.float32(0)}


@dataclasses.dataclass(frozen=True)
class KeepMasked:
    """The same, with the mask beside it."""

    def __call__(
        self, state: TrainState, batches: Any, key: Any, mask: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        kept = {"batches": batches, "mask": mask}
        return state.replace(model_state=kept, step=state.step + 1), {"fit": jnp.float32(0)}


@functools.cache
def uneven_source(hosted: bool = False) -> NamedBatchSource:
    """Batches of several sizes and kinds; or rows that stay on the host, beside points."""
    rows = np.arange(3 * 100, dtype=np.float32).reshape(100, 3)
    box = UniformDomainSampler([(0.1, 0.7), (-3.0, 1.0)], {"speed": np.float32(2)})
    key = keys.split_root(5).sampling
    if hosted:
        pools = {"rows": HostPool(rows), "sorted": HostPool(rows)}
        sizes = {"rows": 13, "sorted": 3}
        own = NamedBatchSource.from_pools(pools, sizes, key, sort_axes={"sorted": 0}, resident=False)
        return NamedBatchSource({**own.samplers, "box": box}, {**sizes, "box": 5}, key)
    samplers = {
        "one": RandomRowSampler(HostPool(rows, rows[:, :1] * 2)),
        "distinct": RandomRowSampler(HostPool(rows), replace=False),
        "sorted": RandomRowSampler(HostPool(rows), sort_axis=0),
        "all": RandomRowSampler(HostPool(rows[:7])),
        "box": box,
        "even": box,
        "normal": Normal(),
    }
    sizes = {"one": 1, "distinct": 9, "sorted": 10, "all": "all", "box": 3, "even": 16, "normal": 50}
    return NamedBatchSource(samplers, sizes, key)


def masked_batches(placement: Any, own: NamedBatchSource, steps: int) -> tuple[list[Any], TrainLoop]:
    """Batch and mask of every step as the compiled program was given them."""
    prepared = own.prepare(placement.host_device)
    shapes = jax.tree.map(np.asarray, own(0))
    filled = placement.shares.filled
    kept = {
        "batches": {
            name: jax.tree.map(lambda leaf: np.zeros((filled(len(leaf)), *leaf.shape[1:]), leaf.dtype), rows)
            for name, rows in shapes.items()
        },
        "mask": {name: np.zeros(filled(len(rows["inputs"])), bool) for name, rows in shapes.items()},
    }
    state = initialize_train_state(kept, NoOptimizer(), {}, keys.split_root(5))
    feed = open_source(prepared, 0, steps, placement)
    try:
        loop = TrainLoop(KeepMasked(), state, feed.source, placement=placement)
        state, seen = loop.place(state), []
        while len(seen) < steps:
            stack, _ = feed.at(len(seen))
            state = loop.run(state, len(seen) + 1, stack).state
            seen.append(state.model_state)
    finally:
        feed.close()
    return seen, loop


def keeping_state(source: NamedBatchSource) -> TrainState:
    shapes = jax.eval_shape(source, 0)
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return initialize_train_state(empty, NoOptimizer(), {}, keys.split_root(5))


def rows_split(state: TrainState) -> Any:
    """Shardings that leave the batch that was kept where it was drawn."""
    return jax.tree.map(lambda leaf: None, state).replace(
        model_state=jax.tree.map(lambda leaf: PartitionSpec(DATA_AXIS), state.model_state)
    )


def batches_in_the_loop(
    placement: Any, own: NamedBatchSource, steps: int = STEPS
) -> tuple[list[Any], TrainLoop]:
    """The batch of every step as the compiled program drew it."""
    state = keeping_state(own)
    loop = TrainLoop(Keep(), state, own, placement=placement)
    state = loop.place(state)
    seen = []
    for step in range(steps):
        state = loop.run(state, step + 1).state
        seen.append(state.model_state)
    return seen, loop


def heat() -> Any:
    """The heat problem with batches that eight devices can share."""
    problem = _problems.heat()
    sizes = dict.fromkeys(problem.datamodule.batch_sizes, 8)
    return dataclasses.replace(problem, datamodule=PoolDataModule(problem.datamodule.pools, sizes))


def _uneven_losses(reduced: Any, params: Any, batches: Any, mask: Any) -> dict[str, Any]:
    field = functools.partial(_problems._mlp, params)
    initial, boundary = batches["initial"], batches["boundary"]
    return {
        "initial": reduced((field(initial["inputs"]) - initial["targets"]) ** 2, mask["initial"]),
        "boundary": reduced(field(boundary["inputs"])[:, 0] ** 2, mask["boundary"]),
    }


def _masked_losses(params: Any, batches: Any, mask: Any) -> dict[str, Any]:
    return _uneven_losses(masked_mean, params, batches, mask)


def _summed_losses(params: Any, batches: Any, mask: Any) -> dict[str, Any]:
    return _uneven_losses(masked_sum, params, batches, mask)


def _careless_losses(params: Any, batches: Any, mask: Any) -> dict[str, Any]:
    every = {name: jnp.ones_like(rows) for name, rows in mask.items()}
    return _masked_losses(params, batches, every)


_LOSSES = {"masked": _masked_losses, "summed": _summed_losses, "careless": _careless_losses}
UNEVEN_SIZES = {"initial": 9, "boundary": 3}


@functools.cache
def uneven(*, losses: str = "masked", **options: Any) -> Any:
    """A problem whose batches no even number of devices can share; its losses are one of `_LOSSES`."""
    problem = _problems.heat()
    module = LossModule(problem.module.init, _LOSSES[losses], batch_keys=tuple(UNEVEN_SIZES))
    pools = {name: problem.datamodule.pools[name] for name in UNEVEN_SIZES}
    return dataclasses.replace(
        problem, module=module, datamodule=PoolDataModule(pools, UNEVEN_SIZES, **options)
    )


def balancer() -> GradNormBalancer:
    """Weights from the gradients on the batches of the steps themselves."""
    return GradNormBalancer(("initial", "boundary"), update_every_n_steps=3)


def _residuals(params: Any, batches: Any) -> dict[str, jax.Array]:
    """One row for each point of two batches, whatever their numbers are."""
    field = functools.partial(_problems._mlp, params)
    return {
        "inside": field(batches["inside"]["inputs"]) - jnp.sum(batches["inside"]["inputs"], 1, keepdims=True),
        "edge": field(batches["edge"]["inputs"]),
    }


def _residual_losses(params: Any, batches: Any) -> dict[str, jax.Array]:
    return {name: jnp.mean(rows**2) for name, rows in _residuals(params, batches).items()}


class _Following:
    """Points that follow the residuals, by a density and by a set that grows."""

    def train_batch_source(self, batch_keys: Any, key: Any) -> NamedBatchSource:
        domain = UniformDomainSampler([(0.1, 0.7), (-1.0, 1.0)])
        samplers = {
            "inside": ResidualDistributionSampler(domain, 4, num_candidates=64),
            "edge": ResidualRefinementSampler(
                domain, 4, capacity=24, num_initial=16, num_added=4, num_candidates=32, method="greedy"
            ),
        }
        return NamedBatchSource(samplers, {"inside": 16, "edge": 8}, key)


class _Standing:
    """Points of the same domain."""

    def train_batch_source(self, batch_keys: Any, key: Any) -> NamedBatchSource:
        domain = UniformDomainSampler([(0.1, 0.7), (-1.0, 1.0)])
        return NamedBatchSource(dict.fromkeys(("inside", "edge"), domain), {"inside": 16, "edge": 8}, key)


@functools.cache
def balanced(kind: str) -> tuple[Any, Any]:
    """A problem and its balancer: gradient norms on points that follow residuals, or the tangent kernel."""
    module = LossModule(
        _problems._init_mlp, _residual_losses, batch_keys=("inside", "edge"), residuals=_residuals
    )
    names = ("inside", "edge")
    if kind == "gradnorm":
        data, balancer = _Following(), GradNormBalancer(names, update_every_n_steps=3)
    else:
        data = _Standing()
        balancer = NTKBalancer(names, update_every_n_steps=3, diagnostic_batch_sizes=6)
    return dataclasses.replace(_problems.heat(), module=module, datamodule=data), balancer


def distance(model_state: Any, key: Any) -> dict[str, Any]:
    """A number of the model at points of the evaluation's own stream."""
    points = jax.random.uniform(key, (32, 2), jnp.float32)
    return {"distance": jnp.mean(_problems._mlp(model_state, points) ** 2)}


def watched_fit(kind: str, stop: int, *, folder: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """A fit that is evaluated, stopped early by what that gave, and keeps the best; its checkpoints too."""
    problem, balancer = balanced(kind)
    watching = (
        Evaluate(distance, every_n_steps=2),
        EarlyStopping("evaluation/distance", patience=1, min_delta=0.01, mode="max", every_n_steps=4),
        *callbacks,
    )
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(
            folder, every_n_steps=2, keep_best=("evaluation/distance", 1, "max"), max_to_keep=1
        )
    trainer = Trainer(stop, checkpoints=checkpoints, callbacks=watching, log_every_n_steps=3, **options)
    result = trainer.fit(
        problem.module, seed=0, balancer=balancer, resume="auto" if folder else False, **problem.arguments
    )
    return result, checkpoints


def summary(result: Any) -> dict[str, Any]:
    """What a watched fit came to, as plain data."""
    return {
        "steps": [row["step"] for row in result.history],
        "distances": [row["evaluation/distance"] for row in result.history if row["step"] % 2 == 0],
        "weights": np.asarray(result.state.balancer_state["weights"]).tolist(),
        "model": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(result.state.model_state)],
        "iterations": int(result.state.step),
        "stopped": result.stopped_early,
    }


def fit(
    stop: int,
    *,
    problem: Any = None,
    balancer: Any = None,
    seed: Any = 0,
    directory: Any = None,
    resume: Any = "auto",
    every_n_steps: int | None = None,
    **options: Any,
) -> Any:
    """A fit of a problem, `heat()` for `None`, up to a step, and what it warned of."""
    problem = problem or heat()
    checkpoints = None if directory is None else Checkpoints(directory, every_n_steps=every_n_steps)
    trainer = Trainer(stop, checkpoints=checkpoints, **{"progress": False, **options})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = trainer.fit(
            problem.module,
            seed=seed,
            balancer=balancer,
            resume=False if directory is None else resume,
            **problem.arguments,
        )
    return result, [str(warning.message) for warning in told]


def farthest(state: TrainState, other: TrainState) -> float:
    """The largest difference of two models, beside the largest entry of each leaf."""
    pairs = zip(jax.tree.leaves(state.model_state), jax.tree.leaves(other.model_state), strict=True)
    arrays = [(np.asarray(one), np.asarray(two)) for one, two in pairs]
    return max(float(np.abs(one - two).max() / np.abs(two).max()) for one, two in arrays)


def digest_of(state: TrainState) -> str:
    """The digest of all bits of a state, gathered from wherever they lie."""
    return digest(processes.to_local(state))


class Watched:
    """Rows on a disk, as a pool sees them, that note which of them are read."""

    def __init__(self, rows: np.ndarray[Any, Any]):
        self._rows = rows
        self.shape, self.dtype, self.chunks = rows.shape, rows.dtype, (1,)
        self.read: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        self.read |= {int(number) for number in np.arange(len(self))[index].ravel()}
        return self._rows[index]


def hosted_source(rows: Any) -> NamedBatchSource:
    """Rows that stay on the host, beside points that are drawn on a device."""
    key = keys.split_root(5).sampling
    pools = NamedBatchSource.from_pools({"rows": {"inputs": rows}}, {"rows": 16}, key, resident=False)
    samplers = {**pools.samplers, "box": UniformDomainSampler([(0.1, 0.7)])}
    return NamedBatchSource(samplers, {"rows": 16, "box": 8}, key)


def fed_batches(placement: Any, source: NamedBatchSource, steps: int) -> list[Any]:
    """The batch of every step as the compiled program was fed it."""
    shapes = {
        "rows": {"inputs": np.zeros((16, 2), np.float32)},
        "box": {"inputs": np.zeros((8, 1), np.float32)},
    }
    state = initialize_train_state(shapes, NoOptimizer(), {}, keys.split_root(5))
    feed = open_source(source.prepare(placement.host_device), 0, steps, placement)
    try:
        loop = TrainLoop(Keep(), state, feed.source, placement=placement)
        state, seen = loop.place(state), []
        while len(seen) < steps:
            stack, _ = feed.at(len(seen))
            state = loop.run(state, len(seen) + 1, stack).state
            seen.append(state.model_state)
    finally:
        feed.close()
    return seen
