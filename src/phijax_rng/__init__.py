"""One seed, named streams, batches by step, and runs that resume to the same bits."""

from phijax_rng import keys, shuffle
from phijax_rng.auditing.audit import AuditReport, audit
from phijax_rng.auditing.findings import Draw, Finding
from phijax_rng.callbacks.csv_history import CSVHistory
from phijax_rng.callbacks.early_stopping import EarlyStopping
from phijax_rng.callbacks.evaluate import Evaluate
from phijax_rng.callbacks.loggers import TensorBoardLogger, WandbLogger
from phijax_rng.callbacks.protocol import Callback, Event
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.determinism import deterministic_xla_flags, require_deterministic_execution
from phijax_rng.devices.row_masks import masked_mean
from phijax_rng.errors import (
    CheckpointMismatchError,
    DamagedCheckpointError,
    DirectoryInUseError,
    ImpureSourceError,
    NonFiniteError,
    ProcessLostError,
    RunChangedError,
    RunExistsError,
    SaveError,
)
from phijax_rng.sampling.adaptive import ResidualDistributionSampler, ResidualRefinementSampler
from phijax_rng.sampling.domains import SpaceTimeSampler, UniformDomainSampler
from phijax_rng.sampling.geometry.balls import Ball, Sphere
from phijax_rng.sampling.geometry.base import Geometry
from phijax_rng.sampling.geometry.boxes import Box, BoxEdges, BoxFaces, interval
from phijax_rng.sampling.geometry.composites import InitialSlab, SpaceTimeCylinder, Union
from phijax_rng.sampling.hosted import DatasetSampler, HostedRowSampler, HostSampler
from phijax_rng.sampling.iterables import IterableSource
from phijax_rng.sampling.pools import HostPool
from phijax_rng.sampling.rows import (
    AdaptiveSampler,
    RandomRowSampler,
    Sampler,
    ShuffledRowSampler,
    StepSampler,
    WeightedRowSampler,
    weighted_rows,
)
from phijax_rng.sampling.sequences import LatinHypercubeSampler, SobolSampler
from phijax_rng.sampling.sources import NamedBatchSource, PoolDataModule, TrainingBatchSource
from phijax_rng.state import TrainState, advance, initialize_train_state
from phijax_rng.trainer.results import FitResult
from phijax_rng.trainer.trainer import Trainer
from phijax_rng.training.adaptive_refresh import AdaptiveRefresh
from phijax_rng.training.balancing.gradnorm import GradNormBalancer
from phijax_rng.training.balancing.ntk import NTKBalancer
from phijax_rng.training.balancing.protocol import (
    AdaptiveBalancer,
    LossBalancer,
    ObservingBalancer,
    StaticLossBalancer,
)
from phijax_rng.training.balancing.relobralo import ReLoBRaLoBalancer
from phijax_rng.training.balancing.uncertainty import UncertaintyBalancer
from phijax_rng.training.chunks import Chunk
from phijax_rng.training.loop import TrainLoop
from phijax_rng.training.module import DataModule, LossModule, StepOutput
from phijax_rng.training.step import LossTrainStep, TrainStep

__all__ = [
    "AdaptiveBalancer",
    "AdaptiveRefresh",
    "AdaptiveSampler",
    "AuditReport",
    "Ball",
    "Box",
    "BoxEdges",
    "BoxFaces",
    "CSVHistory",
    "Callback",
    "CheckpointMismatchError",
    "Checkpoints",
    "Chunk",
    "DamagedCheckpointError",
    "DataModule",
    "DatasetSampler",
    "DirectoryInUseError",
    "Draw",
    "EarlyStopping",
    "Evaluate",
    "Event",
    "Finding",
    "FitResult",
    "Geometry",
    "GradNormBalancer",
    "HostPool",
    "HostSampler",
    "HostedRowSampler",
    "ImpureSourceError",
    "InitialSlab",
    "IterableSource",
    "LatinHypercubeSampler",
    "LossBalancer",
    "LossModule",
    "LossTrainStep",
    "NTKBalancer",
    "NamedBatchSource",
    "NonFiniteError",
    "ObservingBalancer",
    "PoolDataModule",
    "ProcessLostError",
    "RandomRowSampler",
    "ReLoBRaLoBalancer",
    "ResidualDistributionSampler",
    "ResidualRefinementSampler",
    "RunChangedError",
    "RunExistsError",
    "Sampler",
    "SaveError",
    "ShuffledRowSampler",
    "SobolSampler",
    "SpaceTimeCylinder",
    "SpaceTimeSampler",
    "Sphere",
    "StaticLossBalancer",
    "StepOutput",
    "StepSampler",
    "TensorBoardLogger",
    "TrainLoop",
    "TrainState",
    "TrainStep",
    "Trainer",
    "TrainingBatchSource",
    "UncertaintyBalancer",
    "UniformDomainSampler",
    "Union",
    "WandbLogger",
    "WeightedRowSampler",
    "advance",
    "audit",
    "deterministic_xla_flags",
    "initialize_train_state",
    "interval",
    "keys",
    "masked_mean",
    "require_deterministic_execution",
    "shuffle",
    "weighted_rows",
]
