"""What a user may plug in: sources and samplers, and which members of them are optional.

    pool --> sampler --> source        rows --> (key, size) -> rows --> step -> {name: batch}

A protocol lists the required members, and its docstring the optional ones in a table. `adapters` reads
these, once.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from phijax_rng._base.types import BatchSize, KeyScalar, Rows, Step

INDEX = "index"
"""The one field of the batches of a `HostSampler.chooser`: int32 row numbers."""


@runtime_checkable
class TrainingBatchSource(Protocol):
    """What the trainer needs of a source: a batch for a step.

    A source that does not say it is traceable is called on the host, with a Python int.

    | optional member | what it says | without it |
    |---|---|---|
    | `traceable = True` | pure in the step, and may be traced | called on the host |
    | `fixed = True` | every step gets the same batch | a warning if it does |
    | `prepare(device)` | the source to call, its arrays on the device | the source itself |
    | `names` | the names of the batches, in order | those the module reads |
    | `samplers`, `batch_sizes` | name -> sampler, name -> size | not known; none is adaptive |
    | `key` | the key it draws from, for the contract | not compared |
    | `sample(key, batch_sizes)` | batches for diagnostics | a balancer has no batches of its own |
    | `sampler_keys(step)` | name -> key, for the audit | keys without a name |
    | `stacked_batches(steps, count)` | many steps at once, with a leading axis | one by one |
    | `fetches_own_rows = True` | `stacked_batches` takes `own_rows` too | every process fetches all rows |
    | `host_and_device_parts()` | see `NamedBatchSource` | all of it is called on the host |
    | `describe()` | plain data for the contract | its class and settings |
    | `contents()` | name -> arrays, digested for the contract | not compared |
    """

    def __call__(self, step: Any) -> Any:
        """The batch of this step: `{name: {field: rows}}`."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Draws rows from this step's key alone.

    | optional member | what it says | without it |
    |---|---|---|
    | `check_size(size, name)` | raises on a size that it cannot serve, before tracing | any positive size |
    | `num_rows` | the rows of a finite pool, which serves the size `"all"` | no finite pool |
    | `fixed = True` | every step gets the same rows | a warning if it does |
    | `describe()` | plain data for the contract | its class |
    | `contents()` | arrays, digested for the contract | not compared |
    """

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Rows by field name, the leading axis of length `size`. May be traced, `size` is static."""
        ...


@runtime_checkable
class StepSampler(Protocol):
    """Draws the rows of an absolute step from a key that is the same at every step.

    The key is `keys.stream(sampling_key, "sampler", name)`. `sample` serves diagnostics.
    """

    def sample_at(self, key: KeyScalar, step: Step, size: BatchSize) -> Rows:
        """Rows of the batch at `step`, which may be traced."""
        ...

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Rows for diagnostics, from an explicit key."""
        ...


@runtime_checkable
class AdaptiveSampler(Protocol):
    """Draws rows from a key and a state that follows the residuals, at absolute steps.

    The trainer stores the state in `TrainState.sampler_state` under the name of the sampler. Before it
    draws the batch of a step at which the sampler is due, it calls `refresh`.

    | optional member | what it says | without it |
    |---|---|---|
    | those of `Sampler` | | |
    | `residual_names` | which of the module's residuals it follows | the one with the sampler's name |
    """

    def init(self, key: KeyScalar) -> Any:
        """The state before the first refresh: a pytree of arrays."""
        ...

    def sample(self, key: KeyScalar, size: BatchSize, state: Any) -> Rows:
        """Rows by field name. May be traced."""
        ...

    def due(self, step: Step, state: Any) -> Any:
        """Whether to refresh before the batch of `step` is drawn, a bool of shape `()`. May be traced."""
        ...

    def refresh(self, key: KeyScalar, state: Any, residuals: Callable[[Rows], jax.Array]) -> Any:
        """The state after a refresh, of the same structure. May be traced.

        `residuals` maps rows of the sampler's making to an array with one row of residuals for each.
        """
        ...


@runtime_checkable
class HostSampler(Protocol):
    """A sampler whose rows are fetched on the host.

    It may have the optional members of a `Sampler`. Its batches are NumPy arrays.
    """

    @property
    def chooser(self) -> Any:
        """A pytree, `Sampler` or `StepSampler`, whose batches are `{"index": row numbers}`."""
        ...

    def gather(self, index: np.ndarray[Any, Any]) -> Rows:
        """The rows with these numbers, on the host: field name -> array of shape `(*index.shape, ...)`.

        The last axis of `index` counts the rows of a batch, axes before it count batches.
        """
        ...
