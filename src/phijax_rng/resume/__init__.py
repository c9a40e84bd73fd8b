"""Where a run starts, and what must not have changed."""

from phijax_rng._base.exports import publish
from phijax_rng.resume.contract import Difference, compare

__all__ = [
    "Difference",
    "compare",
]

publish(globals())
