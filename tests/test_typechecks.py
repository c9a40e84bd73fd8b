"""The annotations of the package are checked while the tests run; here is what that catches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float, Key

import phijax_rng.keys
from tests._typechecks import checked


def wrapped(fn: Any) -> Any:
    """What the import hook makes of a function or a class of the package."""
    return jaxtyping.jaxtyped(fn, typechecker=checked)


@wrapped
def scale(x: Float[Array, "rows axes"], by: int) -> Float[Array, "rows axes"]:
    if by < 0:
        raise ValueError("by must not be negative")
    return x if by else x[0]


@wrapped
def first_of(batches: dict[str, Float[Array, "rows axes"]]) -> None:
    next(iter(batches.values()))


def test_the_package_is_checked() -> None:
    assert hasattr(phijax_rng.keys.step_key, "__wrapped__")


def test_what_fits_passes() -> None:
    assert scale(jnp.ones((2, 3)), by=2).shape == (2, 3)
    assert jax.vmap(lambda x: scale(x, by=1))(jnp.ones((4, 2, 3))).shape == (4, 2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: scale(jnp.ones((2, 3)), by=0),
        lambda: scale(jnp.ones(3), by=1),
        lambda: scale(jnp.ones((2, 3), int), by=1),
        lambda: first_of({"pde": jnp.ones(3)}),
        lambda: jax.jit(scale, static_argnames="by")(jnp.ones(3), by=1),
    ],
    ids=["result", "rank", "dtype", "inside a dict", "traced"],
)
def test_what_does_not_fit_fails(call: Callable[[], Any]) -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


def test_the_functions_own_checks_speak_first() -> None:
    with pytest.raises(ValueError, match="by must not be negative"):
        scale("no array at all", by=-1)


def test_pytrees_can_hold_what_transformations_put_in_them() -> None:
    @wrapped
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Stream:
        key: Key[Array, ""]

    assert jax.tree.map(lambda _: None, Stream(jax.random.key(0))).key is None
    batch = Stream(jax.random.split(jax.random.key(0), 3))
    assert jax.vmap(lambda stream: jax.random.bits(stream.key))(batch).shape == (3,)
