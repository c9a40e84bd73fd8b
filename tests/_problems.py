"""Tiny problems that tests train: a few dozen parameters, each program compiled once per process.

    heat()        an MLP on the heat equation, three pools, three losses, Adam
    dropout()     a regression whose losses read the runtime key
    statistics()  a regression that carries batch statistics and reports a diagnostic

Functions of a problem live at the top of this module, so every test traces the same program and the
loop's own store gives it the same executable. Keys of dicts are in sorted order, as JAX gives them back.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phijax_rng import (
    HostPool,
    LossModule,
    LossTrainStep,
    NamedBatchSource,
    PoolDataModule,
    StepOutput,
    TrainLoop,
    TrainState,
    initialize_train_state,
    keys,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What `Trainer.fit` takes, and the same by hand for tests of the loop."""

    module: LossModule
    datamodule: PoolDataModule
    optimizer: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Trainer.fit`; `seed` is the test's own."""
        return {"datamodule": self.datamodule, "optimizer": self.optimizer}

    @property
    def train_step(self) -> LossTrainStep:
        return LossTrainStep(self.module, self.optimizer)

    def state(self, seed: int = 0) -> TrainState:
        """The state `Trainer.fit` starts from."""
        streams = keys.split_root(seed)
        return initialize_train_state(self.module.init(streams.model), self.optimizer, {}, streams)

    def source(self, seed: int = 0) -> NamedBatchSource:
        streams = keys.split_root(seed)
        return self.datamodule.train_batch_source(self.module.batch_keys, streams.sampling)

    def loop(self, on_nonfinite: str = "raise") -> TrainLoop:
        """A loop of seed 0, from an executable that tests share."""
        return TrainLoop(self.train_step, self.state(), self.source(), on_nonfinite=on_nonfinite)

    @functools.cached_property
    def _own_loop(self) -> TrainLoop:
        return self.loop()

    def run(self, stop: int, *, chunk_size: int = 4096) -> TrainState:
        """The state of seed 0 after `stop` updates, by the loop alone."""
        loop = self._own_loop
        state = loop.place(self.state())
        for step in range(0, stop, chunk_size):
            state = loop.run(state, min(step + chunk_size, stop)).state
        return state


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that receives the name of every program XLA compiles inside the block."""
    names: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@functools.cache
def heat() -> Problem:
    line = np.linspace(0, 1, 16, dtype=np.float32)
    space, time = (axis.reshape(-1, 1) for axis in np.meshgrid(line, line))
    pools = {
        "initial": HostPool(np.stack([line, 0 * line], 1), np.sin(np.pi * line)[:, None]),
        "boundary": HostPool(np.stack([np.round(line), line], 1)),
        "pde": HostPool(np.concatenate([space, time], 1)),
    }
    module = LossModule(_init_mlp, _heat_losses, batch_keys=("initial", "boundary", "pde"), predict=_mlp)
    return Problem(module, PoolDataModule(pools, {"initial": 4, "boundary": 4, "pde": 8}), optax.adam(1e-2))


@functools.cache
def dropout() -> Problem:
    module = LossModule(_init_mlp, _dropout_losses, batch_keys=("data",))
    return Problem(module, _regression_data(), optax.adam(1e-2))


@functools.cache
def statistics() -> Problem:
    module = LossModule(_init_with_statistics, _statistics_losses, batch_keys=("data",))
    return Problem(module, _regression_data(), optax.adam(1e-2))


def _regression_data() -> PoolDataModule:
    inputs = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)
    return PoolDataModule({"data": HostPool(inputs, inputs[:, :1] * inputs[:, 1:])}, {"data": 4})


def _init_mlp(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {
        "hidden": {"bias": jnp.zeros(8), "kernel": jax.random.normal(first, (2, 8))},
        "output": {"bias": jnp.zeros(1), "kernel": jax.random.normal(second, (8, 1)) / 4},
    }


def _hidden(params: Any, inputs: jax.Array) -> jax.Array:
    return jnp.tanh(inputs @ params["hidden"]["kernel"] + params["hidden"]["bias"])


def _output(params: Any, hidden: jax.Array) -> jax.Array:
    return hidden @ params["output"]["kernel"] + params["output"]["bias"]


def _mlp(params: Any, inputs: jax.Array) -> jax.Array:
    return _output(params, _hidden(params, inputs))


def _heat_losses(params: Any, batches: Any) -> dict[str, jax.Array]:
    field = functools.partial(_mlp, params)
    points = batches["pde"]["inputs"]
    along_x, along_t = (jnp.broadcast_to(axis, points.shape) for axis in jnp.eye(2))

    def slope(at: jax.Array) -> jax.Array:
        return jax.jvp(field, (at,), (along_x,))[1]

    curvature = jax.jvp(slope, (points,), (along_x,))[1]
    change = jax.jvp(field, (points,), (along_t,))[1]
    return {
        "pde": jnp.mean((change - 0.1 * curvature) ** 2),
        "initial": jnp.mean((field(batches["initial"]["inputs"]) - batches["initial"]["targets"]) ** 2),
        "boundary": jnp.mean(field(batches["boundary"]["inputs"]) ** 2),
    }


def _dropout_losses(params: Any, batches: Any, key: jax.Array) -> dict[str, jax.Array]:
    hidden = _hidden(params, batches["data"]["inputs"])
    kept = jax.random.bernoulli(key, 0.5, hidden.shape)
    predicted = _output(params, jnp.where(kept, 2 * hidden, 0))
    return {"fit": jnp.mean((predicted - batches["data"]["targets"]) ** 2)}


def _init_with_statistics(key: jax.Array) -> Any:
    return {"params": _init_mlp(key), "seen": {"batches": jnp.int32(0), "mean": jnp.zeros(8)}}


def _statistics_losses(model_state: Any, batches: Any) -> StepOutput:
    params, seen = model_state["params"], model_state["seen"]
    hidden = _hidden(params, batches["data"]["inputs"])
    mean = jnp.mean(hidden, axis=0)
    error = _output(params, hidden - mean) - batches["data"]["targets"]
    renewed = {"batches": seen["batches"] + 1, "mean": 0.9 * seen["mean"] + 0.1 * mean}
    return StepOutput(
        {"fit": jnp.mean(error**2)},
        model_state={"params": params, "seen": renewed},
        diagnostics={"spread": jnp.std(hidden)},
    )
