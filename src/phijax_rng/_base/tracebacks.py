"""Tracebacks of errors that leave the package: the user's lines, and none of what lies between them.

A losses function with a misspelled name raises behind some twenty frames of a trainer and of JAX. `door`
marks what users call; an error that passes one keeps the frames of the user's code. What looks like a fault
of this package keeps every frame. `JAX_TRACEBACK_FILTERING=off` keeps them always, as it does for JAX.
"""

import dis
import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

import jax

T = TypeVar("T", bound=Callable[..., Any])

_RAISE = dis.opmap["RAISE_VARARGS"]
_OURS = "phijax_rng"
_OPEN: set[Callable[..., Any]] = set()
"""Constructors that are doors: a class may be exported by its wing and by the package."""

# Whose frames lie between a call of ours and a line of the user.
_BETWEEN = (_OURS, "jax", "jaxlib", "contextlib", "functools", "concurrent", "threading")


def door(function: T) -> T:
    """A function that users call."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            if _package(sys._getframe(1)) == _OURS:
                raise  # the door that the user came through shortens it
            # A bare `raise` goes on with what is stored here, without adding this frame again.
            error.__traceback__ = None if _explain_call(error, function) else _shortened(error)
            raise

    return cast(T, call)


def open_door(kind: type) -> None:
    """Makes a door of the constructor of a class that users make objects of, once."""
    made = cast(Any, kind)
    if "__init__" in vars(kind) and made.__init__ not in _OPEN:
        # The signature of a class is that of its `__init__`, which `wraps` keeps.
        made.__init__ = door(made.__init__)
        _OPEN.add(made.__init__)


def _explain_call(error: Exception, function: Callable[..., Any]) -> bool:
    """Adds the parameters to an error of Python about the arguments of this call; whether it is one."""
    traceback = error.__traceback__
    is_one = isinstance(error, TypeError) and traceback is not None and traceback.tb_next is None
    if is_one:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        bare = [p.replace(annotation=p.empty) for p in parameters]
        name = function.__qualname__.removesuffix(".__init__")
        error.add_note(f"It is called as {name}{inspect.Signature(bare)}.")
    return is_one


def _shortened(error: Exception) -> TracebackType | None:
    """The traceback without frames of this package, and without those of JAX that lead to a user's line."""
    traceback = error.__traceback__
    if jax.config.values.get("jax_traceback_filtering") == "off":
        return traceback
    frames = []
    each = traceback
    while each is not None:
        frames.append(each)
        each = each.tb_next
    users = [index for index, frame in enumerate(frames) if _package(frame.tb_frame) not in _BETWEEN]
    last = users[-1] if users else -1
    after = frames[last + 1 :]
    if any(_package(frame.tb_frame) == _OURS for frame in after):
        if not _is_deliberate(frames[-1]):
            return traceback
        after = []
    shortened = None
    for frame in reversed([*frames[: last + 1], *after]):
        if frame in after or _package(frame.tb_frame) not in _BETWEEN:
            shortened = TracebackType(shortened, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    # JAX says that it has removed frames of its own, in two lines.
    notes = [note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note]
    if hasattr(error, "__notes__"):
        error.__notes__ = notes
    return shortened


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_deliberate(last: TracebackType) -> bool:
    """Whether the error comes from a `raise` statement of this package."""
    code = last.tb_frame.f_code.co_code
    return _package(last.tb_frame) == _OURS and code[last.tb_lasti] == _RAISE
