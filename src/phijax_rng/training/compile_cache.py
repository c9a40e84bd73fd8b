"""Compiled programs of this process, by the digest of their text.

The same program is compiled once in a process. A program with a changed closure or global has another text
and is compiled again.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable

import jax
from jax.sharding import Sharding

from phijax_rng._base.background import Worker

# An executable holds about 14 MB of the host (measured, CPU), and memory on its devices; a search over
# hyperparameters would otherwise keep all of them.
_MAX_PROGRAMS = 8

# Short enough for Ctrl-C to feel immediate; a compilation takes seconds.
_SECONDS_BETWEEN_CHECKS = 0.05

_programs: "collections.OrderedDict[tuple[object, ...], jax.stages.Compiled]" = collections.OrderedDict()
_lock = threading.Lock()

# One thread for programs that are compiled one after the other, whatever their number: a thread for each
# leaves a heap of tens of megabytes behind.
_idle: list[Worker] = []

os.register_at_fork(after_in_child=_idle.clear)  # a fork copies no thread


def compiled(
    lowered: jax.stages.Lowered, program: str, sharding: Sharding, while_compiling: Callable[[], None]
) -> jax.stages.Compiled:
    """The executable of a program, from the cache of this process if it is there.

    Args:
        lowered: the program.
        program: the digest of its text.
        sharding: its devices, which the text does not name.
        while_compiling: called repeatedly until the program is compiled.
    """
    if jax.config.values.get("jax_use_simplified_jaxpr_constants"):
        # With this option captured arrays are not part of the text, so the digest would not see them change.
        return _compile(lowered, while_compiling)
    # The text lacks pytree structures and does not tell a typed key from its words; options of JAX may
    # change what the compiler makes of one text.
    dtypes = tuple(str(leaf.dtype) for leaf in jax.tree.leaves(lowered.out_info))
    options = tuple(sorted((name, repr(value)) for name, value in jax.config.values.items()))
    name = (program, sharding, lowered.in_tree, lowered.out_tree, dtypes, options)
    with _lock:
        if name in _programs:
            _programs.move_to_end(name)
            return _programs[name]
    # Compiled outside the lock, so that threads with different programs do not wait for each other.
    executable = _compile(lowered, while_compiling)
    with _lock:
        _programs[name] = executable
        while len(_programs) > _MAX_PROGRAMS:
            _programs.popitem(last=False)
    return executable


def _compile(lowered: jax.stages.Lowered, while_compiling: Callable[[], None]) -> jax.stages.Compiled:
    """Compiles in another thread, so that this one can run signal handlers and `while_compiling`."""
    with _lock:
        worker = _idle.pop() if _idle else Worker("phijax_rng-compile")
    executable = worker.submit(lowered.compile)
    # Also where this thread leaves early: XLA cannot be interrupted, and others must not wait for it.
    executable.add_done_callback(lambda _: _idle.append(worker))
    worker.submit(_trim_heap)
    while not executable.done():
        concurrent.futures.wait([executable], _SECONDS_BETWEEN_CHECKS)
        while_compiling()
    return executable.result()


def _trim_heap() -> None:
    """Gives freed memory back to the system: XLA frees 10 MB for each program, and glibc would keep them."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
