"""Early stopping: what counts as better, how long it waits, and what a resume remembers."""

import dataclasses
import types

import pytest

from phijax_rng import Checkpoints, CSVHistory, EarlyStopping, Evaluate, Trainer
from tests import _problems

HEAT = _problems.heat()


def look(stopping, memory, step, **metrics):
    return stopping(types.SimpleNamespace(step=step, metrics=metrics, memory=memory))


def looks(stopping, values):
    """After how many calls it stops the run; `None` for never."""
    memory = {}
    for count, value in enumerate(values, start=1):
        if look(stopping, memory, count, loss=value):
            return count
    return None


NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "values", "stops"),
    [
        ({"patience": 2}, [3, 2, 1, 0, -1, -2], None),
        ({"patience": 2}, [3, 2, 2, 1, 1, 1], 6),
        ({"patience": 1}, [3, 3], 2),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 2.4], 3),
        ({"patience": 2, "mode": "max"}, [3, 4, 3, 4], 4),
        ({"patience": 2}, [NAN, NAN], 2),
        ({"patience": None}, [3] * 50, None),
        ({"target": 1}, [3, 2, 1.5, 1, 0], 4),
        ({"target": 1}, [3, NAN, -1], 3),
        ({"target": 0.9, "mode": "max"}, [0.1, 0.95, 0.5], 2),
        # Reaching a target is no matter of how much better it is.
        ({"target": 1, "min_delta": 5}, [3, 2, 1], 3),
        ({"diverges_at": 10}, [3, 9.99, 10], 3),
        ({"diverges_at": 10}, [3, NAN], 2),
        ({"diverges_at": 10}, [3, float("inf")], 2),
        ({"diverges_at": 0.1, "mode": "max"}, [0.5, 0.05], 2),
        ({"diverges_at": 10, "target": 1}, [3, 9, 3, 1], 4),
        ({"diverges_at": 10, "patience": 2}, [3, 3, 3], 3),
        ({"patience": 2}, [NAN, 1, NAN, 0.5, NAN, NAN], 6),
    ],
)
def test_it_stops_when_patience_has_run_out(options, values, stops):
    assert looks(EarlyStopping("loss", **options), values) == stops


def fit(stop, folder, stopping, **words):
    checkpoints = Checkpoints(folder, asynchronous=False) if folder else None
    trainer = Trainer(stop, checkpoints=checkpoints, callbacks=(stopping,), progress=False)
    return trainer.fit(HEAT.module, seed=0, **HEAT.arguments, **words)


NEVER_BETTER = EarlyStopping(patience=2, min_delta=1e6, every_n_steps=4)


def test_a_run_that_was_stopped_is_over_when_it_is_started_again(tmp_path):
    stopped = fit(30, tmp_path, NEVER_BETTER)
    assert (stopped.iterations, stopped.stopped_early) == (12, True)
    with _problems.compilations() as compiled:
        again = fit(30, tmp_path, NEVER_BETTER, resume="auto")
    assert (again.iterations, again.stopped_early) == (0, True)
    assert compiled == []


def test_more_patience_lets_a_stopped_run_go_on(tmp_path):
    fit(30, tmp_path, NEVER_BETTER)
    more = fit(30, tmp_path, dataclasses.replace(NEVER_BETTER, patience=4), resume="auto")
    assert (more.iterations, int(more.state.step)) == (8, 20)


def test_another_target_lets_a_stopped_run_go_on(tmp_path):
    reached = EarlyStopping(target=1e6, every_n_steps=4)
    assert fit(12, tmp_path, reached).iterations == 4
    assert fit(12, tmp_path, reached, resume="auto").iterations == 0
    assert fit(12, tmp_path, EarlyStopping(target=-1.0, every_n_steps=4), resume="auto").iterations == 8


def test_nothing_is_carried_from_one_fit_of_a_trainer_to_the_next():
    trainer = Trainer(30, callbacks=(NEVER_BETTER,), progress=False)
    ends = [trainer.fit(HEAT.module, seed=0, **HEAT.arguments).iterations for _ in range(2)]
    assert ends == [12, 12]


def test_a_stop_triggered_by_nan_logs_a_warning(caplog):
    assert looks(EarlyStopping("loss", patience=3), [1, NAN, 2, NAN]) == 4
    assert looks(EarlyStopping("loss", patience=2), [NAN, NAN]) == 2
    assert looks(EarlyStopping("loss", patience=2), [NAN, 1, 2, 2]) == 4  # control: no warning
    assert looks(EarlyStopping("loss", diverges_at=5), [1, 7]) == 2
    assert looks(EarlyStopping("loss", target=5), [7, NAN, 1]) == 3  # control: what was wanted
    assert caplog.messages == [
        "EarlyStopping stops the run at step 4: 'loss' was NaN in 2 of the last 3 calls",
        "EarlyStopping stops the run at step 2: 'loss' was NaN in 2 of the last 2 calls",
        "EarlyStopping stops the run at step 2: 'loss' is 7, and diverges_at is 5",
    ]


def show(event):
    event.report({"error": 1.0})


show.every_n_steps = 4


def test_a_number_that_nothing_records_raises_before_the_first_update(tmp_path):
    # None of those before may report it.
    before = (Evaluate(lambda m: {"error": 1.0}, name="other"), CSVHistory(tmp_path / "history.csv"))
    callbacks = (*before, EarlyStopping("error", every_n_steps=4), show)
    with pytest.raises(ValueError) as caught:
        Trainer(8, callbacks=callbacks, progress=False).fit(HEAT.module, seed=0, **HEAT.arguments)
    assert str(caught.value) == (
        "EarlyStopping follows 'error', and the run records 'total_loss', 'pde', 'initial', 'boundary'. "
        "Follow one of them, or put the callback that reports it first."
    )


def test_control_a_number_that_a_callback_before_may_report_is_followed():
    callbacks = (show, EarlyStopping("error", patience=1, every_n_steps=4))
    result = Trainer(30, callbacks=callbacks, progress=False).fit(HEAT.module, seed=0, **HEAT.arguments)
    assert (result.iterations, result.stopped_early) == (8, True)


def test_a_best_step_by_a_number_that_nothing_records_raises_before_the_first_update(tmp_path):
    saves = Checkpoints(tmp_path, every_n_steps=4, keep_best=("error", 2))
    with pytest.raises(ValueError) as caught:
        Trainer(8, checkpoints=saves, progress=False).fit(HEAT.module, seed=0, **HEAT.arguments)
    assert str(caught.value) == (
        "keep_best compares 'error', and the run records 'total_loss', 'pde', 'initial', 'boundary'. "
        "Name one of them, or add the callback that reports it."
    )
    assert saves.steps == ()


def test_a_number_that_is_not_there_is_named():
    with pytest.raises(ValueError) as caught:
        look(EarlyStopping("error"), {}, 5, loss=1.0)
    assert str(caught.value) == (
        "EarlyStopping follows 'error', and step 5 has 'loss'. Follow one of them, or put the callback that "
        "reports it first."
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"patience": 0},
            ValueError,
            "patience must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        ({"mode": "less"}, ValueError, "mode must be one of 'min', 'max', got 'less'. Pick one of them."),
        (
            {"min_delta": -1},
            ValueError,
            "min_delta must be finite and not negative, got -1. Pick a number of at least 0.",
        ),
        ({"min_delta": "1"}, TypeError, "min_delta must be a number, got '1'. Pass a float."),
        (
            {"every_n_steps": 1.5},
            TypeError,
            "every_n_steps must be a whole number, got 1.5. Pass an int or a NumPy integer.",
        ),
        (
            {"target": NAN},
            ValueError,
            "target must be finite, got nan. Pick a finite number.",
        ),
        ({"diverges_at": "10"}, TypeError, "diverges_at must be a number, got '10'. Pass a float."),
        (
            {"target": 2.0, "diverges_at": 1.0},
            ValueError,
            "target must be better than diverges_at with mode='min', got 2.0 and 1.0. "
            "Exchange them, or pass the other mode.",
        ),
        ({"restore_best": 1}, TypeError, "restore_best must be True or False, got 1. Pass a bool."),
        ({"metric": ""}, TypeError, "metric[0] must be a non-empty string, got ''. Name it."),
    ],
)
def test_settings_are_checked_at_construction(options, error, message):
    with pytest.raises(error) as caught:
        EarlyStopping(**options)
    assert str(caught.value) == message
