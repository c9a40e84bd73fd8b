"""Geometries made of geometries: unions, and space beside time.

Each takes uniform numbers like any geometry and hands them on to its parts, so that a union of
discs or the wall of a moving domain is drawn at once, from one key, with the fields of its parts.

>>> import jax
>>> from phijax_rng.sampling.geometry.balls import Ball
>>> from phijax_rng.sampling.geometry.boxes import Box
>>> start = InitialSlab(Box([(0.0, 1.0)]))
>>> start.sample(jax.random.key(0), 2)["inputs"][:, 0].tolist()
[0.0, 0.0]
>>> two = Union((Ball((0.0, 0.0), 1.0), Ball((4.0, 0.0), 2.0)))
>>> two.sample(jax.random.key(0), 3)["parts"].shape
(3,)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from phijax_rng._base import coordinates, exact_math, pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Rows
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.geometry.base import (
    Geometry,
    GeometrySampler,
    checked,
    contents,
    dtype_of,
    followed,
    num_dimensions,
)


@pytrees.record(data=("parts", "shares"), meta=("weights", "dtype"))
@dataclasses.dataclass(frozen=True, eq=False)
class Union(GeometrySampler):
    """Several geometries of one space, each chosen in proportion to its weight.

    Where parts overlap, points are drawn from both. The field `parts` (int32) says which part a point
    is from. All parts are placed for every point, so the cost is the sum of theirs.

    Attributes:
        parts: geometries with the same axes and fields, at least one.
        weights: a non-negative number for each part, not all zero; a part of weight zero is never
            drawn. `None` takes each part's length, area or volume, so that parts that do not overlap
            are covered uniformly.
        dtype: that of the parts, which have one; only parts of your own that declare none take another.
        shares: the cumulative shares of the parts.
    """

    kind: ClassVar[str] = "Union"

    parts: tuple[Any, ...]
    weights: Any = None
    _: dataclasses.KW_ONLY
    dtype: Any = None
    shares: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.parts, str) or not isinstance(self.parts, Sequence) or not self.parts:
            raise TypeError(
                f"parts must be geometries, at least one, got {formatted(self.parts)}. Pass a tuple."
            )
        parts = tuple(checked(part, f"parts[{index}]") for index, part in enumerate(self.parts))
        _require_alike(parts)
        weights = _measures(parts) if self.weights is None else _checked_weights(self.weights, len(parts))
        dtype = followed(self.dtype, parts[0], "the parts")
        shares = exact_math.cumulative_shares(weights, dtype)
        assign(self, parts=parts, weights=tuple(weights), dtype=dtype, shares=shares)

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.parts[0].num_axes)

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes: one for the part, and as many as the neediest part."""
        return 1 + max(int(part.num_uniforms) for part in self.parts)

    @property
    def num_dimensions(self) -> int | None:
        """Of what the parts measure; `None` where they do not say, or differ."""
        found = {num_dimensions(part) for part in self.parts}
        return found.pop() if len(found) == 1 else None

    @property
    def measure(self) -> float:
        """The parts' measures together."""
        return float(sum(part.measure for part in self.parts))

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: the first chooses the part, the others the place in it."""
        which = exact_math.choose(u[:, 0], jnp.asarray(self.shares))
        placed = [part.place(u[:, 1 : 1 + part.num_uniforms]) for part in self.parts]
        rows = {name: _pick(which, [rows[name] for rows in placed]) for name in placed[0]}
        return {**rows, "parts": which}

    def contents(self) -> dict[str, Any]:
        """What the parts pick from, whose digest goes into the contract."""
        return {f"parts[{index}]": contents(part) for index, part in enumerate(self.parts)}


class _BesideTime(GeometrySampler):
    """A geometry of space with the time as one more coordinate."""

    space: Any

    @property
    def num_axes(self) -> int:
        """Coordinates of a point: those of space, and the time."""
        return int(self.space.num_axes) + 1

    def contents(self) -> dict[str, Any]:
        """What the space picks from, whose digest goes into the contract."""
        return contents(self.space)


@pytrees.record(data=("space", "time_bounds"), meta=("time_axis", "dtype"))
@dataclasses.dataclass(frozen=True, eq=False)
class SpaceTimeCylinder(_BesideTime):
    """A geometry of space at all times between two: a domain, or its wall.

    `normals` of the space have no component in time.

    Attributes:
        space: a geometry whose axes are those of space.
        time_bounds: `(start, end)`, finite, `start < end`; stored as `dtype`.
        time_axis: the column of `inputs` that holds the time.
        dtype: that of the space; only a space of your own that declares none takes another.
    """

    kind: ClassVar[str] = "SpaceTimeCylinder"

    space: Any
    time_bounds: Any
    time_axis: int = 0
    _: dataclasses.KW_ONLY
    dtype: Any = None

    def __post_init__(self) -> None:
        space = checked(self.space, "space")
        dtype = followed(self.dtype, space, "space")
        bounds = coordinates.checked_bounds([self.time_bounds], "time_bounds", dtype)[0]
        axis = validation.whole_number(self.time_axis, "time_axis", space.num_axes + 1)
        assign(self, dtype=dtype, time_bounds=bounds, time_axis=axis)

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes: one for the time, and those of the space."""
        return int(self.space.num_uniforms) + 1

    @property
    def num_dimensions(self) -> int:
        """One more than the space has."""
        return int(self.space.num_dimensions) + 1

    @property
    def measure(self) -> float:
        """The measure of the space times the duration."""
        return float(self.space.measure) * float(self.time_bounds[1] - self.time_bounds[0])

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: the first gives the time, the others the place."""
        bounds = jnp.asarray(self.time_bounds)
        times = exact_math.affine(u[:, 0], bounds[0], bounds[1])
        return _with_time(self.space.place(u[:, 1:]), times, self.time_axis)


@pytrees.record(data=("space", "time"), meta=("time_axis", "dtype"))
@dataclasses.dataclass(frozen=True, eq=False)
class InitialSlab(_BesideTime):
    """A geometry of space at one time: where initial values are given.

    Attributes:
        space: a geometry whose axes are those of space.
        time: finite; stored as `dtype`.
        time_axis: the column of `inputs` that holds the time.
        dtype: as in `SpaceTimeCylinder`.
    """

    kind: ClassVar[str] = "InitialSlab"

    space: Any
    time: Any = 0.0
    time_axis: int = 0
    _: dataclasses.KW_ONLY
    dtype: Any = None

    def __post_init__(self) -> None:
        space = checked(self.space, "space")
        dtype = followed(self.dtype, space, "space")
        axis = validation.whole_number(self.time_axis, "time_axis", space.num_axes + 1)
        time = validation.finite_array(self.time, "time", (), dtype)
        assign(self, dtype=dtype, time=time, time_axis=axis)

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes: those of the space."""
        return int(self.space.num_uniforms)

    @property
    def num_dimensions(self) -> int:
        """As many as the space has."""
        return int(self.space.num_dimensions)

    @property
    def measure(self) -> float:
        """The measure of the space."""
        return float(self.space.measure)

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers; the time is exact."""
        times = jnp.broadcast_to(jnp.asarray(self.time), u.shape[:1])
        return _with_time(self.space.place(u), times, self.time_axis)


def _with_time(rows: Rows, times: jax.Array, axis: int) -> Rows:
    """The rows with the time as one more column of `inputs`, and a zero in their normals."""
    places, times = exact_math.alike(rows["inputs"], times)
    moved = {**rows, "inputs": _insert(places, times, axis)}
    if "normals" in rows:
        normals = rows["normals"]
        moved["normals"] = _insert(normals, jnp.zeros(normals.shape[:-1], normals.dtype), axis)
    return moved


def _insert(array: jax.Array, column: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate([array[..., :axis], column[..., None], array[..., axis:]], axis=-1)


def _pick(which: jax.Array, values: list[jax.Array]) -> jax.Array:
    """For each row that of the chosen part."""
    picked = values[0]
    for index, value in enumerate(values[1:], start=1):
        chosen = (which == index).reshape(-1, *(1,) * (value.ndim - 1))
        picked = jnp.where(chosen, value, picked)
    return picked


def _require_alike(parts: tuple[Geometry, ...]) -> None:
    """Raises unless all parts have the same fields, with rows of the same shape and dtype."""
    found = []
    for part in parts:
        numbers = jax.ShapeDtypeStruct((1, part.num_uniforms), dtype_of(part))
        rows = jax.eval_shape(part.place, numbers)
        found.append({name: f"{row.dtype}{list(row.shape[1:])}" for name, row in sorted(rows.items())})
    for index, fields in enumerate(found):
        if fields != found[0]:
            raise ValueError(
                f"parts must have the same fields; parts[0] has {found[0]!r} and parts[{index}] has "
                f"{fields!r}. Unite geometries of one space, all with normals or all without."
            )


def _measures(parts: tuple[Any, ...]) -> list[float]:
    dimensions = [num_dimensions(part) for part in parts]
    if None in dimensions or len(set(dimensions)) != 1:
        raise ValueError(
            f"weights=None weighs parts by their measure, and the parts have dimensions {dimensions!r}. "
            "Pass a weight for each part."
        )
    return [float(part.measure) for part in parts]


def _checked_weights(weights: object, count: int) -> list[float]:
    checked_weights = validation.finite_array(weights, "weights", (count,))
    if (checked_weights < 0).any() or not checked_weights.any():
        raise ValueError(
            f"weights must be non-negative and not all zero, got {formatted(weights)}. "
            "Fix them, or drop the part."
        )
    return [float(weight) for weight in checked_weights]
