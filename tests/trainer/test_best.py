"""The best state as the result: from the checkpoints, or from a copy in memory, and the same on a resume."""

import pytest

from phijax_rng import Checkpoints, EarlyStopping, Trainer
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full

HEAT = _problems.heat()
NUMBERS = {2: 5.0, 4: 3.0, 6: 4.0, 7: 3.5, 8: 3.0, 10: 6.0, 12: 7.0}


def tell(event):
    """The number of a step, however the model is."""
    event.report({"number": numbers[event.step]})


tell.every_n_steps, tell.at_end = 2, True
numbers = dict(NUMBERS)


def fit(
    stop, folder=None, *, patience=2, mode="min", restore_best=True, keep_best=True, resume="auto", **words
):
    checkpoints = None
    if folder is not None:
        rule = ("number", 1, mode) if keep_best else None
        checkpoints = Checkpoints(folder, every_n_steps=2, max_to_keep=1, keep_best=rule, asynchronous=False)
    stopping = EarlyStopping(
        "number", patience=patience, mode=mode, every_n_steps=2, restore_best=restore_best, **words
    )
    trainer = Trainer(stop, callbacks=(tell, stopping), checkpoints=checkpoints, progress=False)
    return trainer.fit(HEAT.module, seed=0, **HEAT.arguments, **({"resume": resume} if folder else {}))


@pytest.mark.parametrize("with_folder", [False, True], ids=["memory", "checkpoints"])
def test_the_result_has_the_best_state_and_its_numbers(tmp_path, with_folder):
    folder = tmp_path if with_folder else None
    result = fit(12, folder)
    assert (result.stopped_early, result.iterations) == (True, 8)
    assert_trees_bitwise_equal(result.state, HEAT.run(4))
    assert result.metrics["number"] == 3.0
    row = next(row for row in fit(4, restore_best=False).history if row["step"] == 4)
    assert result.metrics["total_loss"] == row["total_loss"]
    # Control: the last state, which is what is saved.
    last = fit(12, restore_best=False)
    assert (int(last.state.step), last.metrics["number"]) == (8, 3.0)
    assert first_difference(last.state, result.state) is not None
    if with_folder:
        assert Checkpoints(folder).steps == (4, 8)
        assert_trees_bitwise_equal(Checkpoints(folder).restore(last.state), last.state)


@pytest.mark.parametrize("cut", mostly_full([2, 4, 6, 7], everyday=[7]))
def test_a_resumed_run_has_the_result_of_one_that_was_never_stopped(tmp_path, cut):
    straight = fit(12, tmp_path / "straight")
    fit(cut, tmp_path / "cut")
    resumed = fit(12, tmp_path / "cut")
    assert_trees_bitwise_equal(resumed.state, straight.state)
    assert (resumed.metrics, resumed.history) == (straight.metrics, straight.history)
    again = fit(12, tmp_path / "cut")
    assert again.iterations == 0
    assert_trees_bitwise_equal(again.state, straight.state)


@pytest.mark.parametrize("with_folder", [False, True], ids=["memory", "checkpoints"])
@pytest.mark.parametrize(
    ("stop", "mode", "best"),
    mostly_full([(6, "min", 4), (7, "max", 2), (12, "max", 12), (7, "min", 4)], everyday=[(7, "max", 2)]),
)
def test_a_run_that_reaches_its_last_step_restores_the_best_too(tmp_path, with_folder, stop, mode, best):
    result = fit(stop, tmp_path if with_folder else None, patience=9, mode=mode)
    assert (int(result.state.step), result.stopped_early) == (best, False)
    assert_trees_bitwise_equal(result.state, HEAT.run(best))


@pytest.mark.parametrize("with_folder", [False, True], ids=["memory", "checkpoints"])
def test_the_end_may_be_the_best(tmp_path, with_folder, monkeypatch):
    monkeypatch.setitem(numbers, 7, 0.5)
    result = fit(7, tmp_path if with_folder else None)
    assert (int(result.state.step), result.metrics["number"]) == (7, 0.5)


@pytest.mark.parametrize("with_folder", [False, True], ids=["memory", "checkpoints"])
def test_without_a_finite_number_the_state_is_the_last_one(tmp_path, with_folder, monkeypatch, caplog):
    for step in numbers:
        monkeypatch.setitem(numbers, step, float("nan"))
    result = fit(4, tmp_path if with_folder else None, patience=9)
    assert int(result.state.step) == 4
    assert caplog.messages == ["no step has a finite 'number', so the state is the last one"]


def test_a_run_that_fails_has_its_last_state():
    def fail(event):
        raise RuntimeError("no")

    fail.every_n_steps = 6
    stopping = EarlyStopping("number", every_n_steps=2, restore_best=True)
    with pytest.raises(RuntimeError) as caught:
        Trainer(12, callbacks=(tell, stopping, fail), progress=False).fit(
            HEAT.module, seed=0, **HEAT.arguments
        )
    assert int(caught.value.result.state.step) == 6


@pytest.mark.full
def test_a_run_that_goes_back_to_its_best_step_repeats_its_bits(tmp_path):
    first = fit(12, tmp_path, restore_best=False)
    back = fit(12, tmp_path, restore_best=False, resume="best")
    assert (int(first.state.step), back.iterations) == (8, 4)
    assert_trees_bitwise_equal(back.state, first.state)
    assert (back.history, back.metrics) == (first.history, first.metrics)
    assert sorted(entry.name for entry in (tmp_path / "superseded").iterdir()) == ["8-0"]
    # Another run may start there too, and draws on from the same step.
    saves = Checkpoints(tmp_path / "other", asynchronous=False)
    other = Trainer(8, checkpoints=saves, progress=False).fit(
        HEAT.module, seed=0, **HEAT.arguments, ckpt_path=tmp_path, ckpt_step="best"
    )
    assert other.iterations == 4
    assert_trees_bitwise_equal(other.state, first.state)


def test_checkpoints_that_do_not_keep_it_are_refused(tmp_path):
    with pytest.raises(ValueError) as caught:
        fit(4, tmp_path, keep_best=False)
    assert str(caught.value) == (
        "restore_best takes the best step from the checkpoints, and keep_best is None. "
        "Pass Checkpoints(..., keep_best=('number', 1, 'min'))."
    )
    saves = Checkpoints(tmp_path, every_n_steps=2, keep_best=("number", 3, "max"))
    with pytest.raises(ValueError, match=r"and keep_best is \('number', 3, 'max'\)\. Pass"):
        Trainer(4, callbacks=(EarlyStopping("number", restore_best=True),), checkpoints=saves)


def test_one_result_has_one_best_state():
    with pytest.raises(ValueError) as caught:
        Trainer(4, callbacks=[EarlyStopping(name, restore_best=True) for name in ("a", "b")])
    assert str(caught.value) == (
        "restore_best is set for 'a' and for 'b', and a result has one state. Pass it to one EarlyStopping."
    )
