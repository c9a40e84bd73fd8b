"""The leaves of a train state as a checkpoint stores them: numbered, typed, digested.

Names of parameters may contain any character, so arrays are stored by number; the document lists the leaf of
each number, with dtype (of keys, the implementation) and shape. Nothing is cast: a restored leaf has the
dtype that was saved, or the restore raises.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from phijax_rng import keys
from phijax_rng._base.digests import Digested, digest_leaves
from phijax_rng.checkpoints import split_leaves
from phijax_rng.checkpoints.split_leaves import Snapshot
from phijax_rng.errors import CheckpointMismatchError
from phijax_rng.state import TrainState

MODEL, REST = "model_state", "rest"
"""The two parts of a state, stored apart so that weights can be read alone."""

Array: TypeAlias = jax.Array | np.ndarray[Any, Any]
Arrays: TypeAlias = Mapping[str, Array]
"""The stored arrays of a part, by number."""

# Another optimizer differs in every leaf; the first few name it.
_MOST_SHOWN = 8

# What a user builds each field of a state from, for the last line of a mismatch.
_BUILT_FROM = {
    "model_state": "model",
    "optimizer_state": "optimizer",
    "balancer_state": "balancer",
    "sampler_state": "samplers",
    **dict.fromkeys(("rng_key", "sampling_key", "balancer_key"), "implementation of keys"),
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state.

    Attributes:
        name: its number, as stored.
        path: its place in the state: `model_state['dense']['kernel']`.
        value: an array, typed key, number or abstract value.
    """

    name: str
    path: str
    value: Any

    @property
    def implementation(self) -> str | None:
        """The implementation of a key; `None` for other leaves."""
        return keys.implementation_of(self.value) if keys.is_typed_key(self.value) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The leaf's shape; a key's words are not part of it."""
        return tuple(np.shape(self.value))

    @property
    def is_stored(self) -> bool:
        """Whether there is anything to store: Orbax refuses arrays without elements."""
        return 0 not in self.shape

    @property
    def dtype(self) -> str:
        """`float32`, or `key<threefry2x32>`."""
        return f"key<{self.implementation}>" if self.implementation else str(jnp.result_type(self.value))

    def array(self) -> Array:
        """The value as it is stored: keys as their words, numbers as arrays, NumPy arrays as copies."""
        if self.implementation:
            return jax.random.key_data(self.value)
        if isinstance(self.value, jax.Array):
            return self.value
        # A copy, since the caller may write into a NumPy array while the save runs in the background.
        return np.array(self.value, dtype=jnp.result_type(self.value))

    def target(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and placement to read the stored array into."""
        typed = isinstance(self.value, (jax.Array, jax.ShapeDtypeStruct))
        sharding = self.value.sharding if typed else None
        # The words of a key have one axis more than the key; only a sharding on a mesh fits both.
        on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
        if sharding is None or (self.implementation and not on_mesh):
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if self.implementation:
            key = jax.ShapeDtypeStruct(self.shape, self.value.dtype)
            words = jax.eval_shape(jax.random.key_data, key)
            return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)
        return jax.ShapeDtypeStruct(self.shape, jnp.result_type(self.value), sharding=sharding)

    def restored(self, array: jax.Array | None) -> jax.Array:
        """The leaf, from the stored array; `None` for one that was not stored."""
        if array is None:
            return jnp.zeros(self.shape, jnp.result_type(self.value))
        if self.implementation:
            return jax.random.wrap_key_data(array, impl=self.implementation)
        return array


Parts: TypeAlias = Mapping[str, list[Leaf]]


def leaves_of(state: TrainState) -> dict[str, list[Leaf]]:
    """The leaves of `model_state`, and all others, each in the order of the pytree."""
    return {
        MODEL: _numbered(_model_alone(state)),
        REST: _numbered(state.replace(model_state=None)),
    }


def rebuild(like: TrainState, parts: Mapping[str, list[jax.Array]]) -> TrainState:
    """`like` with the leaves of these parts."""
    state = like
    if REST in parts:
        without_model = jax.tree.structure(like.replace(model_state=None))
        state = jax.tree.unflatten(without_model, parts[REST])
    model = jax.tree.unflatten(jax.tree.structure(_model_alone(like)), parts[MODEL])
    return state.replace(model_state=model.model_state)


def saved_leaves(saved: Mapping[str, Any]) -> dict[str, list[Leaf]]:
    """The leaves that a document lists, as abstract values on the default device."""
    return {
        part: [
            Leaf(f"{index:05d}", path, jax.ShapeDtypeStruct(tuple(shape), _dtype(dtype)))
            for index, (path, dtype, shape) in enumerate(rows)
        ]
        for part, rows in saved.items()
    }


def _dtype(text: str) -> Any:
    if not text.startswith("key<"):
        return jnp.dtype(text)
    implementation = text.removeprefix("key<").removesuffix(">")
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


def describe(parts: Parts) -> dict[str, list[list[Any]]]:
    """Part -> [path, dtype, shape] of each leaf, as plain data."""
    return {
        part: [[leaf.path, leaf.dtype, list(leaf.shape)] for leaf in leaves] for part, leaves in parts.items()
    }


def described(parts: Parts, arrays: Mapping[str, Mapping[str, Any]], save: str) -> dict[str, Any]:
    """Leaves and digests of a state, for its document.

    Args:
        parts: the leaves.
        arrays: from `snapshot`; with several processes, all of them call this.
        save: a name of this save, no other of this run.
    """
    split = digested_tiles(arrays, save)
    digests = {part: digest_stored(leaves, {**arrays[part], **split[part]}) for part, leaves in parts.items()}
    # Only where a leaf is split: other documents do not change.
    tiles = {part: {name: list(arrays[part][name].tile) for name in found} for part, found in split.items()}
    return {
        "leaves": describe(parts),
        "digests": digests,
        **({"tiles": tiles} if any(tiles.values()) else {}),
    }


def digested_tiles(arrays: Mapping[str, Mapping[str, Any]], save: str) -> dict[str, dict[str, Digested]]:
    """What the digests of split arrays are made of; with several processes, all of them call this."""
    return {
        part: {
            name: array.digested(f"{save}/{part}/{name}")
            for name, array in named.items()
            if isinstance(array, Snapshot)
        }
        for part, named in arrays.items()
    }


def snapshot(arrays: Arrays) -> dict[str, Any]:
    """The arrays on the host, as this process has them: those that are split over devices in tiles."""
    return {
        name: Snapshot.of(array) if split_leaves.is_split(array) else np.asarray(_on_one_device(array))
        for name, array in arrays.items()
    }


def _on_one_device(array: Array) -> Array:
    # The object that Orbax reads too: an array keeps its copy on the host, so there is one.
    return array.addressable_shards[0].data if isinstance(array, jax.Array) else array


def stored_arrays(leaves: list[Leaf]) -> dict[str, Array]:
    """The arrays to store, by number."""
    return {leaf.name: leaf.array() for leaf in leaves if leaf.is_stored}


def digest_stored(leaves: list[Leaf], arrays: Mapping[str, Any]) -> str:
    """The digest of a part: path, type and shape of every leaf, and the stored bits."""
    return digest_leaves([(f"{leaf.path}:{leaf.dtype}", _stored(leaf, arrays)) for leaf in leaves])


def _stored(leaf: Leaf, arrays: Mapping[str, Any]) -> Any:
    # Any dtype serves for an array without elements: the leaf's own enters the digest by its path.
    return arrays[leaf.name] if leaf.is_stored else np.empty(leaf.shape, np.uint8)


def read_arrays(path: Path, parts: Parts) -> dict[str, dict[str, jax.Array]]:
    """The stored arrays of these parts, by number; the bits are not verified."""
    wanted = {
        part: {leaf.name: leaf.target() for leaf in leaves if leaf.is_stored}
        for part, leaves in parts.items()
    }
    wanted = {part: named for part, named in wanted.items() if named}
    restoring = ocp.args.PyTreeRestore(
        wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,  # of the weights alone
    )
    # Orbax casts silently to the dtype of the target. The dtypes in the document were compared with the
    # targets before, and the digest verifies the bits, so a cast cannot pass.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(path, args=restoring) if wanted else {}
    return {part: arrays.get(part, {}) for part in parts}


def verifiable(arrays: Mapping[str, Any], tiles: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What `digest_stored` takes for restored arrays; with several processes, all of them call this.

    Args:
        arrays: by number.
        tiles: number -> the shape of the tiles of those that were split.
    """
    return {name: split_leaves.verifiable(array, tiles.get(name)) for name, array in arrays.items()}


def misdescribed(path: Path, saved: Mapping[str, Any]) -> str | None:
    """What a document says of the stored arrays and is not so: a sentence, or `None`."""
    tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(path)).tree
    for part, rows in saved.items():
        stored = tree.get(part) or {}
        listed = {f"{number:05d}": row for number, row in enumerate(rows) if 0 not in row[2]}
        if set(listed) != set(stored):
            return f"it lists {len(listed)} arrays in {part}, and {len(stored)} are stored"
        for number, (name, dtype, shape) in listed.items():
            found = stored[number]
            if not dtype.startswith("key<") and (dtype, shape) != (str(found.dtype), list(found.shape)):
                return f"it gives {name} as {dtype}{shape}, and {found.dtype}{list(found.shape)} is stored"
    return None


def require_fit(step: int, saved: Mapping[str, Any], wanted: Parts) -> None:
    """Raises `CheckpointMismatchError`, with both sides, unless path, dtype and shape of each leaf agree."""
    before = {path: f"{dtype}{shape}" for part in wanted for path, dtype, shape in saved[part]}
    now = {path: f"{dtype}{shape}" for rows in describe(wanted).values() for path, dtype, shape in rows}
    differ = [path for path in dict.fromkeys((*before, *now)) if before.get(path) != now.get(path)]
    lines = [
        f"  {path}\n    in the checkpoint: {before.get(path, 'absent')}\n"
        f"    in this run:       {now.get(path, 'absent')}"
        for path in differ
    ]
    if not lines:
        return
    more = [f"  and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    head = f"checkpoint at step {step} does not fit this run:"
    raise CheckpointMismatchError("\n".join([head, *lines[:_MOST_SHOWN], *more, _fix(differ)]))


def _fix(paths: list[str]) -> str:
    """What to build as it was, where these leaves differ."""
    fields = {path.partition("[")[0].partition(".")[0] for path in paths}
    parts = list(dict.fromkeys(part for field, part in _BUILT_FROM.items() if field in fields)) or ["state"]
    named = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    # Weights of another model do not fit either.
    or_else = "" if MODEL in fields else ", or restore the weights only"
    return f"Build the run with the {named} it was saved from{or_else}."


def _model_alone(state: TrainState) -> TrainState:
    # Fields left empty have no leaves, so that those of the other part keep their paths.
    return state.replace(**{f.name: None for f in dataclasses.fields(state) if f.name != "model_state"})


def _numbered(state: TrainState) -> list[Leaf]:
    return [
        Leaf(f"{index:05d}", jax.tree_util.keystr(path).removeprefix("."), leaf)
        for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state))
    ]
