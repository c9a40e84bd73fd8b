import contextlib
import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    EarlyStopping,
    HostPool,
    LossModule,
    PoolDataModule,
    Trainer,
    keys,
)
from phijax_rng._base import validation
from phijax_rng.callbacks.progress import Silent
from phijax_rng.errors import NonFiniteError, SaveError
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference

HEAT = _problems.heat()


class Note:
    """Stores its events."""

    def __init__(self, every_n_steps, stop_at=None):
        self.every_n_steps = every_n_steps
        self.stop_at = stop_at
        self.events = []

    def __call__(self, event):
        self.events.append(event)
        return event.step == self.stop_at


def fit(stop, *callbacks, **options):
    return Trainer(stop, callbacks=callbacks, progress=False, **options).fit(
        HEAT.module, seed=0, **HEAT.arguments
    )


@pytest.mark.parametrize("chunk_size", [1, 7, None])
def test_callbacks_are_called_at_their_steps_whatever_the_chunks(chunk_size):
    often, rarely = Note(3), Note(5)
    fit(16, often, rarely, chunk_size=chunk_size)
    assert [event.step for event in often.events] == [3, 6, 9, 12, 15]
    assert [event.step for event in rarely.events] == [5, 10, 15]


def test_the_state_a_callback_is_given_stays_its_own():
    kept = []

    def keep(event):
        kept.append(event.state)

    keep.every_n_steps = 4
    fit(12, keep)
    for step, state in zip((4, 8, 12), kept, strict=True):
        assert_trees_bitwise_equal(state, HEAT.run(step), dict_order=False)


def test_a_callback_stops_the_run_after_every_other_callback_was_called():
    stopper, other = Note(2, stop_at=6), Note(2)
    result = fit(20, stopper, other)
    assert (result.iterations, result.stopped_early, result.interrupted) == (6, True, False)
    assert [event.step for event in other.events] == [2, 4, 6]
    assert_trees_bitwise_equal(result.state, fit(6).state)


def test_an_error_in_a_callback_is_its_own_and_saves_what_was_reached(tmp_path):
    def fail(event):
        raise RuntimeError("no room for the plot")

    fail.every_n_steps = 5
    with pytest.raises(RuntimeError, match=r"^no room for the plot\n"):
        fit(20, fail, checkpoints=Checkpoints(tmp_path))
    assert Checkpoints(tmp_path).steps == (5,)


def test_a_state_read_late_is_the_state_of_its_step():
    note = Note(4)
    fit(8, note)
    assert_trees_bitwise_equal(note.events[0].state, HEAT.run(4), dict_order=False)
    assert first_difference(note.events[1].state, HEAT.run(4)) is not None


class Wrong(Note):
    """A callback with one member that is not what it should be."""

    def __init__(self, **members):
        super().__init__(2)
        vars(self).update(members)


@pytest.mark.parametrize("callbacks", [3, None, "show", Note(2), {"a": Note(2)}, {1}])
def test_callbacks_other_than_a_sequence_raise(callbacks):
    with pytest.raises(TypeError) as caught:
        Trainer(4, callbacks=callbacks)
    assert str(caught.value) == (
        f"callbacks must be a sequence of callbacks, got {validation.described(callbacks)}. "
        "Pass a tuple of them."
    )


def no_event():
    pass


no_event.every_n_steps = 2


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [
        (
            EarlyStopping,
            TypeError,
            "callbacks[0] must be an object, got the class EarlyStopping. Call it: EarlyStopping(...).",
        ),
        (no_event, TypeError, "callbacks[0] must take (event), got (). Fix its parameters."),
        (
            Wrong(finish=3),
            TypeError,
            "callbacks[0].finish must be callable, got 3. Pass a function.",
        ),
        (
            Wrong(finish=lambda: None),
            TypeError,
            "callbacks[0].finish must take (event), got (). Fix its parameters.",
        ),
        (
            Wrong(is_over=True),
            TypeError,
            "callbacks[0].is_over must be callable, got True. Pass a function.",
        ),
        (
            Wrong(check=lambda: None),
            TypeError,
            "callbacks[0].check must take (memory), got (). Fix its parameters.",
        ),
        (Wrong(name=3), TypeError, "callbacks[0].name must be a str, got 3. Pass a name."),
        (Wrong(follows=3), TypeError, "callbacks[0].follows must be a str, got 3. Pass a name."),
        (3, TypeError, "callbacks[0] must be callable and have every_n_steps, got 3. Add what is missing."),
        (
            Note(0),
            ValueError,
            "callbacks[0].every_n_steps must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
    ],
    ids=lambda value: "",
)
def test_an_object_that_is_no_callback_raises(callback, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Trainer(4, callbacks=(callback,))


class Evaluate:
    """Draws and computes a lot, from separate streams."""

    every_n_steps = 1

    def __call__(self, event):
        for index in range(3):
            noise = jax.random.normal(event.key("evaluation", str(index)), (100,))
            assert np.isfinite(noise).all()
        np.random.default_rng(event.step).random(10)
        for array in jax.tree.leaves(event.state.model_state):
            np.array(array)[...] = 0


def draw_a_thousand_keys(event):
    jax.random.split(keys.stream(event.state.sampling_key, "thousand"), 1000)


draw_a_thousand_keys.every_n_steps = 1


def test_nothing_a_host_does_moves_a_number(tmp_path):
    plain = fit(20).state
    disturbed = {
        "evaluation at every step": fit(20, Evaluate()),
        "a thousand keys at every step": fit(20, draw_a_thousand_keys),
        "logging and saving at every step": fit(
            20, log_every_n_steps=1, checkpoints=Checkpoints(tmp_path, every_n_steps=1)
        ),
    }
    for result in disturbed.values():
        assert_trees_bitwise_equal(result.state, plain)
    assert first_difference(fit(21).state, plain) is not None


def test_keys_of_callbacks_are_apart_from_training_and_from_each_other():
    note = Note(1)
    fit(3, note)
    drawn = {keys.fingerprint(event.key("a")) for event in note.events}
    drawn |= {keys.fingerprint(event.key("b")) for event in note.events}
    state = HEAT.state()
    training = {keys.fingerprint(keys.step_key(state.sampling_key, step)) for step in range(4)}
    training |= {keys.fingerprint(keys.fold_in(state.balancer_key, step)) for step in range(4)}
    assert len(drawn) == 6
    assert not drawn & training


# Memory


class Remember:
    """Stores the steps of its calls in its memory."""

    def __init__(self, every_n_steps=2, name=None):
        self.every_n_steps = every_n_steps
        if name:
            self.name = name

    def __call__(self, event):
        event.memory.setdefault("steps", []).append(event.step)


def remembered(folder, step=None):
    return Checkpoints(folder).memory(step)["callbacks"]


def test_the_memory_of_a_callback_is_saved_and_restored(tmp_path):
    saves = {"checkpoints": Checkpoints(tmp_path, every_n_steps=4)}
    fit(9, Remember(), **saves)
    assert remembered(tmp_path, 4) == {"Remember": {"steps": [2, 4]}}
    again = Trainer(14, callbacks=(Remember(),), progress=False, **saves)
    again.fit(HEAT.module, seed=0, **HEAT.arguments, resume=True)
    assert remembered(tmp_path, 14) == {"Remember": {"steps": [2, 4, 6, 8, 10, 12, 14]}}


def test_a_trainer_used_twice_carries_nothing_over(tmp_path):
    note = Remember()
    for folder in ("one", "two"):
        fit(4, note, checkpoints=Checkpoints(tmp_path / folder))
        assert remembered(tmp_path / folder) == {"Remember": {"steps": [2, 4]}}


def test_callbacks_may_be_added_and_removed_at_a_resume(tmp_path):
    def resume(stop, *callbacks):
        trainer = Trainer(stop, callbacks=callbacks, progress=False, checkpoints=Checkpoints(tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return trainer.fit(HEAT.module, seed=0, **HEAT.arguments, resume="auto")

    resume(4, Remember())
    resume(6, Note(1), Remember(name="other"), Remember())
    assert remembered(tmp_path) == {"Remember": {"steps": [2, 4, 6]}, "other": {"steps": [6]}}
    resume(8)
    assert remembered(tmp_path) == {}
    result = resume(10, Remember())
    assert remembered(tmp_path) == {"Remember": {"steps": [10]}}
    assert_trees_bitwise_equal(result.state, HEAT.run(10))


def test_two_of_a_kind_have_a_memory_each(tmp_path):
    fit(6, Remember(2), Remember(3), checkpoints=Checkpoints(tmp_path))
    assert remembered(tmp_path) == {"Remember": {"steps": [2, 4, 6]}, "Remember#2": {"steps": [3, 6]}}


def test_names_that_end_in_a_number_lose_no_callback(tmp_path):
    named = [Remember(2, name) for name in ("a", "a#2", "a")]
    fit(2, *named, checkpoints=Checkpoints(tmp_path))
    assert remembered(tmp_path) == {name: {"steps": [2]} for name in ("a", "a#2", "a#3")}


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            {"best": np.float32(1)},
            "memory['best'] must be plain data, got float32[]. "
            "Keep Python numbers, strings, and lists and dicts (with str keys) of them.",
        ),
        (
            {"rows": [(1, 2)]},
            "memory['rows'][0] must be plain data, got (1, 2). "
            "Keep Python numbers, strings, and lists and dicts (with str keys) of them.",
        ),
        (
            {1: 2},
            "memory must be plain data, got {1: 2}. "
            "Keep Python numbers, strings, and lists and dicts (with str keys) of them.",
        ),
    ],
    ids=["NumPy", "tuple", "number as a key"],
)
def test_memory_that_json_would_change_raises(kept, message):
    def keep(event):
        event.memory.update(kept)

    keep.every_n_steps = 1
    with pytest.raises(TypeError) as caught:
        fit(1, keep)
    assert str(caught.value) == message


# Reports


def test_later_callbacks_and_the_history_have_a_report(tmp_path):
    def tell(event):
        event.report({"own": event.step / 2})

    tell.every_n_steps = 3
    early, late = Note(3), Note(3)
    result = fit(7, early, tell, late, checkpoints=Checkpoints(tmp_path), log_every_n_steps=2)
    assert [event.metrics["own"] for event in late.events] == [1.5, 3.0]
    assert [row["step"] for row in result.history] == [2, 3, 4, 6]
    assert [row.get("own") for row in result.history] == [None, 1.5, None, 3.0]
    assert "own" not in result.metrics  # nothing was reported at the last step
    assert len(late.events[-1].history) == 4


@pytest.mark.parametrize("name", ["total_loss", "step"])
def test_a_name_that_is_taken_cannot_be_reported(name):
    def tell(event):
        event.report({name: 1.0})

    tell.every_n_steps = 1
    with pytest.raises(ValueError) as caught:
        fit(1, tell)
    assert str(caught.value) == (
        f"report has {name!r}, which is already recorded at this step. Use another name."
    )


# Errors


def test_a_check_that_fails_ends_the_fit_before_anything_is_traced_and_closes_the_display(monkeypatch):
    class Closed(Silent):
        closed = 0

        def close(self):
            self.closed += 1

    class Checking(Note):
        name = "own"

        def check(self, memory):
            raise OSError("the disk is full")

    display, module = Closed(), dataclasses.replace(HEAT.module, losses=lambda model_state, batches: 1 / 0)
    monkeypatch.setattr("phijax_rng.trainer.trainer.make_progress", lambda *given: display)
    with pytest.raises(OSError, match="the disk is full") as caught:
        Trainer(4, callbacks=(Note(1), Checking(2))).fit(module, seed=0, **HEAT.arguments)
    assert caught.value.__notes__ == ["raised by the callback 'own' before the first update"]
    assert display.closed == 1


class Fail:
    def __init__(self, error, every_n_steps=5, name="fail"):
        self.error, self.every_n_steps, self.name = error, every_n_steps, name

    def __call__(self, event):
        event.memory["half"] = "done"
        raise self.error


def test_an_error_skips_no_other_callback_and_carries_the_result(tmp_path):
    before, behind = Remember(5, "before"), Remember(5, "behind")
    with pytest.raises(RuntimeError) as caught:
        fit(20, before, Fail(RuntimeError("no room")), behind, checkpoints=Checkpoints(tmp_path))
    assert caught.value.__notes__ == ["raised by the callback 'fail' at step 5"]
    assert remembered(tmp_path, 5) == {"before": {"steps": [5]}, "behind": {"steps": [5]}}
    result = caught.value.result
    assert (result.iterations, result.stopped_early) == (5, True)
    assert_trees_bitwise_equal(result.state, HEAT.run(5))
    again = Trainer(20, progress=False, checkpoints=Checkpoints(tmp_path))
    resumed = again.fit(HEAT.module, seed=0, **HEAT.arguments, resume=True)
    assert_trees_bitwise_equal(resumed.state, HEAT.run(20))


def test_two_errors_at_one_step_are_both_raised():
    first, second = RuntimeError("first"), ValueError("second")
    with pytest.raises(ExceptionGroup) as caught:
        fit(20, Fail(first, name="a"), Fail(second, name="b"))
    assert caught.value.exceptions == (first, second)
    assert caught.value.result.iterations == 5


def test_an_error_of_a_callback_does_not_hide_a_nan(tmp_path):
    def bad(model_state, batches):
        return {"fit": jnp.sum(model_state["w"]) * jnp.float32("nan")}

    module = LossModule(lambda key: {"w": jnp.ones(2)}, bad, batch_keys=("data",))
    data = PoolDataModule({"data": HostPool(np.zeros((2, 1), np.float32))}, {"data": 1})

    class Closing(Note):
        def finish(self, event):
            raise OSError("the disk is full")

    trainer = Trainer(5, callbacks=(Closing(1),), progress=False, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(module, datamodule=data, optimizer=optax.sgd(0.1), seed=0)
    assert caught.value.__notes__[-1] == "and then: OSError: the disk is full"
    assert Checkpoints(tmp_path).steps == (0,)


class Open(Note):
    """Holds something until the run ends."""

    def __init__(self, every_n_steps, stop_at=None):
        super().__init__(every_n_steps, stop_at)
        self.finished = []

    def finish(self, event):
        self.finished.append(event.step)


@pytest.mark.parametrize("end", ["done", "stopped", "failed"])
def test_finish_is_called_once_however_the_run_ends(end):
    opened = Open(2, stop_at=4 if end == "stopped" else None)
    others = (Fail(RuntimeError("x"), 4),) if end == "failed" else ()
    with contextlib.suppress(RuntimeError):
        fit(6, opened, *others)
    assert opened.finished == [6 if end == "done" else 4]


def test_a_save_that_fails_is_not_hidden_by_a_callback_that_does(tmp_path, monkeypatch):
    class Closing(Open):
        def finish(self, event):
            super().finish(event)
            raise OSError("the disk is full")

    def fail(self, *arguments, **options):
        raise SaveError("no room", step=6)

    closing = Closing(2)
    monkeypatch.setattr(Checkpoints, "save", fail)
    with pytest.raises(SaveError) as caught:
        fit(6, closing, checkpoints=Checkpoints(tmp_path))
    assert closing.finished == [6]
    assert caught.value.__notes__ == ["and then: OSError: the disk is full"]
    assert_trees_bitwise_equal(caught.value.state, HEAT.run(6))


def test_an_error_at_the_end_carries_the_complete_result(tmp_path):
    class Closing(Note):
        def finish(self, event):
            raise OSError("the disk is full")

    other = Open(2)
    with pytest.raises(OSError, match="the disk is full") as caught:
        fit(6, Closing(2), other, checkpoints=Checkpoints(tmp_path))
    assert other.finished == [6]
    assert (caught.value.result.iterations, caught.value.result.stopped_early) == (6, False)
    assert Checkpoints(tmp_path).steps == (6,)


def test_a_bool_of_numpy_stops_and_other_answers_raise():
    def stop(event):
        return np.bool_(event.step >= 4)

    stop.every_n_steps = 2
    assert fit(20, stop).iterations == 4

    def odd(event):
        return 1

    odd.every_n_steps = 2
    message = (
        "a callback must return True to stop, False or None to continue, got 1. "
        "Wrap a comparison of arrays in bool(...)."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        fit(20, odd)
