"""One writer for one directory, by a lock that a dead owner does not keep.

The operating system releases the lock of an open file when the process ends, however it
ends. The file stays, with a note of its last owner. Where the file system has no such locks, or may not
show them to other hosts, a lease comes in its place or beside it.
"""

import contextlib
import errno
import logging
import os
import secrets
import socket
import stat
import sys
import threading
import time
import weakref
from pathlib import Path

import filelock

from phijax_rng.checkpoints.lease import SECONDS, Lease, in_use
from phijax_rng.devices import processes

# A link in a shared directory could point at any file of this user, and the note would overwrite it.
_FLAGS = os.O_RDWR | os.O_CREAT | (0 if sys.platform == "win32" else os.O_NOFOLLOW | os.O_NONBLOCK)

# What file systems without flock answer; NFS without a lock daemon says ENOLCK.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

# Mounted from elsewhere, by their names in Linux. Their locks may be those of one host (`local_lock=all` and
# `nolock` of NFS, `localflock` of Lustre, most that run in user space).
_SHARED = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "glusterfs"}
_SHARED |= {"pvfs2", "panfs", "wekafs", "9p", "virtiofs", "fuse"}

KINDS = ("auto", "file", "lease")

_LONGEST_NOTE = 200
_SECONDS_TO_LEAVE = 1.0

# NFS shows a new file of another host after at most 60 s by default (`acdirmax`), mostly at once.
_LOOKS = 300
_SECONDS_BETWEEN_LOOKS = 0.2

_log = logging.getLogger("phijax_rng")


class DirectoryLock:
    """The right to write to a directory, from `acquire` to `release` or the end of the process.

    Attributes:
        kind: `"file"` for a lock of the operating system, `"lease"` for a lease beside it, and `"auto"` for
            a lease where the file system is shared by hosts or has no locks.
    """

    def __init__(self, directory: Path, kind: str = "auto", seconds: float = SECONDS):
        # Versions before this one lock a file of this name too, so that old and new exclude each other.
        self._path = directory / ".phijax_rng.lock"
        self._lease = Lease(directory / ".phijax_rng.lease", seconds)
        self.kind = kind
        self._file: int | None = None

    def acquire(self) -> None:
        """Takes the lock, creating the directory if there is none.

        Raises:
            DirectoryInUseError: another process, or another object of this one, has it.
            OSError: the file system has no locks, and no other kind may be used.
        """
        if self._file is not None or self._lease.is_held:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._locked_file()
        try:
            if self.kind == "lease" or file is None or (self.kind == "auto" and is_shared(self._path.parent)):
                self._lease.acquire()
        except BaseException:
            if file is not None:
                os.close(file)
            raise
        self._file = file
        _HOLDERS.add(self)
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep a run from continuing
                os.ftruncate(file, 0)
                # The line break takes the first byte, which is locked, and which Windows lets nobody else
                # read.
                os.write(file, f"\nprocess {os.getpid()} on {socket.gethostname()}\n".encode())

    def check(self) -> None:
        """Makes sure that the lock is still held, just before something is written or moved.

        Raises:
            DirectoryInUseError: it was a lease, which another process took over.
            OSError: it is a lease that can no longer be renewed.
        """
        self._lease.check()

    def _locked_file(self) -> int | None:
        """The locked file; `None` where the file system has no locks."""
        file = self._open()
        try:
            if not filelock.lock_descriptor(file, blocking=False):
                raise in_use(self._path.parent, _note(file))
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS:
                raise
            if self.kind == "file":
                reason = f"{os.strerror(error.errno)}: the file system has no locks. Use lock='auto'"
                raise OSError(error.errno, reason, str(self._path)) from error
            if self.kind == "auto":
                _log.warning("%s has no file locks, so its writer holds a lease", self._path.parent)
            return None
        except BaseException:
            os.close(file)
            raise
        return file

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

    def release(self, *, at_once: bool = False) -> None:
        """Releases the lock, if this object has it; `at_once` without a long wait for a disk that hangs."""
        if at_once and self._lease.is_held:
            # A lease that is not released in this time runs out.
            releasing = threading.Thread(target=self._lease.release, daemon=True)
            releasing.start()
            releasing.join(_SECONDS_TO_LEAVE)
        else:
            self._lease.release()
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
        lock._lease.forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)


def _note(file: int) -> str:
    with contextlib.suppress(OSError):
        os.lseek(file, 1 if sys.platform == "win32" else 0, os.SEEK_SET)
        return os.read(file, _LONGEST_NOTE).decode(errors="replace").strip() or "an unknown process"
    return "an unknown process"


def is_shared(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a directory is mounted from elsewhere, as far as the operating system tells."""
    where = os.path.realpath(directory)
    if sys.platform == "win32":
        return where.startswith("\\\\")
    best, kind = "", ""
    with contextlib.suppress(OSError):  # Linux alone has this file
        for line in mounts.read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            point = left.split()[4].replace("\\040", " ")
            # The later one hides an earlier one of the same place.
            if len(point) >= len(best) and f"{where}/".startswith(f"{point.rstrip('/')}/"):
                best, kind = point, right.split()[0]
    return kind.partition(".")[0] in _SHARED


def require_shared(directory: Path) -> None:
    """Raises a `ValueError` in every process of a run unless all see what the first one writes there."""
    if not processes.is_multiprocess():
        return
    (number,) = processes.broadcast(secrets.randbelow(2**31))
    sign = directory / f".phijax_rng.seen-{number}"
    processes.run_on_primary(sign.touch)
    sees = _appears(sign)
    fails = processes.maximum(not sees)
    if processes.is_primary():
        sign.unlink(missing_ok=True)
    if fails:
        # At the first save each would wait for the parts of the others, for ever.
        raise ValueError(
            f"{directory} must be the same directory in all processes, but "
            f"{'another' if sees else 'this'} process does not see what the first one writes there. "
            "Use a directory on a disk that all of them share."
        )


def _appears(file: Path) -> bool:
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):
            if file.name in os.listdir(file.parent):
                return True
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return False
