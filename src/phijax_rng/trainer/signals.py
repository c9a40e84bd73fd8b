"""Deferred signal handling: handlers set a flag that the trainer polls between chunks.

Nothing is raised while a call of the loop is in flight or a file half written. A second SIGINT is raised
at once. Outside the main thread Python allows no handlers, and none are set.

With several processes all stop at the same step when one of them receives a signal. SIGTERM is then left to
JAX's preemption service, unless that is off: a handler of ours would replace the one of the service.
"""

import itertools
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from phijax_rng.devices import processes

_log = logging.getLogger("phijax_rng")

# JAX's preemption service wants a number for each poll that is the same in every process and has no gaps, so
# the counter lives as long as the process, over all its runs.
_polls = itertools.count(1)


class StopSignals:
    """A `with` block in which SIGINT and SIGTERM set `received`; with several processes `poll` sets it.

    Attributes:
        received: the first signal that came, or that the processes agreed on; `None` without one.
        describe_save: which save is on disk, for the message of a second SIGINT.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.describe_save: Callable[[], str] = lambda: "no checkpoint was saved"
        self._shared = processes.is_multiprocess()
        self._preemption = self._shared and bool(jax.config.values.get("jax_enable_preemption_service"))
        self._pending = 0
        self._interrupts = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        # Elsewhere `signal.signal` raises.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._preemption else (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # A handler that was not set from Python cannot be set back from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt(f"interrupted twice: {self.describe_save()}")
        if not self._pending:
            self._pending = number
            # With several processes `poll` sets it, at the same step in all of them.
            self.received = None if self._shared else signal.Signals(number)
            _log.warning("%s: stopping after this chunk", signal.Signals(number).name)

    def poll(self) -> bool:
        """Whether to stop here. With several processes all must call it, once in every host step."""
        if not self._shared or self.received is not None:
            return self.received is not None
        if self._preemption and multihost_utils.reached_preemption_sync_point(next(_polls)):
            self.received = signal.SIGTERM
        elif agreed := processes.maximum(self._pending):
            self.received = signal.Signals(agreed)
        return self.received is not None
