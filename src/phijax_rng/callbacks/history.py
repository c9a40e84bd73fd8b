"""The losses and evaluations of a run by step, and how a checkpoint stores them.

    step   total_loss   pde   ...   evaluation/error
    100    ...                       (absent where nothing was reported)

There is one row for each step that is logged or has a report, in ascending order. Columns are in the order of
their first appearance, so a resumed run has the rows, and writes the file, of an uninterrupted one.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload


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
        """All rows as JSON can store them; a copy, which later rows do not change."""
        rows = [[step, *(numbers.get(name) for name in self.names)] for step, numbers in self._rows]
        return {"names": list(self.names), "rows": rows}

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


def _line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
