import logging
import re
import signal
import threading

import pytest

from phijax_rng.trainer.signals import StopSignals

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_sets_a_flag_and_raises_nothing(number, caplog):
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(number)
        assert signals.received is number
    assert [record.getMessage() for record in caplog.records] == [f"{number.name}: stopping after this chunk"]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("number", BOTH)
def test_the_handlers_of_the_caller_are_set_back(number):
    heard = []
    previous = signal.signal(number, lambda *_: heard.append(number))
    try:
        with StopSignals():
            signal.raise_signal(number)
        assert heard == []
        with pytest.raises(ZeroDivisionError), StopSignals():
            raise ZeroDivisionError
        signal.raise_signal(number)
        assert heard == [number]
    finally:
        signal.signal(number, previous)


def test_a_second_sigint_is_raised_and_names_the_save_that_stands():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match=r"^interrupted twice: no checkpoint was saved$"):
            signal.raise_signal(signal.SIGINT)
        signals.describe_save = lambda: "the newest checkpoint is step 7 in /run"
        message = "interrupted twice: the newest checkpoint is step 7 in /run"
        with pytest.raises(KeyboardInterrupt, match=f"^{re.escape(message)}$"):
            signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGINT


def test_a_second_sigint_is_raised_after_a_sigterm_too():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match=r"^interrupted twice: no checkpoint was saved$"):
            signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGTERM


def test_a_second_sigterm_changes_nothing():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received is signal.SIGTERM


@pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1]], ids=["SIGINT", "SIGTERM"])
def test_the_first_signal_decides_how_the_run_ends(first, second):
    with StopSignals() as signals:
        signal.raise_signal(first)
        signal.raise_signal(second)
        assert signals.received is first


def test_outside_the_main_thread_no_handler_is_set():
    inside = []

    def run():
        with StopSignals() as signals:
            inside.append(([signal.getsignal(number) for number in BOTH], signals.received))

    outside = [signal.getsignal(number) for number in BOTH]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert inside == [(outside, None)]
    with StopSignals():
        assert [signal.getsignal(number) for number in BOTH] != outside


def test_one_block_inside_another_hands_the_signals_back():
    with StopSignals() as outer:
        with StopSignals() as inner:
            signal.raise_signal(signal.SIGINT)
        assert (inner.received, outer.received) == (signal.SIGINT, None)
        signal.raise_signal(signal.SIGTERM)
        assert outer.received is signal.SIGTERM
