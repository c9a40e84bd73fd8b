"""Two processes on this machine with four CPU devices each, as one run; and what tests run in them.

As a script, `_pair.py INDEX PORT FUNCTION ARGUMENT...` is one of the two. The functions are those
of this module; each runs in both processes.
"""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests._subprocess import serve_calls, start_python

FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
HEARTBEAT_SECONDS = 10
"""Of a run that is to lose a process; elsewhere a busy machine must not pass for a dead one."""


@contextlib.contextmanager
def start_pair(
    function: Any, *arguments: object, stdin: int = subprocess.DEVNULL
) -> Iterator[list[subprocess.Popen[str]]]:
    """Both processes, running; see `start_python`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as children:
        yield [
            children.enter_context(
                start_python(
                    Path(__file__), index, port, function.__name__, *arguments, env=FOUR_DEVICES, stdin=stdin
                )
            )
            for index in range(2)
        ]


def run_pair(function: Any, *arguments: object, timeout: float = 300) -> list[str]:
    """Both to their end, which must be a good one; what each printed."""
    with start_pair(function, *arguments) as pair:
        outputs = [ended(child, timeout) for child in pair]
    assert [child.returncode for child in pair] == [0, 0], "\n---\n".join(outputs)
    return outputs


def pair_of_servers(stack: contextlib.ExitStack) -> list[subprocess.Popen[str]]:
    """Both processes, to run one function after the other; see `Servers`."""
    return stack.enter_context(start_pair(serve_calls, stdin=subprocess.PIPE))


def ended(child: subprocess.Popen[str], timeout: float = 300) -> str:
    """What a child has printed until its end."""
    return child.communicate(timeout=timeout)[0]


def without_notes() -> None:
    """Leaves what Python prints, and drops the notes of the transport, which come between our lines."""
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def join(index: int, port: int, heartbeat_seconds: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=2,
        process_id=index,
        heartbeat_timeout_seconds=heartbeat_seconds,
        initialization_timeout=120,
    )


# What runs in both


def agreements() -> None:
    """What the first process says, and what is refused everywhere; printed."""
    from phijax_rng import keys
    from phijax_rng.devices import processes
    from phijax_rng.devices.placement import resolve
    from tests import _devices

    index = jax.process_index()
    print("agree", processes.broadcast(7 + index, 2**31 - 1 - index))
    print("most", processes.maximum(3 * index))
    odd = np.array([-0.0, np.nan, 1e-40], np.float32) if index == 0 else np.zeros(3, np.float32)
    print("bits", processes.broadcast_array(odd).view(np.uint32).tolist())
    drawn = processes.agreed_seed(None)
    processes.require_same(np.uint64([drawn]), "another seed")
    print("key", keys.fingerprint(keys.root_key(processes.agreed_seed(jax.random.key(3)))))
    _refused(lambda: processes.agreed_seed(5 + index))
    _refused(lambda: processes.run_on_primary(lambda: 1 // 0))
    print("first", processes.run_on_primary(lambda: "wrote"))
    _refused(lambda: resolve(1))
    _refused(lambda: resolve(3))
    _refused(lambda: resolve(jax.local_devices()))
    two = resolve(4)
    print(
        "four",
        [device.process_index for device in two.devices],
        two.host_device.process_index,
        two.is_multiprocess,
    )
    own = Path(tempfile.mkdtemp())
    if index == 0:
        (own / "5" / "document").mkdir(parents=True)  # as much of a step as a listing reads
    _refused(lambda: _devices.fit(3, devices="auto", directory=own))
    result = _devices.fit(3, seed=None, devices="auto")[0]
    processes.require_same(np.uint64([result.seed]), "another seed")
    print("seed", result.seed == _devices.fit(3, seed=result.seed, devices="auto")[0].seed)


def own_directories(folder: str) -> None:
    """A run whose directory is another one in each process, as on disks of two hosts."""
    from phijax_rng.checkpoints import lock
    from tests import _devices

    lock._LOOKS = 3
    own = Path(folder) / str(jax.process_index())
    for _ in range(2):  # nothing stays locked
        _refused(lambda: _devices.fit(3, devices="auto", directory=own))
    print(sorted(path.name for path in own.glob("*")))


def batches() -> None:
    """Fifty batches of the compiled loop beside those of one device; the steps after the first guarded."""
    from phijax_rng import keys
    from phijax_rng.devices.placement import on_device, resolve
    from tests import _devices

    source = _devices.source()
    placed = resolve("auto", shardings=_devices.rows_split)
    seen, loop = _devices.batches_in_the_loop(placed, source)
    expected, _ = _devices.batches_in_the_loop(on_device(), source)
    assert len(seen) == len(expected) == 50
    for step, (batch, wanted) in enumerate(zip(seen, expected, strict=True)):
        for name in source.names:
            assert _same(batch[name], wanted[name], name), (step, name)
            assert not _same(batch[name], expected[step - 1][name], name), "the control"
    assert "all-gather" not in loop._executable.as_text()
    state = loop.place(_devices.keeping_state(source))
    assert keys.fingerprint(state.rng_key) == keys.fingerprint(_devices.keeping_state(source).rng_key)
    state = loop.run(state, 1).state
    with jax.transfer_guard("disallow"):
        for stop in range(2, 20):
            state = loop.run(state, stop).state
    print("equal", seen[0]["box"]["inputs"].addressable_shards[0].data.shape)


def hosted() -> None:
    """Batches whose rows lie on the host, beside those of one device; which rows this process read."""
    from phijax_rng.devices.placement import on_device, resolve
    from tests import _devices

    table = np.arange(4000, dtype=np.float32).reshape(2000, 2)
    whole, own = _devices.Watched(table), _devices.Watched(table)
    expected = _devices.fed_batches(on_device(), _devices.hosted_source(whole), 20)
    source = _devices.hosted_source(own)
    drawn = {int(row) // 2 for row in np.asarray(source(0)["rows"]["inputs"])[:, 0]}
    seen = _devices.fed_batches(resolve("auto", shardings=_devices.rows_split), source, 20)
    for batch, wanted in zip(seen, expected, strict=True):
        for name in source.names:
            assert _same(batch[name], wanted[name], name)
    # The batch of the first step was asked for whole, for its shapes.
    index = jax.process_index()
    mine = {int(row) // 2 for batch in expected for row in batch["rows"]["inputs"][8 * index :][:8, 0]}
    print("own" if own.read == mine | drawn else "others too", len(whole.read) > len(own.read))
    _filled_up()


def _filled_up() -> None:
    """The same of batches that the devices cannot share, filled up and masked."""
    from phijax_rng.devices.placement import resolve
    from tests import _devices

    placed = resolve("auto", shardings=_devices.rows_split, uneven="pad")
    index = jax.process_index()
    assert placed.shares.local_rows(13).tolist() == list([range(8), range(8, 13)][index])
    assert placed.shares.local_rows(3).tolist() == [[0, 1, 2], [2]][index]
    source = _devices.uneven_source(hosted=True)
    seen, _ = _devices.masked_batches(placed, source, 5)
    for step, kept in enumerate(seen):
        for name, rows in jax.tree.map(np.asarray, source(step)).items():
            size = len(rows["inputs"])
            places = np.minimum(np.arange(placed.shares.filled(size)), size - 1)
            filled = {field: array[places] for field, array in rows.items()}
            assert _same(kept["batches"][name], filled, name), (step, name)
            counts = np.arange(len(places)) < size
            for shard in kept["mask"][name].addressable_shards:
                assert np.asarray(shard.data).tolist() == counts[shard.index].tolist()
    print("filled up")


def _same(batch: Any, wanted: Any, name: str) -> bool:
    """Whether this process's rows of a batch are those of the whole batch."""
    ulp = 4 if name == "normal" else 0
    for field, rows in batch.items():
        for shard in rows.addressable_shards:
            own, other = np.asarray(shard.data), np.asarray(wanted[field])[shard.index]
            words = own.view(np.int32).astype(np.int64) - other.view(np.int32)
            if np.abs(words).max() > ulp:
                return False
    return True


def _refused(call: Any) -> None:
    try:
        print("not refused", call())
    except Exception as error:
        print(type(error).__name__, error)


class _Board:
    """A run of Weights & Biases as a logger sees it; each process would write a file of its own."""

    def __init__(self, folder: Path):
        self._path = folder / f"board-{jax.process_index()}"

    def log(self, numbers: Any, step: int) -> None:
        with self._path.open("a") as file:
            print(step, sorted(numbers), file=file)


def watched(folder: str) -> None:
    """A run that is balanced, adaptive, evaluated, logged and stopped early; resumed, and in one go."""
    from phijax_rng import Checkpoints, CSVHistory
    from phijax_rng.callbacks import TensorBoardLogger, WandbLogger
    from tests import _devices

    remembered, save = [], Checkpoints.save

    def noting(self: Any, state: Any, contract: Any = None, memory: Any = None) -> None:
        # Each process has its own clock, and no number depends on it.
        remembered.append({name: part for name, part in memory.items() if name not in ("seconds", "timing")})
        save(self, state, contract, memory)

    Checkpoints.save = noting
    digests = []
    for name, stops in (("whole", (40,)), ("again", (6, 40))):
        own = Path(folder) / name
        own.mkdir(exist_ok=True)
        for stop in stops:
            logs = (
                CSVHistory(own / "history.csv", every_n_steps=2),
                TensorBoardLogger(own / "events", every_n_steps=2),
                WandbLogger(_Board(own), every_n_steps=2),
            )
            result, checkpoints = _devices.watched_fit(
                "gradnorm", stop, folder=own / "run", callbacks=logs, devices="auto", progress=False
            )
        digests.append(_devices.digest_of(result.state))
    print(
        json.dumps({**_devices.summary(result), "best": checkpoints.best_step, "on disk": checkpoints.steps})
    )
    rows = json.dumps(remembered, sort_keys=True, default=lambda table: table.plain())
    print(rows.replace("again", "whole"))
    print(digests)


def matrix(folder: str, *saved: str) -> None:
    """Goes on, on two processes, from what was saved elsewhere; without `saved`, saves."""
    from phijax_rng import Checkpoints
    from tests import _devices

    if not saved:
        whole = _devices.fit(12, devices="auto")[0].state
        _devices.fit(5, devices="auto", directory=folder)
        print(_devices.digest_of(whole))
    for name in saved:
        result, told = _devices.fit(12, devices="auto", directory=f"{folder}/{name}")
        changes = Checkpoints(f"{folder}/{name}").contract()["run"]["changes"]
        assert all("machine.processes" in text for text in told), told
        assert len(told) == (0 if jax.process_index() else len(changes)), "the first process tells"
        level = changes[-1]["survives"] if changes else "exact"
        model = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(result.state.model_state)]
        print(name, level, len(changes), _devices.digest_of(result.state), repr(model), sep="|")


def clocks(told: str) -> None:
    """A run in which the clocks of the processes disagree, about chunks and about saves."""
    from phijax_rng.devices import processes
    from phijax_rng.training.loop import Pace
    from tests import _devices

    index = jax.process_index()
    Pace.next_count = lambda self, bound: min(bound, 3 + 2 * index)
    if told == "apart":
        processes.broadcast = lambda *values: tuple(map(int, values))
    print("fitting", flush=True)
    result, _ = _devices.fit(30, devices="auto")
    print("done", _devices.digest_of(result.state))


def saves(folder: str) -> None:
    """The second process alone finds its saves due; nothing is saved but the end."""
    from phijax_rng import Checkpoints
    from tests import _devices

    def due(self: Any, step: int) -> bool:
        return jax.process_index() == 1

    Checkpoints.is_due = due
    _devices.fit(9, devices="auto", directory=folder, chunk_size=3)
    print(Checkpoints(folder).steps)


def limits(folder: str, seconds: str = "0") -> None:
    """The first process prepares the data, and its clock alone ends the run; printed."""
    import time

    from phijax_rng import HostPool, PoolDataModule, Trainer
    from phijax_rng.trainer import signals
    from tests import _problems

    index = jax.process_index()
    signals.time.monotonic = lambda: 1000.0 + (10.0 * calls[0] if index == 0 else 0)
    calls = [0]

    class Prepared(PoolDataModule):
        def prepare_data(self) -> None:
            time.sleep(float(seconds))
            (Path(folder) / f"prepared by {index}").touch()
            if (Path(folder) / "broken").exists():
                raise OSError("no such host")

        def setup(self, stage: str) -> None:
            print("prepared:", sorted(path.name for path in Path(folder).iterdir()))

    class Tick:
        every_n_steps = 1

        def __call__(self, event: Any) -> None:
            calls[0] += 1

    problem = _problems.dropout()
    rows = np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 2)
    data = Prepared({"data": HostPool(rows, rows[:, :1])}, {"data": 8})
    trainer = Trainer(100, max_time=45, callbacks=[Tick()], chunk_size=2, devices="auto", progress=False)
    arguments = {**problem.arguments, "datamodule": data}
    result = trainer.fit(problem.module, seed=0, **arguments)
    print("ended", int(result.state.step), result.interrupted)
    (Path(folder) / "broken").touch()
    _refused(lambda: trainer.fit(problem.module, seed=0, **arguments))


def long_run(folder: str, stop: str) -> None:
    """A run that is meant to be stopped from outside; prints a line at every look, in one process."""
    from phijax_rng.callbacks import progress
    from tests import _devices

    progress._SECONDS_BETWEEN_LINES = (0.0, 0.0)
    sys.stderr = sys.stdout
    result, told = _devices.fit(
        int(stop), devices="auto", directory=folder, every_n_steps=20, chunk_size=4, progress=True
    )
    assert not told, told
    whole = _devices.fit(int(stop), devices="auto")[0].state
    same = _devices.digest_of(result.state) == _devices.digest_of(whole)
    print("done", int(result.state.step), "the bits of an uninterrupted run" if same else "other bits")


if __name__ == "__main__":
    index, port, function, *arguments = sys.argv[1:]
    without_notes()
    # Before they meet: the transport gives up on a process that comes 30 seconds after the first.
    importlib.import_module("tests._devices")

    join(int(index), int(port), HEARTBEAT_SECONDS if function == long_run.__name__ else 250)
    globals()[function](*arguments)
