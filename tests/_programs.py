"""The digests of whole programs, which a change of the code's shape must not move.

    python -m tests._programs

prints the SHA-256 of the StableHLO text of the heat problem's loop, as one JSON object: plain, with GradNorm,
with an adaptive sampler, and on eight devices. Start it with eight CPU devices in XLA_FLAGS.
"""

import json
import os
import tempfile
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax

from benchmarks import _heat
from phijax_rng import (
    Checkpoints,
    GradNormBalancer,
    LossModule,
    NamedBatchSource,
    PoolDataModule,
    RandomRowSampler,
    ResidualDistributionSampler,
    Trainer,
)
from phijax_rng.sampling.geometry import Box


class Adaptive:
    """The heat problem's data, with points that follow the residuals."""

    def train_batch_source(self, batch_keys: tuple[str, ...], key: jax.Array) -> NamedBatchSource:
        pools = _heat.make_arrays()
        samplers: dict[str, Any] = {name: RandomRowSampler(pools[name]) for name in ("initial", "boundary")}
        samplers["pde"] = ResidualDistributionSampler(
            Box([(0.0, 1.0), (0.0, 1.0)]), num_candidates=256, refresh_every_n_steps=50
        )
        return NamedBatchSource(samplers, _heat.SIZES, key)


def program(tmp: str, *, balancer: Any = None, datamodule: Any = None, devices: Any = 1) -> str:
    """The digest that the contract of a run records."""
    module = LossModule(
        _heat.init,
        _heat.losses,
        batch_keys=_heat.LOSSES,
        loss_names=_heat.LOSSES,
        residuals=_heat.residuals,
        name="heat",
    )
    checkpoints = Checkpoints(tmp, asynchronous=False)
    Trainer(1, checkpoints=checkpoints, devices=devices, progress=False).fit(
        module,
        datamodule=datamodule or PoolDataModule(_heat.make_arrays(), _heat.SIZES),
        optimizer=optax.adam(1e-3),
        seed=_heat.SEED,
        balancer=balancer,
    )
    return str(checkpoints.contract()["training"]["program"])


def programs() -> dict[str, str]:
    """The digest of each program, by name."""
    variants = {
        "static": {},
        "gradnorm": {"balancer": GradNormBalancer(_heat.LOSSES, update_every_n_steps=100)},
        "adaptive": {"datamodule": Adaptive()},
        "eight devices": {"devices": 8},
    }
    found = {}
    for name, options in variants.items():
        with tempfile.TemporaryDirectory() as directory:
            found[name] = program(directory, **options)
    return found


if __name__ == "__main__":
    print(json.dumps({jax.__version__: programs()}))
