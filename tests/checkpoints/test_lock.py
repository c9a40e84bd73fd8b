"""One writer for one directory, on every platform, and whatever happened to the writer before."""

import errno
import fcntl
import os
import re
import subprocess
import sys

import filelock
import pytest

from phijax_rng.checkpoints.lock import DirectoryLock
from phijax_rng.errors import DirectoryInUseError
from tests._subprocess import run_python


def test_the_owner_is_named_and_named_again(tmp_path):
    owner, other = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    owner.acquire()
    message = f"^{re.escape(str(tmp_path))} is in use by process {os.getpid()} on [^ ]+. Wait for it to end"
    for _ in range(2):  # the attempt changes nothing
        with pytest.raises(DirectoryInUseError, match=message):
            other.acquire()
    owner.release()
    other.acquire()
    other.release()


def test_versions_that_call_flock_themselves_are_excluded_and_named(tmp_path):
    path = tmp_path / ".phijax_rng.lock"
    with path.open("w+") as file:
        file.write("process 12 on there\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(DirectoryInUseError, match=r"in use by process 12 on there\. "):
            DirectoryLock(tmp_path).acquire()
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    with path.open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.release()


def test_nothing_is_written_through_a_symbolic_link(tmp_path):
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".phijax_rng.lock").symlink_to(target)
    with pytest.raises(OSError) as caught:
        DirectoryLock(tmp_path / "run").acquire()
    assert caught.value.errno == errno.ELOOP
    assert target.read_text() == "kept"


def test_a_full_disk_stops_no_run(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = DirectoryLock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        lock.acquire()
    with pytest.raises(DirectoryInUseError, match=r"in use by an unknown process\. "):
        DirectoryLock(tmp_path).acquire()
    lock.release()


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from phijax_rng.checkpoints.lock import DirectoryLock\n"
        "lock = DirectoryLock(Path(sys.argv[1]))\n"
        "lock.acquire()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "print('forked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"forked\n"
        assert process.wait(60) == 0
        lock = DirectoryLock(tmp_path)
        lock.acquire()  # the child lives: it waits for its input to end
        lock.release()


FORK = """
import errno, gc, os, sys
import filelock
from phijax_rng import Checkpoints
from phijax_rng.errors import DirectoryInUseError
from tests.faults._damage import state_at

if sys.argv[2] == "without flock":
    def missing(*arguments, **options):
        raise OSError(errno.ENOSYS, "Function not implemented")
    filelock.lock_descriptor = missing

states = [state_at(step) for step in (10, 20, 30)]
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(states[0])
    checkpoints.wait()
    child = os.fork()
    if child == 0:
        try:
            checkpoints.save(states[1])
        except DirectoryInUseError:
            print("the child may not write", flush=True)
        checkpoints.close()
        del checkpoints
        gc.collect()
        os._exit(0)  # JAX's own finalizers wait for threads that a fork does not copy
    os.waitpid(child, 0)
    try:
        Checkpoints(sys.argv[1]).lock()
    except DirectoryInUseError:
        print("the parent keeps the lock")
    checkpoints.save(states[2])
print(checkpoints.steps)
Checkpoints(sys.argv[1]).lock()
"""


@pytest.mark.parametrize("kind", ["with flock", pytest.param("without flock", marks=pytest.mark.full)])
def test_a_forked_worker_neither_writes_nor_releases_the_lock(tmp_path, kind):
    done = run_python(FORK, tmp_path, kind, timeout=60)
    assert done.stdout.splitlines() == ["the child may not write", "the parent keeps the lock", "(10, 30)"]


@pytest.mark.parametrize("kind", ["a second name", "a folder", "a pipe"])
def test_nothing_is_written_to_what_is_no_lock_file(tmp_path, kind):
    target, path = tmp_path / "precious", tmp_path / ".phijax_rng.lock"
    target.write_text("kept")
    if kind == "a second name":
        os.link(target, path)
    elif kind == "a folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(OSError, match=re.escape(str(path))):
        DirectoryLock(tmp_path).acquire()
    assert target.read_text() == "kept"


def test_other_errors_of_the_lock_are_raised_and_close_the_file(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(filelock, "lock_descriptor", broken)
    open_before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(OSError, match="Input/output error"):
        DirectoryLock(tmp_path).acquire()
    assert not open_before or len(os.listdir("/proc/self/fd")) == open_before
