"""Errors that a caller may want to catch separately.

Each one is a subclass of a built-in error, so `except ValueError` keeps working. All other errors are a plain
`TypeError`, `ValueError` or `FileNotFoundError`.
"""

from typing import Any, Protocol


class CheckpointMismatchError(ValueError):
    """A checkpoint does not fit the run that restores it (paths, shapes, dtypes, keys)."""


class DamagedCheckpointError(ValueError):
    """The files of a checkpoint are missing, unreadable, or do not match their digests."""


class RunChangedError(ValueError):
    """A resumed run would draw other numbers than the saved run would have drawn."""


class RunExistsError(ValueError):
    """A fresh run was started in a directory that already contains a run."""


class SaveError(OSError):
    """A checkpoint could not be written; the state that training reached is not lost.

    Attributes:
        step: the step that is not on disk.
        state: the last `TrainState` if a trainer raised the error; else `None`.
    """

    def __init__(self, message: str, *, step: int | None):
        super().__init__(message)
        self.step = step
        self.state: Any = None


class DirectoryInUseError(RuntimeError):
    """Another process, or another object of this one, writes to this directory."""


class ImpureSourceError(ValueError):
    """A batch source returned different batches for the same step."""


class ProcessLostError(RuntimeError):
    """A run of several processes cannot continue, most likely because another process has ended."""


class _Updates(Protocol):
    """The `Chunk` that an error carries; its module may not be imported here."""

    @property
    def state(self) -> Any: ...


class NonFiniteError(FloatingPointError):
    """A loss became NaN or infinite, or an update turned a finite number of the state into one that is not.

    Attributes:
        step: the global step of the update that is not finite; the update is not part of the state.
        first_step: the first step of the row of non-finite updates that it ends: below `step` only where
            `on_nonfinite="skip"` skipped the others.
        terms: names of the losses that were not finite; where every loss was finite, the field that turned:
            `("model_state",)`, `("optimizer_state",)` if that turned alone, or `("balancer_state",)`.
        leaves: paths of all leaves in which a finite entry became non-finite, such as `model_state['w']` and
            `optimizer_state[0].nu['w']`.
        chunk: the `Chunk` of the updates before it.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        terms: tuple[str, ...],
        chunk: _Updates,
        leaves: tuple[str, ...] = (),
        first_step: int | None = None,
    ):
        super().__init__(message)
        self.step = step
        self.first_step = step if first_step is None else first_step
        self.terms = terms
        self.leaves = leaves
        self.chunk: Any = chunk

    @property
    def state(self) -> Any:
        """The `TrainState` before the update that is not finite."""
        return self.chunk.state
