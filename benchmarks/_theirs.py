"""The heat problem with PhiJAX, through its public interface. Not importable without PhiJAX."""

import contextlib
import importlib.util
import io
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import _heat

present = importlib.util.find_spec("phijax") is not None
if present:
    import phijax

ABSENT = "PhiJAX is not installed, so there is nothing to measure against"


class Objective:
    """The losses."""

    loss_names = batch_keys = _heat.LOSSES

    def losses(self, model_apply: Any, model_state: Any, batches: Any) -> dict[str, jax.Array]:
        return _heat.losses(model_state, batches)


class Data:
    """The data module for PhiJAX's trainer; records when each step requests its batch."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        self.stamps: list[tuple[float, float]] = []

    def prepare_stage(self, stage: str) -> None: ...

    def teardown_stage(self, stage: str) -> None: ...

    def input_statistics(self) -> None: ...

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        drawn = source(self.sizes, key)

        def stamped(step: int) -> Any:
            self.stamps.append((time.perf_counter(), time.process_time()))
            return drawn(step)

        return stamped


def source(sizes: Mapping[str, int], key: jax.Array) -> Any:
    """PhiJAX's source, with its pools on the device."""
    pools = {name: phijax.data.HostPool(**fields) for name, fields in _heat.make_arrays().items()}
    drawn = phijax.data.NamedBatchSource.from_pools(pools, dict(sizes), key)
    return drawn.prepare(jax.local_devices()[0])


def factory(*, key: jax.Array, **_: Any) -> Any:
    return phijax.InitializedModel(apply=_heat.network, state=_heat.init(key))


def gradnorm(every: int) -> Any:
    return phijax.balancers.GradNormBalancer(_heat.LOSSES, update_every_n_steps=every)


def fit(num_steps: int, sizes: Mapping[str, int], balancer: Any = None) -> tuple[Any, np.ndarray[Any, Any]]:
    """A complete call of its `Trainer.fit`, and the times at which its steps began, shape `(steps, 2)`."""
    with contextlib.redirect_stdout(io.StringIO()):  # its constructor describes the machine
        trainer = phijax.Trainer(
            num_steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=10**9,
        )
    data = Data(sizes)
    module = phijax.PhiModule(factory, Objective())
    result = trainer.fit(
        module, datamodule=data, optimizer=_heat.optimizer(), seed=_heat.SEED, balancer=balancer
    )
    jax.block_until_ready(result.state)
    return result, np.array(data.stamps)
