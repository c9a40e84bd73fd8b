"""Balls and spheres; disks and circles with two axes.

>>> import jax
>>> circle = Sphere((1.0, 0.0), 0.5)
>>> rows = circle.sample(jax.random.key(0), 4)
>>> {name: row.shape for name, row in rows.items()}
{'inputs': (4, 2), 'normals': (4, 2)}
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import coordinates, exact_math, pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Rows
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.geometry.base import GeometrySampler


@dataclasses.dataclass(frozen=True, eq=False)
class _Round(GeometrySampler):
    """What has a center and a radius."""

    center: Any
    radius: Any
    _: dataclasses.KW_ONLY
    dtype: Any = None

    def __post_init__(self) -> None:
        dtype = coordinates.resolved(self.dtype, self.center, self.radius)
        center = validation.finite_array(self.center, "center", (None,), dtype)
        assign(self, dtype=dtype, center=center, radius=_checked_radius(self.radius, dtype))

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.center.shape[0])


@pytrees.record(data=("center", "radius"), meta=("dtype",))
@dataclasses.dataclass(frozen=True, eq=False)
class Sphere(_Round):
    """The surface of a ball, with outward normals: a circle with two axes.

    With three axes a point has a uniform height and a uniform angle (Archimedes); with more it is a
    vector of normal quantiles, made one long (Muller, 1959). `normals` has shape `(size, axes)`.

    Attributes:
        center: finite coordinates; stored as `dtype`, shape `(axes,)`.
        radius: positive and finite; stored as `dtype`.
        dtype: float32 or float64; by default float64 with x64 on, unless center and radius are narrower.
    """

    kind: ClassVar[str] = "Sphere"

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
        """Points from uniform numbers, and their directions from the center."""
        u, center, radius = exact_math.alike(u, self.center, self.radius)
        normals = _direction(u, self.num_axes)
        offset = exact_math.product(radius, normals, u[:, :1])
        return {"inputs": center[None, :] + offset, "normals": normals}


@pytrees.record(data=("center", "radius"), meta=("dtype",))
@dataclasses.dataclass(frozen=True, eq=False)
class Ball(_Round):
    """The inside of a sphere: a disk with two axes.

    The distance from the center is `radius * u ** (1 / axes)`, the direction that of a `Sphere`.

    Attributes:
        center: finite coordinates; stored as `dtype`, shape `(axes,)`.
        radius: positive and finite; stored as `dtype`.
        dtype: float32 or float64; by default float64 with x64 on, unless center and radius are narrower.
    """

    kind: ClassVar[str] = "Ball"

    num_dimensions = _Round.num_axes

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
        u, center, radius = exact_math.alike(u, self.center, self.radius)
        distance = exact_math.product(radius, exact_math.root(u[:, :1], self.num_axes), u[:, :1])
        offset = exact_math.product(distance, _direction(u[:, 1:], self.num_axes), u[:, :1])
        return {"inputs": center[None, :] + offset}


def _num_uniforms_of_direction(num_axes: int) -> int:
    return max(1, num_axes - 1) if num_axes <= 3 else num_axes


def _direction(u: jax.Array, num_axes: int) -> jax.Array:
    """Uniform unit vectors, shape `(size, num_axes)`."""
    if num_axes == 1:
        return jnp.where(u < 0.5, -1, 1).astype(u.dtype)
    if num_axes == 2:
        return jnp.stack(exact_math.circle(u[:, 0]), axis=1)
    if num_axes == 3:
        height = 1 - 2 * u[:, 0]
        ring = 2 * jnp.sqrt(exact_math.product(u[:, 0], 1 - u[:, 0], u[:, 0]))
        x, y = (exact_math.product(ring, part, u[:, 0]) for part in exact_math.circle(u[:, 1]))
        return jnp.stack([x, y, height], axis=1)
    # Zero has no normal quantile; half of the finest step of `u` has one.
    if u.dtype == jnp.float64:
        normal = exact_math.normal_quantile(jnp.maximum(u, 2.0**-54))
        return exact_math.unit_vectors(normal, u[:, 0])
    normal = jax.scipy.special.ndtri(jnp.maximum(u, 2.0**-25))
    return normal / jnp.linalg.norm(normal, axis=1, keepdims=True)


def _unit_ball(num_axes: int) -> float:
    return math.pi ** (num_axes / 2) / math.gamma(num_axes / 2 + 1)


def _checked_radius(radius: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    checked = validation.finite_array(radius, "radius", (), dtype)
    if not checked > 0:
        raise ValueError(f"radius must be positive in {dtype}, got {formatted(radius)}. Pass more than 0.")
    return checked
