"""Hooks into JAX for the audit: random primitives are reported as they run.

While `watching(watcher)` is open, the calling thread runs JAX op by op (`jax.disable_jit`), and the watcher
receives every split, fold and draw with the bits of its keys. Other threads run JAX as usual.

JAX has no public way to do this, so a few private names are used, all listed in `names.PRIVATE_NAMES` and
checked before the first replacement. Everything that was replaced is put back, also after an error.

    random primitives       run as usual, then reported with the bits of their keys
    while, cond, scan, jit  that hold a draw and reach a compiler: run equation by equation
    vmap of one of these    row by row, so that every row draws what it would draw alone
    anything else compiled  reported as not seen, if it may hold a draw

    names       every private name of JAX, and the check
    watcher     who receives the reports            walks       regions, equation by equation
    swaps       what is replaced, and put back      compiled    what is reported as not seen
    primitives  random primitives, loops, branches  transforms  grad, jvp, vmap, checkpoint
    patches     the way in
"""

from phijax_rng.auditing.jax_hooks.names import private_modules
from phijax_rng.auditing.jax_hooks.patches import watching
from phijax_rng.auditing.jax_hooks.watcher import Watcher

__all__ = ["Watcher", "private_modules", "watching"]
