"""The trace of a body under `jit` or `scan`, and its values; imported only when an audit begins.

Every operation is done where it would have been done without the body. What comes out is a tracer that
knows its value, so that whatever is no tracer came from Python.
"""

from collections.abc import Hashable, Iterable
from typing import Any

from jax._src import core

from phijax_rng.auditing.jax_hooks.bodies import Constants, as_array, is_array
from phijax_rng.auditing.jax_hooks.watcher import mine


class BodyTracer(core.Tracer[Any]):
    """A value computed inside a body, with the value."""

    __slots__ = ("val",)

    def __init__(self, trace: Any, val: Any):
        super().__init__(trace, core.typeof(val))
        self.val = val

    def to_concrete_value(self) -> Any:
        return core.to_concrete_value(self.val)


class BodyTrace(core.Trace):
    """Does every operation where it was done without the body, and sees what enters from Python."""

    def __init__(self, parent: Any, bodies: Any, known: Constants, what: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self.parent_trace = parent
        self.open = True
        self._bodies, self._known, self._what = bodies, known, what
        self._new: Constants = {}
        self.branches: dict[Hashable, int] = {}

    def close(self) -> None:
        self.open = False
        for place, values in self._new.items():
            self._known.setdefault(place, values)

    def wrap(self, value: Any) -> Any:
        return BodyTracer(self, value)

    def value(self, x: Any) -> Any:
        """What a result of the body is outside of it."""
        if isinstance(x, BodyTracer) and (x._trace is self or not x._trace.open):
            return x.val
        return as_array(x) if is_array(x) else x

    def lowered(self, operands: Iterable[Any], word: str) -> list[Any]:
        return [self._lower(x, (word, index)) for index, x in enumerate(operands)]

    def _lower(self, x: Any, operand: tuple[str, int]) -> Any:
        if not isinstance(x, BodyTracer):
            digest = self._bodies.digest(x)
            if digest is not None:
                self._look_up((*operand, self._bodies.place()), digest)
            return x
        if x._trace is self:
            return x.val
        if not x._trace.open:
            self._tell()
            return x.val
        return x

    def _look_up(self, place: Hashable, digest: Hashable) -> None:
        if place not in self._known:
            self._new.setdefault(place, set()).add(digest)
        elif digest not in self._known[place]:
            self._known[place].add(digest)
            self._tell()

    def _tell(self) -> None:
        if (watcher := mine()) is not None:
            watcher.record("frozen", None, None, data=self._what)

    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, BodyTracer) and val._trace is self else self.wrap(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        values = self.lowered(tracers, primitive.name)
        avals = [core.typeof(value) for value in values]
        with core.set_current_trace(core.eval_trace):  # as in `bind`, which is not always around
            out = primitive.bind_with_trace(self.parent_trace, values, avals, params)
        return [self.wrap(x) for x in out] if primitive.multiple_results else self.wrap(out)

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        with core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def _custom(self, rule: str, primitive: Any, functions: Any, tracers: Any, params: Any) -> Any:
        if not _differentiates(self.parent_trace):
            with core.set_current_trace(self):
                return functions[0].call_wrapped(*tracers)
        process = getattr(self.parent_trace, rule)
        outs = process(primitive, *functions, self.lowered(tracers, primitive.name), **params)
        return [self.wrap(x) for x in outs]

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self._custom("process_custom_jvp_call", primitive, (fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self._custom("process_custom_vjp_call", primitive, (fun, fwd, bwd), tracers, params)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        values = self.lowered(tracers, primitive.name)
        outs = self.parent_trace.process_shard_map(primitive, fun, values, **params)
        return [self.wrap(x) for x in outs]

    def cur_qdd(self, x: Any) -> Any:
        return self.parent_trace.cur_qdd(x)


def _differentiates(trace: Any) -> bool:
    while type(trace).__name__ in ("BodyTrace", "BatchTrace"):
        trace = trace.parent_trace
    return type(trace).__name__ != "EvalTrace"
