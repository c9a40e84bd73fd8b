"""What is replaced in JAX while a watcher is active, and put back after it."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core.primitives as jep
import numpy as np

from phijax_rng._internals.bodies import Bodies, body_types
from phijax_rng._internals.walks import KINDS, RANDOM, RAW, WALKS, by_row, holds_draw, map_over_mesh
from phijax_rng._internals.watcher import Evaluation, Watcher, Words, activate, active, mine, words_of

LAST_TESTED = "0.12"
"""The newest JAX that the audit was tested with."""

_HIDDEN_KINDS = {"random_wrap_p": "wrap", "random_unwrap_p": "unwrap"}
"""Primitives that JAX does not export; they live beside its typed keys."""

_NEEDED = {
    "core": (
        *("eval_jaxpr", "jaxpr_as_fun", "NamedAxisEffect", "Trace", "Tracer", "EvalTrace", "trace_ctx"),
        *("set_current_trace", "typeof", "is_concrete", "to_concrete_value"),
    ),
    "dispatch": ("xla_primitive_callable",),
    "stages": ("Compiled",),
    "api": ("argnums_partial2",),
    "config": (
        *("_check_vma", "disable_jit", "scan3", "jax_xla_profile_version", "trace_context", "config_ext"),
    ),
    "lib": ("jax_jit",),
    "pjit": ("_infer_params", "_run_python_pjit"),
    "lax.control_flow.loops": ("scan", "scan3"),
    "source_info_util": ("user_context", "current_name_stack", "current"),
    "interpreters.ad": ("linearize", "jvp", "backward_pass3", "ct_check"),
    "interpreters.batching": ("BatchTrace", "BatchTracer"),
    "random.prng": ("random_wrap_p", "random_unwrap_p"),
    "random.core": ("random_clone_p",),
    "shard_map": ("shard_map_p",),
}


_PROFILE = -20
_lock = threading.Lock()
_numbers = itertools.count()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tells `watcher` of every random primitive that this thread runs inside the block.

    Raises:
        RuntimeError: another audit is open in this process, or JAX has moved what is needed here.
    """
    source = _jax_internals()
    if not _lock.acquire(blocking=False):
        raise RuntimeError(
            "an audit is open in this process already, and two would see each other's draws. "
            "Run one after the other."
        )
    with contextlib.ExitStack() as stack:
        stack.callback(_lock.release)
        patches = _Patches()
        stack.callback(patches.restore)
        _install(patches, source)
        _enter_open_jit(stack, source)
        stack.enter_context(jax.debug_key_reuse(False))  # it would raise where we report
        activate(watcher)
        stack.callback(activate, None)
        yield


def _enter_open_jit(stack: contextlib.ExitStack, source: dict[str, Any]) -> None:
    """Runs what JAX would compile op by op, by way of its Python code, where `_install_bodies` waits for it.

    `jax.disable_jit` is read twice: by JAX's Python code, and by its C++ code, which would call the
    function at once. The C++ code keeps what it learns by a key, and the version of a profile that
    nobody has, which means nothing to the compiler below one, makes that another key.
    """
    config, jax_jit = source["config"], source["lib"].jax_jit
    stack.enter_context(jax.disable_jit())
    stack.enter_context(config.jax_xla_profile_version(_PROFILE))
    stack.enter_context(config.scan3(True))
    stack.callback(jax_jit.set_disable_jit_state, config.disable_jit)
    jax_jit.set_disable_jit_state(_never(config))


@functools.cache
def _never(config: Any) -> Any:
    """A setting that is false, in every thread."""
    return config.config_ext.Config(
        "phijax_rng_never", False, include_in_jit_key=False, include_in_trace_context=False
    )


def _jax_internals() -> dict[str, Any]:
    """The modules of `jax._src` by name, every needed name checked."""
    found = {}
    missing = [f"jax.extend.core.primitives.{name}" for name in (*KINDS, *WALKS) if not hasattr(jep, name)]
    for module, names in _NEEDED.items():
        try:
            found[module] = importlib.import_module(f"jax._src.{module}")
        except ImportError:
            missing.append(f"jax._src.{module}")
            continue
        missing += [f"jax._src.{module}.{name}" for name in names if not hasattr(found[module], name)]
    if missing:
        raise RuntimeError(
            f"JAX {jax.__version__} has moved what the audit looks through: {', '.join(missing)}. "
            f"Use JAX 0.10.2 to {LAST_TESTED}, or a newer phijax_rng; training does not need the audit."
        )
    return found


class _Patches:
    """Attributes replaced for a while; `restore` puts all of them back, newest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        if name in own:
            before = own[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _install(patches: _Patches, source: dict[str, Any]) -> None:
    for name, kind in KINDS.items():
        primitive = getattr(jep, name)
        patches.set(primitive, "impl", _watched(primitive.impl, kind))
    for name, kind in _HIDDEN_KINDS.items():
        primitive = getattr(source["random.prng"], name)
        patches.set(primitive, "impl", _watched(primitive.impl, kind))
    clone = source["random.core"].random_clone_p
    patches.set(clone, "impl", _watched(clone.impl, "clone"))
    for name, walk in WALKS.items():
        primitive = getattr(jep, name)
        patches.set(primitive, "impl", _walked(primitive.impl, walk))
    patches.set(jep.while_p, "bind", _bind_while)
    _install_bodies(patches, source)
    _install_evaluation(patches, source)
    _install_differentiation(patches, source)
    _install_mapping(patches, source)
    _install_unseen(patches, source)
    _install_host_generators(patches)


def _watched(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The implementation of a random primitive, with a report after it."""

    def implementation(*args: Any, **params: Any) -> Any:
        watcher = mine()
        if watcher is None:
            other = active()
            if other is not None and other.thread != threading.get_ident():
                other.foreign(kind)
            return original(*args, **params)
        # Compiled, as ever: op by op one draw of Threefry takes a hundred calls.
        with watcher.blinded(), jax.disable_jit(False):
            out = original(*args, **params)
        watcher.record(kind, **_described(kind, args, params, out))
        return out

    return implementation


def _described(kind: str, args: tuple[Any, ...], params: dict[str, Any], out: Any) -> dict[str, Any]:
    if kind in ("seed", "wrap"):
        data = np.asarray(args[0])
        return {"keys": None, "out": words_of(out), "data": data.reshape(-1) if kind == "seed" else None}
    keys = words_of(args[0])
    details: dict[str, Any] = {"keys": keys, "out": None}
    if kind == "split":
        details |= {"out": words_of(out), "data": tuple(params["shape"])}
    elif kind == "fold_in":
        # Keys and numbers are broadcast against each other: one key and many numbers under vmap.
        places = np.broadcast_to(np.arange(len(keys.rows)).reshape(keys.shape), out.shape).reshape(-1)
        folded = np.broadcast_to(np.asarray(args[1]), out.shape).reshape(-1)
        repeated = Words(keys.implementation, keys.rows[places], tuple(out.shape))
        details = {"keys": repeated, "out": words_of(out), "data": folded}
    elif kind == "bits":
        details |= {"shape": tuple(params["shape"]), "bits": params["bit_width"]}
    elif kind == "gamma":
        details |= {"shape": (), "bits": 8 * np.dtype(out.dtype).itemsize}
    return details


def _walked(original: Callable[..., Any], walk: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **params: Any) -> Any:
        if mine() is None or not holds_draw(params):
            return original(*args, **params)
        return walk(*args, **params)

    return implementation


def _bind_while(*args: Any, **params: Any) -> Any:
    """`lax.while_loop` first tries Python's own loop, and binds the primitive when that gave up."""
    if (watcher := mine()) is not None:
        watcher.discard_loop()
    return type(jep.while_p).bind(jep.while_p, *args, **params)


def _install_bodies(patches: _Patches, source: dict[str, Any]) -> None:
    core, config, pjit, loops = (
        source[name] for name in ("core", "config", "pjit", "lax.control_flow.loops")
    )
    bodies = Bodies(core, config.trace_context)
    infer, run = pjit._infer_params, pjit._run_python_pjit

    def _infer_params(fun: Any, options: Any, args: Any, kwargs: Any) -> Any:
        called = sys._getframe(1).f_code.co_name == "cache_miss"  # and not lowered, or looked at
        if not called or mine() is None or not config.disable_jit.value:
            return infer(fun, options, args, kwargs)
        return _Opened(options), []

    def _run_python_pjit(params: Any, flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(params, _Opened):
            return run(params, flat, fun, args, kwargs)
        out = bodies.call(fun, args, kwargs, params.options)
        no_program = types.SimpleNamespace(effects=(), consts=())
        return out, [], None, [], no_program, None, None, []

    patches.set(pjit, "_infer_params", _infer_params)
    patches.set(pjit, "_run_python_pjit", _run_python_pjit)
    scan = loops.scan

    def scan3(f: Any, init: Any, xs: Any, length: Any, reverse: bool, unroll: Any) -> Any:
        steps = _length_of(xs, length)
        if mine() is not None and config.disable_jit.value and steps:
            return bodies.scan(f, init, xs, steps, reverse)
        with config.scan3(False), contextlib.nullcontext() if steps else jax.disable_jit(False):
            return scan(f, init, xs, length, reverse, unroll)

    patches.set(loops, "scan3", scan3)
    is_concrete = core.is_concrete

    def looked_at(x: Any) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_name in ("cond", "switch") and mine() is not None:
            bodies.branch(frame)
        return bool(is_concrete(x))

    patches.set(core, "is_concrete", looked_at)
    _install_closures(patches, core)


@dataclasses.dataclass
class _Opened:
    """In place of the parameters of a `jit`: its options."""

    options: Any


def _length_of(xs: Any, length: Any) -> int | None:
    """Steps of a scan, where its arguments agree on them."""
    lengths = {jax.numpy.shape(x)[:1] for x in jax.tree.leaves(xs)} | ({(length,)} if length is not None else set())
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else None


def _install_closures(patches: _Patches, core: Any) -> None:
    """A custom rule that runs outside of a body may hold values of that body."""
    _, tracer_type = body_types(core)
    process = core.EvalTrace.process_primitive

    def process_primitive(trace: Any, primitive: Any, args: Any, params: Any, /) -> Any:
        return process(trace, primitive, [_outside(x, tracer_type) for x in args], params)

    patches.set(core.EvalTrace, "process_primitive", process_primitive)


def _outside(x: Any, tracer_type: Any) -> Any:
    while isinstance(x, tracer_type) and x._trace.open:
        x = x.val
    return x


def _install_evaluation(patches: _Patches, source: dict[str, Any]) -> None:
    core, info = source["core"], source["source_info_util"]
    original = core.eval_jaxpr

    def eval_jaxpr(jaxpr: Any, consts: Any, *args: Any, propagate_source_info: bool = True) -> list[Any]:
        watcher = mine()
        if watcher is None:
            return original(jaxpr, consts, *args, propagate_source_info=propagate_source_info)
        inputs = getattr(jaxpr, "all_invars", None) or [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(inputs, [*consts, *args], strict=True))
        evaluation = Evaluation(next(_numbers))
        with watcher.enter("evaluations", evaluation):
            for equation in jaxpr.eqns:
                evaluation.equation = equation
                operands = [_read(env, atom) for atom in equation.invars]
                names = info.current_name_stack() + equation.source_info.name_stack
                traceback = equation.source_info.traceback if propagate_source_info else None
                with info.user_context(traceback, name_stack=names), equation.ctx.manager:
                    out = equation.primitive.bind(
                        *operands, **equation.primitive.get_bind_params(equation.params)
                    )
                outs = out if equation.primitive.multiple_results else [out]
                env.update(zip(equation.outvars, outs, strict=True))
        return [_read(env, atom) for atom in jaxpr.outvars]

    patches.set(core, "eval_jaxpr", eval_jaxpr)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if hasattr(atom, "val") else env[atom]


def _install_differentiation(patches: _Patches, source: dict[str, Any]) -> None:
    api, ad = source["api"], source["interpreters.ad"]
    partial = api.argnums_partial2

    def argnums_partial2(fun: Any, argnums: Any, args: Any, kwargs: Any) -> Any:
        if (watcher := mine()) is not None:
            watcher.differentiating = (fun, args, kwargs)
        return partial(fun, argnums, args, kwargs)

    patches.set(api, "argnums_partial2", argnums_partial2)

    def within(stack: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            watcher = mine()
            if watcher is None:
                return original(*args, **kwargs)
            what: Any = watcher.differentiating or (args[0], list(args[1]), {})
            watcher.differentiating = None
            with watcher.enter(stack, what):
                return original(*args, **kwargs)

        return wrapped

    patches.set(ad, "linearize", within("differentiations", ad.linearize))
    patches.set(ad, "jvp", within("differentiations", ad.jvp))
    backward = ad.backward_pass3

    def backward_pass3(*args: Any, **kwargs: Any) -> Any:
        watcher = mine()
        with contextlib.nullcontext() if watcher is None else watcher.enter("backward", True):
            return backward(*args, **kwargs)

    patches.set(ad, "backward_pass3", backward_pass3)
    check = ad.ct_check

    def ct_check(*args: Any, **kwargs: Any) -> None:
        # Types under a mesh name its axes; taken by vmap, as here, they do not.
        watcher = mine()
        if watcher is None or not watcher.stacks["meshes"]:
            check(*args, **kwargs)

    patches.set(ad, "ct_check", ct_check)


def _install_mapping(patches: _Patches, source: dict[str, Any]) -> None:
    core, batching = source["core"], source["interpreters.batching"]
    original = batching.BatchTrace.process_primitive

    def process_primitive(trace: Any, primitive: Any, tracers: Any, params: Any, /) -> Any:
        watcher = mine()
        if watcher is None:
            return original(trace, primitive, tracers, params)
        size, name = trace.axis_data.size, trace.axis_data.name
        if primitive in RANDOM:
            mapped = trace.to_batch_info(tracers[0])[1] is not None
            with watcher.enter("maps", (size, name, mapped)):
                return original(trace, primitive, tracers, params)
        if not holds_draw(params) or any(
            getattr(effect, "name", None) == name for effect in _effects(params, core.NamedAxisEffect)
        ):
            return original(trace, primitive, tracers, params)
        # JAX keeps programs written down under disable_jit apart from others, so these rows stay here.
        with core.set_current_trace(trace.parent_trace):
            outs = by_row(watcher, primitive, [trace.to_batch_info(t) for t in tracers], params, size)
        src = source["source_info_util"].current()
        wrapped = [batching.BatchTracer(trace, out, 0, src) for out in outs]
        return wrapped if primitive.multiple_results else wrapped[0]

    patches.set(batching.BatchTrace, "process_primitive", process_primitive)
    sharded = core.EvalTrace.process_shard_map

    def process_shard_map(trace: Any, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        watcher = mine()
        if watcher is None:
            return sharded(trace, primitive, fun, args, **params)
        mark = watcher.mark()
        try:
            axes = tuple(params["newly_manual_axes"])
            with watcher.enter("meshes", axes), core.set_current_trace(trace):
                return map_over_mesh(source["config"], fun, args, params)
        except Exception:
            watcher.discard_since(mark)
            watcher.unseen("shard_map")
        with watcher.blinded():
            return sharded(trace, primitive, fun, args, **params)

    patches.set(core.EvalTrace, "process_shard_map", process_shard_map)
    if hasattr(core, "pvary_p"):  # a note on types that has no meaning under vmap
        patches.set(core.pvary_p, "impl", _identity_over_mesh(core.pvary_p.impl))


def _identity_over_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **params: Any) -> Any:
        watcher = mine()
        if watcher is None or not watcher.stacks["meshes"]:
            return original(*args, **params)
        return args[0]

    return implementation


def _effects(params: dict[str, Any], kind: type) -> Iterator[Any]:
    for value in params.values():
        for jaxpr in value if isinstance(value, (tuple, list)) else [value]:
            yield from (effect for effect in getattr(jaxpr, "effects", ()) if isinstance(effect, kind))


def _install_unseen(patches: _Patches, source: dict[str, Any]) -> None:
    dispatch, compiled = source["dispatch"], source["stages"].Compiled
    callable_for = dispatch.xla_primitive_callable

    def xla_primitive_callable(primitive: Any, **params: Any) -> Any:
        watcher, run = mine(), callable_for(primitive, **params)
        if watcher is None or not (primitive in RAW or holds_draw(params)):
            return run
        watcher.unseen(primitive.name)

        def unwatched(*args: Any) -> Any:
            with watcher.blinded():
                return run(*args)

        return unwatched

    patches.set(dispatch, "xla_primitive_callable", xla_primitive_callable)
    call = compiled.__call__

    def __call__(executable: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if (watcher := mine()) is not None:
            watcher.unseen("a compiled executable")
        # JAX refuses to run an executable while jit is disabled.
        with jax.disable_jit(False) if watcher is not None else contextlib.nullcontext():
            return call(executable, *args, **kwargs)

    patches.set(compiled, "__call__", __call__)
    start = threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        if (watcher := mine()) is not None:
            watcher.unseen(f"thread {thread.name!r}")
        start(thread)

    patches.set(threading.Thread, "start", start_thread)


_GENERATORS = tuple(
    (module, getattr(home, name, None))
    for module, home, name in ((np.random, np.random.mtrand, "_rand"), (random, random, "_inst"))
)
"""Where the functions of the global generators are, and the generators."""


def _install_host_generators(patches: _Patches) -> None:
    """Reports draws from the global generators of NumPy and Python, which no key names."""
    for module, owner in _GENERATORS:
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is owner and not name.startswith(("_", "get")):
                patches.set(module, name, _reported(function, f"{module.__name__}.{name}"))
    patches.set(np.random, "default_rng", _reported_seeds(np.random.default_rng))


def _reported(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if (watcher := mine()) is not None:
            watcher.record("host", None, None, data=name)
        return function(*args, **kwargs)

    return wrapped


def _reported_seeds(function: Callable[..., Any]) -> Callable[..., Any]:
    def default_rng(seed: Any = None) -> Any:
        if (watcher := mine()) is not None:
            if seed is None:
                watcher.record("host", None, None, data="numpy.random.default_rng()")
            elif isinstance(seed, (int, np.integer, np.ndarray, list, tuple)):
                watcher.record("host seed", None, None, data=repr(np.asarray(seed).tolist()))
        return function(seed)

    return default_rng
