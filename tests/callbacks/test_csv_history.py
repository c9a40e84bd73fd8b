"""The CSV file is that of an uninterrupted run, whatever a killed process left of it."""

import dataclasses
import os
from pathlib import Path

import pytest

from phijax_rng import CSVHistory, Evaluate, Trainer
from phijax_rng.callbacks.history import History
from phijax_rng.callbacks.protocol import adapt_callbacks
from phijax_rng.callbacks.runner import CallbackRunner
from tests import _problems
from tests.callbacks._events import make_event

HEAT = _problems.heat()


def table(history):
    return "".join([history.csv_header(), *(history.csv_row(i) for i in range(len(history)))]).encode()


def rows(stop, start=0):
    history = History()
    for step in range(1, stop + 1):
        history.add(step, {"loss": 1 / step, **({"extra": step} if step > 6 else {})})
    return history


def watch(path, history, step, remembered=()):
    """One call at this step by a fresh process; returns the memories after it."""
    watchers = CallbackRunner(adapt_callbacks((CSVHistory(path, every_n_steps=1),)), dict(remembered))
    watchers.call(make_event(step, history=history))
    return watchers.memories()


def test_the_file_is_the_history(tmp_path):
    path = tmp_path / "deep" / "history.csv"
    trainer = Trainer(
        7,
        callbacks=(Evaluate(lambda m: {"one": 1}, every_n_steps=3), CSVHistory(path, every_n_steps=3)),
        progress=False,
        log_every_n_steps=2,
    )
    result = trainer.fit(HEAT.module, seed=0, **HEAT.arguments)
    lines = path.read_text().splitlines()
    means = "mean/total_loss,mean/pde,mean/initial,mean/boundary"
    assert lines[0] == f"step,total_loss,pde,initial,boundary,{means},evaluation/one"
    assert [line.split(",")[0] for line in lines[1:]] == ["2", "3", "4", "6", "7"]
    assert float(lines[1].split(",")[1]) == result.history[0]["total_loss"]
    assert [entry.name for entry in path.parent.iterdir()] == ["history.csv"]


def test_wall_time_and_speed_are_columns_where_they_are_asked_for(tmp_path):
    history, timing = rows(3), History()
    timing.add(2, {"seconds": 0.5})
    timing.add(3, {"seconds": 1.5, "steps_per_second": 1.0})
    watchers = CallbackRunner(
        adapt_callbacks(
            tuple(CSVHistory(tmp_path / name, every_n_steps=1, timing=name == "b") for name in "ab")
        ),
        {},
    )
    watchers.call(make_event(3, history=history, timing=timing))
    assert (tmp_path / "a").read_bytes() == table(history)
    assert (tmp_path / "b").read_text().splitlines() == [
        "step,loss,seconds,steps_per_second",
        "1,1.0,,",
        "2,0.5,0.5,",
        f"3,{1 / 3!r},1.5,1.0",
    ]


@pytest.mark.parametrize(
    "left", ["nothing", "as it was", "further rows", "half a row", "another file", "less"]
)
@pytest.mark.parametrize("cut", [1, 5, 6, 7])
def test_the_file_is_that_of_one_run_whatever_a_killed_process_left(tmp_path, left, cut):
    path, history = tmp_path / "history.csv", rows(cut)
    remembered = watch(path, history, cut)
    written = path.read_bytes()
    assert written == table(history)
    leftovers = {
        "as it was": written,
        "further rows": table(rows(9)) if cut > 6 else written + table(rows(9))[-20:],
        "half a row": written + b"8,0.",
        "another file": b"x" * (len(written) + 10),
        "less": written[:-3],
    }
    path.unlink()
    if left != "nothing":
        path.write_bytes(leftovers[left])
    watch(path, rows(9), 9, remembered)
    assert path.read_bytes() == table(rows(9))


def test_a_reader_meets_a_complete_file_at_any_time(tmp_path, monkeypatch):
    path = tmp_path / "history.csv"
    remembered = watch(path, rows(3), 3)
    synced, replaced = [], []
    fsync, replace = os.fsync, Path.replace

    def note_sync(file):
        fsync(file)
        synced.append((path.read_bytes(), (tmp_path / "history.csv.new").read_bytes()))

    def note_replace(source, target):
        assert len(synced) == 1
        replaced.append((source, target))
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    watch(path, rows(5), 5, remembered)
    assert synced == [(table(rows(3)), table(rows(5)))]
    assert replaced == [(tmp_path / "history.csv.new", path)]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "history.csv"
    remembered = watch(path, rows(3), 3)

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        watch(path, rows(5), 5, remembered)
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.csv"]
    assert path.read_bytes() == table(rows(3))


def test_a_run_of_the_version_before_continues(tmp_path):
    path, history = tmp_path / "history.csv", rows(5)
    path.write_bytes(table(history))
    callback = CSVHistory(path)
    before = {callback.name: {"rows": 4, "bytes": len(table(rows(4))), "columns": 1}}
    assert watch(path, rows(8), 8, before) == {callback.name: {"rows": 8}}
    assert path.read_bytes() == table(rows(8))


def test_every_row_is_formatted_once(monkeypatch):
    history, formatted = History(), []
    real = History.csv_row

    def note(self, index):
        formatted.append(index)
        return real(self, index)

    monkeypatch.setattr(History, "csv_row", note)
    for step in range(1, 5):
        history.add(step, {"loss": 1 / step})
        history.csv_table()
    assert formatted == [0, 0, 1, 1, 2, 2, 3]  # and the last row each time, since it may still grow
    history.add(4, {"late": 2.0})
    assert history.csv_table().splitlines() == [
        "step,loss,late",
        "1,1.0,",
        "2,0.5,",
        *(f"3,{1 / 3!r},", "4,0.25,2.0"),
    ]


@pytest.mark.parametrize("path", [3, "", b"history.csv", "history\0.csv", None])
def test_a_path_is_needed(path):
    with pytest.raises(TypeError) as caught:
        CSVHistory(path)
    assert str(caught.value) == f"path must be a path, got {path!r}. Name the file."


def test_a_file_that_is_no_history_raises_and_stays(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("my,own\n1,2\n")
    with pytest.raises(FileExistsError) as caught:
        fit_untraced(path)
    assert str(caught.value) == (
        f"{path} is not a history, and writing one would delete its content. Name another file."
    )
    assert caught.value.__notes__ == [f"raised by the callback 'CSVHistory/{path}' before the first update"]
    assert path.read_text() == "my,own\n1,2\n"


def fit_untraced(path):
    """A fit that must end before its losses are traced."""
    module = dataclasses.replace(
        HEAT.module, losses=lambda model_state, batches: pytest.fail("the losses were traced")
    )
    trainer = Trainer(4, callbacks=[CSVHistory(path, every_n_steps=2)], progress=False)
    trainer.fit(module, seed=0, **HEAT.arguments)


def test_a_path_that_cannot_be_written_is_named_before_the_first_update(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IsADirectoryError) as caught:
        fit_untraced(tmp_path)
    assert str(caught.value) == f"{tmp_path} is a directory. Name a file in it."
    with pytest.raises(NotADirectoryError) as caught:
        fit_untraced(tmp_path / "file" / "history.csv")
    assert str(caught.value) == (
        f"{tmp_path / 'file'} is not a directory, so nothing can be written below it. Name another."
    )
