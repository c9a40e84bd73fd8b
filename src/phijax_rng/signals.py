"""SIGINT and SIGTERM as a wish that the trainer grants at its next look.

The handlers only set a flag: nothing is raised while a call of the loop is in flight or a file half
written. A second SIGINT is raised at once. Outside the main thread Python allows no handlers, and
none are set.
"""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_log = logging.getLogger("phijax_rng")


class StopSignals:
    """A `with` block in which SIGINT and SIGTERM set `received`.

    Attributes:
        received: the first signal that came, or `None`.
        standing: says which save stands, to be told with a second SIGINT.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.standing: Callable[[], str] = lambda: "no checkpoint was saved"
        self._interrupts = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # A handler that was not set from Python cannot be set back from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt(f"interrupted twice: {self.standing()}")
        if self.received is None:
            self.received = signal.Signals(number)
            _log.warning("%s: stopping at the next look", self.received.name)
