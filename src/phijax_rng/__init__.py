"""One seed, named streams, batches by step, and runs that resume to the same bits."""

import importlib.metadata

from phijax_rng import determinism as determinism
from phijax_rng import errors, keys, shuffle
from phijax_rng._base.exports import publish
from phijax_rng.auditing import audit
from phijax_rng.callbacks import Callback, CSVHistory, EarlyStopping, Evaluate, Event
from phijax_rng.checkpoints import Checkpoints
from phijax_rng.devices import masked_mean, masked_sum
from phijax_rng.sampling import (
    DatasetSampler,
    HostPool,
    IterableSource,
    LatinHypercubeSampler,
    NamedBatchSource,
    PoolDataModule,
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    Sampler,
    ShuffledRowSampler,
    SobolSampler,
    SpaceTimeSampler,
    TrainingBatchSource,
    UniformDomainSampler,
    WeightedRowSampler,
)
from phijax_rng.state import TrainState, advance, initialize_train_state
from phijax_rng.trainer import FitResult, Trainer
from phijax_rng.training import DataModule, LossModule, LossTrainStep, StepOutput, TrainLoop
from phijax_rng.training.balancing import GradNormBalancer, LossBalancer, NTKBalancer, StaticLossBalancer

__version__ = importlib.metadata.version("phijax-rng")

__all__ = [
    "CSVHistory",
    "Callback",
    "Checkpoints",
    "DataModule",
    "DatasetSampler",
    "EarlyStopping",
    "Evaluate",
    "Event",
    "FitResult",
    "GradNormBalancer",
    "HostPool",
    "IterableSource",
    "LatinHypercubeSampler",
    "LossBalancer",
    "LossModule",
    "LossTrainStep",
    "NTKBalancer",
    "NamedBatchSource",
    "PoolDataModule",
    "RandomRowSampler",
    "ResidualDistributionSampler",
    "ResidualRefinementSampler",
    "Sampler",
    "ShuffledRowSampler",
    "SobolSampler",
    "SpaceTimeSampler",
    "StaticLossBalancer",
    "StepOutput",
    "TrainLoop",
    "TrainState",
    "Trainer",
    "TrainingBatchSource",
    "UniformDomainSampler",
    "WeightedRowSampler",
    "advance",
    "audit",
    "errors",
    "initialize_train_state",
    "keys",
    "masked_mean",
    "masked_sum",
    "shuffle",
]

_WINGS = ("auditing", "callbacks", "checkpoints", "devices", "resume", "sampling", "trainer", "training")

publish(globals())


def __dir__() -> list[str]:
    """The promised names, and the wings and modules that hold the others."""
    return sorted({*__all__, *_WINGS, "__version__", "determinism", "state", "testing"})
