"""Where `jit`, `scan` and `cond` call a Python function."""

import contextlib
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax

from phijax_rng.auditing.jax_hooks.bodies import Bodies, asking_frame
from phijax_rng.auditing.jax_hooks.swaps import Internals, Swaps, disable_jit
from phijax_rng.auditing.jax_hooks.watcher import mine


def install(swaps: Swaps, source: Internals) -> None:
    """Bodies are run in the open, see `bodies`."""
    core, config, pjit = source["core"], source["config"], source["pjit"]
    loops = source["lax.control_flow.loops"]
    bodies = Bodies(core, config.trace_context)
    swaps.set(pjit, "_infer_params", _inferring(pjit._infer_params, config))
    swaps.set(pjit, "_run_python_pjit", _running(pjit._run_python_pjit, bodies))
    swaps.set(loops, "scan3", _scanning(loops.scan, config, bodies))
    swaps.set(core, "is_concrete", _branching(core.is_concrete, bodies))
    process = core.EvalTrace.process_primitive
    swaps.set(core.EvalTrace, "process_primitive", _reaching_outside(process, bodies))


@dataclasses.dataclass
class _Opened:
    """In place of the parameters of a `jit`: its options."""

    options: Any


def _inferring(infer: Callable[..., Any], config: Any) -> Callable[..., Any]:
    def _infer_params(fun: Any, options: Any, args: Any, kwargs: Any) -> Any:
        called = asking_frame().f_code.co_name == "cache_miss"  # and not lowered, or looked at
        if not called or mine() is None or not config.disable_jit.value:
            return infer(fun, options, args, kwargs)
        return _Opened(options), []

    return _infer_params


def _running(run: Callable[..., Any], bodies: Bodies) -> Callable[..., Any]:
    def _run_python_pjit(params: Any, flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(params, _Opened):
            return run(params, flat, fun, args, kwargs)
        out = bodies.call(fun, args, kwargs, params.options)
        no_program = types.SimpleNamespace(effects=(), consts=())
        return out, [], None, [], no_program, None, None, []

    return _run_python_pjit


def _scanning(scan: Callable[..., Any], config: Any, bodies: Bodies) -> Callable[..., Any]:
    def scan3(f: Any, init: Any, xs: Any, length: Any, *how: Any) -> Any:
        steps = _length_of(xs, length)
        if mine() is not None and config.disable_jit.value and steps:
            return bodies.scan(f, init, xs, steps, reverse=how[0])
        # Op by op JAX refuses a scan of no steps.
        with config.scan3(False), contextlib.nullcontext() if steps else disable_jit(False):
            return scan(f, init, xs, length, *how)

    return scan3


def _length_of(xs: Any, length: Any) -> int | None:
    """Steps of a scan, where its arguments agree on them; JAX says what is wrong where they do not."""
    lengths = {jax.numpy.shape(x)[:1] for x in jax.tree.leaves(xs)}
    lengths |= set() if length is None else {(length,)}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else None


def _branching(is_concrete: Callable[..., bool], bodies: Bodies) -> Callable[..., bool]:
    def looked_at(x: Any) -> bool:
        frame = asking_frame()
        if frame.f_code.co_name in ("cond", "switch") and mine() is not None:
            bodies.branch(frame)
        return is_concrete(x)

    return looked_at


def _reaching_outside(process: Callable[..., Any], bodies: Bodies) -> Callable[..., Any]:
    """A custom rule that runs outside of a body may hold values of that body."""

    def process_primitive(trace: Any, primitive: Any, args: Any, params: Any, /) -> Any:
        return process(trace, primitive, [bodies.outside(x) for x in args], params)

    return process_primitive
