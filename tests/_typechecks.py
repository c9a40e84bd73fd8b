"""Checks the shapes and dtypes in the package's annotations on every call, while the tests run.

jaxtyping's import hook wraps each function with the checker named in `conftest.py`. Ours parts from
plain beartype in three ways:

- Arguments are checked after the call has returned, together with the result. A call with a wrong
  argument then meets the package's own check and its message, as it does for users; an argument the
  function let pass must fit its annotation.
- Constructors are left alone. JAX rebuilds pytrees with whatever a transformation has put in the
  fields: batched tracers, `None`, shardings, plain objects.
- Only annotations with an array of jaxtyping in them count. The others are mypy's.
"""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import beartype
import jaxtyping


def checked(stub: Callable[..., Any]) -> Callable[..., Any]:
    """What jaxtyping calls with two stubs per function: one for the arguments, one for the result.

    Both carry the annotations; the first has `Any` for its result and runs before the call.
    """
    before_the_call = inspect.signature(stub).return_annotation is Any
    if before_the_call or stub.__qualname__.endswith(".__init__"):
        return stub
    stub.__annotations__ = {name: hint for name, hint in stub.__annotations__.items() if has_shape(hint)}
    return beartype.beartype(stub)


def has_shape(hint: Any) -> bool:
    """Whether an annotation speaks of an array of jaxtyping, at any depth."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(has_shape(inner) for inner in get_args(hint))
