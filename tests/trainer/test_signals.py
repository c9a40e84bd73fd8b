import logging
import os
import re
import signal
import threading

import pytest

from phijax_rng import Trainer
from phijax_rng._base.background import LeaveNow
from phijax_rng.trainer.signals import StopSignals, checked_signals

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
        with pytest.raises(LeaveNow, match=r"^interrupted twice: no checkpoint was saved$"):
            signal.raise_signal(signal.SIGINT)
        signals.describe_save = lambda: "the newest checkpoint is step 7 in /run"
        message = "interrupted twice: the newest checkpoint is step 7 in /run"
        with pytest.raises(LeaveNow, match=f"^{re.escape(message)}$"):
            signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGINT


def test_a_second_sigint_is_raised_after_a_sigterm_too():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(LeaveNow, match=r"^interrupted twice: no checkpoint was saved$"):
            signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGTERM


def test_a_second_sigterm_changes_nothing():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received is signal.SIGTERM


@pytest.mark.parametrize("first_of_two", BOTH, ids=["SIGINT", "SIGTERM"])
def test_a_signal_that_ends_the_process_decides_over_sigint(first_of_two):
    with StopSignals() as signals:
        signal.raise_signal(first_of_two)
        signal.raise_signal(signal.SIGINT if first_of_two is signal.SIGTERM else signal.SIGTERM)
        assert signals.received is signal.SIGTERM
    with pytest.raises(SystemExit) as left:
        signals.end("exit")
    assert left.value.code == 143
    signals.end("return")


def test_of_two_signals_that_end_the_process_the_first_decides():
    with StopSignals(checked_signals(("SIGUSR1", "SIGTERM"))) as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received is signal.SIGUSR1
    with pytest.raises(SystemExit) as left:
        signals.end("exit")
    assert left.value.code == 128 + signal.SIGUSR1


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


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_that_is_ignored_stays_ignored(number):
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            assert signal.getsignal(number) is signal.SIG_IGN
            os.kill(os.getpid(), number)
            assert not signals.poll()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, previous)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGXCPU, signal.SIGHUP], ids=lambda n: n.name)
def test_other_signals_mean_stop_where_they_are_named(number):
    before = signal.getsignal(number)
    with StopSignals(checked_signals((number.name, number))) as signals:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os.kill(os.getpid(), number)
        assert signals.received is number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ("SIGTERM", TypeError, r"^signals must be a tuple, got 'SIGTERM'\. Pass names such as"),
        ({"SIGTERM"}, TypeError, r"^signals must be a tuple"),
        ((15,), TypeError, r"^signals\[0\] must be a name or a signal\.Signals, got 15\."),
        (
            ("SIGTERM", "TERM"),
            ValueError,
            r"^signals\[1\] is 'TERM', and a run cannot stop on it\. Pick of SIGTERM,",
        ),
        ((signal.SIGKILL,), ValueError, r"^signals\[0\] is 'SIGKILL', and a run cannot stop on it\."),
        (("SIGSEGV",), ValueError, r"^signals\[0\] is 'SIGSEGV', and a run cannot stop on it\."),
        (("SIGBREAK",), ValueError, r"^signals\[0\] is 'SIGBREAK', and this system has no such signal\."),
    ],
)
def test_signals_that_no_run_can_stop_on_are_refused(signals, error, message):
    with pytest.raises(error, match=message):
        Trainer(1, signals=signals)
    assert Trainer(1, signals=()).signals == ()


def test_a_handler_of_the_caller_raises_only_where_nothing_is_left_half_done():
    """As an alarm of a test runner does, or Ctrl-C where SIGINT is not among the signals."""

    def alarm(number, frame):
        raise TimeoutError("too slow")

    previous = signal.signal(signal.SIGALRM, alarm)
    try:
        done = []
        with StopSignals(()) as signals:
            with pytest.raises(TimeoutError, match="too slow"), signals.held():
                signal.raise_signal(signal.SIGALRM)
                signal.raise_signal(signal.SIGALRM)
                done.append("the rest")
            assert done == ["the rest"]
            with pytest.raises(TimeoutError, match="too slow"):
                signal.raise_signal(signal.SIGALRM)
            with pytest.raises(KeyboardInterrupt), signals.held():
                signal.raise_signal(signal.SIGINT)
                done.append("and here")
        assert done == ["the rest", "and here"]
        assert signal.getsignal(signal.SIGALRM) is alarm
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_sigint_is_held_back_too():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        done = []
        with pytest.raises(LeaveNow), signals.held():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        assert done == [1]


def test_a_handler_that_a_callback_sets_stays():
    def own(number, frame):
        pass

    previous = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_the_end_of_the_grace_period_ends_a_wait():
    with StopSignals(grace=0.05) as signals:
        signals.describe_save = lambda: "the newest checkpoint is step 7 in /run"
        signal.raise_signal(signal.SIGTERM)
        message = r"^the grace period of 0\.05 s is over: the newest checkpoint is step 7 in /run$"
        with pytest.raises(LeaveNow, match=message):
            threading.Event().wait(60)
        assert signals.grace_over
    with StopSignals(grace=0.05) as signals:
        signal.raise_signal(signal.SIGTERM)
    assert signals._timer.finished.is_set(), "the timer ends with the block"
    assert not signals.grace_over


def test_a_disk_that_cannot_be_listed_hides_no_interrupt():
    def listing():
        raise OSError("stale file handle")

    with StopSignals() as signals:
        signals.describe_save = listing
        signal.raise_signal(signal.SIGINT)
        message = r"^interrupted twice: the checkpoints cannot be listed \(OSError\)$"
        with pytest.raises(LeaveNow, match=message):
            signal.raise_signal(signal.SIGINT)
