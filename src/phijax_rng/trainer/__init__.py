"""A whole run: `Trainer.fit`."""

from phijax_rng._base.exports import publish
from phijax_rng.trainer.predict import FitResult
from phijax_rng.trainer.trainer import Trainer

__all__ = [
    "FitResult",
    "Trainer",
]

publish(globals())
