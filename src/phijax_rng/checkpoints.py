"""Save and restore whole train states; the only module that knows Orbax.

    <directory>/<step>/model_state     arrays of `model_state`, by number
                       rest            arrays of everything else, by number
                       contract        JSON: what each number is, the run's contract, their SHA-256

Restoring creates and changes nothing. A save counts when it is on disk: an asynchronous one is waited
for before the next, and by `wait` and `close`, which raise what went wrong in the background.

>>> import tempfile, jax, optax
>>> from phijax_rng import keys, initialize_train_state
>>> state = initialize_train_state({"w": jax.numpy.ones(3)}, optax.sgd(0.1), {}, keys.split_root(0))
>>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
...     checkpoints.save(state)
...     checkpoints.wait()
...     restored = checkpoints.restore(like=state)
...     checkpoints.steps, bool(restored.sampling_key == state.sampling_key)
((0,), True)
"""

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from phijax_rng import _checks, keys
from phijax_rng.contract import dumps, loads
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError
from phijax_rng.state import TrainState

_MODEL, _REST, _CONTRACT = "model_state", "rest", "contract"


class Checkpoints:
    """The checkpoints of one run, in one directory.

    Attributes:
        directory: where they are, absolute.
        every_n_steps: save at multiples of this step; `None` for no such saves.
        every_minutes: save when this long has passed since the last; `None` for no such saves.
        max_to_keep: how many of the newest steps are kept; `None` for all.
        asynchronous: whether `save` returns before the files are written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = 10,
        max_to_keep: int | None = 3,
        asynchronous: bool = True,
    ):
        """Nothing is created or read before the first save or restore.

        Raises:
            TypeError: a count is not a whole number, or `directory` is not a path.
            ValueError: a count or a time is not positive.
        """
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise TypeError(f"directory must be a path, got {directory!r}. Pass where the run is kept.")
        self.directory = Path(os.path.abspath(Path(directory).expanduser()))
        self.every_n_steps = (
            None if every_n_steps is None else _checks.positive(every_n_steps, "every_n_steps")
        )
        self.every_minutes = None if every_minutes is None else _positive_minutes(every_minutes)
        self.max_to_keep = None if max_to_keep is None else _checks.positive(max_to_keep, "max_to_keep")
        self.asynchronous = _checks.flag(asynchronous, "asynchronous")
        self._manager: ocp.CheckpointManager | None = None
        self._last_save = time.monotonic()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, steps={list(self.steps)})"

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What there is

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are on disk, ascending; empty when there is no directory."""
        if not self.directory.is_dir():
            return ()
        return tuple(sorted(int(entry.name) for entry in self.directory.iterdir() if _is_step(entry)))

    @property
    def latest_step(self) -> int | None:
        """The highest step on disk, or `None`."""
        return self.steps[-1] if self.steps else None

    def contract(self, step: int | None = None) -> dict[str, Any]:
        """The contract saved with a step (the latest for `None`), as plain data.

        Raises:
            FileNotFoundError: there is no such step; the steps there are, are listed.
            DamagedCheckpointError: the contract is unreadable or does not match its digest.
        """
        return dict(self._record(self.existing(step))["run_contract"])

    # Saving

    def save(self, state: TrainState, contract: Mapping[str, Any] | None = None) -> None:
        """Saves the state under its step; asynchronously unless told otherwise at construction.

        The arrays may be donated or changed as soon as this returns. A failure in the background is
        raised by the next `save`, by `wait` or by `close`.

        Raises:
            TypeError: `state` is not a `TrainState`.
            FileExistsError: this step is on disk already.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"state must be a TrainState, got {state!r}. Use initialize_train_state.")
        step = int(state.step)
        self.wait()
        if step in self.steps:
            raise FileExistsError(
                f"step {step} is already saved in {self.directory}. "
                "Continue from it, or use another directory."
            )
        model, rest = _leaves(state)
        record = {
            "leaves": {_MODEL: _manifest(model), _REST: _manifest(rest)},
            "run_contract": dict(contract or {}),
        }
        items = {
            name: ocp.args.StandardSave(arrays)
            for name, arrays in ((_MODEL, _arrays(model)), (_REST, _arrays(rest)))
            if arrays
        }
        document = ocp.args.JsonSave(dumps({"schema": 1, **record}))
        self._writer().save(step, args=ocp.args.Composite(**items, **{_CONTRACT: document}), force=True)
        self._last_save = time.monotonic()

    def wait(self) -> None:
        """Waits for the save in flight, raises what went wrong in it, and drops the oldest steps."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._drop_oldest()

    def close(self) -> None:
        """Waits, and lets go of the directory. The object can be used again."""
        if self._manager is not None:
            try:
                self.wait()
            finally:
                self._manager.close()
                self._manager = None

    def next_save(self, step: int) -> int | None:
        """The next step after `step` at which `every_n_steps` asks for a save."""
        if self.every_n_steps is None:
            return None
        return (step // self.every_n_steps + 1) * self.every_n_steps

    def is_due(self, step: int) -> bool:
        """Whether `every_n_steps` or `every_minutes` asks for a save now, at `step`."""
        by_step = self.every_n_steps is not None and step % self.every_n_steps == 0
        minutes = (time.monotonic() - self._last_save) / 60
        return by_step or (self.every_minutes is not None and minutes >= self.every_minutes)

    def start_clock(self) -> None:
        """Counts `every_minutes` from now."""
        self._last_save = time.monotonic()

    def supersede_after(self, step: int) -> list[int]:
        """Moves the steps above `step` to `superseded/`, out of the way of a run that starts there."""
        self.wait()
        later = [found for found in self.steps if found > step]
        for found in later:
            folder = self.directory / "superseded"
            folder.mkdir(exist_ok=True)
            taken = sum(1 for entry in folder.iterdir() if entry.name.split("-")[0] == str(found))
            (self.directory / str(found)).rename(folder / f"{found}-{taken}")
        if later and self._manager is not None:
            self._manager.reload()
        return later

    # Restoring

    def restore(self, like: TrainState, step: int | None = None, *, weights_only: bool = False) -> TrainState:
        """The state saved at a step, bit for bit.

        Args:
            like: a state of the same structure, shapes and dtypes, whose arrays (or abstract values)
                also say where to place what is read.
            step: which one; the latest for `None`.
            weights_only: take `model_state` alone, and everything else from `like`.

        Raises:
            FileNotFoundError: there is no such step; the steps there are, are listed.
            CheckpointMismatchError: the checkpoint does not fit `like`; the first leaves that differ
                are named with both sides.
            DamagedCheckpointError: files are missing or unreadable.
        """
        step = self.existing(step)
        saved = self._record(step)["leaves"]
        model, rest = _leaves(like)
        wanted = {_MODEL: model} if weights_only else {_MODEL: model, _REST: rest}
        _require_fit(step, saved, wanted, weights_only)
        read = {name: self._read(step, name, leaves) for name, leaves in wanted.items()}
        model_state = jax.tree.unflatten(jax.tree.structure(like.model_state), read[_MODEL])
        if weights_only:
            return like.replace(model_state=model_state)
        without_model = like.replace(model_state=None)
        return jax.tree.unflatten(jax.tree.structure(without_model), read[_REST]).replace(
            model_state=model_state
        )

    # Inside

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=None,  # Orbax would count steps by the time of their saving
                    save_root_metadata=False,
                    enable_async_checkpointing=self.asynchronous,
                ),
            )
        return self._manager

    def _drop_oldest(self) -> None:
        if self.max_to_keep is not None and self._manager is not None:
            for step in self.steps[: -self.max_to_keep]:
                self._manager.delete(step)

    def existing(self, step: int | None = None) -> int:
        """This step if it is on disk; the latest for `None`.

        Raises:
            FileNotFoundError: there is no such step; the steps there are, are listed.
        """
        steps = self.steps
        if not steps:
            raise FileNotFoundError(
                f"no checkpoint in {self.directory}. Check the path, or start a fresh run."
            )
        if step is None:
            return steps[-1]
        number = _checks.step_number(step)
        if number not in steps:
            raise FileNotFoundError(
                f"no checkpoint at step {number} in {self.directory}; there are steps "
                f"{', '.join(map(str, steps))}. Pick one of them."
            )
        return number

    def _record(self, step: int) -> dict[str, Any]:
        where = f"step {step} in {self.directory}"
        try:
            with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
                document = reader.restore(self.directory / str(step) / _CONTRACT)
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCheckpointError(f"the contract of {where} cannot be read: {error}") from error
        record = loads(document, where)
        if "leaves" not in record:
            raise DamagedCheckpointError(f"{where} was not saved by phijax_rng. Restore another step.")
        return record

    def _read(self, step: int, item: str, leaves: list["_Leaf"]) -> list[Any]:
        targets = {leaf.name: leaf.target() for leaf in leaves if leaf.size}
        read: dict[str, Any] = {}
        if targets:
            try:
                with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                    read = reader.restore(
                        self.directory / str(step) / item, args=ocp.args.StandardRestore(targets)
                    )
            except (OSError, ValueError, KeyError) as error:
                raise DamagedCheckpointError(
                    f"{item} of step {step} in {self.directory} cannot be read: {error}"
                ) from error
        return [leaf.wrapped(read.get(leaf.name)) for leaf in leaves]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array of a state: where it is, and how it is stored. Keys are stored as their words."""

    name: str
    path: str
    value: Any

    @property
    def implementation(self) -> str | None:
        return str(jax.random.key_impl(self.value)) if keys.is_typed_key(self.value) else None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.value))

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def dtype(self) -> str:
        return f"key<{self.implementation}>" if self.implementation else str(jnp.result_type(self.value))

    def array(self) -> Any:
        """The value as Orbax stores it; NumPy scalars would save and not restore."""
        if self.implementation:
            return jax.random.key_data(self.value)
        return self.value if isinstance(self.value, jax.Array) else np.asarray(self.value)

    def target(self) -> jax.ShapeDtypeStruct:
        sharding = getattr(self.value, "sharding", None)
        if sharding is None or self.implementation:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if self.implementation:
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(self.shape, self.value.dtype))
            return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
        return jax.ShapeDtypeStruct(self.shape, jnp.result_type(self.value), sharding=sharding)

    def wrapped(self, array: Any) -> Any:
        if not self.size:
            return jnp.zeros(self.shape, jnp.result_type(self.value))
        return jax.random.wrap_key_data(array, impl=self.implementation) if self.implementation else array


def _leaves(state: TrainState) -> tuple[list[_Leaf], list[_Leaf]]:
    """The arrays of `model_state`, and all others in the order of the state's own leaves."""
    return _numbered(state.replace(**_nothing_but("model_state", state))), _numbered(
        state.replace(model_state=None)
    )


def _nothing_but(kept: str, state: TrainState) -> dict[str, None]:
    return {f.name: None for f in dataclasses.fields(state) if f.name != kept}


def _numbered(state: TrainState) -> list[_Leaf]:
    flat = jax.tree_util.tree_leaves_with_path(state)
    return [
        _Leaf(f"{index:05d}", jax.tree_util.keystr(path).removeprefix("."), leaf)
        for index, (path, leaf) in enumerate(flat)
    ]


def _manifest(leaves: list[_Leaf]) -> list[list[Any]]:
    return [[leaf.path, leaf.dtype, list(leaf.shape)] for leaf in leaves]


def _arrays(leaves: list[_Leaf]) -> dict[str, Any]:
    """By number, since names of parameters may hold any character. Orbax refuses zero-size arrays."""
    return {leaf.name: leaf.array() for leaf in leaves if leaf.size}


def _require_fit(
    step: int, saved: Mapping[str, Any], wanted: Mapping[str, list[_Leaf]], weights_only: bool
) -> None:
    before = {path: f"{dtype}{shape}" for item in wanted for path, dtype, shape in saved[item]}
    now = {path: f"{dtype}{shape}" for item in wanted for path, dtype, shape in _manifest(wanted[item])}
    lines = []
    for path in dict.fromkeys((*before, *now)):
        if before.get(path) != now.get(path):
            lines.append(
                f"  {path}\n    in the checkpoint: {before.get(path, 'absent')}\n"
                f"    in this run:       {now.get(path, 'absent')}"
            )
    if lines:
        shown = lines[:8] + ([f"  and {len(lines) - 8} more"] if len(lines) > 8 else [])
        mend = "" if weights_only else ", or restore the weights only"
        raise CheckpointMismatchError(
            f"checkpoint at step {step} does not fit this run:\n"
            + "\n".join(shown)
            + f"\nBuild the run with the model and optimizer it was saved from{mend}."
        )


def _is_step(entry: Path) -> bool:
    return entry.name.isdecimal() and str(int(entry.name)) == entry.name and entry.is_dir()


def _positive_minutes(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"every_minutes must be a number, got {value!r}. Pass minutes, or None.")
    if not value > 0:
        raise ValueError(f"every_minutes must be positive, got {value!r}. Pass minutes, or None.")
    return float(value)
