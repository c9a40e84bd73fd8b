"""The history lies in files of its own, which no later save repeats and no damage hides."""

import itertools
import json
import logging

import pytest

from phijax_rng import Checkpoints, Trainer
from phijax_rng.callbacks.history import History
from phijax_rng.checkpoints import document as row_files
from phijax_rng.checkpoints.document import DOCUMENT, DOCUMENT_FILE
from phijax_rng.errors import DamagedCheckpointError, SaveError
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal

STOP, EVERY = 60, 4


def train(folder, stop=STOP, **options):
    problem = _problems.dropout()
    kept = {"max_to_keep": None, "every_n_steps": EVERY, "asynchronous": False, **options.pop("saves", {})}
    trainer = Trainer(
        stop, checkpoints=Checkpoints(folder, **kept), chunk_size=6, log_every_n_steps=1, progress=False
    )
    return trainer.fit_state(
        problem.module, problem.state(), optimizer=problem.optimizer, source=problem.source(), **options
    )


def document(folder, step):
    return json.loads((folder / str(step) / DOCUMENT / DOCUMENT_FILE).read_text())["contract"]


def named(*documents):
    return {f"{name}.jsonl" for one in documents for files in one["tables"].values() for name, *_ in files}


def on_disk(folder):
    return {path.name for path in (folder / "rows").iterdir()}


def rows_of(folder, step):
    return Checkpoints(folder).memory(step)["history"]["rows"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, train(folder)


def test_every_step_has_the_rows_up_to_it(run):
    folder, result = run
    expected = [list(row.values()) for row in result.history]
    assert [row[0] for row in expected] == list(range(1, STOP + 1))
    for step in Checkpoints(folder).steps:
        memory = Checkpoints(folder).memory(step)
        assert memory["history"]["rows"] == expected[:step]
        assert [row[0] for row in memory["timing"]["rows"]] == list(range(1, step + 1))


def test_a_save_writes_new_rows_and_few_old_ones(run):
    folder, _ = run
    sizes = [len(json.dumps(document(folder, step))) for step in (12, STOP)]
    assert sizes[1] < 1.2 * sizes[0]
    for step in Checkpoints(folder).steps:
        for files in document(folder, step)["tables"].values():
            counts = [rows for _, rows, _ in files]
            assert sum(counts) == step - 1
            assert all(before > after for before, after in itertools.pairwise(counts))
            assert len(counts) <= (step - 1).bit_length()
    written = sum(len(path.read_bytes().splitlines()) for path in (folder / "rows").iterdir())
    assert written < 2 * STOP * STOP.bit_length() < 2 * sum(range(EVERY, STOP + 1, EVERY))


def test_a_rewound_run_has_the_rows_of_one_that_was_not_and_its_old_branch_keeps_its_own(run, tmp_path):
    _, whole = run
    train(tmp_path, STOP - 10)
    again = train(tmp_path, resume=True, ckpt_step=20)
    assert again.history == whole.history
    assert_trees_bitwise_equal(again.state, whole.state)
    assert rows_of(tmp_path, STOP) == [list(row.values()) for row in whole.history]
    (left,) = (tmp_path / "superseded").glob("48-*")
    old = json.loads((left / DOCUMENT / DOCUMENT_FILE).read_text())["contract"]
    assert named(old) <= on_disk(tmp_path)
    assert len(named(old) - named(document(tmp_path, 20))) > 0


def test_a_run_that_starts_from_another_directory_has_its_rows(run, tmp_path):
    folder, whole = run
    other = train(tmp_path, ckpt_path=folder, ckpt_step=32)
    assert other.history == whole.history
    assert rows_of(tmp_path, STOP) == rows_of(folder, STOP)


@pytest.mark.parametrize("damage", ["missing", "cut", "edited"])
def test_damage_is_named_and_costs_only_the_rows_of_the_file(run, tmp_path, damage, caplog):
    _, whole = run
    train(tmp_path, 40)
    (name, count, last), *others = document(tmp_path, 40)["tables"]["history"]
    assert others
    path = tmp_path / "rows" / f"{name}.jsonl"
    if damage == "missing":
        path.unlink()
    else:
        text = path.read_bytes()
        path.write_bytes(text[:-1] if damage == "cut" else text.replace(b"1", b"2", 1))
    with pytest.raises(DamagedCheckpointError, match=f"{name}.jsonl with {count} rows"):
        Checkpoints(tmp_path).memory(40)
    # The state has nothing to do with it.
    problem = _problems.dropout()
    assert_trees_bitwise_equal(Checkpoints(tmp_path).restore(problem.state(), 40), problem.run(40))
    with caplog.at_level(logging.WARNING, "phijax_rng"):
        resumed = train(tmp_path, resume=True)
    assert f"{name}.jsonl" in caplog.text
    assert "without these rows" in caplog.text
    assert_trees_bitwise_equal(resumed.state, whole.state)
    assert resumed.history == whole.history[last:]
    assert [row[0] for row in rows_of(tmp_path, STOP)] == list(range(last + 1, STOP + 1))


def test_files_that_no_step_names_are_deleted_where_there_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_MANY_FILES", 0)
    result = train(tmp_path, saves={"max_to_keep": 2})
    checkpoints = Checkpoints(tmp_path)
    assert len(checkpoints.steps) == 2
    assert on_disk(tmp_path) == named(*(document(tmp_path, step) for step in checkpoints.steps))
    assert rows_of(tmp_path, checkpoints.steps[0]) == [list(r.values()) for r in result.history][:-EVERY]


def test_nothing_is_deleted_where_a_document_cannot_be_read(tmp_path, monkeypatch):
    train(tmp_path, 20)
    before = on_disk(tmp_path)
    (tmp_path / "8" / DOCUMENT / DOCUMENT_FILE).write_text("{")
    monkeypatch.setattr(row_files, "_MANY_FILES", 0)
    monkeypatch.setattr("phijax_rng.checkpoints.directory._PAUSES", (0.0,) * 3)
    run_directory = Checkpoints(tmp_path)
    run_directory._row_files.delete_unnamed(run_directory._run.all_documents)
    assert on_disk(tmp_path) == before


# Writers of the arrays find their folder removed.
@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
def test_rows_that_cannot_be_written_fail_the_save_and_leave_the_steps_before(tmp_path, monkeypatch):
    train(tmp_path, 20)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_files.RowFiles, "write", full)
    with pytest.raises(SaveError, match=r"step 2\d could not be saved"):
        train(tmp_path, resume=True)
    monkeypatch.undo()
    assert Checkpoints(tmp_path).latest_step == 20
    assert [row[0] for row in rows_of(tmp_path, 20)] == list(range(1, 21))


def test_files_of_another_table_are_not_continued():
    history = History()
    for step in range(1, 8):
        history.add(step, {"loss": 1 / step})
    _, files, new = row_files.split(history.snapshot(), [])
    assert files == [[next(iter(new)), 6, 6]]
    history.add(8, {"loss": 0.0})
    kept, more, text = row_files.split(history.snapshot(), files)
    assert [rows for _, rows, _ in more] == [6, 1]
    assert list(text.values()) == [b"[7,0.14285714285714285]\n"]
    assert kept == {"names": ["loss"], "rows": [[8, 0.0]]}
    # The control: the same numbers of rows, which end at another step.
    _, all_new, _ = row_files.split(history.snapshot(), [[files[0][0], 6, 5]])
    assert [rows for _, rows, _ in all_new] == [7]
