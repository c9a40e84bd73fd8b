"""How regions that JAX would compile are run in the open.

Each function here does what a primitive of JAX does, by binding the primitives inside of it one after the
other: `while`, `cond`, `scan` and `jit` by their jaxprs, a mapped region row by row, `shard_map` as `vmap`.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.extend.core.primitives as jep
import jax.numpy as jnp
import numpy as np

from phijax_rng.auditing.jax_hooks.watcher import mine

KINDS = {
    "random_seed_p": "seed",
    "random_split_p": "split",
    "random_fold_in_p": "fold_in",
    "random_bits_p": "bits",
    "random_gamma_p": "gamma",
}
"""Primitives of `jax.extend.core.primitives`, and the word each is reported under."""

RAW = frozenset(
    getattr(jep, name)
    for name in ("threefry2x32_p", "rng_bit_generator_p", "rng_uniform_p")
    if hasattr(jep, name)
)
"""Generators beneath JAX's keys: who calls them draws without a key that could be named."""


def holds_draw(value: Any) -> bool:
    """Whether parameters of a primitive hold a jaxpr with a random primitive in it, at any depth."""
    if hasattr(value, "eqns"):
        return any(equation.primitive in RANDOM or holds_draw(equation.params) for equation in value.eqns)
    if isinstance(value, dict):
        return any(map(holds_draw, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(holds_draw, value))
    return hasattr(value, "jaxpr") and not isinstance(value, type) and holds_draw(value.jaxpr)


RANDOM = frozenset(
    getattr(jep, name)
    for name in (*KINDS, "threefry2x32_p", "rng_bit_generator_p", "rng_uniform_p")
    if hasattr(jep, name)
)


def _call(jaxpr: Any, *args: Any) -> list[Any]:
    return list(jax.extend.core.jaxpr_as_fun(jaxpr)(*args))


def _walk_while(
    *args: Any, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int, body_jaxpr: Any, **_: Any
) -> list[Any]:
    cond_consts, args = args[:cond_nconsts], args[cond_nconsts:]
    body_consts, carry = args[:body_nconsts], list(args[body_nconsts:])
    watcher = mine()
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


def by_row(watcher: Any, primitive: Any, operands: Any, params: dict[str, Any], around: Any) -> list[Any]:
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


def map_over_mesh(config: Any, fun: Any, args: Any, params: dict[str, Any]) -> Any:
    """`fun` on every device of the mesh, as nested `vmap`s with the names of its axes."""
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    axes = [axis for axis in mesh.axis_names if axis in manual]
    sizes = {axis: mesh.shape[axis] for axis in axes}
    split = [_split_over(x, spec, axes, sizes) for x, spec in zip(args, params["in_specs"], strict=True)]
    returned: list[Any] = []

    def body(*xs: Any) -> list[Any]:
        answer, specs = fun(*xs).unpack_aux()
        returned[:] = [answer, list(specs)]
        return list(answer)

    mapped: Callable[..., Any] = body
    for axis in reversed(axes):
        over = tuple(0 if axis in own else None for _, own in split)
        mapped = jax.vmap(mapped, in_axes=over, axis_name=axis, axis_size=sizes[axis])
    with config._check_vma(False):
        outs = mapped(*(x for x, _ in split))
    answer, specs = returned
    joined = [_join_over(x, spec, axes) for x, spec in zip(outs, specs, strict=True)]
    return answer.update(joined)


def _spec_axes(spec: Any, rank: int) -> list[tuple[str, ...]]:
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in tuple(spec)]
    return entries + [()] * (rank - len(entries))


def _split_over(x: Any, spec: Any, axes: list[str], sizes: dict[str, int]) -> tuple[Any, list[str]]:
    """`x` with one leading axis for each axis of the mesh that splits it, in the order of the mesh."""
    shape: list[int] = []
    place: dict[str, int] = {}
    for whole, names in zip(jnp.shape(x), _spec_axes(spec, jnp.ndim(x)), strict=True):
        for name in names:
            place[name] = len(shape)
            shape.append(sizes[name])
        shape.append(whole // int(np.prod([sizes[name] for name in names])))
    own = [axis for axis in axes if axis in place]
    rest = [axis for axis in range(len(shape)) if axis not in place.values()]
    return jnp.transpose(jnp.reshape(x, shape), [place[axis] for axis in own] + rest), own


def _join_over(x: Any, spec: Any, axes: list[str]) -> Any:
    """One array from the rows of all devices; where the mesh repeats it, the first device's."""
    names = _spec_axes(spec, jnp.ndim(x) - len(axes))
    kept = [axis for axis in axes if any(axis in dim for dim in names)]
    for index, axis in reversed(list(enumerate(axes))):
        if axis not in kept:
            x = x[(slice(None),) * index + (0,)]
    order, shape = [], []
    for dim, own in enumerate(names):
        order += [kept.index(axis) for axis in own] + [len(kept) + dim]
        shape.append(int(np.prod([x.shape[kept.index(axis)] for axis in own] + [x.shape[len(kept) + dim]])))
    return jnp.reshape(jnp.transpose(x, order), shape)
