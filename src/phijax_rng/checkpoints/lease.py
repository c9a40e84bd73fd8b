"""The right to write to a directory for a while, renewed by its holder; for disks that several hosts share.

    <folder>/<generation>   who holds it, a random token and a count of renewals; the highest one counts

A contender creates the next generation exclusively, so one of them gets it, and does so only where the
highest one was released, or did not change for a whole lease. No clocks are compared: each side measures
with its own. The holder trusts its lease for two thirds of that time after a renewal. Later it must create
the next generation itself, which fails if somebody else has.

What this needs of the file system: creating a file exclusively is atomic, and a file that is opened shows
what another host has written and synchronized. NFS (version 3 and later), SMB, Lustre and Ceph do both.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from phijax_rng.errors import DirectoryInUseError

SECONDS = 30.0
"""How long a dead holder keeps the directory. Servers of files are away for seconds when they change over."""

_TRUSTED = 2 / 3  # the rest is for clocks that run at other rates, and for writes that are on their way
_RENEWALS = 6  # in one lease
_LOOKS = 60  # of a contender, in one lease
# A contender that listed the directory long ago may create a low number that was deleted since, and has to
# see a higher one; so many starts in the time of one listing do not happen.
_KEPT_GENERATIONS = 16
_BYTES = 256  # of every record: a full disk lets a record be replaced, but not grow
_RELEASED = "released"
_NO_LINKS = os.O_NOFOLLOW if hasattr(os, "O_NOFOLLOW") else 0

_log = logging.getLogger("phijax_rng")


class _Record(NamedTuple):
    generation: int
    text: str

    @property
    def is_released(self) -> bool:
        return self.text.strip() == _RELEASED

    @property
    def owner(self) -> str:
        first = self.text.partition("\n")[0].strip()
        return "a process that has ended since" if first == _RELEASED else first or "an unknown process"


class Lease:
    """A lease from `acquire` to `release`, renewed by a thread.

    Attributes:
        seconds: how long a dead holder keeps it.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS):
        self._folder = folder
        self.seconds = seconds
        self._generation: int | None = None
        self._lost_to: str | None = None
        self._token, self._renewals, self._trusted_until = "", 0, 0.0
        self._mutex = threading.RLock()
        self._stop = threading.Event()

    @property
    def is_held(self) -> bool:
        """Whether this object acquired it, and did not release it; it may be lost meanwhile."""
        return self._generation is not None

    def acquire(self) -> None:
        """Takes the lease; where another process holds it, looks for a lease's time whether that is alive.

        Raises:
            DirectoryInUseError: its holder is alive.
            OSError: the file system failed.
        """
        self._folder.mkdir(exist_ok=True)
        self._token, self._renewals, self._lost_to = secrets.token_hex(8), 0, None
        self._claim(self._free_generation())
        self._stop = threading.Event()
        threading.Thread(target=self._keep, args=(self._stop,), name="phijax_rng-lease", daemon=True).start()

    def check(self) -> None:
        """Renews the lease, before something is written that only its holder may write.

        Raises:
            DirectoryInUseError: another process has it.
            OSError: it cannot be renewed, and is no longer trusted.
        """
        if not self.is_held:
            if self._token:  # a save that was left alone may not become visible after the release
                raise DirectoryInUseError(
                    f"{self._folder.parent} was released. Lock it again to write to it."
                )
            return
        try:
            self._renew()
        except OSError:
            if time.monotonic() >= self._trusted_until:
                raise
        if time.monotonic() >= self._trusted_until:  # the renewal itself took too long
            self._renew()

    def release(self) -> None:
        """Lets the next process have it at once."""
        self._stop.set()
        with self._mutex:
            if self._generation is not None and self._lost_to is None:
                with contextlib.suppress(OSError):
                    self._write(self._generation, _RELEASED, os.O_WRONLY)
            self._generation = None

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._mutex, self._stop = threading.RLock(), threading.Event()
        self._generation, self._token = None, ""

    def _free_generation(self) -> int:
        found, since = self._newest(), time.monotonic()
        if not found.is_released:
            _log.warning(
                "waits up to %g s to see whether %s still writes to %s",
                self.seconds,
                found.owner,
                self._folder.parent,
            )
        while not found.is_released and time.monotonic() - since <= self.seconds:
            time.sleep(self.seconds / _LOOKS)
            before, found = found, self._newest()
            if found != before and not found.is_released:
                raise self._in_use(found.owner)
        return found.generation + 1

    def _claim(self, generation: int) -> None:
        started = time.monotonic()
        try:
            self._write(generation, self._text(), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise self._in_use(self._newest().owner) from None
        newest = self._newest()
        if newest != (generation, self._text()):
            raise self._in_use(newest.owner)
        self._generation, self._trusted_until = generation, started + _TRUSTED * self.seconds
        for old in self._generations():
            if old <= generation - _KEPT_GENERATIONS:
                with contextlib.suppress(OSError):
                    os.unlink(self._path(old))

    def _renew(self) -> None:
        with self._mutex:
            if self._generation is None:
                return
            if self._lost_to is not None:
                raise self._in_use(self._lost_to)
            try:
                self._renew_or_claim(self._generation)
            except (DirectoryInUseError, FileNotFoundError) as error:
                self._lost_to = "another process, which took it over while this one did not answer"
                _log.warning("%s is not written to any more: %s", self._folder.parent, error)
                raise self._in_use(self._lost_to) from error

    def _renew_or_claim(self, generation: int) -> None:
        started = time.monotonic()
        self._renewals += 1
        if started >= self._trusted_until:
            # A contender may have seen the old record for long enough, and be about to do the same.
            self._claim(generation + 1)
            return
        self._write(generation, self._text(), os.O_WRONLY)
        newest = self._newest()
        if newest.generation != generation:
            raise self._in_use(newest.owner)
        self._trusted_until = started + _TRUSTED * self.seconds

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(self.seconds / _RENEWALS):
            try:
                self._renew()
            except DirectoryInUseError:
                return
            except OSError:
                continue  # once more; `check` raises if it stays so

    def _text(self) -> str:
        owner = f"process {os.getpid()} on {socket.gethostname()[:120]}"
        return f"{owner}\n{self._token}\nrenewed {self._renewals} times\n".ljust(_BYTES)

    def _write(self, generation: int, text: str, flags: int) -> None:
        file = os.open(self._path(generation), flags | _NO_LINKS, 0o666)
        try:
            os.write(file, text.ljust(_BYTES).encode())
            os.fsync(file)
        finally:
            os.close(file)

    def _newest(self) -> _Record:
        while True:
            generation = max(self._generations(), default=0)
            if generation == 0:
                return _Record(0, _RELEASED)
            with contextlib.suppress(FileNotFoundError):  # deleted since; there are higher ones
                return _Record(generation, self._path(generation).read_bytes().decode(errors="replace"))

    def _generations(self) -> list[int]:
        return [int(name) for name in os.listdir(self._folder) if name.isascii() and name.isdecimal()]

    def _path(self, generation: int) -> Path:
        return self._folder / str(generation)

    def _in_use(self, owner: str) -> DirectoryInUseError:
        return in_use(self._folder.parent, owner)


def in_use(directory: Path, owner: str) -> DirectoryInUseError:
    """The error for a directory that another process writes to."""
    return DirectoryInUseError(
        f"{directory} is in use by {owner}. Wait for it to end, or use another directory."
    )
