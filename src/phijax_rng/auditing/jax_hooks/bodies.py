"""What `jit` and `scan` do to a Python function, in the open: its arguments are copies, its Python runs once.

The program that JAX keeps repeats what the Python code did at its first call; an audit runs that code at
every call, to see each draw. The two are the same as long as the code takes nothing from Python that
changes in between: no counter, no key in an attribute, no generator of NumPy. So inside a body every
value that is computed is a tracer that knows its value, and whatever enters an operation and is no
tracer is one of those things that JAX would keep. At a later call it must be what it was at the first;
if not, the watcher is told.

    first call    x = x + normal(fold_in(key, 0))     key and 0 enter from Python: remembered, by line
    second call   x = x + normal(fold_in(key, 1))     1 was not there: JAX would have repeated 0
"""

import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from phijax_rng.auditing.events import words_of

_JAX = os.path.dirname(jax.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

Constants = dict[Hashable, set[Hashable]]
"""Where a value entered from Python -> the values that entered there."""


class Bodies:
    """The bodies of one audit, and what each took from Python when it first ran."""

    def __init__(self, core: Any, trace_context: Callable[[], Hashable]):
        # JAX's own classes are its bases, and are there for certain once all names were looked up.
        from phijax_rng.auditing.jax_hooks import body_traces  # noqa: PLC0415

        self.core, self.types = core, body_traces
        self.trace_context = trace_context
        self.known: dict[Hashable, Constants] = {}
        self.branches: dict[int, tuple[Any, int]] = {}
        self._digests: dict[int, tuple[Any, Hashable]] = {}
        self._depth = 0

    def call(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Any) -> Any:
        """What `jit(fun)(*args, **kwargs)` gives."""
        fixed, moving = _sorted_arguments(args, kwargs, options)
        if _is_of_jax(fun) and not any(map(callable, fixed.values())):
            return fun(*args, **kwargs)  # its own functions keep nothing
        leaves, tree = jax.tree.flatten(moving)
        known = self.known.setdefault(self._signature(fun, fixed, tree, leaves), {})
        return self.run(functools.partial(_with_fixed, fun, len(args), fixed), leaves, tree, known, "jit")

    def scan(self, body: Any, init: Any, xs: Any, length: int, *, reverse: bool) -> Any:
        """What `lax.scan` gives for at least one step."""
        known: Constants = {}
        carry, stacked = init, []
        for index in reversed(range(length)) if reverse else range(length):
            row = jax.tree.map(lambda x, at=index: jax.lax.index_in_dim(x, at, keepdims=False), xs)
            leaves, tree = jax.tree.flatten((carry, row))
            carry, y = self.run(lambda both: body(*both), leaves, tree, known, "scan")
            stacked.append(y)
        ordered = stacked[::-1] if reverse else stacked
        return carry, jax.tree.map(lambda *ys: jax.numpy.stack(ys), *ordered)

    def run(self, fun: Any, leaves: list[Any], tree: Any, known: Constants, what: str) -> Any:
        """`fun` of the tree with these leaves, as a body."""
        core, parent = self.core, self.core.trace_ctx.trace
        if not _is_known(parent):  # written down for later: Python runs once, as ever
            return _copied(fun(jax.tree.unflatten(tree, leaves)))
        trace = self.types.BodyTrace(parent, self, known, what)
        given = [trace.wrap(as_array(x)) if is_array(x) else x for x in leaves]
        self._depth += 1
        try:
            with core.set_current_trace(trace):
                out, out_tree = jax.tree.flatten(fun(jax.tree.unflatten(tree, given)))
            return jax.tree.unflatten(out_tree, [trace.value(x) for x in out])
        finally:
            trace.close()
            self._depth -= 1
            if not self._depth:
                self.branches.clear()  # frames hold what their functions hold

    def outside(self, x: Any) -> Any:
        """What a value of an open body is outside of it."""
        while isinstance(x, self.types.BodyTracer) and x._trace.open:
            x = x.val
        return x

    def branch(self, frame: Any) -> None:
        """`lax.cond` or `lax.switch` looks at its predicate in this frame."""
        trace = self.core.trace_ctx.trace
        while trace is not None and type(trace).__name__ != "BodyTrace":
            trace = getattr(trace, "parent_trace", None)
        if trace is not None:
            line = _line_outside(frame)
            trace.branches[line] = trace.branches.get(line, 0) + 1
            self.branches[id(frame)] = frame, trace.branches[line]

    def digest(self, value: Any) -> Hashable:
        """What two equal values have in common; `None` for what is not known here."""
        if isinstance(value, self.core.Tracer):
            return None
        if isinstance(value, jax.Array):
            # An array stays what it is, and is kept alive, so that no other gets its id.
            if id(value) not in self._digests:
                self._digests[id(value)] = value, _bytes_of(value)
            return self._digests[id(value)][1]
        return _bytes_of(value)

    def place(self) -> Hashable:
        """The innermost line outside of JAX, and which of the branches at its line each one around it is."""
        frame: Any = sys._getframe(2)
        line, branches = _line_outside(frame), []
        while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (__file__, "run"):
            if id(frame) in self.branches:  # alive, so no other has its id
                branches.append(self.branches[id(frame)][1])
            frame = frame.f_back
        return line, tuple(branches)

    def _signature(self, fun: Any, fixed: Any, tree: Any, leaves: list[Any]) -> Hashable:
        types = tuple(self.core.typeof(x) if is_array(x) else type(x) for x in leaves)
        return _Same(fun), _Fixed(fixed), tree, types, self.trace_context()


class _Same:
    """A function as JAX tells it from others: by identity, or the same method of the same object."""

    def __init__(self, fun: Any):
        self.fun = fun
        self.identity = (id(fun.__self__), id(fun.__func__)) if isinstance(fun, types.MethodType) else id(fun)

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.identity == self.identity


class _Fixed:
    """Static arguments, compared as JAX compares them."""

    def __init__(self, fixed: dict[Hashable, Any]):
        self.fixed = fixed

    def __hash__(self) -> int:
        return hash(tuple((place, type(value), hash(value)) for place, value in self.fixed.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fixed) and self.fixed == other.fixed


def _sorted_arguments(args: Any, kwargs: Any, options: Any) -> tuple[dict[Hashable, Any], Any]:
    """The static arguments by place, and all others."""
    static = {place % len(args) for place in options.static_argnums if -len(args) <= place < len(args)}
    fixed: dict[Hashable, Any] = {place: args[place] for place in sorted(static)}
    fixed |= {name: kwargs[name] for name in options.static_argnames if name in kwargs}
    moving = [x for place, x in enumerate(args) if place not in static]
    return fixed, (moving, {name: x for name, x in kwargs.items() if name not in fixed})


def _with_fixed(fun: Any, count: int, fixed: dict[Hashable, Any], moving: Any) -> Any:
    given, named = moving
    rest = iter(given)
    args = [fixed[place] if place in fixed else next(rest) for place in range(count)]
    return fun(*args, **named, **{name: value for name, value in fixed.items() if isinstance(name, str)})


def _is_known(trace: Any) -> bool:
    """Whether values are computed here, and not written down as a program."""
    while trace is not None and type(trace).__name__ != "EvalTrace":
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


@functools.lru_cache(maxsize=4096)
def _file_is_of_jax(file: str) -> bool:
    return os.path.abspath(file).startswith(_JAX)


def _is_of_jax(fun: Any) -> bool:
    while hasattr(fun, "__wrapped__"):
        fun = fun.__wrapped__
    code = getattr(fun, "__code__", None)
    return code is not None and _file_is_of_jax(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_inside(file: str) -> bool:
    """JAX, this folder, and what wraps its functions to check annotations."""
    return file.startswith((_JAX, _HERE, "<@beartype")) or f"{os.sep}jaxtyping{os.sep}" in file


def asking_frame() -> Any:
    """The frame of JAX that called a function put in the place of one of JAX's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(_JAX):
        frame = frame.f_back  # of a type checker
    return frame


def _line_outside(frame: Any) -> Hashable:
    """The innermost line outside of JAX and of this folder."""
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)


def _copied(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, leaves)


def _bytes_of(value: Any) -> Hashable:
    try:
        if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return words_of(value).implementation, value.shape, words_of(value).rows.tobytes()
        array = np.asarray(value)
        large = array.nbytes > 4096
        content = hashlib.sha256(array.tobytes()).digest() if large else array.tobytes()
        return str(array.dtype), array.shape, content
    except (TypeError, ValueError, RuntimeError):  # neither an array nor a number
        return None
