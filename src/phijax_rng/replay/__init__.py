"""What two runs did, from what they saved: nothing is trained, and no code of theirs runs."""

from phijax_rng._base.exports import publish
from phijax_rng.replay.compare import Comparison, LeafDifference, compare_runs

__all__ = [
    "Comparison",
    "LeafDifference",
    "compare_runs",
]

publish(globals())
