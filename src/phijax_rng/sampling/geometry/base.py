"""Domains and their boundaries: maps from uniform numbers to points of a domain or of its boundary.

    uniform numbers in [0, 1), shape (size, num_uniforms)  --place-->  {"inputs": points, "normals": ...}

A geometry is such a map, and keeps volumes: numbers that are uniform become points that are uniform.
Whatever makes the numbers may be put before it: a key (every geometry is a sampler by itself), a
low-discrepancy sequence (`SobolSampler`, `LatinHypercubeSampler`), or a user's own. Everything that
belongs to a point, such as its outward normal, comes from the same numbers.

Points are float32, or float64 with x64 on; see `_base.coordinates`. Coordinates are built from products and
sums that are each rounded alone, so they are the same bits eager, jitted, looped, and as the beginning of a
larger batch; float32 balls and spheres of more than three axes go through XLA's normal quantiles and agree
to within 4 ulp.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from phijax_rng._base import coordinates, exact_math, validation
from phijax_rng._base.plain_data import described, kind_of, plain
from phijax_rng._base.types import BatchSize, KeyScalar, Rows
from phijax_rng._base.validation import formatted


@runtime_checkable
class Geometry(Protocol):
    """A map from uniform numbers to points, registered as a pytree.

    Optional members: `measure` (length, area or volume) and `num_dimensions` (of what it measures), which
    `Union` weighs its parts by; `dtype`, float32 or float64, of the uniform numbers that it takes. Without it
    they are float64 where x64 is on and `place` gives float64 points for float32 numbers, else float32.
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
    """What all geometries of this package share: each is a sampler of uniform points.

    Attributes:
        dtype: of the uniform numbers, and of the points.
    """

    dtype: Any

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many points."""
        validation.num_points(size, name)

    def sample(self: Any, key: KeyScalar, size: BatchSize) -> Rows:
        """Uniform points: `place(jax.random.uniform(key, (size, num_uniforms), dtype))`.

        Args:
            key: a typed key of shape `()`; may be traced.
            size: points to draw; static, a positive int.
        """
        shape = (validation.num_points(size, "size"), self.num_uniforms)
        placed: Rows = self.place(exact_math.unit(key, shape, self.dtype))
        return placed

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        fields = [field.name for field in dataclasses.fields(self) if field.init]  # type: ignore[arg-type]
        shown = {name: plain(getattr(self, name), _numbers) for name in fields if name != "dtype"}
        return {"kind": kind_of(self), **shown, **described_dtype(self.dtype)}


def checked(value: object, name: str) -> Geometry:
    """`value`, if it is a geometry whose arrays a program can take as arguments."""
    if not isinstance(value, Geometry) or jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"{name} must be a geometry, registered as a pytree, got {formatted(value)}. "
            "Pass for example a Box."
        )
    return value


def dtype_of(geometry: Geometry) -> np.dtype[Any]:
    """The dtype of the uniform numbers that a geometry takes, and so of its points; see `Geometry`."""
    declared = getattr(geometry, "dtype", None)
    if declared is not None:
        return coordinates.checked_dtype(declared, f"the dtype of {formatted(geometry)}", "Use float32.")
    if not coordinates.x64_is_on():
        return coordinates.FLOAT32
    numbers = jax.ShapeDtypeStruct((1, geometry.num_uniforms), np.float32)
    with jax.numpy_dtype_promotion("standard"):
        inputs = jax.eval_shape(geometry.place, numbers)["inputs"]
    return coordinates.FLOAT64 if inputs.dtype == np.float64 else coordinates.FLOAT32


def described_dtype(dtype: np.dtype[Any]) -> dict[str, str]:
    """The dtype for the contract. float32 is left out: runs of 0.1.0 had no other, and did not name it."""
    return {} if dtype == np.float32 else {"dtype": str(dtype)}


def followed(dtype: object, geometry: Geometry, name: str) -> np.dtype[Any]:
    """The dtype of points that are made of those of `geometry`: `dtype` where the geometry says none.

    Raises:
        ValueError: another dtype than that of the geometry, whose own numbers are rounded already.
    """
    own = dtype_of(geometry)
    if dtype is None:
        return own
    wanted = coordinates.resolved(dtype)
    if getattr(geometry, "dtype", None) is not None and wanted != own:
        raise ValueError(
            f"dtype must be that of {name}, {own}, got {wanted}. Pass dtype={wanted} to {name} itself."
        )
    return wanted


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
