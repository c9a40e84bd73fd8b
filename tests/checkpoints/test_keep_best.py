"""The newest steps to go on from, the best to use."""

import jax
import pytest

from phijax_rng import Checkpoints, Trainer
from phijax_rng.checkpoints.keep_best import KeepBest
from phijax_rng.checkpoints.writer import dropped
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal

HEAT = _problems.heat()

NAN = float("nan")
VALUES = {2: 3.0, 3: -9.0, 4: 1.0, 6: NAN, 8: 1.0, 10: 2.0, 12: float("inf")}


@pytest.mark.parametrize(
    ("options", "best"),
    [
        (("loss", 1), [4]),
        (("loss", 3), [4, 8, 10]),
        (("loss", 9), [4, 8, 10, 2]),
        (("loss", 2, "max"), [2, 10]),
    ],
)
def test_the_best_are_the_least_finite_and_the_earlier_of_two_equals(options, best):
    assert KeepBest.checked(options, 2).best(VALUES) == best


@pytest.mark.parametrize(("end", "best"), [({13: 0.5}, 13), ({13: 1.0}, 4), ({13: NAN}, 4), ({12: 0.5}, 12)])
def test_the_end_of_a_run_competes_whatever_its_step(end, best):
    assert KeepBest.checked(("loss", 1), 2).best(VALUES, end) == [best]


@pytest.mark.parametrize(
    ("max_to_keep", "best", "gone"),
    [(1, [2], [4, 6]), (2, [2, 4], []), (9, [], []), (None, [], []), (1, [], [2, 4, 6]), (2, [8], [2, 4])],
)
def test_steps_neither_new_nor_best_are_deleted(max_to_keep, best, gone):
    assert dropped((2, 4, 6, 8), max_to_keep, best) == gone


STATE = _problems.heat().state()


def save(checkpoints, step, value, name="loss"):
    memory = None if value is None else {"metrics": {name: value}}
    checkpoints.save(STATE.replace(step=STATE.step + step), memory=memory)
    checkpoints.wait()


def test_the_newest_stays_however_bad_it_is(tmp_path):
    with Checkpoints(tmp_path, every_n_steps=1, max_to_keep=1, keep_best=("loss", 1)) as checkpoints:
        for step, value in enumerate([5.0, 3.0, 4.0, None, NAN]):
            save(checkpoints, step, value)
        assert checkpoints.steps == (1, 4)
        assert checkpoints.best_step == 1
        save(checkpoints, 5, 2.0)
        assert checkpoints.steps == (5,)
        save(checkpoints, 6, 1.0, name="another")
        assert checkpoints.steps == (5, 6)


def test_a_resumed_process_knows_the_best_of_those_before(tmp_path):
    options = {"every_n_steps": 1, "max_to_keep": 1, "keep_best": ("loss", 2)}
    for step, value in enumerate([3.0, 1.0, 5.0, 2.0, 4.0]):
        with Checkpoints(tmp_path, **options) as checkpoints:
            save(checkpoints, step, value)
    assert checkpoints.steps == (1, 3, 4)
    assert Checkpoints(tmp_path).best_step == 1  # read from the documents, without the options


def test_steps_that_are_set_aside_and_saved_again_are_read_again(tmp_path):
    with Checkpoints(tmp_path, every_n_steps=1, max_to_keep=1, keep_best=("loss", 1)) as checkpoints:
        for step, value in ((1, 2.0), (2, 1.0)):
            save(checkpoints, step, value)
        assert checkpoints.best_step == 2
        checkpoints.supersede_after(0)
        save(checkpoints, 2, 9.0)
        save(checkpoints, 3, 8.0)
        assert checkpoints.steps == (3,)


def test_a_state_saved_by_hand_remembers_what_it_is_given(tmp_path):
    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(STATE, {"a": 1}, {"callbacks": {"x": [1.5, "two", None]}})
        checkpoints.save(STATE.replace(step=STATE.step + 1))
    assert checkpoints.memory(0) == {"callbacks": {"x": [1.5, "two", None]}}
    assert checkpoints.contract(0) == {"a": 1}
    assert checkpoints.memory() == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"keep_best": "loss"},
            TypeError,
            "keep_best must be (metric, k) or (metric, k, 'max'), got 'loss'. "
            "Pass, for example, ('total_loss', 3).",
        ),
        (
            {"keep_best": ("loss", 0)},
            ValueError,
            "keep_best[1] must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        (
            {"keep_best": ("loss", 1, "low")},
            ValueError,
            "keep_best[2] must be one of 'min', 'max', got 'low'. Pick one of them.",
        ),
        (
            {"keep_best": ("loss", 1), "every_n_steps": None},
            ValueError,
            "keep_best compares saves at multiples of every_n_steps, which is None. Pass it too.",
        ),
    ],
    ids=["no tuple", "none", "mode", "no saves that compete"],
)
def test_options_are_checked_at_construction(tmp_path, options, error, message):
    with pytest.raises(error) as caught:
        Checkpoints(tmp_path, **{"every_n_steps": 1} | options)
    assert str(caught.value) == message


def test_a_metric_that_no_save_has_raises_after_the_save(tmp_path):
    checkpoints = Checkpoints(tmp_path, every_n_steps=2, keep_best=("total_los", 1))

    def reports_nothing(event):
        """A callback that might report the number, since it does not say that it will not."""

    reports_nothing.every_n_steps = 2
    trainer = Trainer(8, checkpoints=checkpoints, callbacks=(reports_nothing,), progress=False)
    with pytest.raises(ValueError, match=r"^keep_best compares 'total_los', and the numbers of step 2 are "):
        trainer.fit(HEAT.module, seed=0, **HEAT.arguments)
    assert Checkpoints(tmp_path).steps == (2,)


def test_the_newest_rule_decides_for_a_reader_without_one(tmp_path):
    numbers = {2: (1.0, 0.5), 4: (2.0, 0.9), 6: (3.0, 0.7)}
    for step, (loss, accuracy) in numbers.items():
        rule = ("loss", 1) if step < 6 else ("accuracy", 1, "max")
        with Checkpoints(tmp_path, every_n_steps=2, max_to_keep=None, keep_best=rule) as checkpoints:
            checkpoints.save(
                STATE.replace(step=STATE.step + step),
                memory={"metrics": {"loss": loss, "accuracy": accuracy}},
            )
        reader = Checkpoints(tmp_path)
        assert reader.best_step == (2 if step < 6 else 4)
    assert reader.existing("best") == 4
    assert reader.memory("best")["metrics"] == {"loss": 2.0, "accuracy": 0.9}
    assert int(reader.restore(STATE, "best").step) == 4
    # The rule of this object goes first.
    assert Checkpoints(tmp_path, every_n_steps=2, keep_best=("loss", 1)).best_step == 2
    assert Checkpoints(tmp_path, every_n_steps=4, keep_best=("loss", 1)).best_step == 4


def test_what_has_no_best_step_says_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in "):
        Checkpoints(tmp_path).existing("best")
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 3, 1.0)
    with pytest.raises(ValueError) as caught:
        Checkpoints(tmp_path).existing("best")
    assert str(caught.value) == (
        f"no step in {tmp_path} is the best: none was saved with keep_best. Pass a number, for example 3, or "
        "Checkpoints(..., keep_best=(metric, k)) with a number that was recorded."
    )
    with pytest.raises(ValueError) as caught:
        Checkpoints(tmp_path, every_n_steps=3, keep_best=("error", 1)).existing("best")
    assert str(caught.value) == (
        f"no step in {tmp_path} is the best: keep_best compares 'error', and steps 3 have no finite number "
        "of this name. Pass one of these steps."
    )
    with pytest.raises(ValueError, match=r"^step must be one of 'best', got 'newest'\. Pick one of them\.$"):
        Checkpoints(tmp_path).existing("newest")


def test_every_array_can_be_read_without_a_state_to_compare_with(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(STATE)
    arrays = Checkpoints(tmp_path).arrays()
    assert tuple(arrays) == Checkpoints(tmp_path).paths()
    leaves = {jax.tree_util.keystr(path)[1:]: leaf for path, leaf in jax.tree.leaves_with_path(STATE)}
    assert_trees_bitwise_equal(arrays, {path: leaves[path] for path in arrays})
    assert set(leaves) == set(arrays)
