"""Finite iterables of batches as sources: read in order, and never silently begun anew.

A source is asked by step; an iterable only gives the next batch. So the batches that may be asked for again
(by the trainer's checks, and by a save while the loop is fed ahead) are kept, a resume reads and drops
the batches before its step, or is refused, and the end of the iterable is an error with its number.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.validation import formatted

# The feed draws up to three stacks, of 64 steps or 64 MiB, ahead of what a save asks for.
_KEPT = 256
_KEPT_BYTES = 256 * 2**20
_KEPT_LEAST = 8


class IterableSource:
    """The batches of an iterable, one for each step from 0 on.

    Not pure by itself: batch t is the one that the iterable gives when it is read t times before. So the
    iterable must give the same batches every time it is begun. A resume compares the next batch with that
    of the saved run, and refuses another one.

    Attributes:
        iterable: gives batches `{name: {field: rows}}` of one structure: a list, a data loader, Grain's
            `IterDataset`, a generator. Of an iterator, the batch it gives next is that of step 0.
        on_resume: `"skip"` reads the batches before the first step that is asked for and drops them;
            `"refuse"` raises instead.

    Raises:
        TypeError: `iterable` cannot be iterated.
        ValueError: `on_resume` is neither, or the iterable is empty.
    """

    def __init__(self, iterable: Iterable[Any], *, on_resume: str = "skip"):
        scalar = isinstance(iterable, (str, bytes)) or getattr(iterable, "shape", None) == ()
        if not isinstance(iterable, Iterable) or scalar:
            raise TypeError(
                f"iterable must give batches one by one, got {formatted(iterable)}. Pass an iterable."
            )
        if _is_empty(iterable):
            raise ValueError(f"iterable must give at least one batch, got {formatted(iterable)}. Fill it.")
        self.iterable = iterable
        self.on_resume = validation.one_of(on_resume, "on_resume", ("skip", "refuse"))
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._most = _KEPT

    def __call__(self, step: object) -> Any:
        """The batch of a step.

        Raises:
            ValueError: the iterable has ended, or the step cannot be reached.
        """
        step = validation.step_number(step)
        if step in self._kept:
            return self._kept[step]
        self._seek(step)
        while self._next <= step:
            batch = self._read()
        return batch

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract, which compares the next batch as well."""
        return {"kind": "IterableSource"}

    def _seek(self, step: int) -> None:
        """Begins, and begins again from the first batch where the step lies behind."""
        behind = step < self._next
        if self._iterator is not None and not behind:
            return
        if self._iterator is None and step and self.on_resume == "refuse":
            raise ValueError(
                f"the source is an iterable that would have to skip {step} batches, and on_resume='refuse'. "
                "Start at step 0, or pass on_resume='skip'."
            )
        if behind and isinstance(self.iterable, Iterator):
            raise ValueError(
                f"the source is an iterator at step {self._next}, and step {step} was asked for. "
                "Pass an iterable that can be begun anew, such as a list or a data loader."
            )
        self._iterator, self._next = iter(self.iterable), 0
        self._kept.clear()

    def _read(self) -> Any:
        assert self._iterator is not None
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self._next:
                raise ValueError(
                    f"the source is an iterable that gave no batch, got {formatted(self.iterable)}. "
                    "Fill it, or pass one that can be begun anew if it has been read before."
                ) from None
            raise ValueError(
                f"the source is an iterable that ended after {self._next} batches, and step {self._next} "
                f"was asked for. Train to max_steps={self._next}, or pass one that goes on."
            ) from None
        # A loader may fill the same arrays again for its next batch.
        batch = _copied(batch)
        if not self._next:
            self._most = _most_kept(batch)
        self._kept[self._next] = batch
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        self._next += 1
        return batch


def _is_empty(iterable: Any) -> bool:
    try:
        return not len(iterable)
    except TypeError:  # a loader may have a length in principle, and not over its data
        return False


def _copied(batch: object) -> Any:
    """A copy on the host, names in the order given."""
    if isinstance(batch, Mapping):
        return {name: jax.tree.map(np.array, rows) for name, rows in batch.items()}
    return jax.tree.map(np.array, batch)


def _most_kept(batch: object) -> int:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    return max(_KEPT_LEAST, min(_KEPT, _KEPT_BYTES // max(size, 1)))
