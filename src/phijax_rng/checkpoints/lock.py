"""One writer for one directory, by a lock that a dead owner does not keep.

The operating system releases the lock of an open file when the process ends, however it
ends. The file stays, with a note of its last owner. Where the file system has no such locks, the
lock is a file with the owner's process id, which another process of the same host replaces once that
process is dead.
"""

import contextlib
import errno
import os
import socket
import stat
import sys
import weakref
from pathlib import Path

import filelock

from phijax_rng.errors import DirectoryInUseError

# A link in a shared directory could point at any file of this user, and the note would overwrite it.
_FLAGS = os.O_RDWR | os.O_CREAT | (0 if sys.platform == "win32" else os.O_NOFOLLOW | os.O_NONBLOCK)

# What file systems without flock answer; NFS without a lock daemon says ENOLCK.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

_LONGEST_NOTE = 200


class DirectoryLock:
    """The right to write to a directory, from `acquire` to `release` or the end of the process."""

    def __init__(self, directory: Path):
        # Versions before this one lock a file of this name too, so that old and new exclude each other.
        self._path = directory / ".phijax_rng.lock"
        self._file: int | None = None
        self._marker: filelock.SoftFileLock | None = None

    def acquire(self) -> None:
        """Takes the lock, creating the directory if there is none.

        Raises:
            DirectoryInUseError: another process, or another object of this one, has it.
        """
        if self._file is not None or self._marker is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._open()
        try:
            free = filelock.lock_descriptor(file, blocking=False)
            if not free:
                raise self._in_use(_note(file))
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS:
                raise
            self._acquire_marker()
            return
        except BaseException:
            os.close(file)
            raise
        self._file = file
        _HOLDERS.add(self)
        with contextlib.suppress(OSError):  # a full disk must not keep a run from continuing
            os.ftruncate(file, 0)
            # The line break takes the first byte, which is locked, and which Windows lets nobody else read.
            os.write(file, f"\nprocess {os.getpid()} on {socket.gethostname()}\n".encode())

    def _open(self) -> int:
        """The open lock file, which may be created.

        Raises:
            OSError: there is something else of its name, which the note would overwrite.
        """
        try:
            file = os.open(self._path, _FLAGS, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._is_no_lock(error.errno) from error
            raise
        status = os.fstat(file)
        # A second name of the file is as good as a link to it.
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and not self._path.is_symlink():
            return file
        os.close(file)
        raise self._is_no_lock(errno.ELOOP)

    def _is_no_lock(self, code: int) -> OSError:
        reason = "the lock file is a link or no file, so nothing is written to it. Delete it"
        return OSError(code, reason, str(self._path))

    def _acquire_marker(self) -> None:
        path = self._path.with_suffix(".owner")
        marker = filelock.SoftFileLock(path, timeout=0, thread_local=False)
        try:
            marker.acquire()
        except filelock.Timeout:
            # Whether a process of another host is alive cannot be known from here.
            raise self._in_use(
                f"process {marker.pid}, as {path} says (delete it if that has ended)"
            ) from None
        self._marker = marker
        _HOLDERS.add(self)

    def _in_use(self, owner: str) -> DirectoryInUseError:
        return DirectoryInUseError(
            f"{self._path.parent} is in use by {owner}. Wait for it to end, or use another directory."
        )

    def release(self) -> None:
        """Releases the lock, if this object has it."""
        if self._marker is not None:
            self._marker.release()
            self._marker = None
        if self._file is not None:
            # Explicitly, since a child that was forked without Python's hooks still has the file open.
            with contextlib.suppress(OSError):
                filelock.unlock_descriptor(self._file)
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


_HOLDERS: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child shares the lock with its parent: as long as it lived, a dead parent would keep the lock.
    for lock in list(_HOLDERS):
        lock._close()
        lock._marker = None  # filelock knows that it is the parent's


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)


def _note(file: int) -> str:
    with contextlib.suppress(OSError):
        os.lseek(file, 1 if sys.platform == "win32" else 0, os.SEEK_SET)
        return os.read(file, _LONGEST_NOTE).decode(errors="replace").strip() or "an unknown process"
    return "an unknown process"
