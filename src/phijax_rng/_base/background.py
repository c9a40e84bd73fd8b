"""Work in a thread that a process need not wait for when it ends.

The threads of `concurrent.futures` are joined when the interpreter exits, so user code that hangs in one of
them would keep the process alive after Ctrl-C.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LeaveNow(KeyboardInterrupt):
    """Ends a run without a wait for anything.

    The caller gets a plain `KeyboardInterrupt`: Python gives the exit status of an interrupt to no subclass.
    """


class Worker:
    """One daemon thread, which does what is submitted in order."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """The future result of a call."""
        future: Future[T] = Future()
        self._tasks.put((future, lambda: function(*arguments)))
        return future

    def end(self) -> None:
        """Ends the thread after what is submitted."""
        self._tasks.put(None)

    def close(self, *, wait: bool = True) -> None:
        """Drops what has not begun; with `wait`, returns when the call in progress has ended."""
        self._closed = True
        self.end()
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if self._closed or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # raised again where the result is read
                future.set_exception(error)
            # Or the thread would keep the result alive until the next call ends.
            del task, future, call
