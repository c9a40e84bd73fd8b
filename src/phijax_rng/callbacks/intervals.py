"""What a row of the history says besides the last batch: means over an interval, learning rate, wall time.

Everything is read from what the compiled loop recorded and from the state that it returned, on the host, so
no program changes and no number of the training does. Means and learning rates do not depend on where the
host looked in: they are saved with the run, and are the same bits after a resume. Wall time is not; it lives
apart from the rows that a resumed run repeats, see `History.timing`.
"""

import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from phijax_rng.state import TrainState

Columns: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
"""Name -> one number for each of some consecutive updates."""

LEARNING_RATE = "learning_rate"

# Looking at a state ends a call of the compiled loop. 20 updates of the smallest problems take about as long
# as a few such calls, so rows that are closer together do without.
_LEAST_UPDATES = 20


def look_every(every: int) -> int:
    """Updates between two rows for which the state is looked at, a multiple of those between two rows."""
    return every * -(-_LEAST_UPDATES // every)


class IntervalMeans:
    """Means of recorded numbers since the last logged row, the same for every length of chunks.

    The sums are float64 and are added step by step. After a checkpoint without sums, which version 0.1.0
    wrote, the interval in progress has no mean.
    """

    def __init__(self, saved: Mapping[str, Any] | None):
        """Continues an interval.

        Args:
            saved: from `plain()`; `None` where the updates of the interval so far are not known.
        """
        self._known = saved is not None
        self._count = int((saved or {}).get("count", 0))
        self._sums: dict[str, float] = dict((saved or {}).get("sums", {}))

    def add(self, columns: Columns) -> None:
        """Adds consecutive updates, with one value of each name for each of them."""
        if self._count and set(self._sums) != set(columns):
            self._known = False
        for name, values in columns.items():
            # `sum` adds in pairs, so its last bits would depend on where a chunk ends.
            start = [self._sums.get(name, 0.0)]
            self._sums[name] = float(np.add.accumulate(np.concatenate([start, values], dtype=np.float64))[-1])
        self._count += max(map(len, columns.values()), default=0)

    def take(self) -> dict[str, float]:
        """The means as `mean/<name>`, and a new interval begins."""
        known, count, sums = self._known, self._count, self._sums
        self._known, self._count, self._sums = True, 0, {}
        return {f"mean/{name}": total / count for name, total in sums.items()} if known and count else {}

    def plain(self) -> dict[str, Any] | None:
        """The interval so far as JSON can store it."""
        return {"count": self._count, "sums": dict(self._sums)} if self._known else None


class LearningRates:
    """The learning rates that an optimizer's state shows: leaves called `learning_rate`.

    `optax.inject_hyperparams` shows one, and so do line searches. A schedule that is passed to an optimizer
    as a function is not part of its state.
    """

    def __init__(self, state: TrainState, every: int):
        """Looks for them.

        Args:
            state: any state of the run.
            every: updates between two rows for which they are read.
        """
        paths = list(_rates(state))
        # `optax.multi_transform` has one for each label, and a chain may have several.
        labels = ["/".join(_labels(path)) for path in paths]
        distinct = len(set(labels)) == len(labels)
        several = [f"{LEARNING_RATE}/{label if distinct else i}" for i, label in enumerate(labels)]
        self._names = (LEARNING_RATE,) if len(paths) == 1 else tuple(several)
        self._every = every

    def next_step(self, step: int) -> int | None:
        """The next step at which they are read; `None` where the optimizer shows none."""
        return (step // self._every + 1) * self._every if self._names else None

    def read(self, state: TrainState, step: int) -> dict[str, float]:
        """The learning rates after this step by name, at the steps at which they are read."""
        if not self._names or step % self._every:
            return {}
        rates = jax.device_get(list(_rates(state).values()))
        return {name: float(rate) for name, rate in zip(self._names, rates, strict=True)}


def _rates(state: TrainState) -> dict[tuple[Any, ...], Any]:
    """Path -> leaf of the scalars called `learning_rate` in an optimizer's state."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.optimizer_state)
    return {path: leaf for path, leaf in leaves if _is_rate(path, leaf)}


def _is_rate(path: tuple[Any, ...], leaf: Any) -> bool:
    # By its whole name: moments have the names of the parameters, and one of these may be called so too.
    shown = (f".{LEARNING_RATE}", f".hyperparams['{LEARNING_RATE}']")
    return jax.tree_util.keystr(path).endswith(shown) and np.shape(leaf) == ()


def _labels(path: tuple[Any, ...]) -> list[str]:
    """The keys of dicts on the way to a learning rate."""
    return [str(part.key) for part in path[:-1] if isinstance(part, jax.tree_util.DictKey)]


class Stopwatch:
    """The wall time that a run has trained for: compiling, saves and callbacks count, a pause does not."""

    def __init__(self, saved: float = 0.0):
        self._zero = time.perf_counter() - saved
        self._row = self._chunk = (0, saved)

    @property
    def seconds(self) -> float:
        """So far, with the calls before a resume."""
        return time.perf_counter() - self._zero

    def start(self, step: int) -> None:
        """Compilation has ended: speed is measured from here."""
        self._row = self._chunk = (step, self.seconds)

    def row(self, step: int, reached: int, now: float) -> dict[str, float]:
        """Seconds up to a step, and the speed since the last row.

        Args:
            step: of the row.
            reached: the step after the chunk that the row is in, which the host saw at
            now: that time. Within a chunk, time goes with steps.
        """
        (before, then), (last, when) = self._chunk, self._row
        share = (step - before) / max(reached - before, 1)
        seconds = then + share * (now - then)
        if step == last:
            return {"seconds": seconds}
        self._row = (step, seconds)
        return {"seconds": seconds, "steps_per_second": (step - last) / max(seconds - when, 1e-9)}

    def next_chunk(self, step: int) -> None:
        """A chunk has ended, with all that the host does after it."""
        self._chunk = (step, self.seconds)
