"""What ends a run before its last step: signals, handled between chunks, and the clock.

A handler sets a flag that the trainer polls between chunks, so nothing is raised while a call of the loop is
in flight or a file half written. Another SIGINT leaves at once and saves nothing: `LeaveNow`. A
signal that the process ignores stays ignored. Outside the main thread Python allows no handlers, and none
are set.

    SIGINT                      save, and return the result
    SIGTERM and any other       save, and leave with status 128 + its number
    SIGINT twice                leave at once
    grace period over           leave at once

With several processes all stop at the same step when one of them receives a signal, or when the clock of the
first says so. SIGTERM is then left to JAX's preemption service, unless that is off: a handler of ours would
replace the one of the service.
"""

import atexit
import contextlib
import datetime
import itertools
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from phijax_rng._base import validation
from phijax_rng._base.background import LeaveNow
from phijax_rng.devices import processes

_log = logging.getLogger("phijax_rng")

# JAX's preemption service wants a number for each poll that is the same in every process and has no gaps, so
# the counter lives as long as the process, over all its runs.
_polls = itertools.count(1)

# Those that a user or a scheduler sends; the others report a fault of the process, or cannot be handled.
_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP", "SIGQUIT", "SIGBREAK")

# The processes agree on the largest: any other signal decides over SIGINT, which does not end the process.
_OVER_SIGINT = 128

# Statuses of the runs that this process left at once; 0 where the exception that ends it decides.
_left: list[int] = []


@atexit.register
def _end_process() -> None:
    """Ends a process that left a run at once, just before Python would.

    XLA and Orbax still have threads in the calls that nobody waited for. Up to Python 3.13, one that returns
    to an interpreter in its last moments aborts the process, with status 134 in place of that of the signal.
    """
    error = getattr(sys, "last_value", None)
    interactive = hasattr(sys, "ps1")
    status = _left[-1] if _left else None
    if status is None or (status == 0 and (error is None or interactive)):
        return
    # What is registered before this function would have done these.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed
            stream.flush()
    if status == 0 and type(error) is KeyboardInterrupt and os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status or (130 if isinstance(error, KeyboardInterrupt) else 1))


def checked_signals(signals: Sequence[str | signal.Signals]) -> tuple[signal.Signals, ...]:
    """The signals that mean "save and stop".

    Raises:
        TypeError: not a sequence of names or `signal.Signals`.
        ValueError: a signal that this system lacks, or that no run can handle.
    """
    if isinstance(signals, (str, signal.Signals)) or not isinstance(signals, (tuple, list)):
        raise TypeError(
            f"signals must be a tuple, got {validation.formatted(signals)}. "
            "Pass names such as ('SIGTERM', 'SIGINT', 'SIGUSR1')."
        )
    known = {
        name: number for name in _NAMES if isinstance(number := getattr(signal, name, None), signal.Signals)
    }
    found: dict[signal.Signals, None] = {}
    for index, one in enumerate(signals):
        if not isinstance(one, (str, signal.Signals)):
            raise TypeError(
                f"signals[{index}] must be a name or a signal.Signals, got {validation.formatted(one)}. "
                "Pass a name such as 'SIGUSR1'."
            )
        name = one.name if isinstance(one, signal.Signals) else one
        if name not in known:
            why = "this system has no such signal" if name in _NAMES else "a run cannot stop on it"
            raise ValueError(f"signals[{index}] is {name!r}, and {why}. Pick of {', '.join(known)}.")
        found[known[name]] = None
    return tuple(found)


def checked_seconds(value: float | datetime.timedelta | None, name: str) -> float | None:
    """A duration as positive seconds; `None` for no bound."""
    if value is None:
        return None
    if isinstance(value, datetime.timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be seconds or a timedelta, got {validation.formatted(value)}. Pass a number."
        )
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value!r}. Pass seconds, or None for no bound.")
    return float(value)


class StopSignals:
    """A `with` block in which signals set `received`; with several processes `poll` sets it.

    Attributes:
        received: the signal that ends the run, or that the processes agreed on; `None` without one.
        timed_out: whether `max_time` is over, as `poll` has found.
        grace_over: whether the grace period after the first signal is over.
        describe_save: which save is on disk, for the message of `LeaveNow`.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        *,
        max_time: float | None = None,
        grace: float | None = None,
    ) -> None:
        """Starts the clock of `max_time`.

        Args:
            signals: from `checked_signals`.
            max_time: seconds from now on; `None` for no bound.
            grace: seconds from the first signal on after which the run leaves; `None` for no bound.
        """
        self.received: signal.Signals | None = None
        self.timed_out = self.grace_over = False
        self.describe_save: Callable[[], str] = lambda: "no checkpoint was saved"
        self._signals = tuple(signals)
        self._end = None if max_time is None else time.monotonic() + max_time
        self._grace = grace
        self._shared = processes.is_multiprocess()
        self._preemption = self._shared and bool(jax.config.values.get("jax_enable_preemption_service"))
        self._pending = 0
        self._interrupts = 0
        self._timer: threading.Timer | None = None
        self._previous: dict[int, Any] = {}
        self._held: list[int] | None = None

    def __enter__(self) -> "StopSignals":
        # Elsewhere `signal.signal` raises.
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if number in self._signals and not (self._preemption and number == signal.SIGTERM):
                    # A shell ignores SIGINT for what runs in its background, and nohup SIGHUP.
                    if handler is not signal.SIG_IGN:
                        self._previous[number] = signal.signal(number, self._receive)
                elif callable(handler):
                    # What raises at any line, as Python's own handler of SIGINT does: see `held`.
                    self._previous[number] = signal.signal(number, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._previous.items():
            # A callback may have set one of its own, which stays.
            if signal.getsignal(number) in (self._receive, self._hold):
                # A handler that was not set from Python cannot be set back from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A `with` block in which no handler raises; what came is handled at its end.

        For work of microseconds that an exception would leave half done.
        """
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for number in held:
                signal.raise_signal(number)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is None:
            self._previous[number](number, frame)
        else:
            self._held.append(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self._held.append(number)
            return
        if self.grace_over:
            self._leave(f"the grace period of {self._grace:g} s is over")
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._leave("interrupted twice")
        pending = number + _OVER_SIGINT * (number != signal.SIGINT)
        if not self._pending:
            self._start_grace(number)
            _log.warning("%s: stopping after this chunk", signal.Signals(number).name)
        if pending > self._pending and self._pending < _OVER_SIGINT:
            self._pending = pending
            # With several processes `poll` sets it, at the same step in all of them; from then on every one
            # of them ends, and each as its own signals say.
            if not self._shared or self.received is not None:
                self.received = signal.Signals(number)

    def _leave(self, reason: str) -> None:
        _left.append(0)
        try:
            stands = self.describe_save()
        except Exception as error:  # of any type: the disk may be what hangs
            stands = f"the checkpoints cannot be listed ({type(error).__name__})"
        raise LeaveNow(f"{reason}: {stands}")

    def _start_grace(self, number: int) -> None:
        if self._grace is not None:
            self._timer = threading.Timer(self._grace, self._end_grace, [number])
            self._timer.daemon = True
            self._timer.start()

    def _end_grace(self, number: int) -> None:
        self.grace_over = True
        main = threading.main_thread().ident
        if hasattr(signal, "pthread_kill") and main is not None:
            # A real signal, since only that ends a wait of the main thread.
            signal.pthread_kill(main, number)
        else:
            os.kill(os.getpid(), number)

    def poll(self) -> bool:
        """Whether to stop here. With several processes all must call it, once in every host step."""
        if self.received is not None or self.timed_out:
            return True
        over = self._end is not None and time.monotonic() >= self._end
        if not self._shared:
            self.timed_out = over
            return over
        if self._end is not None:
            # The first process decides, since clocks differ.
            self.timed_out = bool(*processes.broadcast(over))
        if self._preemption and multihost_utils.reached_preemption_sync_point(next(_polls)):
            self.received = signal.SIGTERM
        elif agreed := processes.maximum(self._pending):
            self.received = signal.Signals(agreed % _OVER_SIGINT)
        return self.received is not None or self.timed_out

    def end(self, on_sigterm: str) -> None:
        """Leaves the process with the status of the signal, where `on_sigterm` is `"exit"`."""
        if self.received not in (None, signal.SIGINT) and on_sigterm == "exit":
            if _left:
                _left.append(128 + self.received)
            raise SystemExit(128 + self.received)
