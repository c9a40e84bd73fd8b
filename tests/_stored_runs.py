"""Small runs whose checkpoints were saved by earlier versions and are kept in `tests/stored`.

    python -m tests._stored_runs DIRECTORY

trains every run with the version that is installed, saves at each `SAVED` step, and packs it as
`DIRECTORY/<run>-jax-<version>.zip`. Together the runs name every kind of sampler, geometry, source and
balancer that a contract can hold, so that a renamed module or class shows as a resume that warns.

A stored file is never made anew: it stands for runs that users have on disk. Add a new run instead.
"""

import dataclasses
import functools
import pathlib
import sys
import tempfile
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phijax_rng import (
    Checkpoints,
    DatasetSampler,
    EarlyStopping,
    Evaluate,
    GradNormBalancer,
    LatinHypercubeSampler,
    LossModule,
    NamedBatchSource,
    NTKBalancer,
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    ShuffledRowSampler,
    SobolSampler,
    SpaceTimeSampler,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
    WeightedRowSampler,
)
from phijax_rng.sampling import HostedRowSampler
from phijax_rng.sampling.geometry import (
    Ball,
    Box,
    BoxEdges,
    BoxFaces,
    InitialSlab,
    SpaceTimeCylinder,
    Sphere,
    Union,
)
from phijax_rng.training.balancing import ReLoBRaLoBalancer, UncertaintyBalancer

STORED = pathlib.Path(__file__).parent / "stored"
SAVED = (5, 12)
"""The steps of every stored run; its training ends at the last."""


class Memory:
    """A callback that remembers how often it was called and the last loss it saw."""

    every_n_steps = 2
    name = "memory"

    def __call__(self, event: Any) -> None:
        event.memory["calls"] = event.memory.get("calls", 0) + 1
        event.memory["total"] = event.memory.get("total", 0.0) + event.metrics["total_loss"]


@dataclasses.dataclass(frozen=True)
class Samplers:
    """A data module of samplers; PoolDataModule holds pools alone."""

    make: Any

    def train_batch_source(self, batch_keys: tuple[str, ...], key: jax.Array) -> NamedBatchSource:
        samplers = self.make()
        return NamedBatchSource(samplers, {name: "all" if name == "every" else 4 for name in samplers}, key)


@dataclasses.dataclass(frozen=True)
class Run:
    """One stored run."""

    samplers: Any
    balancer: Any
    callbacks: Any = tuple

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.samplers())

    def fit(self, directory: pathlib.Path, **options: Any) -> Any:
        """Trains to the last saved step, in a directory that may hold an earlier one."""
        module = LossModule(init, losses, batch_keys=self.names, loss_names=self.names, residuals=residuals)
        trainer = Trainer(
            SAVED[-1],
            checkpoints=Checkpoints(
                directory, every_n_steps=1, every_minutes=None, max_to_keep=None, asynchronous=False
            ),
            callbacks=self.callbacks(),
            log_every_n_steps=1,
            progress=False,
        )
        balancer = None if self.balancer is None else self.balancer(self.names)
        return trainer.fit(
            module,
            datamodule=Samplers(self.samplers),
            optimizer=optax.adam(1e-2),
            seed=42,
            balancer=balancer,
            **options,
        )


def init(key: jax.Array) -> Any:
    inner, outer = jax.random.split(key)
    return {"inner": jax.random.normal(inner, (8, 2)), "outer": jax.random.normal(outer, (8,)) / 4}


def network(model: Any, point: jax.Array) -> jax.Array:
    return jnp.tanh(model["inner"] @ point) @ model["outer"]


def residuals(model: Any, batches: Any) -> dict[str, jax.Array]:
    return {
        name: jax.vmap(lambda point: network(model, point) - jnp.sin(point[0]))(rows["inputs"])
        for name, rows in batches.items()
    }


def losses(model: Any, batches: Any) -> dict[str, jax.Array]:
    return {name: jnp.mean(rows**2) for name, rows in residuals(model, batches).items()}


def error(model: Any, key: jax.Array) -> dict[str, jax.Array]:
    points = jax.random.uniform(key, (8, 2))
    return {"error": jnp.mean(jax.vmap(lambda point: network(model, point))(points) ** 2)}


def rows(count: int = 12) -> dict[str, Any]:
    return {"inputs": np.linspace(-1, 1, 2 * count, dtype=np.float32).reshape(count, 2)}


def _static() -> dict[str, Any]:
    return {
        "every": RandomRowSampler(rows(3)),
        "distinct": RandomRowSampler(rows(), replace=False),
        "sorted": RandomRowSampler(rows(), sort_axis=0),
        "shuffled": ShuffledRowSampler(rows()),
        "weighted": WeightedRowSampler(rows(), np.arange(12, dtype=np.float32)),
        "uniform": UniformDomainSampler([(0.0, 1.0), (-1.0, 1.0)]),
        "times": SpaceTimeSampler(rows(), (0.0, 1.0)),
    }


def _hosted() -> dict[str, Any]:
    return {
        "disk": HostedRowSampler(ShuffledRowSampler(rows())),
        "dataset": DatasetSampler([{"inputs": row} for row in rows()["inputs"]], order="shuffled"),
        "inside": RandomRowSampler(rows()),
    }


def _square() -> Box:
    return Box([(0.0, 1.0), (0.0, 1.0)])


def _geometric() -> dict[str, Any]:
    return {
        "box": _square(),
        "faces": BoxFaces([(0.0, 1.0), (0.0, 1.0)]),
        "edges": BoxEdges([(0.0, 1.0), (0.0, 1.0)]),
        "ball": Ball((0.0, 0.0), 1.0),
        "sphere": Sphere((0.0, 0.0), 1.0),
        "cylinder": SpaceTimeCylinder(Box([(0.0, 1.0)]), (0.0, 1.0)),
        "slab": InitialSlab(Box([(0.0, 1.0)]), 0.0),
        "union": Union([_square(), Box([(2.0, 3.0), (0.0, 1.0)])]),
        "sobol": SobolSampler(_square()),
        "latin": LatinHypercubeSampler(_square()),
    }


def _adaptive() -> dict[str, Any]:
    return {
        "box": ResidualDistributionSampler(
            _square(), num_candidates=16, refresh_every_n_steps=3, residual_names=("box",)
        ),
        "rows": ResidualRefinementSampler(
            _square(), capacity=12, num_initial=4, num_added=4, num_candidates=16, refresh_every_n_steps=4
        ),
        "walls": BoxFaces([(0.0, 1.0), (0.0, 1.0)]),
    }


def _pair() -> dict[str, Any]:
    return {"walls": RandomRowSampler(rows()), "pde": UniformDomainSampler([(0.0, 1.0), (0.0, 1.0)])}


def _callbacks() -> tuple[Any, ...]:
    return (
        Evaluate(error, every_n_steps=2),
        EarlyStopping("evaluation/error", patience=50, every_n_steps=2),
        Memory(),
    )


RUNS = {
    "static": Run(_static, lambda names: StaticLossBalancer(names, weights={names[0]: 2.0})),
    "plain": Run(_pair, None),
    "gradnorm": Run(_pair, functools.partial(GradNormBalancer, update_every_n_steps=3), _callbacks),
    "ntk": Run(_pair, functools.partial(NTKBalancer, update_every_n_steps=4, diagnostic_batch_sizes=2)),
    "relobralo": Run(_hosted, functools.partial(ReLoBRaLoBalancer, alpha=0.9, lookback=0.5)),
    "uncertainty": Run(_geometric, functools.partial(UncertaintyBalancer, learning_rate=0.1)),
    "adaptive": Run(_adaptive, None, _callbacks),
}


def pack(directory: pathlib.Path, target: pathlib.Path) -> None:
    """The saved steps of a run as one file, without times, so that the same run is the same file."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            name = path.relative_to(directory)
            if name.parts[0].isdigit() and int(name.parts[0]) in SAVED:
                archive.writestr(zipfile.ZipInfo(name.as_posix()), path.read_bytes(), zipfile.ZIP_DEFLATED)


def unpack(run: str, version: str, directory: pathlib.Path) -> pathlib.Path:
    """The directory of a stored run, made by this version of JAX."""
    with zipfile.ZipFile(STORED / f"{run}-jax-{version}.zip") as archive:
        archive.extractall(directory)
    return directory


if __name__ == "__main__":
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as made:
            run.fit(pathlib.Path(made))
            pack(pathlib.Path(made), pathlib.Path(sys.argv[1]) / f"{name}-jax-{jax.__version__}.zip")
