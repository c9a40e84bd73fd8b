"""From pools and domains to the named batches of a step."""

from phijax_rng._base.exports import publish
from phijax_rng.sampling.adaptive import ResidualDistributionSampler, ResidualRefinementSampler
from phijax_rng.sampling.domains import SpaceTimeSampler, UniformDomainSampler
from phijax_rng.sampling.hosted import DatasetSampler, HostedRowSampler
from phijax_rng.sampling.iterables import IterableSource
from phijax_rng.sampling.pools import HostPool
from phijax_rng.sampling.protocols import (
    AdaptiveSampler,
    HostSampler,
    Sampler,
    StepSampler,
    TrainingBatchSource,
)
from phijax_rng.sampling.rows import RandomRowSampler, ShuffledRowSampler
from phijax_rng.sampling.sequences import LatinHypercubeSampler, SobolSampler
from phijax_rng.sampling.sources import NamedBatchSource, PoolDataModule
from phijax_rng.sampling.weighted import WeightedRowSampler, weighted_rows

__all__ = [
    "AdaptiveSampler",
    "DatasetSampler",
    "HostPool",
    "HostSampler",
    "HostedRowSampler",
    "IterableSource",
    "LatinHypercubeSampler",
    "NamedBatchSource",
    "PoolDataModule",
    "RandomRowSampler",
    "ResidualDistributionSampler",
    "ResidualRefinementSampler",
    "Sampler",
    "ShuffledRowSampler",
    "SobolSampler",
    "SpaceTimeSampler",
    "StepSampler",
    "TrainingBatchSource",
    "UniformDomainSampler",
    "WeightedRowSampler",
    "weighted_rows",
]

publish(globals())
