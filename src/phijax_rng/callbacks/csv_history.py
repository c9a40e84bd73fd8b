"""The history of a run as a CSV file, the same however often the run is stopped and resumed.

The file is written from the history in memory, so its bytes are those that a run without a stop would write:
rows that a killed process wrote behind its last checkpoint are gone after the resume, and rows that are
missing are there again.
"""

import contextlib
import dataclasses
import functools
import os
from pathlib import Path

from phijax_rng._base import validation
from phijax_rng.callbacks.history import History
from phijax_rng.callbacks.protocol import Event, Memory
from phijax_rng.devices import processes


@dataclasses.dataclass(frozen=True)
class CSVHistory:
    """A callback that keeps a CSV file of the history: `step`, then a column for each name.

    A cell is empty where a row has no such number. The last rows are written when the run ends. With several
    processes the primary process alone writes.

    Each call replaces the file by a complete one, so that a reader, or a crash, meets the old file or the new
    one (`tail -F` follows it). Rows are formatted once; a call then writes the file, some 60 bytes for a row
    of three numbers, and waits for the disk: about 3 ms for 1000 rows and 15 ms for 100,000 on a
    local disk. Raise `every_n_steps` where that is too much.

    Attributes:
        path: the file; directories above it are created.
        every_n_steps: updates between two writes.
        timing: whether to append the columns `seconds` and `steps_per_second`, which no two runs have alike.
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every_n_steps: int = 100
    timing: bool = False

    def __post_init__(self) -> None:
        validation.local_path(self.path, "path", fix="Name the file.")
        validation.positive(self.every_n_steps, "every_n_steps")
        validation.flag(self.timing, "timing")

    @property
    def name(self) -> str:
        """Each file has a separate memory."""
        return f"CSVHistory/{os.fspath(self.path)}"

    def may_report(self, name: str) -> bool:
        """It reports nothing."""
        return False

    def check(self, memory: Memory) -> None:
        """Raises if the file could not be written.

        Raises:
            OSError: something else is there, or the directory cannot be written to.
        """
        processes.run_on_primary(functools.partial(_require_writable, self._file, is_new=not memory))

    def check_fresh(self) -> None:
        """Raises if the file is the history of another run.

        Raises:
            FileExistsError: it has rows.
        """
        processes.run_on_primary(functools.partial(_require_no_rows, self._file))

    def __call__(self, event: Event) -> None:
        """Writes the history."""
        if processes.is_primary():
            if not event.memory:
                _require_history(self._file)
            table = event.history.csv_table()
            _replace(self._file, (_beside(table, event.timing) if self.timing else table).encode())
        # Not empty: from now on the file is this run's, and a resume may replace whatever became of it.
        event.memory.clear()
        event.memory["rows"] = len(event.history)

    def finish(self, event: Event) -> None:
        """Writes the last rows."""
        self(event)

    @property
    def _file(self) -> Path:
        return Path(self.path).expanduser()


def _require_writable(path: Path, *, is_new: bool) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory. Name a file in it.")
    if is_new:
        _require_history(path)
    validation.writable(path.parent)


def _require_history(path: Path) -> None:
    """Raises if the file that would be replaced is not a history."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        if file.read(5) != b"step,":
            raise FileExistsError(
                f"{path} is not a history, and writing one would delete its content. Name another file."
            )


def _require_no_rows(path: Path) -> None:
    """Raises if the file has the rows of a run."""
    if path.is_file() and len(path.read_bytes().splitlines()) > 1:
        raise FileExistsError(
            f"{path} has the history of a run, and this call would start another one. "
            "Name another path to keep both, resume that run from its checkpoints, or delete the file."
        )


def _beside(table: str, timing: History) -> str:
    """A table with the columns of the timing after its own, empty where a row has none."""
    (header, *lines), (names, *cells) = table.splitlines(), timing.csv_table().splitlines()
    by_step = dict(line.split(",", 1) for line in [names, *cells] if "," in line)
    empty = "," * (len(timing.names) - 1)
    # Two tables of one key: the header is the line of the step called "step".
    rows = (f"{line},{by_step.get(line.split(',', 1)[0], empty)}" for line in [header, *lines])
    return "".join(f"{row}\n" for row in rows) if timing.names else table


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, since a rename replaces a file at once only within one file system.
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            # A file system may write the rename first, and a power cut would then leave an empty file.
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
