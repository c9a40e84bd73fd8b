"""Random primitives that tell the watcher what they did, and jaxprs that say where they are."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax.extend.core.primitives as jep
import numpy as np

from phijax_rng.auditing.events import Words, words_of
from phijax_rng.auditing.jax_hooks.swaps import Internals, Swaps, disable_jit
from phijax_rng.auditing.jax_hooks.walks import KINDS, WALKS, holds_draw
from phijax_rng.auditing.jax_hooks.watcher import Evaluation, active, mine

HIDDEN_KINDS = {"random_wrap_p": "wrap", "random_unwrap_p": "unwrap"}
"""Primitives that JAX does not export; they live beside its typed keys."""

_numbers = itertools.count()


def install(swaps: Swaps, source: Internals) -> None:
    """Random primitives report, and primitives that hold one are walked."""
    for name, kind in KINDS.items():
        primitive = getattr(jep, name)
        swaps.set(primitive, "impl", _watched(primitive.impl, kind))
    for name, kind in HIDDEN_KINDS.items():
        primitive = getattr(source["random.prng"], name)
        swaps.set(primitive, "impl", _watched(primitive.impl, kind))
    clone = source["random.core"].random_clone_p
    swaps.set(clone, "impl", _watched(clone.impl, "clone"))
    for name, walk in WALKS.items():
        primitive = getattr(jep, name)
        swaps.set(primitive, "impl", _walked(primitive.impl, walk))
    swaps.set(jep.while_p, "bind", _bind_while)
    swaps.set(source["core"], "eval_jaxpr", _told_evaluation(source))


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
        with watcher.blinded(), disable_jit(False):
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
        watcher = mine()
        if watcher is None or not holds_draw(params):
            return original(*args, **params)
        if params.get("length") == 0:  # a scan of no steps draws nothing
            with watcher.blinded():
                return original(*args, **params)
        return walk(*args, **params)

    return implementation


def _bind_while(*args: Any, **params: Any) -> Any:
    """`lax.while_loop` first tries Python's own loop, and binds the primitive when that gave up."""
    if (watcher := mine()) is not None:
        watcher.discard_loop()
    return type(jep.while_p).bind(jep.while_p, *args, **params)


def _told_evaluation(source: Internals) -> Callable[..., Any]:
    """`eval_jaxpr`, with the equation it is at on the watcher's stack."""
    info, original = source["source_info_util"], source["core"].eval_jaxpr

    def eval_jaxpr(jaxpr: Any, consts: Any, *args: Any, propagate_source_info: bool = True) -> list[Any]:
        watcher = mine()
        if watcher is None:
            return list(original(jaxpr, consts, *args, propagate_source_info=propagate_source_info))
        inputs = getattr(jaxpr, "all_invars", None) or [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(inputs, [*consts, *args], strict=True))
        evaluation = Evaluation(next(_numbers))
        with watcher.enter("evaluations", evaluation):
            for equation in jaxpr.eqns:
                evaluation.equation = equation
                _evaluate(equation, env, info, propagate_source_info)
        return [_read(env, atom) for atom in jaxpr.outvars]

    return eval_jaxpr


def _evaluate(equation: Any, env: dict[Any, Any], info: Any, propagate_source_info: bool) -> None:
    operands = [_read(env, atom) for atom in equation.invars]
    names = info.current_name_stack() + equation.source_info.name_stack
    traceback = equation.source_info.traceback if propagate_source_info else None
    with info.user_context(traceback, name_stack=names), equation.ctx.manager:
        out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    outs = out if equation.primitive.multiple_results else [out]
    env.update(zip(equation.outvars, outs, strict=True))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if hasattr(atom, "val") else env[atom]
