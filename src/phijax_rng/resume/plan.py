"""Where a run starts: fresh, from its own last checkpoint, or from another run's.

| words                                 | the run starts                                                   |
|---------------------------------------|------------------------------------------------------------------|
| (none)                                | fresh; refused if the directory holds a run                      |
| `resume="auto"`                       | from its own newest step; if it has none, as the other words say |
| `resume=True`, or `ckpt_path="last"`  | from its own newest step, which must exist                       |
| `resume=True, ckpt_step=n`            | from its own step n; later steps are moved to `superseded/`      |
| `ckpt_path=root`                      | from the newest step of another run (its *origin*)               |
| `ckpt_path=root, ckpt_step=n`         | from step n of another run                                       |
| `ckpt_path=root, weights_only=True`   | fresh, with the model state of another run                       |

So one command line with `resume="auto"` always continues, however often it is killed.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.devices import processes
from phijax_rng.errors import RunExistsError
from phijax_rng.state import TrainState


@dataclasses.dataclass(frozen=True)
class Start:
    """Where to start.

    Attributes:
        checkpoints: what to restore from, or `None` for a fresh run.
        step: the step to restore; `None` for the newest intact one, or a fresh run.
        weights_only: whether only the model state is taken from there.
        own: whether it is this trainer's own run that goes on.
    """

    checkpoints: Checkpoints | None = None
    step: int | None = None
    weights_only: bool = False
    own: bool = False

    @property
    def continues(self) -> bool:
        """Whether keys and step come from a checkpoint."""
        return self.checkpoints is not None and not self.weights_only

    def root(self) -> Any:
        """The root key that the run to be continued was started from.

        Raises:
            ValueError: it is not recorded.
        """
        assert self.checkpoints is not None
        known = self.checkpoints.readable_contract(self.step).get("keys", {}).get("root")
        if known is None:
            raise ValueError(
                "seed=None takes the checkpoint's seed, and this checkpoint records none. Pass the seed."
            )
        return keys.from_fingerprint(known)

    def restore(self, fresh: TrainState) -> "Restored":
        """The state to start from, and the contract it was saved with.

        A named step must be intact; without one, damaged steps are passed over with a warning.
        """
        if self.checkpoints is None:
            return Restored(fresh, {}, None, {}, {})
        if self.step is None:
            state, step = self.checkpoints.restore_intact(fresh, weights_only=self.weights_only)
        else:
            step = self.step
            state = self.checkpoints.restore(fresh, step, weights_only=self.weights_only)
        streams = {
            "sampling": keys.fingerprint(state.sampling_key),
            "balancer": keys.fingerprint(state.balancer_key),
        }
        memory = {} if self.weights_only else self.checkpoints.memory(step)
        return Restored(state, self.checkpoints.contract(step), step, streams, memory)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a run starts from.

    Attributes:
        state: the train state.
        contract: the contract it was saved with; empty for a fresh run.
        step: the step it was saved at; `None` for a fresh run.
        streams: fingerprints of the saved keys, for a state that was saved without a contract.
        memory: what history and callbacks remembered; empty for a fresh run.
    """

    state: TrainState
    contract: Mapping[str, Any]
    step: int | None
    streams: Mapping[str, str]
    memory: Mapping[str, Any]


def decide(
    checkpoints: Checkpoints | None,
    *,
    resume: bool | str,
    ckpt_path: str | os.PathLike[str] | None,
    ckpt_step: int | None,
    weights_only: bool,
) -> Start:
    """The start that these words ask for.

    Raises:
        ValueError: words that contradict each other, or need a directory that the trainer lacks; processes
            that do not see the same checkpoints.
        FileNotFoundError: there is no such checkpoint.
        RunExistsError: a fresh run into a directory that holds a run.
    """
    validation.one_of(resume, "resume", (False, True, "auto"))
    validation.flag(weights_only, "weights_only")
    if ckpt_path == "last":
        resume, ckpt_path = _last(resume), None
    elsewhere = _other_root(checkpoints, ckpt_path)
    if ckpt_path is not None and elsewhere is None and not weights_only:
        resume = resume or True
    _require_consistent(checkpoints, resume, elsewhere, ckpt_step, weights_only)
    held = checkpoints.latest_step if checkpoints is not None else None
    _require_seen_by_all(held, None if elsewhere is None else elsewhere.latest_step)
    if resume is True or (resume == "auto" and held is not None):
        assert checkpoints is not None
        step = None if resume == "auto" else ckpt_step
        return Start(checkpoints, _explicit(checkpoints, step), own=True)
    if held is not None:
        raise RunExistsError(
            f"{checkpoints.directory} holds a run at step {held}, and a fresh one was asked for. "  # type: ignore[union-attr]
            "Pass resume='auto' to continue it, another directory to keep both, or delete it."
        )
    if elsewhere is not None:
        return Start(elsewhere, _explicit(elsewhere, ckpt_step), weights_only)
    return Start()


def _require_seen_by_all(*newest: int | None) -> None:
    """Asked before anything else is agreed on, or processes would answer different questions."""
    seen = next((step for step in newest if step is not None), None)
    processes.require_same(
        np.array([-1 if step is None else step for step in newest], np.int64),
        f"the processes see different checkpoints; the newest that is seen here is {seen}. "
        "Keep them in a directory that every process sees.",
    )


def _explicit(checkpoints: Checkpoints, step: int | None) -> int | None:
    """`step`, which must be there; with `None` there must be one at all."""
    found = checkpoints.existing(step)
    return None if step is None else found


def _last(resume: bool | str) -> bool:
    if resume == "auto":
        raise ValueError(
            "ckpt_path='last' demands a checkpoint and resume='auto' does without; they contradict "
            "each other. "
            "Pass one of them."
        )
    return True


def _other_root(checkpoints: Checkpoints | None, ckpt_path: Any) -> Checkpoints | None:
    """The other run's checkpoints; `None` where `ckpt_path` is absent or the trainer's own directory."""
    if ckpt_path is None:
        return None
    if not isinstance(ckpt_path, (str, os.PathLike)):
        raise TypeError(f"ckpt_path must be a path or 'last', got {ckpt_path!r}. Pass the root of a run.")
    elsewhere = Checkpoints(ckpt_path)
    if checkpoints is not None and _same(elsewhere.directory, checkpoints.directory):
        return None
    return elsewhere


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _require_consistent(
    checkpoints: Checkpoints | None,
    resume: bool | str,
    elsewhere: Checkpoints | None,
    ckpt_step: int | None,
    weights_only: bool,
) -> None:
    if resume and checkpoints is None:
        raise ValueError(
            f"resume={resume!r} needs a directory to continue from; the trainer has checkpoints=None. "
            "Pass Trainer(..., checkpoints=Checkpoints(directory))."
        )
    if resume is True and elsewhere is not None:
        raise ValueError(
            "resume=True continues the trainer's own run and "
            f"ckpt_path={str(elsewhere.directory)!r} names another. "
            "Pass resume='auto' to start from the other and continue the own one from then on."
        )
    if resume == "auto" and ckpt_step is not None and elsewhere is None:
        raise ValueError(
            f"resume='auto' continues from the newest step and ckpt_step={ckpt_step!r} names another. "
            "Pass resume=True to go back to that step."
        )
    if ckpt_step is not None and not resume and elsewhere is None:
        raise ValueError(
            f"ckpt_step={ckpt_step!r} names a step of no run. Pass resume=True or ckpt_path too."
        )
    if weights_only and elsewhere is None:
        raise ValueError(
            "weights_only=True needs the root of another run to take the weights from. Pass ckpt_path."
        )
