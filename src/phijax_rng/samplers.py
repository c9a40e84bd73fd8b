"""From a key and a size to rows of a finite pool; and what a sampler is.

    pool --> sampler --> source        rows --> (key, size) -> rows --> step -> {name: batch}

Every sampler is a frozen pytree: its arrays are leaves (so they are arguments of a compiled program,
never constants in it), its options are static. A draw is a pure function of (key, size), pins its
dtypes, and row i of a draw with replacement does not depend on the size.

>>> import jax
>>> sampler = RandomRowSampler({"inputs": [[0.0], [1.0], [2.0]]})
>>> sampler.sample(jax.random.key(0), 2)["inputs"].shape
(2, 1)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from phijax_rng import _checks, _pytrees, _rows
from phijax_rng._types import BatchSize, KeyScalar, Rows, Step
from phijax_rng.pools import as_fields


@runtime_checkable
class Sampler(Protocol):
    """Draws rows from this step's key alone.

    Optional members: `check_size(size, name)` raises on a size it cannot serve, before anything is
    traced; `describe()` returns plain data and `contents()` arrays for the contract; `fixed = True` says
    that every step gets the same rows. A sampler of a finite pool accepts
    the size `"all"`, and says so by a `num_rows` attribute.
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

    The trainer keeps the state in `TrainState.sampler_state` under the name of the sampler. Before it
    draws the batch of a step at which the sampler is due, it calls `refresh`.

    Optional members: those of `Sampler`; and `residual_names`, which of the module's residuals are
    wanted. Without it that is the one that bears the name of the sampler.
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


@_pytrees.record(data=("fields",), meta=("replace", "method", "sort_axis"))
@dataclasses.dataclass(frozen=True, eq=False)
class RandomRowSampler:
    """Rows of a pool, picked uniformly.

    With replacement the indices are `jax.random.randint(key, (size,), 0, num_rows, dtype=int32)`, which
    equals `jax.random.choice` with x64 off. Without replacement, `method="permutation"` takes the first
    `size` places of a keyed permutation (`shuffle.permute_index`) at a cost of O(size), and
    `method="sort"` takes `jax.random.permutation(key, num_rows)[:size]` at a cost of
    O(num_rows log num_rows), for the rows that PhiJAX would draw.

    Attributes:
        fields: field name -> array of shape `(num_rows, ...)`, or a `HostPool`.
        replace: whether a row may be drawn twice in one batch.
        method: how distinct rows are found; without influence when `replace` is true.
        sort_axis: a column of `inputs` to sort each batch by, ascending and stable; `None` to keep
            the order of drawing. With it a row's place depends on the whole batch.

    Raises:
        TypeError: a field is not an array of numbers, or an option is of the wrong type.
        ValueError: fields of different lengths, an unknown method, or no such axis.
    """

    fields: Any
    replace: bool = True
    method: str = "permutation"
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", as_fields(self.fields))
        _checks.flag(self.replace, "replace")
        _checks.one_of(self.method, "method", _rows.METHODS)
        if self.sort_axis is not None:
            axis = _rows.checked_axis(self.sort_axis, "sort_axis", self.fields)
            object.__setattr__(self, "sort_axis", axis)

    @property
    def num_rows(self) -> int:
        """How many rows there are to pick from."""
        return _rows.num_rows(self.fields)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many rows."""
        if not self.replace:
            _rows.check_distinct(size, name, self.num_rows)

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Rows by field name; `"all"` gives every row in the order of the pool.

        Args:
            key: a typed key of shape `()`; may be traced. Not used for `"all"`.
            size: rows to draw; static.

        Returns:
            Field name -> array of shape `(size, ...)`, dtypes of the pool.
        """
        self.check_size(_checks.batch_size(size, "size"), "size")
        if size == "all":
            rows = jax.tree.map(jnp.asarray, self.fields)
        else:
            indices = _rows.draw_indices(key, int(size), self.num_rows, self.replace, self.method)
            rows = _rows.take(self.fields, indices)
        return _rows.sort(rows, self.sort_axis)

    def contents(self) -> dict[str, Any]:
        """The rows, whose digest goes into the contract."""
        return dict(self.fields)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "RandomRowSampler",
            "num_rows": self.num_rows,
            "fields": _rows.describe(self.fields),
            "replace": self.replace,
            "method": None if self.replace else self.method,
            "sort_axis": self.sort_axis,
        }
