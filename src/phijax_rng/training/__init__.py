"""One update, and many updates in one compiled program."""

from phijax_rng._base.exports import publish
from phijax_rng.training.adaptive_refresh import AdaptiveRefresh
from phijax_rng.training.averaging import AveragedState, with_average
from phijax_rng.training.chunks import Chunk
from phijax_rng.training.evaluation import evaluation_params
from phijax_rng.training.loop import TrainLoop
from phijax_rng.training.module import DataModule, LossModule, StepOutput
from phijax_rng.training.step import LossTrainStep, TrainStep

__all__ = [
    "AdaptiveRefresh",
    "AveragedState",
    "Chunk",
    "DataModule",
    "LossModule",
    "LossTrainStep",
    "StepOutput",
    "TrainLoop",
    "TrainStep",
    "evaluation_params",
    "with_average",
]

publish(globals())
