"""Runs regions that JAX would compile equation by equation.

Each function here does what a primitive of JAX does, by binding the primitives inside it in order: `while`,
`cond`, `scan` and `jit` by their jaxprs, a mapped region row by row.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend.core
import jax.extend.core.primitives as jep
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive

from phijax_rng.auditing.events import Mapped
from phijax_rng.auditing.jax_hooks.names import PRIMITIVES
from phijax_rng.auditing.jax_hooks.watcher import Watcher, mine

Parameters = dict[str, Any]
"""Parameters of a primitive: jaxprs, numbers, names."""

Operand = tuple[jax.Array, int | None]
"""A value and the axis that `vmap` maps over; `None` where it maps over none."""


def _exported(names: Iterable[str]) -> frozenset[object]:
    # JAX exports different ones in different versions; the audit needs none of the raw generators.
    return frozenset(getattr(jep, name) for name in names if hasattr(jep, name))


_RAW_NAMES = ("threefry2x32_p", "rng_bit_generator_p", "rng_uniform_p")
RAW = _exported(_RAW_NAMES)
"""Generators beneath JAX's keys: a draw from one has no key that the report could name."""

RANDOM = _exported((*PRIMITIVES, *_RAW_NAMES))


def holds_draw(value: object) -> bool:
    """Whether parameters of a primitive contain a random primitive, at any depth."""
    # By attribute: a jaxpr may be open, closed, or wrapped by another class.
    if hasattr(value, "eqns"):
        return any(equation.primitive in RANDOM or holds_draw(equation.params) for equation in value.eqns)
    if isinstance(value, dict):
        return any(map(holds_draw, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(holds_draw, value))
    return hasattr(value, "jaxpr") and not isinstance(value, type) and holds_draw(value.jaxpr)


def _call(jaxpr: ClosedJaxpr, *args: jax.Array) -> list[jax.Array]:
    return list(jax.extend.core.jaxpr_as_fun(jaxpr)(*args))


def _walk_while(
    *args: jax.Array,
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    **_: object,
) -> list[jax.Array]:
    cond_consts, args = args[:cond_nconsts], args[cond_nconsts:]
    body_consts, carry = args[:body_nconsts], list(args[body_nconsts:])
    watcher = mine()
    assert watcher is not None  # `primitives` calls a walk only for a watcher
    while True:
        going = np.asarray(_call(cond_jaxpr, *cond_consts, *carry)[0])
        if not going.any():
            return carry
        # With a predicate for each row, JAX runs the body for all rows and discards the finished ones.
        with watcher.enter("masks", going) if going.ndim else contextlib.nullcontext():
            following = _call(body_jaxpr, *body_consts, *carry)
        carry = [_where(going, new, old) for new, old in zip(following, carry, strict=True)]


def _where(going: np.ndarray[Any, Any], new: jax.Array, old: jax.Array) -> jax.Array:
    # Without an axis the predicate is that of all rows, and nothing has to be selected.
    if not going.ndim:
        return new
    return jnp.where(going.reshape(going.shape + (1,) * (jnp.ndim(new) - going.ndim)), new, old)


def _walk_cond(
    index: jax.Array, *operands: jax.Array, branches: tuple[ClosedJaxpr, ...], **_: object
) -> list[jax.Array]:
    # JAX clamps an index outside of the branches.
    return _call(branches[min(max(int(index), 0), len(branches) - 1)], *operands)


def _walk_scan(
    *args: jax.Array, jaxpr: ClosedJaxpr, length: int, reverse: bool, **params: Any
) -> list[jax.Array]:
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


def _scan_counts(params: Parameters) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # newer versions of JAX have a tree of arguments instead
    return len(consts), len(carry)


def _walk_jit(*args: jax.Array, jaxpr: ClosedJaxpr, **_: object) -> list[jax.Array]:
    return _call(jaxpr, *args)


WALKS: dict[str, Callable[..., Any]] = {
    "while_p": _walk_while,
    "cond_p": _walk_cond,
    "scan_p": _walk_scan,
    "jit_p": _walk_jit,
}


# Numbers of the maps that ran row by row; rows of different maps must not compare as rows of one.
_groups = itertools.count()


def by_row(
    watcher: Watcher, primitive: Primitive, operands: list[Operand], params: Parameters, around: Mapped
) -> list[jax.Array]:
    """Calls `primitive` for each row of the mapped operands, and stacks the results."""
    group = next(_groups)
    rows = []
    for index in range(around.size):
        row = [
            value if dim is None else jax.lax.index_in_dim(value, index, dim, keepdims=False)
            for value, dim in operands
        ]
        with watcher.enter("rows", (group, index, around)):
            out = primitive.bind(*row, **params)
        rows.append(out if primitive.multiple_results else [out])
    return [jnp.stack(column) for column in zip(*rows, strict=True)]
