"""Code that runs compiled during an audit: what may draw there is reported as not seen."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from phijax_rng.auditing.jax_hooks.names import Modules
from phijax_rng.auditing.jax_hooks.swaps import Swaps, disable_jit
from phijax_rng.auditing.jax_hooks.walks import RAW, holds_draw
from phijax_rng.auditing.jax_hooks.watcher import mine


def install(swaps: Swaps, modules: Modules) -> None:
    """Reports compiled regions, and lets JAX compile what it cannot run op by op."""
    dispatch: Any = modules["dispatch"]
    trace: Any = modules["core"].EvalTrace
    executable = jax.stages.Compiled
    swaps.set(dispatch, "xla_primitive_callable", _reporting_draws(dispatch.xla_primitive_callable))
    swaps.set(trace, "process_shard_map", _compiled("shard_map", trace.process_shard_map))
    swaps.set(executable, "__call__", _compiled("a compiled executable", executable.__call__))
    swaps.set(jax, "disable_jit", _reporting_jit(jax.disable_jit))
    swaps.set(jax.lax, "scan", _scanning(jax.lax.scan))


def _reporting_draws(callable_for: Callable[..., Any]) -> Callable[..., Any]:
    """The door through which every operation that runs by itself reaches the compiler."""

    def xla_primitive_callable(primitive: Any, **params: Any) -> Callable[..., Any]:
        watcher = mine()
        run: Callable[..., Any] = callable_for(primitive, **params)
        if watcher is None or not (primitive in RAW or holds_draw(params)):
            return run
        watcher.unseen(primitive.name)

        def unobserved(*args: Any) -> Any:
            with watcher.blinded():
                return run(*args)

        return unobserved

    return xla_primitive_callable


def _compiled(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = mine()
        if watcher is None:
            return original(*args, **kwargs)
        watcher.unseen(what)
        # JAX raises when an executable runs while jit is disabled.
        with watcher.blinded(), disable_jit(False):
            return original(*args, **kwargs)

    return call


def _reporting_jit(disabling: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def unobserved(watcher: Any) -> Iterator[None]:
        with watcher.blinded(), disabling(False):
            yield

    def disable_jit(disable: bool = True) -> Any:
        watcher = mine()
        if disable or watcher is None:
            return disabling(disable)
        watcher.unseen("jax.disable_jit(False)")
        return unobserved(watcher)

    return disable_jit


def _scanning(scan: Callable[..., Any]) -> Callable[..., Any]:
    """`lax.scan`, compiled where it has no steps: op by op JAX raises, as it cannot know the output."""

    def wrapped(f: Any, init: Any, xs: Any = None, length: int | None = None, **options: Any) -> Any:
        watcher = mine()
        lengths = {len(x) for x in jax.tree.leaves(xs)} if length is None else {length}
        if watcher is None or lengths != {0}:
            return scan(f, init, xs, length, **options)
        # The body is traced and never runs, so nothing is missed.
        with watcher.blinded(), disable_jit(False):
            return scan(f, init, xs, length, **options)

    return wrapped
