"""When callbacks are called: at their steps, where their number is there, and at the end of a run."""

import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import Checkpoints, EarlyStopping, Evaluate, Trainer, keys
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference

HEAT = _problems.heat()


def fit(stop, *callbacks, folder=None, saves=None, resume="auto", **options):
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(folder, **{"asynchronous": False, "max_to_keep": None, **(saves or {})})
    trainer = Trainer(
        stop,
        callbacks=callbacks,
        checkpoints=checkpoints,
        progress=False,
        **{"log_every_n_steps": 4} | options,
    )
    words = {} if folder is None else {"resume": resume}
    return trainer.fit(HEAT.module, seed=0, **HEAT.arguments, **words)


def weight(model_state, key):
    return {"weight": jnp.sum(model_state["output"]["kernel"]), "draw": jax.random.uniform(key)}


def reported(result, name="evaluation/weight"):
    return {row["step"]: row[name] for row in result.history if name in row}


class Count:
    """Counts its calls in its memory, and reports the count."""

    def __init__(self, every_n_steps=None, *, name="count", at_end=True):
        self.every_n_steps, self.name, self.at_end, self.steps = every_n_steps, name, at_end, []

    def __call__(self, event):
        self.steps.append(event.step)
        event.memory["count"] = event.memory.get("count", 0) + 1
        event.report({self.name: event.memory["count"]})


# The end of a run


@pytest.mark.parametrize(("every", "steps"), [(None, [10]), (4, [4, 8, 10]), (5, [5, 10]), (300, [10])])
def test_an_evaluation_sees_the_final_model_once(every, steps):
    result = fit(10, Evaluate(weight, every_n_steps=every))
    assert list(reported(result)) == steps
    final = HEAT.run(10)
    assert result.metrics["evaluation/weight"] == float(jnp.sum(final.model_state["output"]["kernel"]))
    own = keys.stream(final.balancer_key, "callback", "evaluation", "evaluation")
    assert result.metrics["evaluation/draw"] == float(jax.random.uniform(keys.fold_in(own, 10)))
    assert result.history[-1]["total_loss"] == result.metrics["total_loss"]
    assert_trees_bitwise_equal(result.state, final)


def test_a_finished_run_that_is_started_again_evaluates_nothing(tmp_path):
    count = Count()
    first = fit(10, Evaluate(weight), count, folder=tmp_path)
    with _problems.compilations() as compiled:
        again = fit(10, Evaluate(weight), count, folder=tmp_path)
    assert (again.iterations, compiled, count.steps) == (0, [], [10])
    assert (again.metrics, again.history) == (first.metrics, first.history)
    # One that is added later is called, since it has not been.
    later = Count(name="later")
    added = fit(10, Evaluate(weight), count, later, folder=tmp_path)
    assert (added.metrics, count.steps) == ({**first.metrics, "later": 1.0}, [10])


@pytest.mark.parametrize("cut", [6, 8])
def test_a_run_that_goes_on_is_as_if_it_had_not_ended(tmp_path, cut):
    def callbacks():
        return Evaluate(weight, every_n_steps=4), Count(3), EarlyStopping("evaluation/weight", patience=9)

    straight = fit(12, *callbacks(), folder=tmp_path / "straight")
    ended = fit(cut, *callbacks(), folder=tmp_path / "cut")
    assert max(reported(ended)) == cut
    resumed = fit(12, *callbacks(), folder=tmp_path / "cut")
    assert (resumed.history, resumed.metrics) == (straight.history, straight.metrics)
    assert_trees_bitwise_equal(resumed.state, straight.state)
    memories = [Checkpoints(tmp_path / name).memory() for name in ("straight", "cut")]
    same = ("callbacks", "history", "metrics", "end")
    assert [memories[0][name] for name in same] == [memories[1][name] for name in same]
    # Control: at the end of the cut run the callback was called once more than it remembers now.
    assert ended.metrics["count"] == cut // 3 + bool(cut % 3)
    assert reported(resumed, "count") == {3: 1.0, 6: 2.0, 9: 3.0, 12: 4.0}


def test_a_run_that_a_callback_stops_has_an_end_too():
    count = Count()
    stopping = EarlyStopping(patience=1, min_delta=1e6, every_n_steps=3)
    result = fit(30, stopping, Evaluate(weight), count)
    assert (result.stopped_early, count.steps, list(reported(result))) == (True, [6], [6])


def test_a_run_that_a_signal_ends_has_none(tmp_path):
    def interrupt(event):
        os.kill(os.getpid(), signal.SIGINT)

    interrupt.every_n_steps = 6
    count = Count()
    result = fit(12, interrupt, count, folder=tmp_path, chunk_size=6)
    assert (result.interrupted, int(result.state.step), count.steps) == (True, 6, [])
    assert fit(12, count, folder=tmp_path).metrics["count"] == 1


def test_an_error_at_the_end_comes_after_the_others_and_the_save(tmp_path):
    def broken(model_state):
        raise RuntimeError("no data")

    count = Count()
    with pytest.raises(RuntimeError, match="no data") as caught:
        fit(10, Evaluate(broken), count, folder=tmp_path)
    assert caught.value.__notes__ == ["raised by the callback 'evaluation' when the run ended at step 10"]
    assert caught.value.result.metrics["count"] == 1
    # Once it is mended, what failed is called, and nothing else.
    result = fit(10, Evaluate(weight), count, folder=tmp_path)
    assert (result.iterations, count.steps, list(reported(result))) == (0, [10], [10])


def test_the_end_of_a_run_may_be_its_best_step_until_it_goes_on(tmp_path):
    numbers = {4: 3.0, 8: 2.0, 10: 1.0, 12: 4.0}
    saves = {"every_n_steps": 4, "max_to_keep": 1, "keep_best": ("number", 1)}

    def tell(event):
        event.report({"number": numbers[event.step]})

    tell.every_n_steps, tell.at_end = 4, True
    for stop, best, steps in ((10, 10, (8, 10)), (12, 8, (8, 12))):
        fit(stop, tell, folder=tmp_path, saves=saves)
        assert (Checkpoints(tmp_path).best_step, Checkpoints(tmp_path).steps) == (best, steps)
    fit(12, tell, folder=tmp_path / "straight", saves=saves)
    assert Checkpoints(tmp_path / "straight").steps == (8, 12)


def test_a_function_may_be_called_at_the_end_alone():
    def show(event):
        steps.append(event.step)

    steps, show.at_end = [], True
    fit(3, show)
    assert steps == [3]
    show.at_end = "yes"
    with pytest.raises(TypeError, match=r"^callbacks\[0\]\.at_end must be True or False, got 'yes'\."):
        fit(3, show)


def test_a_follower_at_the_end_needs_its_number_too():
    last = Count()
    last.follows = "evaluation/weight"
    fit(3, Evaluate(weight), last)
    assert last.steps == [3]

    def broken(model_state):
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        fit(5, Evaluate(broken), last)
    assert last.steps == [3]


def test_a_best_number_that_the_end_should_have_reported_is_named_after_the_save(tmp_path):
    saves = {"every_n_steps": 4, "keep_best": ("evaluation/wait", 1)}
    with pytest.raises(
        ValueError, match="keep_best compares 'evaluation/wait', and the numbers of step 5 are"
    ):
        fit(5, Evaluate(weight), folder=tmp_path, saves=saves)
    assert Checkpoints(tmp_path).latest_step == 5


def test_two_evaluations_of_one_name_are_refused():
    with pytest.raises(ValueError) as caught:
        Trainer(5, callbacks=(Evaluate(weight), Evaluate(lambda model_state: {"one": 1})))
    assert str(caught.value) == (
        "two Evaluate callbacks have the name 'evaluation', so they would draw from one key stream and "
        "report under the same names. Pass another name= to one of them."
    )


# Cadences


def test_a_callback_looks_only_where_its_number_is():
    class Look(EarlyStopping):
        def __call__(self, event):
            looked.append((event.step, event.metrics[self.metric]))
            return super().__call__(event)

    looked = []
    result = fit(10, Evaluate(weight, every_n_steps=4), Look("evaluation/weight", every_n_steps=2))
    assert looked == [(step, value) for step, value in reported(result).items() if step != 10]
    assert [step for step, _ in looked] == [4, 8]


def test_a_callback_that_may_report_at_other_steps_hides_no_misspelled_number():
    def log(event):
        """Says nothing about what it reports."""

    log.every_n_steps = 2
    callbacks = log, Evaluate(weight, every_n_steps=4), EarlyStopping("evaluation/wait", every_n_steps=2)
    with pytest.raises(ValueError, match="EarlyStopping follows 'evaluation/wait', and step 4 has "):
        fit(10, *callbacks)
    # Control: the right name.
    fit(10, *callbacks[:2], EarlyStopping("evaluation/weight", every_n_steps=2))


NUMBER = "evaluation/weight"


@pytest.mark.parametrize(
    ("callbacks", "saves", "message"),
    [
        (
            (Evaluate(weight, every_n_steps=7), EarlyStopping(NUMBER, every_n_steps=3)),
            None,
            f"EarlyStopping follows '{NUMBER}' every 3 steps, and Evaluate may report it every 7 steps: both "
            "first at step 21, and max_steps is 20. Use the same every_n_steps.",
        ),
        (
            (Evaluate(weight), EarlyStopping(NUMBER, every_n_steps=3)),
            None,
            f"EarlyStopping follows '{NUMBER}' every 3 steps, and Evaluate may report it when the run ends. "
            "Use the same every_n_steps.",
        ),
        (
            (Count(7, at_end=False),),
            {"every_n_steps": 3, "keep_best": ("count", 1)},
            "keep_best compares 'count' at saves every 3 steps, and Count may report it every 7 steps: both "
            "first at step 21, and max_steps is 20. Use the same every_n_steps.",
        ),
    ],
    ids=["never meet", "at the end alone", "saves"],
)
def test_cadences_that_never_meet_raise_before_the_first_update(tmp_path, callbacks, saves, message):
    with pytest.raises(ValueError) as caught:
        fit(20, *callbacks, folder=tmp_path, saves=saves)
    assert str(caught.value) == message
    assert Checkpoints(tmp_path).steps == ()


def test_saves_between_two_evaluations_do_not_compete(tmp_path):
    saves = {"every_n_steps": 2, "max_to_keep": 1, "keep_best": (NUMBER, 5)}
    fit(9, Evaluate(weight, every_n_steps=4), folder=tmp_path, saves=saves)
    assert Checkpoints(tmp_path).steps == (4, 8, 9)


def test_a_callback_that_is_never_called_is_told(caplog):
    def silent(event):
        raise AssertionError

    silent.every_n_steps = 300
    fit(4, EarlyStopping(every_n_steps=100), silent, Evaluate(weight, every_n_steps=100))
    assert caplog.messages == [
        "EarlyStopping/total_loss is called every 100 steps, and max_steps is 4: it is never called",
        f"{silent.__qualname__} is called every 300 steps, and max_steps is 4: it is never called",
    ]


def test_the_error_of_a_callback_is_not_hidden_by_those_who_wait_for_its_number(tmp_path):
    def broken(model_state):
        raise RuntimeError("no data")

    saves = {"every_n_steps": 4, "keep_best": ("evaluation/error", 2)}
    callbacks = Evaluate(broken, every_n_steps=4), EarlyStopping("evaluation/error", every_n_steps=4)
    with pytest.raises(RuntimeError, match="no data") as caught:
        fit(8, *callbacks, folder=tmp_path, saves=saves)
    assert caught.value.__notes__ == ["raised by the callback 'evaluation' at step 4"]
    assert Checkpoints(tmp_path).steps == (4,)


def test_the_error_of_a_callback_is_not_hidden_by_a_save_that_fails_too(tmp_path, monkeypatch):
    def broken(model_state):
        monkeypatch.setattr(Checkpoints, "save", no_room)
        raise RuntimeError("no data")

    def no_room(self, *arguments, **options):
        raise OSError("no room")

    with pytest.raises(RuntimeError, match="no data") as caught:
        fit(8, Evaluate(broken, every_n_steps=4), folder=tmp_path)
    assert caught.value.__notes__[-1] == "and then: OSError: no room"
    assert_trees_bitwise_equal(caught.value.result.state, HEAT.run(4))


# What is reported


def leaked():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(1.0)
    return kept[0]


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (np.zeros(1), "float64[1]"),
        (jnp.zeros((1, 1)), "float32[1, 1]"),
        (np.complex64(1), "complex64[]"),
        ("3.0", "'3.0'"),
        (None, "None"),
        ([1.0], "[1.0]"),
        (jax.random.key(0), "key<fry>[]"),
    ],
)
def test_only_real_numbers_can_be_reported(value, given):
    with pytest.raises(TypeError) as caught:
        fit(2, Evaluate(lambda model_state: {"x": value}))
    assert str(caught.value) == f"report['evaluation/x'] must be a number, got {given}. Reduce it first."


def test_a_traced_value_is_named_as_what_it_is():
    with pytest.raises(TypeError) as caught:
        fit(2, Evaluate(lambda model_state: {"x": leaked()}))
    assert str(caught.value) == (
        "report['evaluation/x'] is a traced value, which has no number outside the function that was traced. "
        "Return it from that function."
    )


def test_control_numbers_of_every_kind_are_reported():
    given = {"a": 1, "b": True, "c": np.float32(0.5), "d": jnp.bfloat16(2), "e": math.nan, "f": np.ones(())}
    metrics = fit(2, Evaluate(lambda model_state: given)).metrics
    assert [metrics[f"evaluation/{name}"] for name in "abcdf"] == [1.0, 1.0, 0.5, 2.0, 1.0]
    assert math.isnan(metrics["evaluation/e"])


def test_nothing_of_it_moves_the_training():
    plain = fit(11).state
    watched = fit(11, Evaluate(weight, every_n_steps=3), Count(2), EarlyStopping(NUMBER, every_n_steps=1))
    assert_trees_bitwise_equal(watched.state, plain)
    assert first_difference(watched.state, HEAT.run(10)) is not None
