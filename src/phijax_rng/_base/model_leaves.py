"""The leaves of a model state: arrays that train, arrays that are carried, and everything else.

    jax or NumPy array, floating or complex      trains
    other array: integers, booleans, keys        carried, may be replaced by `losses`
    function, text, bool, int, field of a module carried unchanged, part of the program
    Python float in a dict, list or tuple        refused: a coefficient or a constant?

A library may say itself what trains: of Flax NNX Variables only `nnx.Param` does, and nothing of an
`eqx.nn.State`. These classes are known by name, so no library is imported.
"""

import numbers
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from phijax_rng._base import validation
from phijax_rng._base.pytrees import Carried, same_value


@runtime_checkable
class _OffersArray(Protocol):
    def __array__(self) -> Any: ...


@runtime_checkable
class _OffersJaxArray(Protocol):
    def __jax_array__(self) -> Any: ...


@runtime_checkable
class _Typed(Protocol):
    dtype: Any
    shape: Any


def is_array(leaf: object) -> bool:
    """Whether the leaf is an array of JAX (traced or abstract too) or NumPy; a Python number is none."""
    # `np.float64` and `np.complex128` are Python numbers too, and what `np.sqrt(2)` returns.
    arrays = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    return isinstance(leaf, arrays) and not isinstance(leaf, (float, complex))


def is_trainable(leaf: object) -> bool:
    """Whether gradients are taken for this leaf: a floating or complex array of JAX or NumPy."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)  # type: ignore[attr-defined]


def is_carried_node(node: object) -> bool:
    """Whether a library says of this part of a model that no gradient is taken for it."""
    return _declared(type(node)) is False


def is_parameter_node(node: object) -> bool:
    """Whether a library says of this part of a model that it is trained, whatever `losses` do to it."""
    return _declared(type(node)) is True


def _declared(kind: type) -> bool | None:
    if _is_kind(kind, "flax.nnx", "Variable"):
        return _is_kind(kind, "flax.nnx", "Param")
    return False if _is_kind(kind, "equinox.nn", "State") else None


def _is_kind(kind: type, package: str, name: str) -> bool:
    """Whether it is, or inherits from, a class of this name in this package."""
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith(f"{package}.") for base in kind.__mro__
    )


def split(model_state: Any) -> tuple[Any, Carried | None]:
    """The model state with `None` for every leaf that is no array, and those leaves (`None` without any).

    NumPy arrays are copied, into native byte order: what is written into them later changes no state.

    Raises:
        TypeError: a leaf could be a parameter or a constant, or is an array that JAX cannot hold.
    """
    leaves, structure = jax.tree.flatten(model_state)
    # A tree without arrays describes a model state (its shardings, say); the leaves stay leaves.
    if any(map(is_array, leaves)) and not all(isinstance(leaf, jax.Array) for leaf in leaves):
        leaves = _adopted(model_state)
    carried = tuple((index, leaf) for index, leaf in enumerate(leaves) if not is_array(leaf))
    if len(carried) in (0, len(leaves)):
        # Rebuilt, so that a container that its owner changes in place is not the state's own.
        return jax.tree.unflatten(structure, leaves), None
    arrays = [leaf if is_array(leaf) else None for leaf in leaves]
    return jax.tree.unflatten(structure, arrays), Carried(structure, carried)


def _adopted(model_state: object) -> list[Any]:
    return [_adopt(leaf, path, parent) for path, leaf, parent in _nodes(model_state) if _is_leaf(leaf)]


def _is_leaf(node: object) -> bool:
    return jax.tree_util.all_leaves([node])


def _nodes(
    node: object, path: KeyPath[Any] = (), parent: object = None
) -> Iterator[tuple[KeyPath[Any], Any, object]]:
    """Every node of a pytree with its path and the node above it, in the order of the leaves."""
    yield path, node, parent
    if not _is_leaf(node):
        below, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
        for key, child in below:
            yield from _nodes(child, (*path, *key), node)


def _adopt(leaf: Any, path: KeyPath[Any], parent: object) -> Any:
    """The leaf as a state holds it."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    if is_array(leaf):
        return _copied(np.asanyarray(leaf), path)
    if isinstance(leaf, numbers.Number) and not isinstance(leaf, numbers.Integral):
        if _is_plain(parent):
            raise TypeError(
                f"{_place(path)} is {leaf!r}, which could be a parameter or a constant. Write "
                f"jnp.asarray({leaf!r}) to train it, or keep it out of the model state to hold it constant."
            )
    elif not callable(leaf) and isinstance(leaf, _OffersArray | _OffersJaxArray | _Typed):
        raise TypeError(
            f"{_place(path)} is an array of another library, got {type(leaf).__qualname__}. "
            "Convert it with jnp.asarray."
        )
    return leaf


def _is_plain(parent: object) -> bool:
    """Whether a number in this container could be meant as a parameter; fields of modules are constants."""
    return parent is None or isinstance(parent, (Mapping, list, tuple)) or _declared(type(parent)) is not None


def _copied(array: Any, path: KeyPath[Any]) -> np.ndarray[Any, Any]:
    """A copy in native byte order."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.getmaskarray(array).any():
        raise TypeError(
            f"{_place(path)} is a masked array in which elements are masked, got "
            f"{validation.formatted(array)}. Fill them."
        )
    native = array.dtype.newbyteorder("=")
    try:
        jnp.result_type(np.empty(0, native))
    except TypeError:
        raise TypeError(
            f"{_place(path)} has a dtype that JAX does not have, got {validation.formatted(array)}. "
            "Convert it, for example with astype(np.float32)."
        ) from None
    return np.array(array, dtype=native, copy=True)


def _place(path: KeyPath[Any]) -> str:
    return f"model_state{jax.tree_util.keystr(path)}"


def require_arrays(model_state: object) -> None:
    """Raises for a model state without arrays: a model that was not initialized.

    Raises:
        TypeError: it has leaves, and none is an array.
    """
    leaves = jax.tree.leaves(model_state)
    if leaves and not any(map(is_array, leaves)):
        _adopted(model_state)
        raise TypeError(
            f"the model state has no arrays, got {validation.described(model_state)}. "
            "Return the parameters from init, for example those of model.init(key, inputs)."
        )


def require_separate(model_state: object) -> None:
    """Raises if an NNX object is in the model state twice.

    JAX flattens both places, and each would be trained on its own.

    Raises:
        ValueError: there is one.
    """
    if "flax.nnx" not in sys.modules:
        return
    seen: dict[int, KeyPath[Any]] = {}
    for path, node, _ in _nodes(model_state):
        if not _is_nnx(type(node)):
            continue
        first = seen.setdefault(id(node), path)
        if first != path:
            raise ValueError(
                f"one {type(node).__qualname__} is both {_place(first)} and {_place(path)}; as a pytree it "
                "would become two. Split the model with nnx.split, and let init return the state alone."
            )


def _is_nnx(kind: type) -> bool:
    return any(base.__module__.startswith("flax.nnx.") for base in kind.__mro__)


def unchanged(new: object, old: object) -> bool:
    """Whether a leaf is the same one: the same array, or an equal constant."""
    return new is old or (not is_array(old) and same_value(new, old))
