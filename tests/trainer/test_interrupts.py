"""A handler that raises at any line between two chunks: the resumed run is the uninterrupted one."""

import json
import signal
import sys
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phijax_rng
from phijax_rng import initialize_train_state, keys
from phijax_rng.callbacks.progress import Silent
from phijax_rng.callbacks.protocol import adapt_callbacks
from phijax_rng.trainer.session import TrainingSession
from phijax_rng.trainer.signals import StopSignals
from phijax_rng.training.chunks import Chunk

PACKAGE = phijax_rng.__path__[0]
STATE = initialize_train_state({"w": jnp.ones(2)}, optax.sgd(0.1), {}, keys.split_root(0))
ENDS = (3, 7, 10)


class Report:
    """Reports a number, and counts its calls."""

    every_n_steps = 1

    def __call__(self, event):
        event.memory["calls"] = event.memory.get("calls", 0) + 1
        event.report({"number": float(event.step + event.memory["calls"])})
        event.memory["done"] = event.step


class Follow:
    """Keeps what the callback before it reported."""

    every_n_steps = 1

    def __call__(self, event):
        event.memory.setdefault("seen", []).append([event.step, event.metrics["number"]])


class Kept:
    """Stands for `Checkpoints`: keeps what was saved last."""

    directory = "memory"
    best_rule = None

    def __init__(self):
        self.steps, self.last = [], None

    def start_clock(self):
        pass

    wait = start_clock

    def next_save(self, step):
        return None

    def is_due(self, step):
        return False

    def is_saved(self, step):
        return step in self.steps

    def save(self, state, contract, memory):
        self.steps.append(int(state.step))
        self.last = state, json.loads(json.dumps(memory, default=lambda table: table.plain()))


def session_from(state, memory, kept, held):
    run = types.SimpleNamespace(
        state=state,
        memory=memory,
        contract=types.SimpleNamespace(may_save=True, for_save=lambda state: {}),
        plan=types.SimpleNamespace(is_own_run=True, may_be_restart=True),
    )
    session = TrainingSession(
        run,
        checkpoints=kept,
        display=Silent(),
        log_every_n_steps=2,
        max_steps=ENDS[-1],
        callbacks=adapt_callbacks((Report(), Follow())),
        held=held,
    )
    session._loss_names = ("loss",)
    return session


def chunk_from(start):
    end = next(end for end in ENDS if end > start)
    losses = np.arange(start, end, dtype=np.float32) / 3
    none = np.zeros(end - start, bool)
    return Chunk(STATE.replace(step=jnp.int32(end)), end, start, {"loss": losses}, none, none)


def train(session):
    while session.step < ENDS[-1]:
        session.on_chunk(chunk_from(session.step))
    session.finish()


def compared(kept):
    """What a resume repeats: everything but wall time."""
    state, memory = kept.last
    return int(state.step), {k: v for k, v in memory.items() if k not in ("seconds", "timing")}


class Interrupt:
    """Raises the signal at the n-th line of the package, or of a callback, that runs."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith((PACKAGE, __file__)):
            return None
        if event == "line" and "signals.py" not in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted(at):
    """The bookkeeping of the second chunk with a SIGINT at its n-th line; lines, and what the run came to."""
    kept = Kept()
    with StopSignals(()) as signals:
        session = session_from(STATE, {}, kept, signals.held)
        session.on_chunk(chunk_from(0))
        interrupt = Interrupt(at)
        chunk, before = chunk_from(session.step), sys.gettrace()
        sys.settrace(interrupt)
        try:
            session.on_chunk(chunk)
        except KeyboardInterrupt as error:
            sys.settrace(before)
            session.abandon(error)
        else:
            sys.settrace(before)
            return interrupt.count, None
        again = session_from(*kept.last, kept, signals.held)
        again.catch_up()
        train(again)
    return interrupt.count, compared(kept)


@pytest.fixture(scope="module")
def whole():
    kept = Kept()
    with StopSignals(()) as signals:
        train(session_from(STATE, {}, kept, signals.held))
    return compared(kept)


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line_loses_neither_state_nor_history_nor_a_callback(whole, every):
    assert whole[1]["callbacks"]["Follow"]["seen"] == [[3, 4.0], [7, 9.0], [10, 13.0]]
    lines, nothing = interrupted(at=None)
    assert nothing is None
    assert lines > 150
    for at in range(1, lines + 1, every):
        assert interrupted(at)[1] == whole, f"interrupted at line {at} of {lines}"


def test_without_the_hold_something_is_lost(whole, monkeypatch):
    """The control."""
    import contextlib

    monkeypatch.setattr(StopSignals, "held", lambda self: contextlib.nullcontext())
    lines, _ = interrupted(at=None)

    def differs(at):
        try:
            return interrupted(at)[1] != whole
        except ValueError:
            return True

    assert any(differs(at) for at in range(1, lines + 1, 3))
