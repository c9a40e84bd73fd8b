import re

import jax
import numpy as np
import pytest

from phijax_rng import Checkpoints, Trainer, keys
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference

HEAT = _problems.heat()


class Note:
    """Remembers what it was shown."""

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


def test_a_callback_that_asks_to_stop_stops_after_every_other_was_called():
    stopper, other = Note(2, stop_at=6), Note(2)
    result = fit(20, stopper, other)
    assert (result.iterations, result.stopped_early, result.interrupted) == (6, True, False)
    assert [event.step for event in other.events] == [2, 4, 6]
    assert_trees_bitwise_equal(result.state, fit(6).state)


def test_an_error_in_a_callback_is_its_own_and_saves_what_was_reached(tmp_path):
    def fail(event):
        raise RuntimeError("no room for the plot")

    fail.every_n_steps = 5
    with pytest.raises(RuntimeError, match=r"^no room for the plot$"):
        fit(20, fail, checkpoints=Checkpoints(tmp_path))
    assert Checkpoints(tmp_path).steps == (5,)


def test_a_state_asked_for_late_is_the_state_of_its_step():
    note = Note(4)
    fit(8, note)
    assert_trees_bitwise_equal(note.events[0].state, HEAT.run(4), dict_order=False)
    assert first_difference(note.events[1].state, HEAT.run(4)) is not None


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [
        (3, TypeError, "callbacks[0] must be callable and have every_n_steps, got 3. Add what is missing."),
        (
            Note(0),
            ValueError,
            "callbacks[0].every_n_steps must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
    ],
    ids=["no callback", "never"],
)
def test_what_is_no_callback_is_refused(callback, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Trainer(4, callbacks=(callback,))


class Evaluate:
    """Draws and computes a lot, from streams of its own."""

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
