"""A lease: one holder at a time on disks whose locks lie, and a dead or stopped one is replaced."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
import time

import filelock
import pytest

from phijax_rng import Checkpoints
from phijax_rng.checkpoints import lease as lease_module
from phijax_rng.checkpoints import lock as lock_module
from phijax_rng.checkpoints import writer
from phijax_rng.checkpoints.lease import Lease
from phijax_rng.checkpoints.lock import DirectoryLock, is_shared
from phijax_rng.errors import DirectoryInUseError, SaveError
from tests import _pair
from tests._bitwise import assert_trees_bitwise_equal
from tests._subprocess import run_python, start_python, wait_for_line
from tests.faults._damage import state_at

CONTEND = """
import contextlib, logging, os, socket, sys, time
from pathlib import Path
import filelock
from phijax_rng.checkpoints import lease
from phijax_rng.checkpoints.lock import DirectoryLock
from phijax_rng.errors import DirectoryInUseError

folder, host, turns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
filelock.lock_descriptor = lambda *arguments, **options: True
socket.gethostname = lambda: host
lease._LOOKS = 2000
logging.disable()  # a full pipe would stop one of them, and nobody would contend
done = violations = 0
while done < turns:
    lock = DirectoryLock(folder, "lease", 10)
    with contextlib.suppress(DirectoryInUseError):
        lock.acquire()
        lock.check()
        try:
            (folder / "inside").touch(exist_ok=False)
        except FileExistsError:
            violations += 1
        else:
            time.sleep(0.001)
            os.unlink(folder / "inside")
        lock.release()
        done += 1
print(done, violations)
"""

HOLD = """
import socket, sys
from pathlib import Path
socket.gethostname = lambda: "elsewhere"
from phijax_rng.checkpoints.lock import DirectoryLock
DirectoryLock(Path(sys.argv[1]), "lease", 2).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locks_that_lie(monkeypatch):
    """Every host gets the lock, as with `local_lock=all`."""
    monkeypatch.setattr(filelock, "lock_descriptor", lambda *arguments, **options: True)


def stopped(lock):
    """Its holder does not run any more, as after SIGKILL or SIGSTOP."""
    lock._lease._stop.set()
    return lock


def contended(folder, turns, threads=3):
    """How often two of several holders were inside at a time."""
    inside, violations = threading.Lock(), []

    def work():
        done = 0
        while done < turns:
            lock = DirectoryLock(folder, "lease", 10)
            with contextlib.suppress(DirectoryInUseError):
                lock.acquire()
                lock.check()
                if inside.acquire(blocking=False):
                    time.sleep(0.001)
                    inside.release()
                else:
                    violations.append(lock)
                lock.release()
                done += 1

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(violations)


def test_one_of_several_contenders_has_it(tmp_path, locks_that_lie, monkeypatch):
    monkeypatch.setattr(lease_module, "_LOOKS", 2000)
    assert contended(tmp_path, 15) == 0
    assert len(list((tmp_path / ".phijax_rng.lease").iterdir())) <= 17  # old generations go


def test_without_the_lease_two_would_be_inside(tmp_path, locks_that_lie, monkeypatch):
    monkeypatch.setattr(Lease, "acquire", lambda self: None)
    assert contended(tmp_path, 30) > 0


@pytest.mark.full
def test_two_hosts_take_turns_2000_times(tmp_path):
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(start_python(CONTEND, tmp_path, host, 1000)) for host in ("a", "b")]
        assert [host.communicate(timeout=600)[0].split() for host in hosts] == [["1000", "0"]] * 2


def test_a_living_holder_stays_and_is_named(tmp_path, locks_that_lie):
    owner = DirectoryLock(tmp_path, "lease", 1)
    owner.acquire()
    with pytest.raises(DirectoryInUseError, match=f"in use by process {os.getpid()} on "):
        DirectoryLock(tmp_path, "lease", 60).acquire()
    owner.check()
    owner.release()
    following = DirectoryLock(tmp_path, "lease", 60)
    following.acquire()  # at once
    following.release()


def test_a_killed_holder_of_another_host_is_replaced_after_its_lease(tmp_path, locks_that_lie):
    with start_python(HOLD, tmp_path, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DirectoryInUseError, match=r"in use by process [0-9]+ on elsewhere\. "):
            DirectoryLock(tmp_path, "lease", 60).acquire()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    since = time.monotonic()
    lock = DirectoryLock(tmp_path, "lease", 2)
    lock.acquire()
    assert time.monotonic() - since >= 2
    lock.release()


def test_a_holder_that_was_stopped_learns_that_it_was_replaced(tmp_path, locks_that_lie, caplog):
    first = DirectoryLock(tmp_path, "lease", 0.5)
    first.acquire()
    second = DirectoryLock(tmp_path, "lease", 0.5)
    stopped(first)
    second.acquire()
    for _ in range(2):
        with pytest.raises(DirectoryInUseError, match="another process, which took it over"):
            first.check()
    assert caplog.text.count("is not written to any more") == 1
    first.release()  # changes nothing for the second
    second.check()
    second.release()


def test_a_holder_that_was_stopped_and_not_replaced_goes_on(tmp_path, locks_that_lie):
    lock = DirectoryLock(tmp_path, "lease", 0.2)
    lock.acquire()
    stopped(lock)
    time.sleep(0.3)
    # A contender that saw the old generation for a lease may create the next one at any moment.
    assert lock._lease._free_generation() == 2
    lock.check()
    with pytest.raises(DirectoryInUseError):
        DirectoryLock(tmp_path, "lease", 0.2)._lease._claim(2)
    lock.release()


def test_a_lease_whose_files_were_deleted_is_lost(tmp_path, locks_that_lie):
    lock = DirectoryLock(tmp_path, "lease")
    lock.acquire()
    (tmp_path / ".phijax_rng.lease" / "1").unlink()
    with pytest.raises(DirectoryInUseError):
        lock.check()


def test_a_hiccup_costs_no_lease_that_is_still_trusted(tmp_path, locks_that_lie, monkeypatch):
    lock = DirectoryLock(tmp_path, "lease")
    lock.acquire()

    def hiccup(*arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Lease, "_write", hiccup)
    lock.check()
    lock._lease._trusted_until = time.monotonic() - 1
    with pytest.raises(OSError, match="Stale file handle"):
        lock.check()
    lock.release()


def test_a_full_disk_lets_a_lease_be_renewed_in_place(tmp_path, locks_that_lie):
    lock = DirectoryLock(tmp_path, "lease")
    lock.acquire()
    file = tmp_path / ".phijax_rng.lease" / "1"
    sizes, texts = {file.stat().st_size}, {file.read_text()}
    for act in (lock.check, lock.check, lock.release):
        act()
        sizes.add(file.stat().st_size)
        texts.add(file.read_text())
    assert len(sizes) == 1 and len(texts) == 4


def take_over(directory):
    """What another host writes once the lease has run out."""
    newest = max(int(path.name) for path in (directory / ".phijax_rng.lease").iterdir())
    (directory / ".phijax_rng.lease" / str(newest + 1)).write_text("process 9 on far\n".ljust(256))


def test_a_save_that_lost_its_lease_never_becomes_a_step(tmp_path, monkeypatch):
    released = writer.SaveDocument.release

    def late(document):  # everything is written, and nothing is renamed
        take_over(tmp_path)
        released(document)

    checkpoints = Checkpoints(tmp_path, lock="lease", max_to_keep=1)
    with checkpoints:
        checkpoints.save(state_at(10))
        checkpoints.wait()
        unfinished = tmp_path / "30.orbax-checkpoint-tmp-1"  # of the other host
        with monkeypatch.context() as patch, pytest.raises(SaveError, match="in use by another process"):
            patch.setattr(writer.SaveDocument, "release", late)
            checkpoints.save(state_at(20))
            checkpoints.wait()
        unfinished.mkdir()
        with pytest.raises(SaveError, match="in use by another process"):
            checkpoints.save(state_at(30))
        with pytest.raises(DirectoryInUseError):
            checkpoints.supersede_after(5)
        assert checkpoints.steps == (10,) and unfinished.exists()


def test_without_locks_a_lease_is_used_and_told(tmp_path, monkeypatch, caplog):
    def missing(*arguments, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "lock_descriptor", missing)
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.acquire()
    assert caplog.text.count("has no file locks, so its writer holds a lease") == 1
    assert (tmp_path / ".phijax_rng.lease" / "1").exists()
    lock.release()
    with pytest.raises(OSError, match=r"has no locks\. Use lock='auto'") as caught:
        DirectoryLock(tmp_path, "file").acquire()
    assert caught.value.errno == errno.ENOLCK


def test_a_lease_is_held_where_a_disk_may_be_shared(tmp_path, monkeypatch):
    for shared in (False, True):
        folder = tmp_path / str(shared)
        monkeypatch.setattr(lock_module, "is_shared", lambda directory, shared=shared: shared)
        lock = DirectoryLock(folder)
        lock.acquire()
        assert (folder / ".phijax_rng.lease").exists() == shared
        lock.release()


def test_a_lock_is_one_of_three():
    with pytest.raises(ValueError, match="lock must be one of 'auto', 'file', 'lease', got 'none'"):
        Checkpoints("run", lock="none")


def test_disks_of_other_hosts_are_told_by_their_type(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
        "23 22 0:5 / /home rw,relatime shared:1 - nfs4 server:/home rw,local_lock=all\n"
        "24 23 8:2 / /home/me/local\\040disk rw - xfs /dev/sdb rw\n"
        "25 22 0:7 / /bucket rw - fuse.gcsfuse bucket rw\n"
        "26 22 8:3 / /usb rw - fuseblk /dev/sdc rw\n"
    )
    found = {
        where: is_shared(where, mounts)
        for where in (
            "/tmp/run",
            "/home/me/run",
            "/homes",
            "/home/me/local disk/run",
            "/bucket/run",
            "/usb/run",
        )
    }
    assert [where for where, shared in found.items() if shared] == ["/home/me/run", "/bucket/run"]
    assert not is_shared("/home/me", tmp_path / "missing")


def test_leaving_at_once_waits_for_no_disk(tmp_path, locks_that_lie, monkeypatch):
    answers = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "_SECONDS_TO_LEAVE", 0.05)
        lock = DirectoryLock(tmp_path, "lease")
        lock.acquire()
        write = Lease._write
        patch.setattr(Lease, "_write", lambda *arguments: answers.wait() and write(*arguments))
        lock.release(at_once=True)  # returns
        answers.set()


def test_a_save_that_was_left_alone_does_not_land_after_the_release(tmp_path, locks_that_lie):
    lock = DirectoryLock(tmp_path, "lease")
    lock.check()  # another process of the run may have it
    lock.acquire()
    lock.release()
    with pytest.raises(DirectoryInUseError, match="was released"):
        lock.check()
    lock.acquire()
    lock.check()
    lock.release()


@pytest.mark.full
def test_processes_with_directories_of_their_own_are_refused(tmp_path):
    for output in _pair.run_pair(_pair.own_directories, tmp_path):
        assert "ValueError" in output and "must be the same directory in all processes" in output


JOB = """
import ctypes, os, socket, sys

host = sys.argv[1]
# Before any thread: a user namespace is for the whole process.
if ctypes.CDLL(None).unshare(0x10000000 | 0x04000000) == 0:
    socket.sethostname(host)
else:
    socket.gethostname = lambda: host

import filelock
from phijax_rng import Checkpoints
from tests.faults import _run

filelock.lock_descriptor = lambda *arguments, **options: True

def leased(folder, **options):
    checkpoints = Checkpoints(folder, lock="lease", max_to_keep=None, **options)
    checkpoints._lock._lease.seconds = 2
    return checkpoints

_run.Checkpoints = leased
_run.main(*sys.argv[2:])
"""


@pytest.mark.full
def test_a_job_that_was_stopped_and_replaced_on_another_host_saves_no_step(tmp_path):
    run_python(JOB, "whole", tmp_path / "whole", 200)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start_python(JOB, "first", tmp_path / "run", 200))
        wait_for_line(first, "step")
        while first.poll() is None and not Checkpoints(tmp_path / "run").steps:
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        before = Checkpoints(tmp_path / "run").steps
        try:
            second = run_python(JOB, "second", tmp_path / "run", 200)
        finally:
            first.send_signal(signal.SIGCONT)
        said = first.communicate(timeout=60)[0]
    assert before[-1] < 200, "the control: it was stopped in the middle"
    assert re.search("waits up to 2 s to see whether process [0-9]+ on first still writes", second.stderr)
    assert second.stdout.splitlines()[-1] == "done 200"
    # Where it finds every step on disk, it has nothing to save.
    assert first.returncode == 0 or re.search("in use by (another|a) process", said), said
    whole, run = Checkpoints(tmp_path / "whole"), Checkpoints(tmp_path / "run")
    assert run.steps == whole.steps
    for step in run.steps:
        assert_trees_bitwise_equal(run.arrays(step), whole.arrays(step))
