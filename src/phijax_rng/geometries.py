"""Where points lie: maps from uniform numbers to points of a domain or of its boundary.

    uniform numbers in [0, 1), shape (size, num_uniforms)  --place-->  {"inputs": points, "normals": ...}

A geometry is such a map, and keeps volumes: numbers that are uniform become points that are uniform.
Whatever makes the numbers may be put before it: a key (every geometry is a sampler by itself), a
low-discrepancy sequence (`SobolSampler`, `LatinHypercubeSampler`), or a user's own. Everything that
belongs to a point, such as its outward normal, comes from the same numbers.

Everything is float32, whatever x64 says. Coordinates are built from products and sums that are each
rounded alone, so they are the same bits eager, jitted, looped, and as the beginning of a larger batch;
balls and spheres of more than three axes go through normal quantiles and agree to within 4 ulp.

>>> import jax
>>> faces = BoxFaces([(0.0, 1.0), (-2.0, 2.0)], faces=((0, "high"),))
>>> faces.sample(jax.random.key(3), 2)["normals"].tolist()
[[1.0, 0.0], [1.0, 0.0]]
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import _checks, _coordinates, _pytrees
from phijax_rng._types import BatchSize, KeyScalar, Rows

_FLOAT32 = np.dtype(np.float32)
_SIDES = ("low", "high")


@runtime_checkable
class Geometry(Protocol):
    """A map from uniform numbers to points, registered as a pytree.

    Optional members: `measure` (length, area or volume) and `num_dimensions` (of what it measures), which
    `Union` weighs its parts by.
    """

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        ...

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes, at least one."""
        ...

    def place(self, u: jax.Array) -> Rows:
        """`inputs` of shape `(size, num_axes)`, and more fields, from `u` of shape `(size, num_uniforms)`."""
        ...


class GeometrySampler:
    """What all geometries of this package share: each is a sampler of uniform points."""

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many points."""
        _checks.num_points(size, name)

    def sample(self: Geometry, key: KeyScalar, size: BatchSize) -> Rows:
        """Uniform points: `place(jax.random.uniform(key, (size, num_uniforms)))`.

        Args:
            key: a typed key of shape `()`; may be traced.
            size: points to draw; static, a positive int.
        """
        shape = (_checks.num_points(size, "size"), self.num_uniforms)
        return self.place(jax.random.uniform(key, shape, dtype=jnp.float32))

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        shown = [field.name for field in dataclasses.fields(self) if field.init]  # type: ignore[arg-type]
        return {"kind": type(self).__name__, **{name: _plain(getattr(self, name)) for name in shown}}


@_pytrees.record(data=("bounds",))
@dataclasses.dataclass(frozen=True, eq=False)
class Box(GeometrySampler):
    """The inside of a box; an interval, rectangle or cuboid with one, two or three axes.

    Its points are those of `UniformDomainSampler`, bit for bit.

    Attributes:
        bounds: one `(lo, hi)` for each axis, finite, `lo < hi`; held as float32, shape `(axes, 2)`.

    Raises:
        TypeError: the bounds are not pairs of numbers.
        ValueError: a bound is not finite or out of order.
    """

    bounds: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", _coordinates.checked_bounds(self.bounds, "bounds", _FLOAT32))

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.bounds.shape[0])

    num_uniforms = num_dimensions = num_axes

    @property
    def measure(self) -> float:
        """The volume."""
        return float(np.prod(_spans(self.bounds)))

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: `lo + (hi - lo) * u`."""
        bounds = jnp.asarray(self.bounds)
        return {"inputs": _coordinates.affine(u, bounds[:, 0], bounds[:, 1])}


def interval(low: float, high: float) -> Box:
    """The interval from `low` to `high`, a box of one axis; its ends are `BoxFaces([(low, high)])`."""
    return Box([(low, high)])


@_pytrees.record(data=("bounds", "shares"), meta=("faces",))
@dataclasses.dataclass(frozen=True, eq=False)
class BoxFaces(GeometrySampler):
    """The boundary of a box, with outward normals; the ends of an interval, the sides of a rectangle.

    A face is chosen in proportion to its area, and a point on it uniformly. `normals` has shape
    `(size, axes)`.

    Attributes:
        bounds: of the box, as in `Box`.
        faces: which of the faces, each as `(axis, "low")` or `(axis, "high")`; all of them for `None`.
        shares: the cumulative shares of the faces in their common area.

    Raises:
        TypeError: the bounds are not pairs of numbers, or a face is no such pair.
        ValueError: a bound is out of order, a face is repeated or not there, or there is none.
    """

    bounds: Any
    faces: tuple[tuple[int, str], ...] | None = None
    shares: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        bounds = _coordinates.checked_bounds(self.bounds, "bounds", _FLOAT32)
        object.__setattr__(self, "bounds", bounds)
        object.__setattr__(self, "faces", _checked_faces(self.faces, len(bounds)))
        areas = [_free_measure(pattern, bounds) for pattern in self._patterns()]
        object.__setattr__(self, "shares", _coordinates.cumulative_shares(areas))

    def _patterns(self) -> np.ndarray[Any, Any]:
        assert self.faces is not None
        return np.array([_pattern([face], self.num_axes) for face in self.faces])

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.bounds.shape[0])

    num_uniforms = num_axes

    @property
    def num_dimensions(self) -> int:
        """Of a face: one less than the box has."""
        return self.num_axes - 1

    @property
    def measure(self) -> float:
        """The area of these faces together."""
        return float(sum(_free_measure(pattern, self.bounds) for pattern in self._patterns()))

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: the first chooses the face, the others the place on it."""
        which = _coordinates.choose(u[:, 0], jnp.asarray(self.shares))
        patterns = self._patterns()
        points = _on_patterns(u, jnp.asarray(self.bounds), patterns, which)
        return {"inputs": points, "normals": jnp.asarray(patterns, jnp.float32)[which]}


@_pytrees.record(data=("bounds", "shares"))
@dataclasses.dataclass(frozen=True, eq=False)
class BoxEdges(GeometrySampler):
    """Where two faces of a box meet: the edges of a cuboid, the corners of a rectangle.

    An edge is chosen in proportion to its length, and a point on it uniformly. `normals` has shape
    `(size, 2, axes)`: the outward normals of both faces, that of the lower axis first.

    Attributes:
        bounds: of the box, as in `Box`; two axes or more.
        shares: the cumulative shares of the edges in their common length.

    Raises:
        TypeError: the bounds are not pairs of numbers.
        ValueError: a bound is not finite or out of order, or there is but one axis.
    """

    bounds: Any
    shares: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        bounds = _coordinates.checked_bounds(self.bounds, "bounds", _FLOAT32)
        if len(bounds) == 1:
            raise ValueError(
                f"bounds must have two axes or more for two faces to meet, got {bounds.tolist()!r}. "
                "Use BoxFaces for the ends of an interval."
            )
        object.__setattr__(self, "bounds", bounds)
        lengths = [_free_measure(pattern, bounds) for pattern in self._patterns()]
        object.__setattr__(self, "shares", _coordinates.cumulative_shares(lengths))

    def _edges(self) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
        for first, second in itertools.combinations(range(self.num_axes), 2):
            yield from itertools.product([(first, s) for s in _SIDES], [(second, s) for s in _SIDES])

    def _patterns(self) -> np.ndarray[Any, Any]:
        return np.array([_pattern(edge, self.num_axes) for edge in self._edges()])

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.bounds.shape[0])

    @property
    def num_dimensions(self) -> int:
        """Of an edge: two less than the box has."""
        return self.num_axes - 2

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes."""
        return self.num_axes - 1

    @property
    def measure(self) -> float:
        """The length of all edges together."""
        return float(sum(_free_measure(pattern, self.bounds) for pattern in self._patterns()))

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers: the first chooses the edge, the others the place on it."""
        which = _coordinates.choose(u[:, 0], jnp.asarray(self.shares))
        points = _on_patterns(u, jnp.asarray(self.bounds), self._patterns(), which)
        pairs = [[_pattern([face], self.num_axes) for face in edge] for edge in self._edges()]
        return {"inputs": points, "normals": jnp.asarray(np.array(pairs), jnp.float32)[which]}


@_pytrees.record(data=("center", "radius"))
@dataclasses.dataclass(frozen=True, eq=False)
class Sphere(GeometrySampler):
    """The surface of a ball, with outward normals: a circle with two axes.

    With three axes a point has a uniform height and a uniform angle (Archimedes); with more it is a
    vector of normal quantiles, made one long (Muller, 1959). `normals` has shape `(size, axes)`.

    Attributes:
        center: finite coordinates; held as float32, shape `(axes,)`.
        radius: positive and finite; held as float32.

    Raises:
        TypeError: the center or the radius is not made of numbers.
        ValueError: one of them is not finite, or the radius is not positive.
    """

    center: Any
    radius: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", _checks.finite_float32(self.center, "center", (None,)))
        object.__setattr__(self, "radius", _checked_radius(self.radius))

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.center.shape[0])

    @property
    def num_dimensions(self) -> int:
        """Of the surface: one less than space has."""
        return self.num_axes - 1

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes."""
        return _num_uniforms_of_direction(self.num_axes)

    @property
    def measure(self) -> float:
        """The area of the surface."""
        return self.num_axes * _unit_ball(self.num_axes) * float(self.radius) ** (self.num_axes - 1)

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers, and the direction they lie in."""
        normals = _direction(u, self.num_axes)
        offset = _coordinates.product(jnp.asarray(self.radius), normals, u[:, :1])
        return {"inputs": jnp.asarray(self.center) + offset, "normals": normals}


@_pytrees.record(data=("center", "radius"))
@dataclasses.dataclass(frozen=True, eq=False)
class Ball(GeometrySampler):
    """The inside of a sphere: a disk with two axes.

    The distance from the center is `radius * u ** (1 / axes)`, the direction that of a `Sphere`.

    Attributes:
        center: finite coordinates; held as float32, shape `(axes,)`.
        radius: positive and finite; held as float32.

    Raises:
        TypeError: the center or the radius is not made of numbers.
        ValueError: one of them is not finite, or the radius is not positive.
    """

    center: Any
    radius: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "center", _checks.finite_float32(self.center, "center", (None,)))
        object.__setattr__(self, "radius", _checked_radius(self.radius))

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.center.shape[0])

    num_dimensions = num_axes

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that one point takes: one for the distance, the others for the direction."""
        return 1 + _num_uniforms_of_direction(self.num_axes)

    @property
    def measure(self) -> float:
        """The volume."""
        return _unit_ball(self.num_axes) * float(self.radius) ** self.num_axes

    def place(self, u: jax.Array) -> Rows:
        """Points from uniform numbers."""
        distance = _coordinates.product(jnp.asarray(self.radius), _root(u[:, :1], self.num_axes), u[:, :1])
        offset = _coordinates.product(distance, _direction(u[:, 1:], self.num_axes), u[:, :1])
        return {"inputs": jnp.asarray(self.center) + offset}


def _num_uniforms_of_direction(num_axes: int) -> int:
    return max(1, num_axes - 1) if num_axes <= 3 else num_axes


def _direction(u: jax.Array, num_axes: int) -> jax.Array:
    """Uniform unit vectors, shape `(size, num_axes)`."""
    if num_axes == 1:
        return jnp.where(u < 0.5, -1, 1).astype(jnp.float32)
    if num_axes == 2:
        return jnp.stack(_coordinates.circle(u[:, 0]), axis=1)
    if num_axes == 3:
        height = 1 - 2 * u[:, 0]
        ring = 2 * jnp.sqrt(_coordinates.product(u[:, 0], 1 - u[:, 0], u[:, 0]))
        x, y = (_coordinates.product(ring, part, u[:, 0]) for part in _coordinates.circle(u[:, 1]))
        return jnp.stack([x, y, height], axis=1)
    # Zero has no normal quantile; half of the finest step of `u` has one.
    normal = jax.scipy.special.ndtri(jnp.maximum(u, 2.0**-25))
    return normal / jnp.linalg.norm(normal, axis=1, keepdims=True)


def _root(u: jax.Array, num_axes: int) -> jax.Array:
    """`u ** (1 / num_axes)`."""
    exact = {1: lambda u: u, 2: jnp.sqrt, 3: _coordinates.cube_root}
    return exact[num_axes](u) if num_axes in exact else u ** jnp.float32(1 / num_axes)


def _unit_ball(num_axes: int) -> float:
    return math.pi ** (num_axes / 2) / math.gamma(num_axes / 2 + 1)


def _spans(bounds: Any) -> np.ndarray[Any, Any]:
    return np.diff(np.asarray(bounds, np.float64), axis=1)[:, 0]


def _pattern(faces: Sequence[tuple[int, str]], num_axes: int) -> list[int]:
    """-1 or 1 for an axis at its low or high end, 0 for one that is free."""
    pattern = [0] * num_axes
    for axis, side in faces:
        pattern[axis] = -1 if side == "low" else 1
    return pattern


def _free_measure(pattern: Any, bounds: Any) -> float:
    return float(np.prod(_spans(bounds)[np.asarray(pattern) == 0]))


def _on_patterns(
    u: jax.Array, bounds: jax.Array, patterns: np.ndarray[Any, Any], which: jax.Array
) -> jax.Array:
    """Points on the chosen parts of a boundary; free axes take the columns of `u` after the first."""
    # The n-th free axis takes column n; an axis that is not free takes any.
    columns = np.where(patterns == 0, np.cumsum(patterns == 0, axis=1), 0)
    free = _coordinates.affine(
        jnp.take_along_axis(u, jnp.asarray(columns)[which], axis=1), bounds[:, 0], bounds[:, 1]
    )
    side = jnp.asarray(patterns)[which]
    return jnp.where(side == 0, free, jnp.where(side < 0, bounds[:, 0], bounds[:, 1]))


def _checked_faces(faces: Any, num_axes: int) -> tuple[tuple[int, str], ...]:
    if faces is None:
        return tuple(itertools.product(range(num_axes), _SIDES))
    if isinstance(faces, str) or not isinstance(faces, Sequence):
        raise TypeError(f"faces must be pairs (axis, side), got {faces!r}. Pass for example ((0, 'low'),).")
    checked: list[tuple[int, str]] = []
    for index, face in enumerate(faces):
        if not isinstance(face, (tuple, list)) or len(face) != 2:
            raise TypeError(
                f"faces[{index}] must be a pair (axis, side), got {face!r}. Pass for example (0, 'low')."
            )
        axis = _checks.whole_number(face[0], f"faces[{index}][0]", num_axes)
        checked.append((axis, _checks.one_of(face[1], f"faces[{index}][1]", _SIDES)))
    if not checked or len(set(checked)) != len(checked):
        raise ValueError(f"faces must be distinct, at least one, got {faces!r}. Name each face once.")
    return tuple(checked)


def _checked_radius(radius: Any) -> np.ndarray[Any, Any]:
    held = _checks.finite_float32(radius, "radius", ())
    if not held > 0:
        raise ValueError(f"radius must be positive in float32, got {radius!r}. Mend it.")
    return held


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "describe"):
        return value.describe()
    return np.asarray(value).tolist() if isinstance(value, (np.ndarray, jax.Array)) else value
