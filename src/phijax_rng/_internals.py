"""The one place that reaches into JAX, for the audit: JAX's random primitives reported as they run.

While `watching(watcher)` is open, everything that the calling thread asks of JAX runs op by op (`jax.disable_jit`),
and the watcher is told of every split, fold and draw with the bits of the keys. Other threads keep JAX as it is.

JAX offers no public way to do this, so names of `jax._src` are used, and used here alone. All are
looked up before anything is replaced; a name that has moved is one clear error. Whatever was
replaced is put back on every way out.

    random primitives       run as ever, then reported with the bits of their keys
    while, cond, scan, jit  that hold a draw and reach a compiler: walked equation by equation
    vmap of one of these    row by row, so that every row draws what it would draw and no more
    shard_map               the same function under vmap over the axes of the mesh
    anything else compiled  reported as not seen, if it holds a draw
"""

import contextlib
import dataclasses
import importlib
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.extend.core.primitives as jep
import jax.numpy as jnp
import numpy as np

LAST_TESTED = "0.12"
"""The newest JAX that the audit was tested with."""

KINDS = {
    "random_seed_p": "seed",
    "random_split_p": "split",
    "random_fold_in_p": "fold_in",
    "random_bits_p": "bits",
    "random_gamma_p": "gamma",
}
"""Primitives of `jax.extend.core.primitives`, and the word each is reported under."""

_HIDDEN_KINDS = {"random_wrap_p": "wrap", "random_unwrap_p": "unwrap"}
"""Two more, which JAX does not export; they live beside its typed keys."""

_NEEDED = {
    "core": ("eval_jaxpr", "EvalTrace", "set_current_trace", "jaxpr_as_fun", "NamedAxisEffect"),
    "dispatch": ("xla_primitive_callable",),
    "stages": ("Compiled",),
    "api": ("argnums_partial2",),
    "config": ("_check_vma",),
    "source_info_util": ("user_context", "current_name_stack", "current"),
    "interpreters.ad": ("linearize", "jvp", "backward_pass3", "ct_check"),
    "interpreters.batching": ("BatchTrace", "BatchTracer"),
    "random.prng": ("random_wrap_p", "random_unwrap_p"),
    "random.core": ("random_clone_p",),
    "shard_map": ("shard_map_p",),
}


class Watcher(Protocol):
    """What is told of the run. All calls come from the thread that is watched."""

    thread: int
    blind: bool

    def record(self, kind: str, keys: Any, out: Any, **details: Any) -> None:
        """A random primitive has run: `keys` and `out` are `Words` or `None`."""

    def unseen(self, what: str) -> None:
        """Something that may hold a draw runs where it cannot be seen."""

    def foreign(self, kind: str) -> None:
        """Another thread ran a random primitive."""

    def enter(self, stack: str, entry: Any) -> contextlib.AbstractContextManager[Any]:
        """For a `with` block, `entry` is on top of the stack of this name."""

    def blinded(self) -> contextlib.AbstractContextManager[None]:
        """For a `with` block, nothing is reported."""

    def discard_loop(self) -> None:
        """If the caller is `lax.while_loop`: its Python loop gave up, and will run again from its start."""


@dataclasses.dataclass(frozen=True)
class Words:
    """The bits of an array of keys: one row of uint32 words for each key, and the shape of the array."""

    implementation: str
    rows: np.ndarray[Any, Any]
    shape: tuple[int, ...]


@dataclasses.dataclass
class Evaluation:
    """One walk over the equations of a jaxpr."""

    number: int
    equation: Any = None


def words_of(keys: Any) -> Words:
    """The bits of typed keys that are known."""
    base = np.asarray(keys._base_array)
    return Words(keys._impl.name, base.reshape(-1, base.shape[-1]), tuple(keys.shape))


_lock = threading.Lock()
_active: Watcher | None = None
_numbers = itertools.count()


def _mine() -> Any:
    """The watcher, if it watches this thread and is not blind to what runs now."""
    watcher: Any = _active
    if watcher is None or watcher.blind or watcher.thread != threading.get_ident():
        return None
    return watcher


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tells `watcher` of every random primitive that this thread runs inside the block.

    Raises:
        RuntimeError: another audit is open in this process, or JAX has moved what is needed here.
    """
    global _active  # noqa: PLW0603 - the primitives are the process's, so the watcher is
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
        stack.enter_context(jax.disable_jit())
        stack.enter_context(jax.debug_key_reuse(False))  # it would raise where we report
        _active = watcher
        stack.callback(_deactivate)
        yield


def _deactivate() -> None:
    global _active  # noqa: PLW0603
    _active = None


def _jax_internals() -> dict[str, Any]:
    """The modules of `jax._src` by name, every needed name checked."""
    found = {}
    missing = [f"jax.extend.core.primitives.{name}" for name in KINDS if not hasattr(jep, name)]
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
    for primitive, walk in _WALKS.items():
        patches.set(primitive, "impl", _walked(primitive.impl, walk))
    patches.set(jep.while_p, "bind", _bind_while)
    _install_evaluation(patches, source)
    _install_differentiation(patches, source)
    _install_mapping(patches, source)
    _install_unseen(patches, source)
    _install_host_generators(patches)


def _watched(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The implementation of a random primitive, with a report after it."""

    def implementation(*args: Any, **params: Any) -> Any:
        watcher = _mine()
        if watcher is None:
            if _active is not None and _active.thread != threading.get_ident():
                _active.foreign(kind)
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
    if kind == "split":
        return {"keys": keys, "out": words_of(out), "data": tuple(params["shape"])}
    if kind == "fold_in":
        # Keys and numbers are broadcast against each other: one key and many numbers under vmap.
        places = np.broadcast_to(np.arange(len(keys.rows)).reshape(keys.shape), out.shape).reshape(-1)
        folded = np.broadcast_to(np.asarray(args[1]), out.shape).reshape(-1)
        repeated = Words(keys.implementation, keys.rows[places], tuple(out.shape))
        return {"keys": repeated, "out": words_of(out), "data": folded}
    if kind == "clone":
        return {"keys": keys, "out": None}
    if kind == "bits":
        return {"keys": keys, "out": None, "shape": tuple(params["shape"]), "bits": params["bit_width"]}
    if kind == "gamma":
        return {"keys": keys, "out": None, "shape": (), "bits": 8 * np.dtype(out.dtype).itemsize}
    return {"keys": keys, "out": None}


def holds_draw(value: Any) -> bool:
    """Whether parameters of a primitive hold a jaxpr with a random primitive in it, at any depth."""
    if hasattr(value, "eqns"):
        return any(equation.primitive in _RANDOM or holds_draw(equation.params) for equation in value.eqns)
    if isinstance(value, dict):
        return any(map(holds_draw, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(holds_draw, value))
    return hasattr(value, "jaxpr") and not isinstance(value, type) and holds_draw(value.jaxpr)


_RANDOM = frozenset(
    getattr(jep, name)
    for name in (*KINDS, "threefry2x32_p", "rng_bit_generator_p", "rng_uniform_p")
    if hasattr(jep, name)
)


def _walked(original: Callable[..., Any], walk: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **params: Any) -> Any:
        if _mine() is None or not holds_draw(params):
            return original(*args, **params)
        return walk(*args, **params)

    return implementation


def _call(jaxpr: Any, *args: Any) -> list[Any]:
    return list(sys.modules["jax._src.core"].jaxpr_as_fun(jaxpr)(*args))


def _walk_while(
    *args: Any, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int, body_jaxpr: Any, **_: Any
) -> list[Any]:
    cond_consts, args = args[:cond_nconsts], args[cond_nconsts:]
    body_consts, carry = args[:body_nconsts], list(args[body_nconsts:])
    watcher = _mine()
    while True:
        going = np.asarray(_call(cond_jaxpr, *cond_consts, *carry)[0])
        if not going.any():
            return carry
        # With a predicate for each row, JAX runs the body for all and keeps what the others had.
        with watcher.enter("masks", going) if going.ndim else contextlib.nullcontext():
            following = _call(body_jaxpr, *body_consts, *carry)
        carry = [_where(going, new, old) for new, old in zip(following, carry, strict=True)]


def _where(going: np.ndarray[Any, Any], new: Any, old: Any) -> Any:
    if not going.ndim:
        return new
    return jnp.where(going.reshape(going.shape + (1,) * (jnp.ndim(new) - going.ndim)), new, old)


def _walk_cond(index: Any, *operands: Any, branches: Any, **_: Any) -> list[Any]:
    return _call(branches[min(max(int(index), 0), len(branches) - 1)], *operands)


def _walk_scan(*args: Any, jaxpr: Any, length: int, reverse: bool, **params: Any) -> Any:
    num_consts, num_carry = _scan_counts(params)
    consts, carry, xs = (
        args[:num_consts],
        list(args[num_consts : num_consts + num_carry]),
        args[num_consts + num_carry :],
    )
    stacked = []
    for index in reversed(range(length)) if reverse else range(length):
        out = _call(jaxpr, *consts, *carry, *(x[index] for x in xs))
        carry, row = out[:num_carry], out[num_carry:]
        stacked.append(row)
    ordered = stacked[::-1] if reverse else stacked
    return [*carry, *(jnp.stack(rows) for rows in zip(*ordered, strict=True))]


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # how newer versions say it
    return len(consts), len(carry)


def _walk_jit(*args: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return _call(jaxpr, *args)


_WALKS = {
    jep.while_p: _walk_while,
    jep.cond_p: _walk_cond,
    jep.scan_p: _walk_scan,
    jep.jit_p: _walk_jit,
}


def _bind_while(*args: Any, **params: Any) -> Any:
    """`lax.while_loop` first tries Python's own loop, and binds the primitive when that gave up."""
    if (watcher := _mine()) is not None:
        watcher.discard_loop()
    return type(jep.while_p).bind(jep.while_p, *args, **params)


def _install_evaluation(patches: _Patches, source: dict[str, Any]) -> None:
    core, info = source["core"], source["source_info_util"]
    original = core.eval_jaxpr

    def eval_jaxpr(jaxpr: Any, consts: Any, *args: Any, propagate_source_info: bool = True) -> list[Any]:
        watcher = _mine()
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
                env.update(zip(equation.outvars, out if equation.primitive.multiple_results else [out]))
        return [_read(env, atom) for atom in jaxpr.outvars]

    patches.set(core, "eval_jaxpr", eval_jaxpr)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if hasattr(atom, "val") else env[atom]


def _install_differentiation(patches: _Patches, source: dict[str, Any]) -> None:
    api, ad = source["api"], source["interpreters.ad"]
    partial = api.argnums_partial2

    def argnums_partial2(fun: Any, argnums: Any, args: Any, kwargs: Any) -> Any:
        if (watcher := _mine()) is not None:
            watcher.differentiating = (fun, args, kwargs)
        return partial(fun, argnums, args, kwargs)

    patches.set(api, "argnums_partial2", argnums_partial2)

    def within(stack: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            watcher = _mine()
            if watcher is None:
                return original(*args, **kwargs)
            what = watcher.differentiating or (args[0], list(args[1]), {})
            watcher.differentiating = None
            with watcher.enter(stack, what):
                return original(*args, **kwargs)

        return wrapped

    patches.set(ad, "linearize", within("differentiations", ad.linearize))
    patches.set(ad, "jvp", within("differentiations", ad.jvp))
    backward = ad.backward_pass3

    def backward_pass3(*args: Any, **kwargs: Any) -> Any:
        watcher = _mine()
        with contextlib.nullcontext() if watcher is None else watcher.enter("backward", True):
            return backward(*args, **kwargs)

    patches.set(ad, "backward_pass3", backward_pass3)
    check = ad.ct_check

    def ct_check(*args: Any, **kwargs: Any) -> None:
        # Types under a mesh name its axes; taken by vmap, as here, they do not.
        watcher = _mine()
        if watcher is None or not watcher.stacks["meshes"]:
            check(*args, **kwargs)

    patches.set(ad, "ct_check", ct_check)


def _install_mapping(patches: _Patches, source: dict[str, Any]) -> None:
    core, batching = source["core"], source["interpreters.batching"]
    original = batching.BatchTrace.process_primitive

    def process_primitive(trace: Any, primitive: Any, tracers: Any, params: Any, /) -> Any:
        watcher = _mine()
        if watcher is None:
            return original(trace, primitive, tracers, params)
        size, name = trace.axis_data.size, trace.axis_data.name
        if primitive in _RANDOM:
            mapped = trace.to_batch_info(tracers[0])[1] is not None
            with watcher.enter("maps", (size, name, mapped)):
                return original(trace, primitive, tracers, params)
        if not holds_draw(params) or any(
            getattr(effect, "name", None) == name for effect in _effects(params, core.NamedAxisEffect)
        ):
            return original(trace, primitive, tracers, params)
        with core.set_current_trace(trace.parent_trace):
            outs = _by_row(watcher, primitive, [trace.to_batch_info(t) for t in tracers], params, size)
        src = source["source_info_util"].current()
        wrapped = [batching.BatchTracer(trace, out, 0, src) for out in outs]
        return wrapped if primitive.multiple_results else wrapped[0]

    patches.set(batching.BatchTrace, "process_primitive", process_primitive)
    sharded = core.EvalTrace.process_shard_map

    def process_shard_map(trace: Any, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        watcher = _mine()
        if watcher is None:
            return sharded(trace, primitive, fun, args, **params)
        mark = watcher.mark()
        try:
            axes = tuple(params["newly_manual_axes"])
            with watcher.enter("meshes", axes), core.set_current_trace(trace):
                return _map_over_mesh(source["config"], fun, args, params)
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
        watcher = _mine()
        if watcher is None or not watcher.stacks["meshes"]:
            return original(*args, **params)
        return args[0]

    return implementation


def _effects(params: dict[str, Any], kind: type) -> Iterator[Any]:
    for value in params.values():
        for jaxpr in value if isinstance(value, (tuple, list)) else [value]:
            yield from (effect for effect in getattr(jaxpr, "effects", ()) if isinstance(effect, kind))


def _by_row(watcher: Any, primitive: Any, operands: Any, params: dict[str, Any], size: int) -> list[Any]:
    """One call of `primitive` for each row of what is mapped, and the results stacked."""
    group = next(_numbers)
    rows = []
    for index in range(size):
        row = [
            value if dim is None else jax.lax.index_in_dim(value, index, dim, keepdims=False)
            for value, dim in operands
        ]
        with watcher.enter("rows", (group, index, size)):
            out = primitive.bind(*row, **params)
        rows.append(out if primitive.multiple_results else [out])
    return [jnp.stack(column) for column in zip(*rows, strict=True)]


def _map_over_mesh(config: Any, fun: Any, args: Any, params: dict[str, Any]) -> Any:
    """`fun` on every device of the mesh, as nested `vmap`s with the names of its axes."""
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    axes = [axis for axis in mesh.axis_names if axis in manual]
    sizes = {axis: mesh.shape[axis] for axis in axes}
    split = [_split_over(x, spec, axes, sizes) for x, spec in zip(args, params["in_specs"], strict=True)]
    returned: list[Any] = []

    def body(*xs: Any) -> list[Any]:
        answer, specs = fun(*xs).unpack_aux()
        returned[:] = [answer, list(specs)]
        return list(answer)

    mapped: Callable[..., Any] = body
    for axis in reversed(axes):
        over = tuple(0 if axis in own else None for _, own in split)
        mapped = jax.vmap(mapped, in_axes=over, axis_name=axis, axis_size=sizes[axis])
    with config._check_vma(False):
        outs = mapped(*(x for x, _ in split))
    answer, specs = returned
    joined = [_join_over(x, spec, axes) for x, spec in zip(outs, specs, strict=True)]
    return answer.update(joined)


def _spec_axes(spec: Any, rank: int) -> list[tuple[str, ...]]:
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in tuple(spec)]
    return entries + [()] * (rank - len(entries))


def _split_over(x: Any, spec: Any, axes: list[str], sizes: dict[str, int]) -> tuple[Any, list[str]]:
    """`x` with one leading axis for each axis of the mesh that splits it, in the order of the mesh."""
    shape: list[int] = []
    place: dict[str, int] = {}
    for length, names in zip(jnp.shape(x), _spec_axes(spec, jnp.ndim(x)), strict=True):
        for name in names:
            place[name] = len(shape)
            shape.append(sizes[name])
            length //= sizes[name]
        shape.append(length)
    own = [axis for axis in axes if axis in place]
    rest = [axis for axis in range(len(shape)) if axis not in place.values()]
    return jnp.transpose(jnp.reshape(x, shape), [place[axis] for axis in own] + rest), own


def _join_over(x: Any, spec: Any, axes: list[str]) -> Any:
    """One array from the rows of all devices; where the mesh repeats it, the first device's."""
    names = _spec_axes(spec, jnp.ndim(x) - len(axes))
    kept = [axis for axis in axes if any(axis in dim for dim in names)]
    for index, axis in reversed(list(enumerate(axes))):
        if axis not in kept:
            x = x[(slice(None),) * index + (0,)]
    order, shape = [], []
    for dim, own in enumerate(names):
        order += [kept.index(axis) for axis in own] + [len(kept) + dim]
        shape.append(int(np.prod([x.shape[kept.index(axis)] for axis in own] + [x.shape[len(kept) + dim]])))
    return jnp.reshape(jnp.transpose(x, order), shape)


def _install_unseen(patches: _Patches, source: dict[str, Any]) -> None:
    dispatch, compiled = source["dispatch"], source["stages"].Compiled
    callable_for = dispatch.xla_primitive_callable

    def xla_primitive_callable(primitive: Any, **params: Any) -> Any:
        watcher, run = _mine(), callable_for(primitive, **params)
        if watcher is None or not (primitive in _RAW or holds_draw(params)):
            return run
        watcher.unseen(primitive.name)

        def unwatched(*args: Any) -> Any:
            with watcher.blinded():
                return run(*args)

        return unwatched

    patches.set(dispatch, "xla_primitive_callable", xla_primitive_callable)
    call = compiled.__call__

    def __call__(executable: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if (watcher := _mine()) is not None:
            watcher.unseen("a compiled executable")
        # JAX refuses to run an executable while jit is disabled.
        with jax.disable_jit(False) if watcher is not None else contextlib.nullcontext():
            return call(executable, *args, **kwargs)

    patches.set(compiled, "__call__", __call__)
    start = threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        if (watcher := _mine()) is not None:
            watcher.unseen(f"thread {thread.name!r}")
        start(thread)

    patches.set(threading.Thread, "start", start_thread)


_RAW = frozenset(
    getattr(jep, name)
    for name in ("threefry2x32_p", "rng_bit_generator_p", "rng_uniform_p")
    if hasattr(jep, name)
)
"""Generators beneath JAX's keys: who calls them draws without a key that could be named."""


def _install_host_generators(patches: _Patches) -> None:
    """Reports draws from the global generators of NumPy and Python, which no key names."""
    for module, owner in ((np.random, np.random.mtrand._rand), (random, random._inst)):  # type: ignore[attr-defined]
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is owner and not name.startswith(("_", "get")):
                patches.set(module, name, _reported(function, f"{module.__name__}.{name}"))
    patches.set(np.random, "default_rng", _reported_if_unseeded(np.random.default_rng))


def _reported(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if (watcher := _mine()) is not None:
            watcher.record("host", None, None, data=name)
        return function(*args, **kwargs)

    return wrapped


def _reported_if_unseeded(function: Callable[..., Any]) -> Callable[..., Any]:
    def default_rng(seed: Any = None) -> Any:
        if seed is None and (watcher := _mine()) is not None:
            watcher.record("host", None, None, data="numpy.random.default_rng()")
        return function(seed)

    return default_rng
