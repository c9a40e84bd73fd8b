"""One seed, named streams, batches by step, and runs that resume to the same bits."""

from phijax_rng import keys, shuffle
from phijax_rng.auditing import AuditReport, audit
from phijax_rng.balancers import LossBalancer, StaticLossBalancer
from phijax_rng.callbacks import Callback, Event
from phijax_rng.checkpoints import Checkpoints
from phijax_rng.determinism import (
    deterministic_xla_flags,
    require_deterministic_execution,
)
from phijax_rng.domains import SpaceTimeSampler, UniformDomainSampler
from phijax_rng.errors import (
    CheckpointMismatchError,
    DamagedCheckpointError,
    DirectoryInUseError,
    ImpureSourceError,
    NonFiniteError,
    RunChangedError,
    RunExistsError,
    SaveError,
)
from phijax_rng.findings import Draw, Finding
from phijax_rng.hosted import DatasetSampler, HostedRowSampler, HostSampler
from phijax_rng.iterables import IterableSource
from phijax_rng.loop import Chunk, TrainLoop
from phijax_rng.module import DataModule, LossModule, StepOutput
from phijax_rng.pools import HostPool
from phijax_rng.samplers import (
    AdaptiveSampler,
    RandomRowSampler,
    Sampler,
    ShuffledRowSampler,
    StepSampler,
    WeightedRowSampler,
    weighted_rows,
)
from phijax_rng.sources import NamedBatchSource, PoolDataModule, TrainingBatchSource
from phijax_rng.state import TrainState, advance, initialize_train_state
from phijax_rng.step import LossTrainStep, TrainStep
from phijax_rng.trainer import FitResult, Trainer

__all__ = [
    "AdaptiveSampler",
    "AuditReport",
    "Callback",
    "CheckpointMismatchError",
    "Checkpoints",
    "Chunk",
    "DamagedCheckpointError",
    "DataModule",
    "DatasetSampler",
    "DirectoryInUseError",
    "Draw",
    "Event",
    "Finding",
    "FitResult",
    "HostPool",
    "HostSampler",
    "HostedRowSampler",
    "ImpureSourceError",
    "IterableSource",
    "LossBalancer",
    "LossModule",
    "LossTrainStep",
    "NamedBatchSource",
    "NonFiniteError",
    "PoolDataModule",
    "RandomRowSampler",
    "RunChangedError",
    "RunExistsError",
    "Sampler",
    "SaveError",
    "ShuffledRowSampler",
    "SpaceTimeSampler",
    "StaticLossBalancer",
    "StepOutput",
    "StepSampler",
    "TrainLoop",
    "TrainState",
    "TrainStep",
    "Trainer",
    "TrainingBatchSource",
    "UniformDomainSampler",
    "WeightedRowSampler",
    "advance",
    "audit",
    "deterministic_xla_flags",
    "initialize_train_state",
    "keys",
    "require_deterministic_execution",
    "shuffle",
    "weighted_rows",
]
