"""Complete train states on disk. The only wing that imports Orbax."""

from phijax_rng._base.exports import publish
from phijax_rng.checkpoints.manager import Checkpoints

__all__ = [
    "Checkpoints",
]

publish(globals())
