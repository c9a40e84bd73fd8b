"""What an audit replaces in JAX, for as long as it runs."""

import contextlib
import threading
from collections.abc import Iterator

import jax

from phijax_rng.auditing.jax_hooks import compiled, primitives, transforms
from phijax_rng.auditing.jax_hooks.names import private_modules
from phijax_rng.auditing.jax_hooks.swaps import Swaps, disable_jit
from phijax_rng.auditing.jax_hooks.watcher import Watcher, activate

_lock = threading.Lock()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Reports to `watcher` every random primitive that this thread runs inside the block.

    Raises:
        RuntimeError: another audit is open in this process, or JAX lacks a private name.
    """
    modules = private_modules()  # first: nothing is replaced in a JAX that lacks a name
    if not _lock.acquire(blocking=False):
        raise RuntimeError(
            "an audit already runs in this process, and two would record each other's draws. "
            "Run one after the other."
        )
    with contextlib.ExitStack() as stack:
        stack.callback(_lock.release)
        swaps = Swaps()
        stack.callback(swaps.restore)
        for part in (primitives, transforms, compiled):
            part.install(swaps, modules)
        # Python runs at every call of a jitted function, so every draw happens where its line is on the
        # stack. JAX keeps programs of this mode apart from others, so none of them outlives the audit.
        stack.enter_context(disable_jit())
        # JAX's own checker raises at the second use of a key, before the audit can report it.
        stack.enter_context(jax.debug_key_reuse(False))
        # Last in, first out: nobody watches while the attributes are put back.
        activate(watcher)
        stack.callback(activate, None)
        yield
