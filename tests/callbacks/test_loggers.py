"""TensorBoard and Weights & Biases get every row once, after a kill and a resume too."""

import dataclasses
import struct
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event as Record

from phijax_rng import Checkpoints, Evaluate, Trainer
from phijax_rng.callbacks import TensorBoardLogger, WandbLogger
from phijax_rng.callbacks.history import History
from phijax_rng.callbacks.protocol import adapt_callbacks
from phijax_rng.callbacks.runner import CallbackRunner
from tests import _problems
from tests.callbacks._events import make_event

HEAT = _problems.heat()
UNTRACED = dataclasses.replace(
    HEAT.module, losses=lambda model_state, batches: pytest.fail("the losses were traced")
)


def scalars(folder):
    """What TensorBoard shows of the event files: (name, step) -> value, withdrawn steps left out."""
    shown = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            record = Record.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if record.HasField("session_log"):
                shown = {place: value for place, value in shown.items() if place[1] < record.step}
            for value in record.summary.value:
                assert (value.tag, record.step) not in shown, "shown twice"
                shown[value.tag, record.step] = value.simple_value
    return shown


def rows(stop):
    history = History()
    for step in range(2, stop + 1, 2):
        history.add(step, {"loss": 1 / step, "evaluation/error": float(step)})
    return history


def expected(stop):
    return {(name, step) for step in range(2, stop + 1, 2) for name in ("loss", "evaluation/error")}


def test_tensorboard_shows_the_history_of_a_fit(tmp_path):
    logger = TensorBoardLogger(tmp_path / "board", every_n_steps=3)
    trainer = Trainer(
        7, callbacks=(Evaluate(lambda m: {"one": 1}), logger), progress=False, log_every_n_steps=2
    )
    for _ in range(2):  # a second fit starts afresh and writes another file
        result = trainer.fit(HEAT.module, seed=0, **HEAT.arguments)
        shown = scalars(tmp_path / "board")
        assert {step for _, step in shown} == {2, 4, 6, 7}
        for row in result.history:
            # The row of the evaluation at the end has no mean: it is no logged one.
            for name in {"total_loss", "mean/total_loss"} & set(row):
                assert shown[name, row["step"]] == pytest.approx(row[name], rel=1e-6)
            assert shown["steps_per_second", row["step"]] > 0


def test_tensorboard_shows_no_step_twice_after_a_kill(tmp_path):
    killed = CallbackRunner(adapt_callbacks((TensorBoardLogger(tmp_path, every_n_steps=1),)), {})
    killed.call(make_event(4, history=rows(4)))
    saved = killed.memories()
    # It continued after its last save. (Only closing a file is sure to write it.)
    killed.finish(make_event(8, history=rows(8)))
    assert {*scalars(tmp_path)} == expected(8)
    resumed = CallbackRunner(adapt_callbacks((TensorBoardLogger(tmp_path, every_n_steps=1),)), saved)
    resumed.call(make_event(5, history=rows(5)))
    resumed.finish(make_event(6, history=rows(6)))
    assert {*scalars(tmp_path)} == expected(6)


def test_a_logger_that_is_added_later_begins_with_the_rows_so_far(tmp_path):
    CallbackRunner(adapt_callbacks((TensorBoardLogger(tmp_path, every_n_steps=1),)), {}).finish(
        make_event(6, history=rows(6))
    )
    assert {*scalars(tmp_path)} == expected(6)


class FakeRun:
    def __init__(self):
        self.rows, self.finished = [], 0

    def log(self, numbers, step):
        self.rows.append((step, numbers))

    def finish(self):
        self.finished += 1


def test_wandb_gets_every_row_at_its_step(tmp_path):
    run, checkpoints = FakeRun(), Checkpoints(tmp_path)
    for stop in (5, 9):
        trainer = Trainer(
            stop,
            callbacks=(WandbLogger(run, every_n_steps=2),),
            checkpoints=checkpoints,
            progress=False,
            log_every_n_steps=2,
        )
        result = trainer.fit(HEAT.module, seed=0, **HEAT.arguments, resume="auto")
    # The last row before a stop is sent again, complete; Weights & Biases passes over it.
    assert [step for step, _ in run.rows] == [2, 4, 4, 6, 8]
    expected = {**result.history[2], **result.timing[2]}
    assert run.rows[3][1] == {name: v for name, v in expected.items() if name != "step"}
    assert run.rows[3][1]["seconds"] > 0
    assert run.finished == 0  # it is its owner's to finish


def test_a_wandb_run_that_the_logger_starts_is_finished_with_the_fit(monkeypatch):
    begun = []

    class Module:
        @staticmethod
        def init(**options):
            begun.append((FakeRun(), options))
            return begun[-1][0]

    monkeypatch.setitem(sys.modules, "wandb", Module)
    logger = WandbLogger(every_n_steps=2, project="heat", mode="offline")
    trainer = Trainer(4, callbacks=(logger,), progress=False, log_every_n_steps=1)
    for count in (1, 2):
        trainer.fit(HEAT.module, seed=0, **HEAT.arguments)
        run, options = begun[-1]
        assert (len(begun), run.finished, len(run.rows)) == (count, 1, 4)
        assert options == {"project": "heat", "mode": "offline"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TensorBoardLogger("logs"),
            "TensorBoardLogger needs tensorboardX. Install phijax-rng[tensorboard].",
        ),
        (WandbLogger, "WandbLogger needs wandb. Install phijax-rng[wandb]."),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, make, message):
    for name in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as caught:
        Trainer(4, callbacks=[make()], progress=False).fit(UNTRACED, seed=0, **HEAT.arguments)
    assert str(caught.value) == message


def test_a_directory_that_cannot_be_made_is_named_before_the_first_update(tmp_path):
    (tmp_path / "file").write_text("")
    logger = TensorBoardLogger(tmp_path / "file" / "board")
    with pytest.raises(NotADirectoryError) as caught:
        Trainer(4, callbacks=[logger], progress=False).fit(UNTRACED, seed=0, **HEAT.arguments)
    assert str(caught.value) == (
        f"{tmp_path / 'file'} is not a directory, so nothing can be written below it. Name another."
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TensorBoardLogger(3),
            "directory must be a path, got 3. Name where the event files go.",
        ),
        (
            lambda: WandbLogger(3),
            "run must have a method log(data, step), got 3. Pass what wandb.init returns.",
        ),
        (
            lambda: WandbLogger(FakeRun),
            "run must be an object, got the class FakeRun. Call it: FakeRun(...).",
        ),
        (
            lambda: WandbLogger(FakeRun(), project="x"),
            "run excludes options of wandb.init, got 'project' too. Pass one of the two.",
        ),
    ],
)
def test_settings_are_checked_at_construction(make, message):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == message


def test_the_real_wandb_takes_the_rows(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; it is an extra")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="heat", mode="offline", dir=tmp_path) as run:
        CallbackRunner(adapt_callbacks((WandbLogger(run),)), {}).finish(make_event(6, history=rows(6)))
        assert run.step == 6
