"""Boxes, their faces and their edges.

Points of a boundary carry the outward normals of their faces, from the same draw.

>>> import jax
>>> right = BoxFaces([(0.0, 1.0), (-2.0, 2.0)], faces=((0, "high"),))
>>> rows = right.sample(jax.random.key(3), 2)
>>> rows["inputs"][:, 0].tolist(), rows["normals"].tolist()
([1.0, 1.0], [[1.0, 0.0], [1.0, 0.0]])
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import coordinates, exact_math, pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Rows
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.geometry.base import GeometrySampler

_SIDES = ("low", "high")


class _Bounded(GeometrySampler):
    """What has the bounds of a box."""

    bounds: Any

    def _check_bounds(self) -> None:
        dtype = coordinates.resolved(self.dtype, self.bounds)
        assign(self, dtype=dtype, bounds=coordinates.checked_bounds(self.bounds, "bounds", dtype))

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.bounds.shape[0])


@pytrees.record(data=("bounds",), meta=("dtype",))
@dataclasses.dataclass(frozen=True, eq=False)
class Box(_Bounded):
    """The inside of a box; an interval, rectangle or cuboid with one, two or three axes.

    Its points are those of `UniformDomainSampler`, bit for bit.

    Attributes:
        bounds: one `(lo, hi)` for each axis, finite, `lo < hi`; stored as `dtype`, shape `(axes, 2)`.
        dtype: float32 or float64; by default float64 with x64 on, unless the bounds are narrower.
    """

    kind: ClassVar[str] = "Box"

    bounds: Any
    _: dataclasses.KW_ONLY
    dtype: Any = None

    def __post_init__(self) -> None:
        self._check_bounds()

    num_uniforms = num_dimensions = _Bounded.num_axes

    @property
    def measure(self) -> float:
        """The volume."""
        return float(np.prod(_spans(self.bounds)))

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: `lo + (hi - lo) * u`."""
        bounds = jnp.asarray(self.bounds)
        return {"inputs": exact_math.affine(u, bounds[:, 0], bounds[:, 1])}


def interval(low: float, high: float, *, dtype: Any = None) -> Box:
    """The interval from `low` to `high`, a box of one axis; its ends are `BoxFaces([(low, high)])`."""
    return Box([(low, high)], dtype=dtype)


class _Patterned(Protocol):
    """What `_Boundary` needs of the geometries that it completes.

    `_patterns` has a row for each part: -1 or 1 for an axis at its low or high end, 0 for a free one.
    """

    @property
    def bounds(self) -> Any: ...

    @property
    def shares(self) -> Any: ...

    def _patterns(self) -> np.ndarray[Any, Any]: ...

    def _measures(self) -> list[float]: ...


class _Boundary(_Bounded):
    """Parts of the boundary of a box, each with some axes at an end and the others free."""

    def _measures(self: _Patterned) -> list[float]:
        return [_free_measure(pattern, self.bounds) for pattern in self._patterns()]

    @property
    def measure(self: _Patterned) -> float:
        """The area of the faces, or the length of the edges, together."""
        return float(sum(self._measures()))

    def _points(self: _Patterned, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Points, and which part each is on: the first number chooses it, the others the place on it."""
        which = exact_math.choose(u[:, 0], jnp.asarray(self.shares))
        return _on_patterns(u, jnp.asarray(self.bounds), self._patterns(), which), which


@pytrees.record(data=("bounds", "shares"), meta=("faces", "dtype"))
@dataclasses.dataclass(frozen=True, eq=False)
class BoxFaces(_Boundary):
    """The boundary of a box, with outward normals; the ends of an interval, the sides of a rectangle.

    A face is chosen in proportion to its area, and a point on it uniformly. `normals` has shape
    `(size, axes)`.

    Attributes:
        bounds: of the box, as in `Box`.
        faces: which of the faces, each as `(axis, "low")` or `(axis, "high")`; all of them for `None`.
        dtype: as in `Box`.
        shares: the cumulative shares of the faces in their common area.
    """

    kind: ClassVar[str] = "BoxFaces"

    bounds: Any
    faces: tuple[tuple[int, str], ...] | None = None
    _: dataclasses.KW_ONLY
    dtype: Any = None
    shares: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_bounds()
        assign(self, faces=_checked_faces(self.faces, len(self.bounds)))
        assign(self, shares=exact_math.cumulative_shares(self._measures(), self.dtype))

    def _patterns(self) -> np.ndarray[Any, Any]:
        assert self.faces is not None
        return np.array([_pattern([face], self.num_axes) for face in self.faces])

    num_uniforms = _Bounded.num_axes

    @property
    def num_dimensions(self) -> int:
        """Of a face: one less than the box has."""
        return self.num_axes - 1

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: the first chooses the face, the others the place on it."""
        points, which = self._points(u)
        return {"inputs": points, "normals": jnp.asarray(self._patterns(), points.dtype)[which]}


@pytrees.record(data=("bounds", "shares"), meta=("dtype",))
@dataclasses.dataclass(frozen=True, eq=False)
class BoxEdges(_Boundary):
    """Where two faces of a box meet: the edges of a cuboid, the corners of a rectangle.

    An edge is chosen in proportion to its length, and a point on it uniformly. `normals` has shape
    `(size, 2, axes)`: the outward normals of both faces, that of the lower axis first.

    Attributes:
        bounds: of the box, as in `Box`; two axes or more.
        dtype: as in `Box`.
        shares: the cumulative shares of the edges in their common length.
    """

    kind: ClassVar[str] = "BoxEdges"

    bounds: Any
    _: dataclasses.KW_ONLY
    dtype: Any = None
    shares: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_bounds()
        if len(self.bounds) == 1:
            raise ValueError(
                "bounds must have two axes or more for two faces to meet, got one. "
                "Use BoxFaces for the ends of an interval."
            )
        assign(self, shares=exact_math.cumulative_shares(self._measures(), self.dtype))

    def _edges(self) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
        for first, second in itertools.combinations(range(self.num_axes), 2):
            yield from itertools.product([(first, s) for s in _SIDES], [(second, s) for s in _SIDES])

    def _patterns(self) -> np.ndarray[Any, Any]:
        return np.array([_pattern(edge, self.num_axes) for edge in self._edges()])

    @property
    def num_dimensions(self) -> int:
        """Of an edge: two less than the box has."""
        return self.num_axes - 2

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes."""
        return self.num_axes - 1

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: the first chooses the edge, the others the place on it."""
        points, which = self._points(u)
        pairs = [[_pattern([face], self.num_axes) for face in edge] for edge in self._edges()]
        return {"inputs": points, "normals": jnp.asarray(np.array(pairs), points.dtype)[which]}


def _spans(bounds: object) -> np.ndarray[Any, Any]:
    return np.diff(np.asarray(bounds, np.float64), axis=1)[:, 0]


def _pattern(faces: Sequence[tuple[int, str]], num_axes: int) -> list[int]:
    """-1 or 1 for an axis at its low or high end, 0 for one that is free."""
    pattern = [0] * num_axes
    for axis, side in faces:
        pattern[axis] = -1 if side == "low" else 1
    return pattern


def _free_measure(pattern: object, bounds: object) -> float:
    return float(np.prod(_spans(bounds)[np.asarray(pattern) == 0]))


def _on_patterns(
    u: jax.Array, bounds: jax.Array, patterns: np.ndarray[Any, Any], which: jax.Array
) -> jax.Array:
    """Points on the chosen parts of a boundary; free axes take the columns of `u` after the first."""
    # The n-th free axis takes column n; an axis that is not free takes any.
    columns = np.where(patterns == 0, np.cumsum(patterns == 0, axis=1), 0)
    free = exact_math.affine(
        jnp.take_along_axis(u, jnp.asarray(columns)[which], axis=1), bounds[:, 0], bounds[:, 1]
    )
    side = jnp.asarray(patterns)[which]
    low, high = (jnp.asarray(bounds[None, :, end], free.dtype) for end in range(2))
    return jnp.where(side == 0, free, jnp.where(side < 0, low, high))


def _checked_faces(faces: object, num_axes: int) -> tuple[tuple[int, str], ...]:
    if faces is None:
        return tuple(itertools.product(range(num_axes), _SIDES))
    if isinstance(faces, str) or not isinstance(faces, Sequence):
        raise TypeError(
            f"faces must be pairs (axis, side), got {formatted(faces)}. Pass for example ((0, 'low'),)."
        )
    checked: list[tuple[int, str]] = []
    for index, face in enumerate(faces):
        if not isinstance(face, (tuple, list)) or len(face) != 2:
            raise TypeError(
                f"faces[{index}] must be a pair (axis, side), got {formatted(face)}. "
                "Pass for example (0, 'low')."
            )
        axis = validation.whole_number(face[0], f"faces[{index}][0]", num_axes)
        checked.append((axis, validation.one_of(face[1], f"faces[{index}][1]", _SIDES)))
    if not checked or len(set(checked)) != len(checked):
        raise ValueError(
            f"faces must be distinct, at least one, got {formatted(faces)}. Name each face once."
        )
    return tuple(checked)
