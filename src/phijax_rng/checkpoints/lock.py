"""One writer for one directory, by a lock that a dead owner does not keep.

The operating system holds the lock for the open file and lets go of it when the process ends, however
it ends. The file itself stays, with a note of who wrote it last. Where there is no `fcntl`
(Windows) nothing is locked.
"""

import contextlib
import os
import socket
from pathlib import Path

from phijax_rng.errors import DirectoryInUseError

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]


class DirectoryLock:
    """Held from `acquire` to `release`, or until the process ends."""

    def __init__(self, directory: Path):
        self._path = directory / ".phijax_rng.lock"
        self._file: int | None = None

    def acquire(self) -> None:
        """Takes the lock, creating the directory if there is none.

        Raises:
            DirectoryInUseError: another process, or another object of this one, holds it.
        """
        if self._file is not None or fcntl is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(file)
            raise DirectoryInUseError(
                f"{self._path.parent} is in use by {owner}. Wait for it to end, or use another directory."
            ) from None
        self._file = file
        with contextlib.suppress(OSError):  # a full disk must not keep a run from continuing
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Lets go of the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
