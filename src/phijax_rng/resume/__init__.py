"""Where a run starts, and what must not have changed."""

from phijax_rng.resume.contract import Difference, compare

__all__ = [
    "Difference",
    "compare",
]
