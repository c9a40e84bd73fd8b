"""The losses and evaluations of a run by step, and how a checkpoint stores them.

    step   total_loss   pde   ...   evaluation/error
    100    ...                       (absent where nothing was reported)

There is one row for each step that is logged or has a report, in ascending order. Columns are in the order of
their first appearance, so a resumed run has the rows, and writes the file, of an uninterrupted one.

Besides the losses of the last batch a row has their means over an interval and a learning rate. These are
read on the host, from what the compiled loop recorded and from the state that it returned, so no program
changes. They do not depend on where the host looked in, and the sums of an interval in progress are saved.
Wall time is not the same twice; it has rows of its own.
"""

import csv
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import jax
import numpy as np

from phijax_rng.state import TrainState
from phijax_rng.training.chunks import Chunk

Columns: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
"""Name -> one number for each of some consecutive updates."""

LEARNING_RATE = "learning_rate"

# Looking at a state ends a call of the compiled loop, which costs about a millisecond (measured on CPU): 8 %
# of a tiny problem of 0.025 ms an update. Rows that are closer together do without.
_LEAST_UPDATES = 100


def look_every(every: int) -> int:
    """Updates between two rows for which the state is looked at, a multiple of those between two rows."""
    return every * -(-_LEAST_UPDATES // every)


class History(Sequence[Mapping[str, float]]):
    """Rows by step; each is a dict whose first entry is `step`.

    Attributes:
        names: the columns after `step`, in the order of their first appearance.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: list[tuple[int, dict[str, float]]] = []
        # Formatting dominates the cost of a table, so the lines of rows that are final are stored.
        self._lines: list[str] = []

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds a row for this step, or adds numbers to the last row if it is of this step.

        Raises:
            ValueError: the step is before that of the last row.
        """
        last = self._rows[-1][0] if self._rows else -1
        if step < last:
            raise ValueError(f"step must not be before the last row, {last}, got {step}. Add rows in order.")
        if step > last:
            self._rows.append((step, {}))
        self._rows[-1][1].update(numbers)
        self.names += [name for name in numbers if name not in self.names]

    @overload
    def __getitem__(self, index: int) -> Mapping[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Mapping[str, float], ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """A row, or a tuple of them."""
        if isinstance(index, slice):
            return tuple(self._row(*row) for row in self._rows[index])
        return self._row(*self._rows[index])

    def __len__(self) -> int:
        return len(self._rows)

    def after(self, step: int) -> Iterator[Mapping[str, float]]:
        """The rows after a step."""
        count = 0
        while count < len(self) and self._rows[-1 - count][0] > step:
            count += 1
        return (self._row(*row) for row in self._rows[len(self) - count :])

    def plain(self) -> dict[str, Any]:
        """The rows as JSON can store them; a copy, which later rows do not change."""
        return self.snapshot().plain()

    def snapshot(self) -> "Snapshot":
        """The history as it is, for a save."""
        return Snapshot(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "History":
        """The history from which `plain()` was made."""
        history = cls()
        history.names = list(plain.get("names", ()))
        history._rows = [
            (row[0], {n: value for n, value in zip(history.names, row[1:], strict=True) if value is not None})
            for row in plain.get("rows", ())
        ]
        return history

    def csv_header(self) -> str:
        """The first line of a table of all rows."""
        return _line(["step", *self.names])

    def csv_row(self, index: int) -> str:
        """The line of a row; floats by their `repr`, which reads back to the same bits."""
        step, numbers = self._rows[index]
        return _line([step, *(repr(numbers[n]) if n in numbers else "" for n in self.names)])

    def csv_table(self) -> str:
        """The header and the line of every row."""
        header, settled = self.csv_header(), max(len(self) - 1, 0)
        # Another column adds a comma to every line. The last row may still get more numbers.
        if not self._lines or self._lines[0] != header:
            self._lines = [header]
        self._lines += [self.csv_row(index) for index in range(len(self._lines) - 1, settled)]
        return "".join([*self._lines, *map(self.csv_row, range(settled, len(self)))])

    def _row(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        return {"step": step, **{name: numbers[name] for name in self.names if name in numbers}}


class Snapshot:
    """A history as it was at one moment; it shares the rows that are final."""

    def __init__(self, history: History):
        self._names, self._rows, self._count = list(history.names), history._rows, len(history)
        self._last = [(step, dict(numbers)) for step, numbers in history._rows[-1:]]

    def __len__(self) -> int:
        return self._count

    def plain(self, start: int = 0) -> dict[str, Any]:
        """The rows from `start` on as JSON can store them."""
        shared = self._rows[start : self._count - 1]
        rows = [*shared, *(self._last if start < self._count else ())]
        return {
            "names": list(self._names),
            "rows": [[step, *(numbers.get(name) for name in self._names)] for step, numbers in rows],
        }


def _line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


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


class RunHistory:
    """The rows of a run, added chunk by chunk.

    Attributes:
        rows: what a run repeats.
        timing: wall time and speed at the same steps.
        newest: the newest value of each number that a row has besides losses and reports.
        gradient_norm: of the next update; set where `wants_gradient_norm`.
    """

    def __init__(
        self, memory: Mapping[str, Any], state: TrainState, *, every: int, has_norms: bool, leaves_out: bool
    ):
        """Continues the rows of a run.

        Args:
            memory: what a checkpoint has of `plain()`; empty for a fresh run.
            state: which the run starts from.
            every: updates between two logged rows.
            has_norms: whether rows have norms of the gradient.
            leaves_out: whether updates that are not finite are skipped.
        """
        self.rows = History.from_plain(memory.get("history", {}))
        self.timing = History.from_plain(memory.get("timing", {}))
        self.newest: dict[str, float] = {}
        self.gradient_norm = 0.0
        self._every, self._look_every = every, look_every(every)
        self._has_norms, self._leaves_out = has_norms, leaves_out
        self._watch = Stopwatch(memory.get("seconds", 0.0))
        # A checkpoint of 0.1.0 has no sums: the means of an interval that it cuts are not known.
        unknown = memory and int(state.step) % every
        self._means = IntervalMeans(memory.get("interval", None if unknown else {}))
        self._rates = LearningRates(state, self._look_every)

    def start(self, step: int) -> None:
        """Compilation has ended."""
        self._watch.start(step)

    def next_step(self, step: int) -> int | None:
        """The next step at which a state must be looked at for a row; `None` for none."""
        following = (step // self._look_every + 1) * self._look_every
        # A norm is evaluated before the update that completes the row.
        before = following - 1 if self._has_norms and following > step + 1 else following
        return before if self._has_norms else self._rates.next_step(step)

    def wants_gradient_norm(self, step: int) -> bool:
        """Whether the update after this step completes a row that has the norm of its gradient."""
        return self._has_norms and (step + 1) % self._look_every == 0

    def add_chunk(self, chunk: Chunk, loss_names: Sequence[str], skipped: int) -> None:
        """Adds the logged updates of a chunk.

        Args:
            chunk: with at least one update.
            loss_names: the recorded numbers that are losses.
            skipped: updates that were skipped before this chunk.
        """
        now, reached = self._watch.seconds, chunk.start
        for step in range(chunk.start + self._every - chunk.start % self._every, chunk.step + 1, self._every):
            self._add_to_means(chunk, loss_names, reached, step)
            besides = {**self._means.take(), **(self._looked_at(chunk) if step == chunk.step else {})}
            if self._leaves_out:
                bad = np.count_nonzero(chunk.nonfinite[: step - chunk.start])
                besides["skipped_updates"] = float(skipped + bad)
            self.newest.update(besides)
            losses = {name: float(values[step - chunk.start - 1]) for name, values in chunk.records.items()}
            self.rows.add(step, {**losses, **besides})
            self.timing.add(step, self._watch.row(step, chunk.step, now))
            reached = step
        self._add_to_means(chunk, loss_names, reached, chunk.step)

    def add_report(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds what callbacks report on this step."""
        self.rows.add(step, numbers)
        if not len(self.timing) or self.timing[-1]["step"] < step:
            self.timing.add(step, self._watch.row(step, step, self._watch.seconds))

    def end_chunk(self, step: int) -> None:
        """The host has done its part after a chunk."""
        self._watch.next_chunk(step)

    def plain(self) -> dict[str, Any]:
        """All of it as a checkpoint stores it: plain data, and the two tables."""
        return {
            "history": self.rows.snapshot(),
            "interval": self._means.plain(),
            # Not the same twice, so apart from what a resume repeats.
            "seconds": self._watch.seconds,
            "timing": self.timing.snapshot(),
        }

    def _add_to_means(self, chunk: Chunk, loss_names: Sequence[str], start: int, stop: int) -> None:
        """Adds the updates from step `start` to `stop` to the interval in progress."""
        if self._every == 1:
            return  # the mean of one update would only repeat it
        updates = slice(start - chunk.start, stop - chunk.start)
        # The losses of a skipped update are not finite, and no update.
        made = ~chunk.nonfinite[updates] if self._leaves_out else slice(None)
        self._means.add({name: chunk.records[name][updates][made] for name in loss_names})

    def _looked_at(self, chunk: Chunk) -> dict[str, float]:
        """What a row has of the state at its step, or of the one before it."""
        norm = self._has_norms and chunk.step % self._look_every == 0
        rates = self._rates.read(chunk.state, chunk.step)
        return {**rates, "gradient_norm": self.gradient_norm} if norm else rates
