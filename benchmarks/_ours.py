"""The heat problem in the words of phijax_rng."""

from collections.abc import Mapping
from typing import Any

import jax

import phijax_rng as pr
from benchmarks import _heat


def fit(num_steps: int, sizes: Mapping[str, int]) -> Any:
    """A whole call of `Trainer.fit`, its result waited for."""
    module = pr.LossModule(_heat.init, _heat.losses, batch_keys=_heat.LOSSES, loss_names=_heat.LOSSES)
    datamodule = pr.PoolDataModule(_heat.make_arrays(), sizes)
    result = pr.Trainer(num_steps, progress=False).fit(
        module, datamodule=datamodule, optimizer=_heat.optimizer(), seed=_heat.SEED
    )
    return jax.block_until_ready(result)


def source(sizes: Mapping[str, int]) -> pr.NamedBatchSource:
    key = pr.keys.split_root(_heat.SEED).sampling
    return pr.NamedBatchSource.from_pools(_heat.make_arrays(), sizes, key)
