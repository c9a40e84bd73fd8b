"""Checkpoints of other programs: told for what they are, and the weights of PhiJAX's are read.

A run may be given another program's checkpoint by mistake, or to start from its weights. PhiJAX stores a
whole state with Orbax, without digests, and lays out keys and optimizer state otherwise. `weights_only=True`
reads its `model_state`, whose paths, shapes and dtypes must be those of the run.
"""

import contextlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from phijax_rng.checkpoints import stored_leaves
from phijax_rng.checkpoints.document import DOCUMENT, DOCUMENT_FILE
from phijax_rng.checkpoints.stored_leaves import MODEL
from phijax_rng.state import TrainState

_METADATA = "_CHECKPOINT_METADATA"
_ITEM = "default"
_OF_ORBAX = ("manifest.ocdbt", "_METADATA", _METADATA)

_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_HEAD = 32
_MOST_ENTRIES = 100


def not_a_directory(path: Path) -> str:
    """What to say of a file where a run's directory should be."""
    kind, how = _kind_of_file(path) or (None, None)
    if kind is None:
        return f"{path} is not a directory. Name another for this run."
    return (
        f"{path} is {kind}, and not the directory of a run of phijax_rng. "
        f"{how}, and pass the weights in the model state of a fresh run."
    )


def no_checkpoint(path: Path) -> str:
    """What to say of a directory without a step of ours."""
    with contextlib.suppress(OSError, ValueError):
        if (path / DOCUMENT / DOCUMENT_FILE).is_file():
            return f"{path} is one step of a run. Pass {path.parent}, and the step {path.name} to pick it."
        theirs = phijax_steps(path)
        if theirs:
            return (
                f"{path} has checkpoints of PhiJAX, at steps {', '.join(map(str, theirs))}. "
                "Pass it as ckpt_path with weights_only=True to take the weights of one."
            )
        folders = [path, *(entry for entry in sorted(path.iterdir())[:_MOST_ENTRIES])]
        inner = [below for folder in folders for below in (folder, folder / _ITEM, folder / "state")]
        if any((folder / name).exists() for folder in inner for name in _OF_ORBAX):
            return (
                f"{path} has checkpoints of Orbax that phijax_rng did not write. Restore them with Orbax, "
                "and pass the weights in the model state of a fresh run."
            )
        for entry in folders[1:]:
            kind = _kind_of_file(entry)
            if kind is not None:
                return f"{path} has no checkpoint of phijax_rng; {entry.name} is {kind[0]}. Check the path."
    return f"no checkpoint in {path}. Check the path, or start a fresh run."


def phijax_steps(path: Path) -> dict[int, Path]:
    """Number and folder of each step that PhiJAX saved: of this one, or of those in it."""
    with contextlib.suppress(OSError, ValueError):
        own = _phijax_step(path)
        if own is not None:
            return {own: path}
        found = {_phijax_step(entry): entry for entry in path.iterdir() if entry.name.isdecimal()}
        return {step: found[step] for step in sorted(step for step in found if step is not None)}
    return {}


def _phijax_step(folder: Path) -> int | None:
    try:
        text = (folder / _METADATA).read_text(encoding="utf-8")
    except OSError:
        return None
    theirs = json.loads(text).get("custom_metadata", {}).get("phijax", {})
    step = theirs.get("step")
    return step if isinstance(step, int) else None


def phijax_weights(folder: Path, step: int, like: TrainState) -> TrainState:
    """`like` with the model state of a step that PhiJAX saved.

    Raises:
        CheckpointMismatchError: paths, shapes or dtypes differ.
    """
    item = epath.Path(folder / _ITEM)
    tree = ocp.PyTreeCheckpointHandler().metadata(item).tree[MODEL]
    leaves = stored_leaves.leaves_of(like)[MODEL]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(like.model_state)]
    wanted = {_names(path): leaf for path, leaf in zip(paths, leaves, strict=True)}
    rows = [_row(path, entry, wanted) for path, entry in jax.tree_util.tree_leaves_with_path(tree)]
    stored_leaves.require_fit(step, {MODEL: rows}, {MODEL: leaves})
    target = {MODEL: jax.tree_util.tree_map_with_path(lambda path, _: wanted[_names(path)].target(), tree)}
    restoring = ocp.args.PyTreeRestore(
        target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        read = reader.restore(item, args=restoring)[MODEL]
    arrays = {_names(path): array for path, array in jax.tree_util.tree_leaves_with_path(read)}
    restored = [wanted[_names(path)].restored(arrays.get(_names(path))) for path in paths]
    return stored_leaves.rebuild(like, {MODEL: restored})


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    # Orbax reads tuples as lists and records as dicts, so an entry is known by its name alone.
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _row(path: tuple[Any, ...], entry: Any, wanted: dict[tuple[str, ...], stored_leaves.Leaf]) -> list[Any]:
    """Path, dtype and shape of a stored array; as the run has them, if it has such a leaf."""
    leaf = wanted.get(_names(path))
    if leaf is None:
        return [MODEL + jax.tree_util.keystr(path), str(entry.dtype), list(entry.shape)]
    target = leaf.target()
    if leaf.implementation and (target.shape, target.dtype) == (tuple(entry.shape), entry.dtype):
        return [leaf.path, leaf.dtype, list(leaf.shape)]
    return [leaf.path, str(entry.dtype), list(entry.shape)]


def _in_zip(path: Path, suffix: str) -> bool:
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return any(name.endswith(suffix) for name in archive.namelist())
    return False


def _is_map(head: bytes) -> bool:
    """Whether this begins a map of MessagePack whose first key is a text."""
    sizes = {**dict.fromkeys(range(0x81, 0x90), 1), 0xDE: 3, 0xDF: 5}
    at = sizes.get(head[0], len(head)) if head else 0
    return at < len(head) and (0xA0 <= head[at] < 0xC0 or head[at] == 0xD9)


# What it is, how to know it by its first bytes, and how to read it.
_FILES: tuple[tuple[str, Callable[[Path, bytes], bool], str], ...] = (
    ("a file of PyTorch", lambda p, h: h.startswith(_LEGACY_TORCH), "Load it with torch.load"),
    ("a file of PyTorch", lambda p, h: h[:2] == b"PK" and _in_zip(p, "data.pkl"), "Load it with torch.load"),
    ("an archive of NumPy", lambda p, h: h[:2] == b"PK" and _in_zip(p, ".npy"), "Load it with numpy.load"),
    ("a file of NumPy or Equinox", lambda p, h: h.startswith(b"\x93NUMPY"), "Load it with its library"),
    ("an HDF5 file", lambda p, h: h.startswith(b"\x89HDF"), "Load it with h5py"),
    ("a safetensors file", lambda p, h: h[8:9] == b"{" and h[4:8] == bytes(4), "Load it with safetensors"),
    (
        "a pickle",
        lambda p, h: h[:1] == b"\x80" and h[1:2] in (b"\2", b"\3", b"\4", b"\5"),
        "Load it with pickle",
    ),
    ("a MessagePack file, as Flax writes them", lambda p, h: _is_map(h), "Load it with flax.serialization"),
)


def _kind_of_file(path: Path) -> tuple[str, str] | None:
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD)
            return next(((kind, how) for kind, test, how in _FILES if test(path, head)), None)
    return None
