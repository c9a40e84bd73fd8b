"""Everything a run must remember, in one frozen pytree.

`TrainState` is what a checkpoint holds and what the compiled loop carries. Two states with equal
bits continue into the same bits: nothing that training reads lives outside it, apart from the pools,
the code and the machine.

    model_state  optimizer_state  balancer_state  sampler_state     what is learned
    rng_key      advanced once a step, its second half goes to the module
    sampling_key, balancer_key     never move; the step is folded in
    step         completed updates, int32
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import keys
from phijax_rng._base import model_leaves, pytrees, validation
from phijax_rng._base.model_leaves import is_array
from phijax_rng._base.pytrees import Carried
from phijax_rng._base.types import KeyScalar
from phijax_rng._base.validation import formatted

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run after `step` updates.

    As a pytree it has the arrays of `model_state` as leaves; functions, text, Python numbers and other
    leaves that are no arrays are static.

    Attributes:
        model_state: parameters and variables, any pytree, as a copy: later changes of the pytree that was
            given, or of its NumPy arrays, do not change the state.
        optimizer_state: what the Optax transformation keeps.
        balancer_state: what the loss balancer keeps.
        rng_key: runtime stream, shape `()`; split once per step.
        sampling_key: shape `()`; batches are drawn from `fold_in(sampling_key, step)`.
        balancer_key: shape `()`; diagnostic batches are drawn from `fold_in(balancer_key, 0)`.
        step: int32 of shape `()`, completed optimizer updates.
        sampler_state: what samplers with a memory keep, by name.
    """

    model_state: Any
    optimizer_state: Any
    balancer_state: Any
    rng_key: KeyScalar
    sampling_key: KeyScalar
    balancer_key: KeyScalar
    step: jax.Array
    sampler_state: Any = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        lines = (f"  {name}={_summary(value)},\n" for name, value in fields)
        return f"TrainState(\n{''.join(lines)})"

    def replace(self, **changes: Any) -> "TrainState":
        """A state with these attributes changed."""
        # The model state that stays is checked and stored already.
        changes.setdefault("model_state", _Stored(self))
        return dataclasses.replace(self, **changes)


class _Stored:
    """The model state of a state, as it is stored."""

    def __init__(self, state: TrainState):
        self.entries = {name: vars(state)[name] for name in ("_parts", "_whole") if name in vars(state)}


class _ModelState:
    """The attribute `model_state`: stored as arrays and constants apart, given out as the whole object.

    The pytree functions of a state read the parts: JAX may put any object in the place of an array.
    """

    def __get__(self, state: TrainState | None, owner: object = None) -> Any:
        if state is None:
            return self
        stored = vars(state)
        if "_whole" not in stored:
            arrays, carried = stored["_parts"]
            stored["_whole"] = arrays if carried is None else carried.joined(arrays)
        return stored["_whole"]

    def __set__(self, state: TrainState, value: object) -> None:
        if isinstance(value, _Stored):
            vars(state).update(**value.entries)
        else:
            model_leaves.require_separate(value)
            vars(state)["_parts"] = model_leaves.split(value)


# After `dataclass`, which would take the descriptor for a default.
TrainState.model_state = _ModelState()

_OTHERS = tuple(field.name for field in dataclasses.fields(TrainState) if field.name != "model_state")
_KEYS = tuple(jax.tree_util.GetAttrKey(name) for name in ("model_state", *_OTHERS))


def _flatten(state: TrainState) -> tuple[tuple[Any, ...], Carried | None]:
    stored = vars(state)
    arrays, carried = stored["_parts"]
    if carried is not None and "_whole" in stored:
        # A custom train step may have changed the object that it was given.
        whole = stored["_whole"]
        arrays, carried = carried.taken_from(whole) or model_leaves.split(whole)
    return (arrays, *(stored[name] for name in _OTHERS)), carried


def with_constants_of(tree: TrainState, state: TrainState) -> TrainState:
    """`tree`, which has other leaves than arrays in its model state, with the constants of `state`."""
    (model, *others), own = _flatten(tree)
    return tree if own is not None else _unflatten(_flatten(state)[1], (model, *others))


def _flatten_with_keys(state: TrainState) -> tuple[Any, Carried | None]:
    children, carried = _flatten(state)
    return tuple(zip(_KEYS, children, strict=True)), carried


def _unflatten(carried: Carried | None, children: Any) -> TrainState:
    state = object.__new__(TrainState)
    arrays, *others = children
    vars(state).update(_parts=(arrays, carried), **dict(zip(_OTHERS, others, strict=True)))
    return state


jax.tree_util.register_pytree_with_keys(TrainState, _flatten_with_keys, _unflatten, _flatten)


@pytrees.record(data=("_arrays",), meta=("_carried",))
class Model:
    """A model state as a pytree whose leaves are its arrays, for JAX's transformations."""

    def __init__(self, model_state: object):
        self._arrays, self._carried = model_leaves.split(model_state)

    @property
    def model_state(self) -> Any:
        """The whole model state."""
        return self._arrays if self._carried is None else self._carried.joined(self._arrays)


def abstract_model(init: Callable[[KeyScalar], object], key: KeyScalar) -> Any:
    """The model state that `init` makes, with abstract arrays; nothing is computed."""
    return jax.eval_shape(lambda key: Model(init(key)), key).model_state


@runtime_checkable
class _Balancer(Protocol):
    """A balancer, which is passed where its state belongs."""

    def initialize(self) -> Any: ...


# Trees with more leaves are summarized, so that the repr of a large model stays short.
_LISTED_LEAVES = 4


def _summary(tree: object) -> str:
    """Paths, dtypes and shapes of a few leaves; of many how many there are, and of which dtypes."""
    leaves = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if is_array(leaf)]
    if len(leaves) == 1 and not leaves[0][0]:
        return keys.formatted(tree)
    if len(leaves) <= _LISTED_LEAVES:
        named = (f"{jax.tree_util.keystr(path)}: {keys.formatted(leaf)}" for path, leaf in leaves)
        return f"{{{', '.join(named)}}}"
    dtypes = sorted({str(jnp.result_type(leaf)) for _, leaf in leaves})
    elements = sum(int(np.prod(jnp.shape(leaf), dtype=np.int64)) for _, leaf in leaves)
    return f"{len(leaves)} leaves of {', '.join(dtypes)}, {elements:,} elements"


def initialize_train_state(
    model_state: object,
    optimizer: object,
    balancer_state: object,
    key: KeyScalar | keys.StreamKeys,
    *,
    sampling_key: KeyScalar | None = None,
    balancer_key: KeyScalar | None = None,
) -> TrainState:
    """The state of a run before its first update.

    The optimizer is initialized on the trainable leaves of `model_state` (see `trainable`).

    Args:
        model_state: parameters and variables, any pytree. If it was initialized from a key, do not
            pass that same key here: with JAX's partitionable Threefry `split(key, 3)` repeats the
            first keys of any longer split. Use `keys.split_root(seed)`.
        optimizer: an Optax `GradientTransformation`, or anything with `init` and `update`.
        balancer_state: from `balancer.initialize()`; `{}` without one.
        key: the runtime key, when `sampling_key` and `balancer_key` are given; `keys.StreamKeys`, whose
            runtime, sampling and balancer streams are taken; or one root alone, split into the three.
        sampling_key: a typed key of shape `()`.
        balancer_key: a typed key of shape `()`.

    Raises:
        TypeError: a key is not one typed key, or only one of the two optional keys is given; a leaf of
            `model_state` could be a parameter or a constant (a Python float in a dict, list or tuple), or is
            an array that JAX cannot hold.
        ValueError: the keys are of different implementations; an NNX object is in `model_state` twice.
    """
    init = validation.optimizer(optimizer).init
    if isinstance(balancer_state, _Balancer):
        raise TypeError(
            f"balancer_state must be what a balancer keeps, got the balancer {formatted(balancer_state)}. "
            "Pass balancer.initialize()."
        )
    rng, sampling, balancer = _three_streams(key, sampling_key, balancer_key)
    model_leaves.require_arrays(model_state)
    state = TrainState(
        model_state=model_state,
        optimizer_state={},
        balancer_state=balancer_state,
        rng_key=rng,
        sampling_key=sampling,
        balancer_key=balancer,
        step=jnp.asarray(np.int32(0)),
    )
    # From the arrays that the state holds: NumPy arrays in native byte order, which JAX can read.
    with jax.numpy_dtype_promotion("standard"):  # as in each update: Optax promotes dtypes
        return state.replace(optimizer_state=init(trainable(state.model_state)))


def _three_streams(
    key: KeyScalar | keys.StreamKeys, sampling_key: KeyScalar | None, balancer_key: KeyScalar | None
) -> tuple[KeyScalar, KeyScalar, KeyScalar]:
    given = {"sampling_key": sampling_key, "balancer_key": balancer_key}
    present = [name for name, value in given.items() if value is not None]
    rng: Any
    sampling: Any
    balancer: Any
    if isinstance(key, keys.StreamKeys):
        if present:
            raise TypeError(
                f"key is StreamKeys and {present[0]} is given too; they name the same stream. "
                "Pass one of them."
            )
        rng, sampling, balancer = key.runtime, key.sampling, key.balancer
    elif not present:
        return _split_three(keys.require_key(key, "key"))
    elif len(present) == 1:
        raise TypeError(
            f"{present[0]} is given without the other of sampling_key and balancer_key. "
            "Pass both beside the runtime key, or one root alone."
        )
    else:
        rng, sampling, balancer = key, sampling_key, balancer_key
    named = {
        "key": keys.require_key(rng, "key"),
        "sampling_key": keys.require_key(sampling, "sampling_key"),
        "balancer_key": keys.require_key(balancer, "balancer_key"),
    }
    keys.require_same_implementation(**named)
    return rng, sampling, balancer


@jax.jit
def _split_three(root: KeyScalar) -> tuple[KeyScalar, KeyScalar, KeyScalar]:
    rng, sampling, balancer = jax.random.split(root, 3)
    return rng, sampling, balancer


def advance(state: TrainState) -> tuple[TrainState, KeyScalar]:
    """One turn of the runtime stream: the state with the next `rng_key`, and this step's key.

    `rng_key, key = jax.random.split(rng_key)`. For custom loops; may be traced. The step is not raised.
    """
    rng_key, key = _split_two(state.rng_key)
    return state.replace(rng_key=rng_key), key


@jax.jit
def _split_two(key: KeyScalar) -> tuple[KeyScalar, KeyScalar]:
    following, now = keys.settled(jax.random.split(key))
    return following, now


def trainable(model_state: object) -> Any:
    """`model_state` with every leaf that is not trainable replaced by `None`.

    Floating and complex arrays are trainable, except in parts that their library carries: Flax NNX
    Variables other than `nnx.Param`, and `eqx.nn.State`.
    """

    def select(node: Any) -> Any:
        if model_leaves.is_carried_node(node):
            return jax.tree.map(lambda leaf: None, node)
        return node if model_leaves.is_trainable(node) else None

    return jax.tree.map(select, model_state, is_leaf=model_leaves.is_carried_node)


def floating(model_state: object) -> Any:
    """`model_state` with every leaf that is no floating or complex array replaced by `None`."""
    return jax.tree.map(lambda leaf: leaf if model_leaves.is_trainable(leaf) else None, model_state)


def rebuilt(model_state: T) -> T:
    """The same leaves in new containers, which may be changed in place."""
    return jax.tree.map(lambda leaf: leaf, model_state)


def merge(trained: object, model_state: object) -> Any:
    """`model_state` with its trainable leaves taken from `trained`."""
    return jax.tree.map(
        lambda new, old: old if new is None else new,
        trained,
        model_state,
        is_leaf=lambda leaf: leaf is None,
    )
