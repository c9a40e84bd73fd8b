"""How a source is asked: with the state of its samplers, and on the host by one thread at a time."""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from phijax_rng._base.types import Step


def ask(source: Any, step: Step, sampler_state: Mapping[str, Any]) -> Any:
    """The batch of a step from any source, with the samplers' state where there is one."""
    return source(step, sampler_state) if sampler_state else source(step)


class HostSource:
    """A source that is asked on the host, by one thread at a time; otherwise the source it holds.

    The thread that draws ahead and the one that saves both ask; a reader or a generator that is
    seeded anew for each step must not be asked by both at once.
    """

    def __init__(self, source: Any, lock: Any = None):
        self._source = source
        self._lock = lock or threading.Lock()

    def __call__(self, step: Any, sampler_state: Mapping[str, Any] | None = None) -> Any:
        """The batch of `step`, a Python int."""
        return self._alone(ask, self._source, step, sampler_state or {})

    @property
    def source(self) -> Any:
        """The source it holds."""
        return self._source

    @property
    def contents(self) -> Callable[[], Any] | None:
        """`contents` of the source it holds, likewise; a dataset may be one that one thread may read."""
        return self._guarded("contents")

    @property
    def stacked_batches(self) -> Callable[..., Any] | None:
        """`stacked_batches` of the source it holds, asked by one thread at a time; `None` if it has none."""
        return self._guarded("stacked_batches")

    def halves(self) -> tuple[Any, Any]:
        """`halves` of the source it holds, the first asked by one thread at a time; else itself alone."""
        if not hasattr(self._source, "halves"):
            return self, None
        on_host, inside = self._source.halves()
        return HostSource(on_host, self._lock), inside

    def _guarded(self, name: str) -> Callable[..., Any] | None:
        inner = getattr(self._source, name, None)
        return None if inner is None else functools.partial(self._alone, inner)

    def _alone(self, inner: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            return inner(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
