"""Finite iterables of batches as sources: read in order, and never restarted silently.

A source is called with a step; an iterable only returns the next batch. So recent batches are retained for
the trainer's checks and for saves while batches are prefetched. A resume reads and drops the batches before
its step, or raises. The end of the iterable is an error with its number.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.pools import numbers
from phijax_rng.sampling.rows import require_narrow

# The prefetcher is up to three stacks, of 64 steps or 64 MiB each, ahead of the step of a save, and a save
# digests the batch of its step again.
_RETAINED = 256
_RETAINED_BYTES = 256 * 2**20
_LEAST_RETAINED = 8


class IterableSource:
    """The batches of an iterable, one for each step from 0 on.

    Not pure by itself: batch t is what the iterable returns after t batches. So the iterable must return the
    same batches every time it is iterated over. A resume compares the next batch with that of the saved run,
    and raises if it differs.

    Attributes:
        iterable: returns batches `{name: {field: rows}}` of one structure: a list, a data loader, Grain's
            `IterDataset`, a generator. Of an iterator, the next batch is that of step 0.
        on_resume: `"skip"` reads the batches before the first step and drops them;
            `"refuse"` raises instead.
    """

    def __init__(self, iterable: Iterable[Any], *, on_resume: str = "skip"):
        scalar = isinstance(iterable, (str, bytes)) or getattr(iterable, "shape", None) == ()
        if not isinstance(iterable, Iterable) or scalar:
            raise TypeError(
                f"iterable must return batches one by one, got {formatted(iterable)}. Pass an iterable."
            )
        if _is_empty(iterable):
            raise ValueError(f"iterable must return at least one batch, got {formatted(iterable)}. Fill it.")
        self.iterable = iterable
        self.on_resume = validation.one_of(on_resume, "on_resume", ("skip", "refuse"))
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._retained: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._most = _RETAINED

    def __call__(self, step: object) -> Any:
        """The batch of a step.

        Raises:
            ValueError: the iterable has ended, or the step cannot be reached.
        """
        step = validation.step_number(step)
        if step in self._retained:
            return self._retained[step]
        self._seek(step)
        while self._next <= step:
            batch = self._read()
        return batch

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract, which compares the next batch as well."""
        return {"kind": "IterableSource"}

    def _seek(self, step: int) -> None:
        """Starts to iterate; starts again from the first batch if the step was passed."""
        passed = step < self._next
        if self._iterator is not None and not passed:
            return
        if self._iterator is None and step and self.on_resume == "refuse":
            raise ValueError(
                f"the source is an iterable that would have to skip {step} batches, and on_resume='refuse'. "
                "Start at step 0, or pass on_resume='skip'."
            )
        if passed and isinstance(self.iterable, Iterator):
            raise ValueError(
                f"the source is an iterator at step {self._next}, which cannot return to step {step}. "
                "Pass an iterable that can be iterated over again, such as a list or a data loader."
            )
        self._iterator, self._next = iter(self.iterable), 0
        self._retained.clear()

    def _read(self) -> Any:
        assert self._iterator is not None
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self._next:
                raise ValueError(
                    f"the source is an iterable that returned no batch, got {formatted(self.iterable)}. "
                    "Fill it; if it has been read before, pass one that can be iterated over again."
                ) from None
            raise ValueError(
                f"the source is an iterable that ended after {self._next} batches, before the batch "
                f"of step {self._next}. Train to max_steps={self._next}, or pass a longer one."
            ) from None
        # A loader may fill the same arrays again for its next batch.
        batch = _copied(batch, self._next)
        if not self._next:
            self._most = _most_retained(batch)
        self._retained[self._next] = batch
        while len(self._retained) > self._most:
            self._retained.popitem(last=False)
        self._next += 1
        return batch


def _is_empty(iterable: Any) -> bool:
    try:
        return not len(iterable)
    except TypeError:  # a loader may have a length in principle, and not over its data
        return False


def checked_batch(batch: object, step: object) -> Any:
    """A batch of a source on the host, in dtypes and byte order that JAX has; mostly the batch itself.

    Raises:
        TypeError: an array does not hold numbers, or numbers of a dtype that JAX does not have.
        ValueError: entries are masked, or beyond the 32 bits to which JAX narrows them.
    """
    arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
    if any(type(array) is not np.ndarray or not _is_of_jax(array.dtype) for array in arrays):
        return _copied(batch, step)
    if any(array.dtype.itemsize > 4 for array in arrays):
        require_narrow(batch, f"batch {step}")
    return batch


def _is_of_jax(dtype: np.dtype[Any]) -> bool:
    widest = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
    return dtype.isnative and dtype.itemsize <= widest.get(dtype.kind, 0)


def _copied(batch: object, step: object) -> Any:
    """A copy on the host, names in the order given."""

    def copied(path: tuple[Any, ...], leaf: object) -> np.ndarray[Any, Any]:
        label = f"batch {step}{jax.tree_util.keystr(path)}"
        array = numbers(leaf, label)
        require_narrow(array, label)
        return array

    if isinstance(batch, Mapping):
        named = jax.tree_util.tree_map_with_path(copied, dict(batch))
        return {name: named[name] for name in batch}
    return jax.tree_util.tree_map_with_path(copied, batch)


def _most_retained(batch: object) -> int:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    return max(_LEAST_RETAINED, min(_RETAINED, _RETAINED_BYTES // max(size, 1)))
