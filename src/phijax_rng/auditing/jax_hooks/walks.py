"""How regions that JAX would compile are run in the open.

Each function here does what a primitive of JAX does, by binding the primitives inside of it one after the
other: `while`, `cond`, `scan` and `jit` by their jaxprs, a mapped region row by row.
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

from phijax_rng.auditing.events import Mapped
from phijax_rng.auditing.jax_hooks.names import PRIMITIVES
from phijax_rng.auditing.jax_hooks.watcher import Watcher, mine

Parameters = dict[str, Any]
"""Parameters of a primitive: jaxprs, numbers, names."""

Operand = tuple[jax.Array, int | None]
"""A value and the axis that `vmap` maps over; `None` where it maps over none."""


def _exported(names: Iterable[str]) -> frozenset[object]:
    return frozenset(getattr(jep, name) for name in names if hasattr(jep, name))


_RAW_NAMES = ("threefry2x32_p", "rng_bit_generator_p", "rng_uniform_p")
RAW = _exported(_RAW_NAMES)
"""Generators beneath JAX's keys: a draw from one has no key that the report could name."""

RANDOM = _exported((*PRIMITIVES, *_RAW_NAMES))


def holds_draw(value: Any) -> bool:
    """Whether parameters of a primitive hold a jaxpr with a random primitive in it, at any depth."""
    if hasattr(value, "eqns"):
        return any(equation.primitive in RANDOM or holds_draw(equation.params) for equation in value.eqns)
    if isinstance(value, dict):
        return any(map(holds_draw, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(holds_draw, value))
    return hasattr(value, "jaxpr") and not isinstance(value, type) and holds_draw(value.jaxpr)


def _call(jaxpr: Any, *args: Any) -> list[Any]:
    return list(jax.extend.core.jaxpr_as_fun(jaxpr)(*args))


def _walk_while(
    *args: Any, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int, body_jaxpr: Any, **_: Any
) -> list[Any]:
    cond_consts, args = args[:cond_nconsts], args[cond_nconsts:]
    body_consts, carry = args[:body_nconsts], list(args[body_nconsts:])
    watcher = mine()
    assert watcher is not None  # nobody else calls this
    while True:
        going = np.asarray(_call(cond_jaxpr, *cond_consts, *carry)[0])
        if not going.any():
            return carry
        # With a predicate for each row, JAX runs the body for all and keeps what the others had.
        with watcher.enter("masks", going) if going.ndim else contextlib.nullcontext():
            following = _call(body_jaxpr, *body_consts, *carry)
        carry = [_where(going, new, old) for new, old in zip(following, carry, strict=True)]


def _where(going: np.ndarray[Any, Any], new: Any, old: Any) -> Any:
    if not going.ndim:
        return new
    return jnp.where(going.reshape(going.shape + (1,) * (jnp.ndim(new) - going.ndim)), new, old)


def _walk_cond(index: Any, *operands: Any, branches: Any, **_: Any) -> list[Any]:
    return _call(branches[min(max(int(index), 0), len(branches) - 1)], *operands)


def _walk_scan(*args: Any, jaxpr: Any, length: int, reverse: bool, **params: Any) -> Any:
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


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # how newer versions say it
    return len(consts), len(carry)


def _walk_jit(*args: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return _call(jaxpr, *args)


WALKS: dict[str, Callable[..., Any]] = {
    "while_p": _walk_while,
    "cond_p": _walk_cond,
    "scan_p": _walk_scan,
    "jit_p": _walk_jit,
}


_groups = itertools.count()


def by_row(
    watcher: Watcher, primitive: Any, operands: list[Operand], params: Parameters, around: Mapped
) -> list[Any]:
    """One call of `primitive` for each row of what is mapped, and the results stacked."""
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
