"""What is added to an error of the user's losses: what they were given, and what a traced array cannot do."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from phijax_rng._base.validation import formatted

_CANNOT = {
    jax.errors.TracerBoolConversionError: (
        "turns an array into a Python bool, as `if`, `while`, `and` and `not` do",
        "Use jnp.where, jnp.logical_and or jax.lax.cond.",
    ),
    jax.errors.TracerIntegerConversionError: (
        "turns an array into a Python int, as `range` and list indices do",
        "Use jax.lax.fori_loop or jnp.take, or a number that is known before.",
    ),
    jax.errors.TracerArrayConversionError: (
        "turns an array into one of NumPy",
        "Use jax.numpy in place of numpy.",
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "picks the rows where a condition holds",
        "Use jnp.where(condition, values, 0) and divide by the sum of the condition.",
    ),
    jax.errors.ConcretizationTypeError: (
        "turns an array into a Python number, as `float`, `int` and `.item()` do",
        "Use the array itself; jax.debug.print shows its value.",
    ),
}
"""Error of JAX -> what the function does, and what to use instead. Subclasses come first."""

# What a misspelled name, an argument in the wrong place or a wrong axis raises.
_OF_ARGUMENTS = (AttributeError, LookupError, TypeError, ValueError)


@contextlib.contextmanager
def explained(name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """A `with` block around the call of a user's function that JAX traces.

    Args:
        name: of the function.
        arguments: what it is called with, by the names that the documentation gives them.

    Raises:
        TypeError: the function needs the value of a traced array.
    """
    try:
        yield
    except tuple(_CANNOT) as error:
        does, fix = next(words for kind, words in _CANNOT.items() if isinstance(error, kind))
        # The line is the last of the traceback, where JAX's own frames have gone.
        told = f"{name} {does}; arrays have no values while a program is compiled. {fix}"
        raise TypeError(told).with_traceback(error.__traceback__) from None
    except _OF_ARGUMENTS as error:
        given = ", ".join(f"{key} = {formatted(value)}" for key, value in arguments.items())
        error.add_note(f"{name} was called with {given}")
        raise
