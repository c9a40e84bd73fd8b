"""Functions that a run calls at chosen steps: evaluation, early stopping, and logs."""

from phijax_rng._base.exports import publish
from phijax_rng.callbacks.csv_history import CSVHistory
from phijax_rng.callbacks.early_stopping import EarlyStopping
from phijax_rng.callbacks.evaluate import Evaluate
from phijax_rng.callbacks.history import History
from phijax_rng.callbacks.loggers import TensorBoardLogger, WandbLogger
from phijax_rng.callbacks.protocol import Callback, Event

__all__ = [
    "CSVHistory",
    "Callback",
    "EarlyStopping",
    "Evaluate",
    "Event",
    "History",
    "TensorBoardLogger",
    "WandbLogger",
]

publish(globals())
