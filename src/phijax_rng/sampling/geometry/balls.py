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

from phijax_rng._base import exact_math, pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Rows
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.geometry.base import GeometrySampler


@dataclasses.dataclass(frozen=True, eq=False)
class _Round(GeometrySampler):
    """What has a center and a radius."""

    center: Any
    radius: Any

    def __post_init__(self) -> None:
        assign(
            self,
            center=validation.finite_float32(self.center, "center", (None,)),
            radius=_checked_radius(self.radius),
        )

    @property
    def num_axes(self) -> int:
        """Coordinates of a point."""
        return int(self.center.shape[0])


@pytrees.record(data=("center", "radius"))
@dataclasses.dataclass(frozen=True, eq=False)
class Sphere(_Round):
    """The surface of a ball, with outward normals: a circle with two axes.

    With three axes a point has a uniform height and a uniform angle (Archimedes); with more it is a
    vector of normal quantiles, made one long (Muller, 1959). `normals` has shape `(size, axes)`.

    Attributes:
        center: finite coordinates; stored as float32, shape `(axes,)`.
        radius: positive and finite; stored as float32.
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
        normals = _direction(u, self.num_axes)
        offset = exact_math.product(jnp.asarray(self.radius), normals, u[:, :1])
        return {"inputs": jnp.asarray(self.center) + offset, "normals": normals}


@pytrees.record(data=("center", "radius"))
@dataclasses.dataclass(frozen=True, eq=False)
class Ball(_Round):
    """The inside of a sphere: a disk with two axes.

    The distance from the center is `radius * u ** (1 / axes)`, the direction that of a `Sphere`.

    Attributes:
        center: finite coordinates; stored as float32, shape `(axes,)`.
        radius: positive and finite; stored as float32.
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
        distance = exact_math.product(jnp.asarray(self.radius), _root(u[:, :1], self.num_axes), u[:, :1])
        offset = exact_math.product(distance, _direction(u[:, 1:], self.num_axes), u[:, :1])
        return {"inputs": jnp.asarray(self.center) + offset}


def _num_uniforms_of_direction(num_axes: int) -> int:
    return max(1, num_axes - 1) if num_axes <= 3 else num_axes


def _direction(u: jax.Array, num_axes: int) -> jax.Array:
    """Uniform unit vectors, shape `(size, num_axes)`."""
    if num_axes == 1:
        return jnp.where(u < 0.5, -1, 1).astype(jnp.float32)
    if num_axes == 2:
        return jnp.stack(exact_math.circle(u[:, 0]), axis=1)
    if num_axes == 3:
        height = 1 - 2 * u[:, 0]
        ring = 2 * jnp.sqrt(exact_math.product(u[:, 0], 1 - u[:, 0], u[:, 0]))
        x, y = (exact_math.product(ring, part, u[:, 0]) for part in exact_math.circle(u[:, 1]))
        return jnp.stack([x, y, height], axis=1)
    # Zero has no normal quantile; half of the finest step of `u` has one.
    normal = jax.scipy.special.ndtri(jnp.maximum(u, 2.0**-25))
    return normal / jnp.linalg.norm(normal, axis=1, keepdims=True)


def _root(u: jax.Array, num_axes: int) -> jax.Array:
    """`u ** (1 / num_axes)`."""
    exact = {1: lambda u: u, 2: jnp.sqrt, 3: exact_math.cube_root}
    return exact[num_axes](u) if num_axes in exact else u ** jnp.float32(1 / num_axes)


def _unit_ball(num_axes: int) -> float:
    return math.pi ** (num_axes / 2) / math.gamma(num_axes / 2 + 1)


def _checked_radius(radius: object) -> np.ndarray[Any, Any]:
    checked = validation.finite_float32(radius, "radius", ())
    if not checked > 0:
        raise ValueError(f"radius must be positive in float32, got {formatted(radius)}. Pass more than 0.")
    return checked
