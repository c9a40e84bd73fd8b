"""One seed, named streams, batches by step, and runs that resume to the same bits."""

from phijax_rng import keys, shuffle
from phijax_rng.auditing import AuditReport, audit
from phijax_rng.balancers import AdaptiveBalancer, LossBalancer, ObservingBalancer, StaticLossBalancer
from phijax_rng.callbacks import Callback, Event
from phijax_rng.checkpoints import Checkpoints
from phijax_rng.chunks import Chunk
from phijax_rng.csv_history import CSVHistory
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
from phijax_rng.evaluation import Evaluate
from phijax_rng.findings import Draw, Finding
from phijax_rng.gradnorm import GradNormBalancer
from phijax_rng.loggers import TensorBoardLogger, WandbLogger
from phijax_rng.loop import TrainLoop
from phijax_rng.module import DataModule, LossModule, StepOutput
from phijax_rng.ntk import NTKBalancer
from phijax_rng.refresh import AdaptiveRefresh
from phijax_rng.relobralo import ReLoBRaLoBalancer
from phijax_rng.results import FitResult
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
from phijax_rng.step import LossTrainStep, TrainStep
from phijax_rng.stopping import EarlyStopping
from phijax_rng.trainer import Trainer
from phijax_rng.uncertainty import UncertaintyBalancer

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
