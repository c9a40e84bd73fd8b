"""What the watcher knows of `grad`, `jvp`, `vmap` and `shard_map` around a draw."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from phijax_rng.auditing.events import Mapped, Push
from phijax_rng.auditing.jax_hooks.swaps import Internals, Swaps
from phijax_rng.auditing.jax_hooks.walks import RANDOM, by_row, holds_draw, map_over_mesh
from phijax_rng.auditing.jax_hooks.watcher import mine


def install(swaps: Swaps, source: Internals) -> None:
    """Every differentiation and every map tells the watcher of itself."""
    api, ad, core = source["api"], source["interpreters.ad"], source["core"]
    swaps.set(api, "argnums_partial2", _remembering(api.argnums_partial2))
    swaps.set(ad, "linearize", _within("differentiations", ad.linearize))
    swaps.set(ad, "jvp", _pushing(_within("differentiations", ad.jvp), source))
    swaps.set(ad.JVPTrace, "process_primitive", _noting_values(ad.JVPTrace.process_primitive, source))
    swaps.set(ad, "backward_pass3", _backward(ad.backward_pass3))
    swaps.set(ad, "ct_check", _lenient_check(ad.ct_check))
    remat = source["ad_checkpoint"].remat_p
    swaps.set(remat, "impl", _computing_again(remat.impl))
    batch = source["interpreters.batching"].BatchTrace
    swaps.set(batch, "process_primitive", _mapped_primitive(batch.process_primitive, source))
    swaps.set(core.EvalTrace, "process_shard_map", _sharded(core.EvalTrace.process_shard_map, source))
    if hasattr(core, "pvary_p"):  # a note on types that has no meaning under vmap
        swaps.set(core.pvary_p, "impl", _identity_over_mesh(core.pvary_p.impl))


def _remembering(partial: Callable[..., Any]) -> Callable[..., Any]:
    def argnums_partial2(fun: Any, argnums: Any, args: Any, kwargs: Any) -> Any:
        if (watcher := mine()) is not None:
            watcher.differentiating = (fun, args, kwargs)
        return partial(fun, argnums, args, kwargs)

    return argnums_partial2


def _within(stack: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        watcher = mine()
        if watcher is None:
            return original(*args, **kwargs)
        what: Any = watcher.differentiating or (args[0], list(args[1]), {})
        watcher.differentiating = None
        with watcher.enter(stack, what):
            return original(*args, **kwargs)

    return wrapped


def _pushing(original: Callable[..., Any], source: Internals) -> Callable[..., Any]:
    """`jvp`, with a note of the maps that its tangents vary over."""

    def jvp(fun: Any, primals: Any, tangents: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = mine()
        if watcher is None:
            return original(fun, primals, tangents, *args, **kwargs)
        push = Push(_maps_of(tangents, source))
        push.values |= _maps_of(primals, source)
        with watcher.enter("pushes", push):
            return original(fun, primals, tangents, *args, **kwargs)

    return jvp


def _noting_values(original: Callable[..., Any], source: Internals) -> Callable[..., Any]:
    """An operation under `jvp`, with a note of the maps that its values, not their tangents, vary over."""

    def process_primitive(trace: Any, primitive: Any, tracers: Any, params: Any, /) -> Any:
        watcher = mine()
        pushes = [] if watcher is None else [push for push in watcher.stacks["pushes"] if push.tangents]
        if pushes:
            found = _maps_of([trace.to_primal_tangent_pair(x)[0] for x in tracers], source)
            for push in pushes:
                push.values |= found
        return original(trace, primitive, tracers, params)

    return process_primitive


def _maps_of(values: Any, source: Internals) -> set[int]:
    """The maps that these values vary over, by the ids of their tags."""
    tracer_type = source["interpreters.batching"].BatchTracer
    found: set[int] = set()
    for value in values:
        inner = value
        while isinstance(inner, jax.core.Tracer):
            if isinstance(inner, tracer_type) and inner.batch_dim is not None:
                found.add(id(inner._trace.tag))  # JAX calls all tags equal
            inner = getattr(inner, "val", getattr(inner, "primal", None))
    return found


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward_pass3(*args: Any, **kwargs: Any) -> Any:
        watcher = mine()
        with contextlib.nullcontext() if watcher is None else watcher.enter("backward", True):
            return original(*args, **kwargs)

    return backward_pass3


def _computing_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **params: Any) -> Any:
        watcher = mine()
        with contextlib.nullcontext() if watcher is None else _again(watcher, params):
            return original(*args, **params)

    return implementation


def _again(watcher: Any, params: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Around a block of `checkpoint`: is it computed a second time, for a derivative?"""
    again = params.get("differentiated") is True
    return contextlib.nullcontext() if not again else watcher.enter("backward", True)


def _lenient_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def ct_check(*args: Any, **kwargs: Any) -> None:
        # Types under a mesh name its axes; taken by vmap, as here, they do not.
        watcher = mine()
        if watcher is None or not watcher.stacks["meshes"]:
            original(*args, **kwargs)

    return ct_check


def _mapped_primitive(original: Callable[..., Any], source: Internals) -> Callable[..., Any]:
    """An operation under `vmap`: a draw with a note of the map, and what holds one row by row."""

    def process_primitive(trace: Any, primitive: Any, tracers: Any, params: Any, /) -> Any:
        watcher = mine()
        if watcher is None:
            return original(trace, primitive, tracers, params)
        if primitive in RANDOM:
            mapped = trace.to_batch_info(tracers[0])[1] is not None
            with watcher.enter("maps", _map_of(watcher, trace, mapped)):
                return original(trace, primitive, tracers, params)
        if not holds_draw(params) or _names_axis(params, trace.axis_data.name, source):
            return original(trace, primitive, tracers, params)
        if primitive.name in _INLINE:
            with _again(watcher, params):
                return _inlined(trace, params["jaxpr"], tracers, source["core"])
        return _rows_of(watcher, trace, (primitive, tracers, params), source)

    return process_primitive


_INLINE = ("jit", "remat2", "checkpoint")
"""Primitives that do what their jaxpr says, once."""


def _inlined(trace: Any, jaxpr: Any, tracers: Any, core: Any) -> list[Any]:
    with core.set_current_trace(trace):
        outs = core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), *tracers)
    return list(outs)


def _map_of(watcher: Any, trace: Any, mapped: bool) -> Mapped:
    pushes = tuple(push for push in watcher.stacks["pushes"] if id(trace.tag) in push.tangents)
    return Mapped(trace.axis_data.size, trace.axis_data.name, mapped, trace.tag, pushes)


def _rows_of(watcher: Any, trace: Any, operation: tuple[Any, Any, Any], source: Internals) -> Any:
    primitive, tracers, params = operation
    core, tracer_type = source["core"], source["interpreters.batching"].BatchTracer
    # JAX keeps programs written down under disable_jit apart from others, so these rows stay here.
    with core.set_current_trace(trace.parent_trace):
        operands = [trace.to_batch_info(t) for t in tracers]
        outs = by_row(watcher, primitive, operands, params, _map_of(watcher, trace, False))
    here = source["source_info_util"].current()
    wrapped = [tracer_type(trace, out, 0, here) for out in outs]
    return wrapped if primitive.multiple_results else wrapped[0]


def _names_axis(params: dict[str, Any], name: Any, source: Internals) -> bool:
    kind = source["core"].NamedAxisEffect
    return any(getattr(effect, "name", None) == name for effect in _effects(params, kind))


def _effects(params: dict[str, Any], kind: type) -> Iterator[Any]:
    for value in params.values():
        for jaxpr in value if isinstance(value, (tuple, list)) else [value]:
            yield from (effect for effect in getattr(jaxpr, "effects", ()) if isinstance(effect, kind))


def _sharded(original: Callable[..., Any], source: Internals) -> Callable[..., Any]:
    """`shard_map` as `vmap` over the mesh; as ever, and not seen, where that fails."""

    def process_shard_map(trace: Any, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        watcher = mine()
        if watcher is None:
            return original(trace, primitive, fun, args, **params)
        mark = watcher.mark()
        try:
            axes = tuple(params["newly_manual_axes"])
            with watcher.enter("meshes", axes), source["core"].set_current_trace(trace):
                return map_over_mesh(source["config"], fun, args, params)
        except Exception:
            watcher.discard_since(mark)
            watcher.unseen("shard_map")
        with watcher.blinded():
            return original(trace, primitive, fun, args, **params)

    return process_shard_map


def _identity_over_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **params: Any) -> Any:
        watcher = mine()
        if watcher is None or not watcher.stacks["meshes"]:
            return original(*args, **params)
        return args[0]

    return implementation
