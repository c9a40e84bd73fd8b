"""Domains and their boundaries: maps from uniform numbers to points of a domain or of its boundary.

    uniform numbers in [0, 1), shape (size, num_uniforms)  --place-->  {"inputs": points, "normals": ...}

A geometry is such a map, and keeps volumes: numbers that are uniform become points that are uniform.
Whatever makes the numbers may be put before it: a key (every geometry is a sampler by itself), a
low-discrepancy sequence (`SobolSampler`, `LatinHypercubeSampler`), or a user's own. Everything that
belongs to a point, such as its outward normal, comes from the same numbers.

Everything is float32, whatever x64 says. Coordinates are built from products and sums that are each
rounded alone, so they are the same bits eager, jitted, looped, and as the beginning of a larger batch;
balls and spheres of more than three axes go through normal quantiles and agree to within 4 ulp.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.plain_data import described, kind_of, plain
from phijax_rng._base.types import BatchSize, KeyScalar, Rows
from phijax_rng._base.validation import formatted


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
        validation.num_points(size, name)

    def sample(self: Geometry, key: KeyScalar, size: BatchSize) -> Rows:
        """Uniform points: `place(jax.random.uniform(key, (size, num_uniforms)))`.

        Args:
            key: a typed key of shape `()`; may be traced.
            size: points to draw; static, a positive int.
        """
        shape = (validation.num_points(size, "size"), self.num_uniforms)
        return self.place(jax.random.uniform(key, shape, dtype=jnp.float32))

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        shown = [field.name for field in dataclasses.fields(self) if field.init]  # type: ignore[arg-type]
        return {"kind": kind_of(self), **{name: plain(getattr(self, name), _numbers) for name in shown}}


def checked(value: object, name: str) -> Geometry:
    """`value`, if it is a geometry whose arrays a program can take as arguments."""
    if not isinstance(value, Geometry) or jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"{name} must be a geometry, registered as a pytree, got {formatted(value)}. "
            "Pass for example a Box."
        )
    return value


def contents(geometry: Any) -> dict[str, Any]:
    """What the geometry, or sampler, picks from, for the contract; empty where it is not known."""
    return dict(geometry.contents()) if callable(getattr(geometry, "contents", None)) else {}


def num_dimensions(geometry: Geometry) -> int | None:
    """The dimension of what `measure` measures; `None` where the geometry does not say."""
    # Not a check by isinstance: a geometry around another has the member only if the other has it.
    return getattr(geometry, "num_dimensions", None)


def _numbers(value: object) -> Any:
    """Arrays and parts of a geometry as the contract stores them."""
    if isinstance(value, Geometry):
        return described(value)
    return np.asarray(value).tolist() if isinstance(value, (np.ndarray, jax.Array)) else value
