"""What lies beyond the watcher's sight, and generators of the host that no key names."""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from phijax_rng.auditing.jax_hooks.swaps import Internals, Swaps, beside, disable_jit
from phijax_rng.auditing.jax_hooks.walks import RAW, holds_draw
from phijax_rng.auditing.jax_hooks.watcher import mine

_GENERATORS = tuple(
    (module, getattr(home, name, None))
    for module, home, name in ((np.random, np.random.mtrand, "_rand"), (random, random, "_inst"))
)
"""Where the functions of the global generators are, and the generators."""

_SEEDED = (
    *((np.random, name) for name in ("default_rng", "RandomState", "SeedSequence")),
    *((np.random, name) for name in ("PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937")),
    (random, "Random"),
)
"""Who makes a generator from a seed."""


def install(swaps: Swaps, source: Internals) -> None:
    """Regions that cannot be seen are reported, and so are draws from global generators."""
    dispatch, compiled = source["dispatch"], source["stages"].Compiled
    callable_for = dispatch.xla_primitive_callable
    swaps.set(dispatch, "xla_primitive_callable", _reporting_draws(callable_for))
    swaps.set(compiled, "__call__", _reporting_call(compiled.__call__))
    swaps.set(jax, "disable_jit", _reporting_jit(jax.disable_jit))
    swaps.set(threading.Thread, "start", _reporting_start(threading.Thread.start))
    for module, owner in _GENERATORS:
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is owner and not name.startswith(("_", "get")):
                swaps.set(module, name, _reported(function, f"{module.__name__}.{name}"))
    for module, name in _SEEDED:
        swaps.set(module, name, _with_report(getattr(module, name), f"{module.__name__}.{name}"))


def _reporting_draws(callable_for: Callable[..., Any]) -> Callable[..., Any]:
    def xla_primitive_callable(primitive: Any, **params: Any) -> Any:
        watcher, run = mine(), callable_for(primitive, **params)
        if watcher is None or not (primitive in RAW or holds_draw(params)):
            return run
        watcher.unseen(primitive.name)

        def unwatched(*args: Any) -> Any:
            with watcher.blinded():
                return run(*args)

        return unwatched

    return xla_primitive_callable


def _reporting_call(call: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(executable: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if (watcher := mine()) is not None:
            watcher.unseen("a compiled executable")
        # JAX refuses to run an executable while jit is disabled.
        with disable_jit(False) if watcher is not None else contextlib.nullcontext():
            return call(executable, *args, **kwargs)

    return __call__


def _reporting_jit(disabling: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def enabled() -> Iterator[None]:
        with beside(), disabling(False):
            yield

    def disable_jit(disable: bool = True) -> Any:
        watcher = mine()
        if disable or watcher is None:
            return disabling(disable)
        watcher.unseen("jax.disable_jit(False)")
        return enabled()

    return disable_jit


def _reporting_start(start: Callable[..., None]) -> Callable[..., None]:
    def start_thread(thread: threading.Thread) -> None:
        if (watcher := mine()) is not None:
            watcher.unseen(f"thread {thread.name!r}")
        start(thread)

    return start_thread


def _reported(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if (watcher := mine()) is not None:
            watcher.record("host", None, None, data=name)
        return function(*args, **kwargs)

    return wrapped


def _with_report(maker: Any, name: str) -> Any:
    """A maker of generators that reports the seed; what was a class stays one."""
    if not isinstance(maker, type):
        return functools.wraps(maker)(lambda *args, **kwargs: _made(maker, name, args, kwargs))

    class Reporting(type(maker)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return _made(maker, name, args, kwargs) if cls is shown else super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, maker) if cls is shown else super().__instancecheck__(instance)

    told = {"__doc__": maker.__doc__, "__module__": maker.__module__}
    shown: Any = Reporting(maker.__name__, (maker,), told)
    return shown


def _made(maker: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    watcher = mine()
    if watcher is not None:
        given = [x for x in (*args, *kwargs.values()) if x is not None]
        if not given:
            watcher.record("host", None, None, data=f"{name}()")
        elif all(isinstance(x, (int, float, str, bytes, np.ndarray, np.generic, list, tuple)) for x in given):
            watcher.record("host seed", None, None, data=f"{name}({', '.join(map(_shown_seed, given))})")
    return maker(*args, **kwargs)


def _shown_seed(seed: Any) -> str:
    return repr(np.asarray(seed).tolist()) if isinstance(seed, (np.ndarray, np.generic)) else repr(seed)
