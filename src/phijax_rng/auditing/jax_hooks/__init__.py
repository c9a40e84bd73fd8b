"""The one place that reaches into JAX, for the audit: JAX's random primitives reported as they run.

While `watching(watcher)` is open, everything that the calling thread asks of JAX runs op by op
(`jax.disable_jit`), and the watcher is told of every split, fold and draw with the bits of the keys.
Other threads keep JAX as it is, but for a `disable_jit` of their own.

JAX offers no public way to do this, so names of `jax._src` are used, in this folder alone. All are
looked up before anything is replaced; a name that has moved is one clear error. Whatever was
replaced is put back on every way out.

    random primitives       run as ever, then reported with the bits of their keys
    jit, scan               the Python function, on copies; what it takes from Python must not change
    while, cond, scan, jit  that hold a draw and reach a compiler: walked equation by equation
    vmap of one of these    row by row, so that every row draws what it would draw and no more
    shard_map               the same function under vmap over the axes of the mesh
    anything else compiled  reported as not seen, if it holds a draw

    watcher      who is told, and what             walks        how regions are walked
    bodies       Python functions under jit        swaps        what is replaced, and put back
    patches      the way in, and what JAX must have

    What is replaced: primitives (they report), transforms (grad, vmap, shard_map), boundaries (jit, scan,
    cond), beyond (compiled programs, threads, generators of the host).
"""

from phijax_rng.auditing.jax_hooks.patches import watching
from phijax_rng.auditing.jax_hooks.swaps import beside
from phijax_rng.auditing.jax_hooks.watcher import Evaluation, Watcher

__all__ = ["Evaluation", "Watcher", "beside", "watching"]
