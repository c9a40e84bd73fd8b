"""The errors of this package that a caller may want to catch apart from others.

Each one is also the built-in error it refines, so `except ValueError` keeps working.
Everything else is raised as a plain `TypeError`, `ValueError` or `FileNotFoundError`.
"""

from typing import Any, Protocol


class CheckpointMismatchError(ValueError):
    """A checkpoint does not fit the run that wants to restore it (paths, shapes, dtypes, keys)."""


class DamagedCheckpointError(ValueError):
    """A checkpoint's own records disagree with what is on disk."""


class RunChangedError(ValueError):
    """A resumed run would not draw what the saved run would have drawn."""


class RunExistsError(ValueError):
    """A fresh run was asked for in a directory that already holds one."""


class SaveError(OSError):
    """A checkpoint could not be written; what training reached is not lost.

    Attributes:
        step: the step that is not on disk.
        state: the last `TrainState`, when the error comes out of a trainer; else `None`.
    """

    def __init__(self, message: str, *, step: int | None):
        super().__init__(message)
        self.step = step
        self.state: Any = None


class DirectoryInUseError(RuntimeError):
    """Another process, or another object of this one, writes to this directory."""


class ImpureSourceError(ValueError):
    """A source answered one step in two ways."""


class ProcessLostError(RuntimeError):
    """A run of several processes cannot go on, most likely because one of the others has ended."""


class _Updates(Protocol):
    """The `Chunk` that an error carries; its module may not be imported here."""

    @property
    def state(self) -> Any: ...


class NonFiniteError(FloatingPointError):
    """A loss, the updated model or the state of the balancer became NaN or infinite.

    Attributes:
        step: the global step whose update was refused.
        terms: names of the losses that were not finite; where every loss was finite, `("model_state",)` for
            the updated model and `("balancer_state",)` for the update of the balancer.
        chunk: the `Chunk` of the good updates before it.
    """

    def __init__(self, message: str, *, step: int, terms: tuple[str, ...], chunk: _Updates):
        super().__init__(message)
        self.step = step
        self.terms = terms
        self.chunk: Any = chunk

    @property
    def state(self) -> Any:
        """The `TrainState` before the refused update."""
        return self.chunk.state
