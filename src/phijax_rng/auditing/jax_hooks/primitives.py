"""Random primitives that report what they did, and primitives that are run equation by equation."""

import threading
from collections.abc import Callable
from typing import Any

import jax.extend.core.primitives as jep
import numpy as np

from phijax_rng.auditing.events import Words, words_of
from phijax_rng.auditing.jax_hooks.names import PRIMITIVES, Modules
from phijax_rng.auditing.jax_hooks.swaps import Swaps, disable_jit
from phijax_rng.auditing.jax_hooks.walks import WALKS, Parameters, holds_draw
from phijax_rng.auditing.jax_hooks.watcher import active, mine


def install(swaps: Swaps, modules: Modules) -> None:
    """Random primitives report, and primitives that hold one run equation by equation."""
    typed_keys: Any = modules["random.prng"]
    cloning: Any = modules["random.core"]
    kinds = {getattr(jep, name): kind for name, kind in PRIMITIVES.items()}
    kinds |= {typed_keys.random_wrap_p: "wrap", typed_keys.random_unwrap_p: "unwrap"}
    kinds[cloning.random_clone_p] = "clone"
    for primitive, kind in kinds.items():
        swaps.set(primitive, "impl", _reporting(primitive.impl, kind))
    for name, walk in WALKS.items():
        primitive = getattr(jep, name)
        swaps.set(primitive, "impl", _walked(primitive.impl, walk))
    swaps.set(jep.while_p, "bind", _bind_while)


def _reporting(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The implementation of a random primitive, with a report after it."""

    def implementation(*args: Any, **params: Any) -> Any:
        watcher = mine()
        if watcher is None:
            other = active()
            if other is not None and other.thread != threading.get_ident():
                other.foreign(kind)
            return original(*args, **params)
        # Compiled as usual: op by op one draw of Threefry takes a hundred calls.
        with watcher.blinded(), disable_jit(False):
            out = original(*args, **params)
        watcher.record(kind, **_described(kind, args, params, out))
        return out

    return implementation


def _described(kind: str, args: tuple[Any, ...], params: Parameters, out: Any) -> dict[str, Any]:
    if kind in ("seed", "wrap"):
        data = np.asarray(args[0])
        return {"keys": None, "out": words_of(out), "data": data.reshape(-1) if kind == "seed" else None}
    keys = words_of(args[0])
    details: dict[str, Any] = {"keys": keys, "out": None}
    if kind == "split":
        details |= {"out": words_of(out), "data": tuple(params["shape"])}
    elif kind == "fold_in":
        # Keys and numbers broadcast against each other: one key and many numbers under vmap.
        positions = np.broadcast_to(np.arange(len(keys.rows)).reshape(keys.shape), out.shape).reshape(-1)
        folded = np.broadcast_to(np.asarray(args[1]), out.shape).reshape(-1)
        repeated = Words(keys.implementation, keys.rows[positions], tuple(out.shape))
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
    # `lax.while_loop` first tries a loop of Python, and binds the primitive when a predicate under vmap
    # stops that. What the attempt drew is drawn again, so its events must go.
    if (watcher := mine()) is not None:
        watcher.discard_loop()
    # The method of the class: the attribute of the instance is this function.
    return type(jep.while_p).bind(jep.while_p, *args, **params)
