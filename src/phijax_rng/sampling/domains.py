"""Points of continuous domains, drawn afresh from each key.

Coordinates are `lo + (hi - lo) * u` with `u` uniform on [0, 1), rounded twice: the product, then the
sum, as NumPy does it. They are therefore the same bits eager, jitted, looped, sharded, and as the
beginning of a larger batch, which `jax.random.uniform(key, shape, minval=lo, maxval=hi)` is not.

>>> import jax
>>> sampler = UniformDomainSampler([(0.0, 1.0), (-2.0, 2.0)])
>>> sampler.sample(jax.random.key(3), 3)["inputs"].shape
(3, 2)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import coordinates, exact_math, pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import BatchSize, KeyScalar, Rows
from phijax_rng._base.validation import formatted
from phijax_rng.sampling import rows
from phijax_rng.sampling.pools import as_fields, numbers


@pytrees.record(data=("bounds", "templates"), meta=("dtype", "sort_axis"))
@dataclasses.dataclass(frozen=True, eq=False)
class UniformDomainSampler:
    """Points uniform in a box.

    `inputs` is `lo + (hi - lo) * u` with `u = jax.random.uniform(key, (size, axes), dtype)`, product and
    sum rounded one after the other; a coordinate can round up to `hi`. It parts from
    `jax.random.uniform(minval, maxval)` by at most one rounding of the span, and not at all where
    `hi - lo` is a power of two.

    Attributes:
        bounds: one `(lo, hi)` for each axis, finite, `lo < hi`; stored as `dtype`, shape `(axes, 2)`.
        templates: more fields, each one row without its leading axis, repeated for every point.
        dtype: float32 or float64, in which `uniform` is drawn; by default float64 with x64 on, unless the
            bounds are narrower.
        sort_axis: a column of `inputs` to sort each batch by, ascending; `None` to keep the order of drawing.
    """

    bounds: Any
    templates: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Any = None
    _: dataclasses.KW_ONLY
    sort_axis: int | None = None

    def __post_init__(self) -> None:
        dtype = coordinates.resolved(self.dtype, self.bounds)
        bounds = coordinates.checked_bounds(self.bounds, "bounds", dtype)
        assign(self, dtype=dtype, bounds=bounds, templates=_checked_templates(self.templates))
        if self.sort_axis is not None:
            axis = validation.whole_number(self.sort_axis, "sort_axis", len(bounds))
            assign(self, sort_axis=axis)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many points."""
        validation.num_points(size, name)

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Points by field name.

        Args:
            key: a typed key of shape `()`; may be traced.
            size: points to draw; static, a positive int.

        Returns:
            `inputs` of shape `(size, axes)`, and each template as `(size, *template.shape)`.
        """
        size = validation.num_points(size, "size")
        u = exact_math.unit(key, (size, self.num_uniforms), self.dtype)
        return rows.sort_rows(self.place(u), self.sort_axis)

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.bounds.shape[0])

    num_uniforms = num_axes

    def place(self, u: jax.Array) -> Rows:
        """Points and templates from uniform numbers of shape `(size, axes)`, in their order."""
        bounds = jnp.asarray(self.bounds)
        inputs = exact_math.affine(u, bounds[:, 0], bounds[:, 1])
        size = u.shape[0]
        repeated = {
            name: jnp.broadcast_to(row, (size, *np.shape(row))) for name, row in self.templates.items()
        }
        return {"inputs": inputs, **repeated}

    def contents(self) -> dict[str, Any]:
        """The templates, whose digest goes into the contract."""
        return dict(self.templates)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "UniformDomainSampler",
            "bounds": np.asarray(self.bounds).tolist(),
            "templates": rows.describe_fields(self.templates),
            "dtype": str(self.dtype),
            "sort_axis": self.sort_axis,
        }


@pytrees.record(data=("fields", "time_bounds"), meta=("time_axis", "replace", "method", "sort_axis", "dtype"))
@dataclasses.dataclass(frozen=True, eq=False)
class SpaceTimeSampler:
    """Points of a pool, at times drawn for each batch.

    `row_key, time_key = split(key)`: the first picks rows uniformly, the second draws a time for each,
    which takes the place of column `time_axis`. Other fields come from the picked rows.

    Attributes:
        fields: field name -> array of shape `(rows, ...)`, or a `HostPool`; `inputs` is float32 (or
            float64 with x64 on) of shape `(rows, axes)`. No `targets`: they would belong to other times.
        time_bounds: `(start, end)`, finite, `start < end`.
        time_axis: the column of `inputs` that holds the time.
        replace: whether a place may be picked twice in one batch.
        method: how distinct places are found, as in `RandomRowSampler`.
        sort_axis: a column of the new `inputs` to sort each batch by, ascending; 0 unless said
            otherwise, `None` to keep the order of drawing.
        dtype: of the new `inputs`, float32, or float64 with x64 on; that of the pool's for `None`.
    """

    fields: Any
    time_bounds: Any
    time_axis: int = 0
    _: dataclasses.KW_ONLY
    replace: bool = True
    method: str = "permutation"
    sort_axis: int | None = 0
    dtype: Any = None

    def __post_init__(self) -> None:
        fields = as_fields(self.fields)
        rows.require_narrow(fields)
        if np.prod(np.shape(fields.get("targets", np.empty((1, 0))))) > 0:
            raise ValueError(
                "fields must not hold 'targets', which belong to the times of the pool. Drop them."
            )
        time_axis = rows.checked_axis(self.time_axis, "time_axis", fields)
        dtype, inputs = self._checked_dtype(fields["inputs"])
        validation.flag(self.replace, "replace")
        validation.one_of(self.method, "method", rows.METHODS)
        assign(self, fields={**fields, "inputs": inputs}, time_axis=time_axis, dtype=dtype)
        bounds = coordinates.checked_bounds([self.time_bounds], "time_bounds", dtype)
        assign(self, time_bounds=bounds[0])
        if self.sort_axis is not None:
            axis = rows.checked_axis(self.sort_axis, "sort_axis", fields)
            assign(self, sort_axis=axis)

    def _checked_dtype(self, inputs: Any) -> tuple[np.dtype[Any], Any]:
        """The dtype of the points, and the pool's inputs in it."""
        if self.dtype is None:
            fix = "Pass dtype=float32."
            return coordinates.checked_dtype(inputs.dtype, "fields['inputs']", fix), inputs
        dtype = coordinates.resolved(self.dtype)
        if inputs.dtype == dtype:
            return dtype, inputs
        narrowed = inputs.astype(dtype) if isinstance(inputs, jax.Array) else np.asarray(inputs, dtype)
        return dtype, narrowed

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many points."""
        validation.num_points(size, name)
        if not self.replace:
            rows.check_distinct(size, name, rows.count_rows(self.fields), "Use a smaller size")

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Points by field name.

        Args:
            key: a typed key of shape `()`; may be traced.
            size: points to draw; static, a positive int.

        Returns:
            `inputs` of shape `(size, axes)`, and the other fields of the picked rows.
        """
        size = validation.num_points(size, "size")
        self.check_size(size, "size")
        row_key, time_key = jax.random.split(key)
        count = rows.count_rows(self.fields)
        indices = rows.draw_indices(row_key, size, count, self.replace, self.method)
        picked = rows.take(self.fields, indices)
        bounds = jnp.asarray(self.time_bounds)
        times = exact_math.affine(exact_math.unit(time_key, (size,), self.dtype), bounds[0], bounds[1])
        return rows.sort_rows(
            {**picked, "inputs": picked["inputs"].at[:, self.time_axis].set(times)}, self.sort_axis
        )

    def contents(self) -> dict[str, Any]:
        """The rows, whose digest goes into the contract."""
        return dict(self.fields)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {
            "kind": "SpaceTimeSampler",
            "num_rows": rows.count_rows(self.fields),
            "fields": rows.describe_fields(self.fields),
            "time_bounds": np.asarray(self.time_bounds).tolist(),
            "time_axis": self.time_axis,
            "replace": self.replace,
            "method": None if self.replace else self.method,
            "sort_axis": self.sort_axis,
        }


def _checked_templates(templates: object) -> dict[str, Any]:
    if not isinstance(templates, Mapping):
        raise TypeError(
            f"templates must be a mapping, got {formatted(templates)}. Pass a dict from field to one row."
        )
    if "inputs" in templates:
        raise ValueError(
            "templates must not have the field 'inputs', which are the points themselves. Rename the field."
        )
    checked = {}
    for name, row in templates.items():
        on_device = isinstance(row, jax.Array) and isinstance(row.dtype, np.dtype)  # keys have another
        checked[str(name)] = row if on_device else numbers(row, f"templates[{name!r}]")
    rows.require_narrow(checked, "templates")
    return checked
