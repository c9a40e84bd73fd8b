"""Compiled programs, kept by the digest of their text.

The same program is compiled once in a process, and one with a changed closure or global is compiled anew,
since its text is another.
"""

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax

_MAX_KEPT = 32

_SECONDS_BETWEEN_CHECKS = 0.05

_kept: "collections.OrderedDict[Any, jax.stages.Compiled]" = collections.OrderedDict()
_kept_lock = threading.Lock()


def compiled(
    lowered: jax.stages.Lowered, program: str, sharding: Any, meanwhile: Callable[[], None]
) -> jax.stages.Compiled:
    """The executable of this program, from this process's store if it is there."""
    if jax.config.values.get("jax_use_simplified_jaxpr_constants"):
        # Captured arrays are then not part of the text, and the digest would not see them change.
        return _compile(lowered, meanwhile)
    output = tuple(str(leaf.dtype) for leaf in jax.tree.leaves(lowered.out_info))
    # Some settings act while compiling and are not in the program's text.
    settings = tuple(sorted((name, repr(value)) for name, value in jax.config.values.items()))
    name = (program, sharding, lowered.in_tree, lowered.out_tree, output, settings)
    with _kept_lock:
        if name in _kept:
            _kept.move_to_end(name)
            return _kept[name]
    executable = _compile(lowered, meanwhile)
    with _kept_lock:
        _kept[name] = executable
        while len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)
    return executable


def _compile(lowered: jax.stages.Lowered, meanwhile: Callable[[], None]) -> jax.stages.Compiled:
    """Compiles in a thread of its own, so that this one can answer a signal."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(lowered.compile())
        except BaseException as error:  # raised again by the thread that waits
            outcome.append(error)

    # A thread, since XLA holds Python signal handlers back until it returns.
    worker = threading.Thread(target=work, name="phijax_rng-compile", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(_SECONDS_BETWEEN_CHECKS)
        meanwhile()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
