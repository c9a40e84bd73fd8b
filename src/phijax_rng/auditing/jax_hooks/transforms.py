"""What the watcher knows of `grad`, `jvp`, `vmap` and `checkpoint` around a draw."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.extend.core
import jax.extend.core.primitives as jep
from jax.extend import source_info_util

from phijax_rng.auditing.events import Mapped
from phijax_rng.auditing.jax_hooks.names import Modules
from phijax_rng.auditing.jax_hooks.swaps import Swaps
from phijax_rng.auditing.jax_hooks.walks import RANDOM, Parameters, by_row, holds_draw
from phijax_rng.auditing.jax_hooks.watcher import Watcher, mine

_INLINE = ("jit", "remat2", "checkpoint")
"""Primitives that do what their jaxpr says, once."""


def install(swaps: Swaps, modules: Modules) -> None:
    """Differentiations and maps report themselves to the watcher."""
    ad: Any = modules["interpreters.ad"]
    batch: Any = modules["interpreters.batching"].BatchTrace
    swaps.set(ad, "linearize", _differentiating(ad.linearize))
    swaps.set(ad, "jvp", _differentiating(ad.jvp, forward=True))
    swaps.set(jep.remat_p, "impl", _computing_again(jep.remat_p.impl))
    swaps.set(batch, "process_primitive", _mapped_primitive(batch.process_primitive, modules))


def _differentiating(original: Callable[..., Any], *, forward: bool = False) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        watcher = mine()
        if watcher is None:
            return original(*args, **kwargs)
        # The function is a partial that holds the arguments which are not differentiated, so a digest of both
        # tells a second gradient at the same batch from one at the next batch.
        function, values = args[:2]
        with contextlib.ExitStack() as stack:
            stack.enter_context(watcher.enter("differentiations", (function, list(values))))
            if forward:
                stack.enter_context(watcher.enter("forward", True))
            return original(*args, **kwargs)

    return wrapped


def _computing_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **params: Any) -> Any:
        watcher = mine()
        with contextlib.nullcontext() if watcher is None else _again(watcher, params):
            return original(*args, **params)

    return implementation


def _again(watcher: Watcher, params: Parameters) -> contextlib.AbstractContextManager[None]:
    """Around a block of `checkpoint`: whether a derivative computes it a second time."""
    again = params.get("differentiated") is True
    return watcher.enter("backward", True) if again else contextlib.nullcontext()


def _mapped_primitive(original: Callable[..., Any], modules: Modules) -> Callable[..., Any]:
    """An operation under `vmap`: a draw with a note of the map, and what holds a draw row by row."""

    def process_primitive(trace: Any, primitive: Any, tracers: Any, params: Parameters, /) -> Any:
        watcher = mine()
        if watcher is None:
            return original(trace, primitive, tracers, params)
        if primitive in RANDOM:
            mapped = trace.to_batch_info(tracers[0])[1] is not None
            with watcher.enter("maps", Mapped(trace.axis_data.size, mapped)):
                return original(trace, primitive, tracers, params)
        # Rows that exchange values along the axis of the map cannot run one after the other.
        if not holds_draw(params) or trace.axis_data.name in _named_axes(params):
            return original(trace, primitive, tracers, params)
        # Under the trace of the map, so that draws inside meet this function again, one by one.
        if primitive.name in _INLINE:
            with _again(watcher, params), jax.extend.core.set_current_trace(trace):
                return _inlined(params["jaxpr"], tracers)
        return _rows_of(watcher, trace, (primitive, tracers, params), modules)

    return process_primitive


def _inlined(jaxpr: Any, values: list[Any]) -> list[Any]:
    if not isinstance(jaxpr, jax.extend.core.ClosedJaxpr):  # that of `checkpoint` is open
        jaxpr = jax.extend.core.ClosedJaxpr(jaxpr, ())
    return list(jax.extend.core.jaxpr_as_fun(jaxpr)(*values))


def _rows_of(watcher: Watcher, trace: Any, operation: tuple[Any, Any, Parameters], modules: Modules) -> Any:
    primitive, tracers, params = operation
    tracer_type: Any = modules["interpreters.batching"].BatchTracer
    with jax.extend.core.set_current_trace(trace.parent_trace):
        operands = [trace.to_batch_info(tracer) for tracer in tracers]
        outs = by_row(watcher, primitive, operands, params, Mapped(trace.axis_data.size, False))
    # What `BatchTrace` passes to its own tracers; error messages of JAX show it.
    here = source_info_util.current()
    wrapped = [tracer_type(trace, out, 0, here) for out in outs]
    return wrapped if primitive.multiple_results else wrapped[0]


def _named_axes(params: Parameters) -> Iterator[object]:
    """The axes whose name an operation uses; each is an effect of its jaxpr."""
    for value in params.values():
        for jaxpr in value if isinstance(value, (tuple, list)) else [value]:
            for effect in getattr(jaxpr, "effects", ()):
                yield getattr(effect, "name", None)
