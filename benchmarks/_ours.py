"""The heat problem with phijax_rng."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

import phijax_rng as pr
from benchmarks import _heat
from benchmarks._ratio import Seconds


def _module() -> pr.LossModule:
    return pr.LossModule(_heat.init, _heat.losses, batch_keys=_heat.LOSSES, loss_names=_heat.LOSSES)


def fit(num_steps: int, sizes: Mapping[str, int], balancer: Any = None) -> Any:
    """A complete call of `Trainer.fit`; waits for its result."""
    datamodule = pr.PoolDataModule(_heat.make_arrays(), sizes)
    result = pr.Trainer(num_steps, progress=False).fit(
        _module(), datamodule=datamodule, optimizer=_heat.optimizer(), seed=_heat.SEED, balancer=balancer
    )
    return jax.block_until_ready(result)


def audit(steps: int = 3) -> Any:
    """The audit of the first steps; raises if it has findings."""
    datamodule = pr.PoolDataModule(_heat.make_arrays(), _heat.SIZES)
    trainer = pr.Trainer(steps, progress=False)
    report = trainer.audit(
        _module(), datamodule=datamodule, optimizer=_heat.optimizer(), seed=_heat.SEED, steps=steps
    )
    assert report.clean, str(report)
    return report


def fit_without_balancer(num_steps: int, sizes: Mapping[str, int]) -> Any:
    """The same training with an update without a balancer: it sums the losses itself."""
    streams = pr.keys.split_root(_heat.SEED)
    state = pr.initialize_train_state(_heat.init(streams.model), _heat.optimizer(), {}, streams)
    datamodule = pr.PoolDataModule(_heat.make_arrays(), sizes)
    result = pr.Trainer(num_steps, progress=False).fit_state(
        _module(), state, train_step=_summed, datamodule=datamodule
    )
    return jax.block_until_ready(result)


def _summed(state: pr.TrainState, batches: Any, key: Any) -> Any:
    def total(params: Any) -> Any:
        losses = _heat.losses(params, batches)
        return sum(losses.values()), losses

    (value, losses), grads = jax.value_and_grad(total, has_aux=True)(state.model_state)
    updates, optimizer_state = _heat.optimizer().update(grads, state.optimizer_state, state.model_state)
    following = state.replace(
        model_state=optax.apply_updates(state.model_state, updates),
        optimizer_state=optimizer_state,
        step=state.step + 1,
    )
    return following, {"total_loss": value, **losses}


def source(sizes: Mapping[str, int]) -> pr.NamedBatchSource:
    key = pr.keys.split_root(_heat.SEED).sampling
    return pr.NamedBatchSource.from_pools(_heat.make_arrays(), sizes, key)


def seconds_to_first_step(arrays: Any, sizes: Mapping[str, int], directory: str) -> Seconds:
    """The time from the call of a fit with checkpoints to the end of its first update."""
    times = []

    def stop(event: Any) -> bool:
        times.append((time.perf_counter(), time.process_time()))
        return True

    stop.every_n_steps = 1  # type: ignore[attr-defined]
    trainer = pr.Trainer(1000, checkpoints=pr.Checkpoints(directory), callbacks=[stop], progress=False)
    began = time.perf_counter(), time.process_time()
    trainer.fit(
        _module(),
        datamodule=pr.PoolDataModule(arrays, sizes),
        optimizer=_heat.optimizer(),
        seed=_heat.SEED,
    )
    return np.subtract(times[0], began)


def first_step_by_parts(arrays: Any, sizes: Mapping[str, int]) -> None:
    """The same update, and the batch of one step, without contract, digests and checks of the source."""
    streams = pr.keys.split_root(_heat.SEED)
    module = _module()
    step = pr.LossTrainStep(module, _heat.optimizer())
    state = pr.initialize_train_state(module.init(streams.model), _heat.optimizer(), {}, streams)
    source = pr.NamedBatchSource.from_pools(arrays, sizes, streams.sampling)
    source = source.prepare(jax.local_devices()[0])
    loop = pr.TrainLoop(step, state, source)
    loop.run(loop.place(state), 1)
    jax.block_until_ready(source(0))
