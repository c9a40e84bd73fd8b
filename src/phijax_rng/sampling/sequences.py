"""Low-discrepancy points: more even than independent ones, and new for each key.

    key --> numbers in the unit cube that fill it evenly --geometry.place--> points of a domain

There is no engine and no position in a sequence: each batch is a complete point set,
randomized by its key only, so the points of step t + 1 share nothing with those of step t, and each
single point is uniform. An average over a batch then has the same expectation as with
independent points and, for smooth functions, far less variance.

| sampler | evenness | row i depends on the size of the batch |
|---|---|---|
| `SobolSampler` | in all axes together; best at sizes that are powers of two | no |
| `LatinHypercubeSampler` | in each axis alone, at every size | yes |

>>> import jax
>>> from phijax_rng.sampling.geometry.boxes import Box
>>> sampler = SobolSampler(Box([(0.0, 1.0)]))
>>> points = sampler.sample(jax.random.key(0), 8)["inputs"][:, 0]
>>> sorted((8 * points).astype(int).tolist())
[0, 1, 2, 3, 4, 5, 6, 7]
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng import shuffle
from phijax_rng._base import pytrees, validation
from phijax_rng._base.coordinates import require_available
from phijax_rng._base.frozen import assign
from phijax_rng._base.plain_data import described, kind_of
from phijax_rng._base.types import BatchSize, KeyScalar, Rows
from phijax_rng.sampling.geometry.base import checked, contents, described_dtype, followed

MAX_SOBOL_SIZE = 2**24
"""Points that float32 coordinates can tell apart."""

MAX_LATIN_SIZE = 2**20
"""Intervals of the unit line in which float32 still has a choice of places."""

_SOBOL_BITS = 30


def _sobol() -> Any:
    """SciPy's engine; its import takes longer than that of this package."""
    from scipy.stats import qmc  # noqa: PLC0415

    return qmc.Sobol


class _PointSet:
    """What both samplers share: a geometry, the dtype of its numbers, and a bound on the size."""

    domain: Any
    dtype: Any

    largest: ClassVar[int]

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many points."""
        self._checked(size, name)

    def contents(self) -> dict[str, Any]:
        """What the geometry picks from, whose digest goes into the contract."""
        return contents(self.domain)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return {"kind": kind_of(self), "domain": described(self.domain), **described_dtype(self.dtype)}

    def _check_domain(self) -> None:
        checked(self.domain, "domain")
        assign(self, dtype=followed(self.dtype, self.domain, "domain"))

    def _checked(self, size: BatchSize, name: str) -> int:
        count = validation.num_points(size, name)
        if count > self.largest:
            raise ValueError(
                f"{name} must be at most {self.largest}, got {count}. Draw less, or use independent points."
            )
        return count


@pytrees.record(data=("domain",), meta=("dtype",))
@dataclasses.dataclass(frozen=True, eq=False)
class SobolSampler(_PointSet):
    """The first points of Sobol's sequence, scrambled by each key.

    The direction numbers are those of Joe and Kuo (2008), read from SciPy. Scrambling is Matoušek's
    (1998): a random lower triangular matrix over GF(2) for each axis, then a random digital shift. It
    keeps what makes the sequence even: of `2**m` points each of the `2**m` equal intervals of each axis
    holds one, and of the first two axes each box of volume `2**-m` with dyadic sides holds one.

    A batch of `n` points costs `n * num_uniforms * log2(n)` exclusive-ors. Row i depends on the key and
    i alone. Coordinates of the unit cube are multiples of `2**-24`, in float64 of `2**-53`: a float64 point
    has the bits of the float32 one, and 29 more.

    Attributes:
        domain: a geometry; its `place` takes the points of the unit cube.
        dtype: that of the domain; only a geometry of your own that declares none takes another.
    """

    kind: ClassVar[str] = "SobolSampler"

    domain: Any
    _: dataclasses.KW_ONLY
    dtype: Any = None
    largest = MAX_SOBOL_SIZE

    def __post_init__(self) -> None:
        self._check_domain()
        if self.domain.num_uniforms > _sobol().MAXDIM:
            raise ValueError(
                f"domain takes {self.domain.num_uniforms} uniform numbers for a point, and Sobol's sequence "
                f"has {_sobol().MAXDIM} axes. Use LatinHypercubeSampler."
            )

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Points by field name.

        Args:
            key: a typed key of shape `()`; may be traced.
            size: points to draw; static, at most `2**24`.
        """
        count = self._checked(size, "size")
        num_axes = int(self.domain.num_uniforms)
        directions = jnp.asarray(direction_numbers(num_axes, (count - 1).bit_length()))
        require_available(self.dtype)
        if self.dtype == np.float32:
            matrix_key, shift_key = jax.random.split(key)
            return self.domain.place(_unit(_scrambled_points(matrix_key, shift_key, directions, count)))
        # The first two keys are those of float32.
        matrix_key, shift_key, lower_matrix_key, lower_shift_key = jax.random.split(key, 4)
        words = _scrambled_points(matrix_key, shift_key, directions, count)
        below = _scrambled_points(lower_matrix_key, lower_shift_key, directions, count, below=True)
        return self.domain.place(_unit_of_two(words, below))


@functools.lru_cache(maxsize=64)
def direction_numbers(num_axes: int, num_bits: int) -> np.ndarray[Any, Any]:
    """Sobol's direction numbers, uint32 of shape `(num_axes, num_bits)`, the first bit highest.

    Point i is the exclusive-or of those that the Gray code of i names. SciPy's engine computes the
    points at powers of two, each of which is two direction numbers.
    """
    engine = _sobol()(num_axes, scramble=False, bits=_SOBOL_BITS)
    numbers = np.zeros((num_axes, num_bits), np.uint32)
    for bit in range(num_bits):
        engine.fast_forward(2**bit - engine.num_generated)
        words = (engine.random(1)[0] * 2.0**32).astype(np.uint32)
        # The Gray code of 2**bit has two bits, this one and the one below.
        numbers[:, bit] = words ^ (numbers[:, bit - 1] if bit else 0)
    numbers.flags.writeable = False
    return numbers


def _scrambled_points(
    matrix_key: KeyScalar, shift_key: KeyScalar, directions: jax.Array, count: int, *, below: bool = False
) -> jax.Array:
    """The first points as words, scrambled and shifted; the 32 bits `below` them where these are wanted."""
    words = _sequence(_scrambled(matrix_key, directions, below), count)
    return words ^ jax.random.bits(shift_key, directions.shape[:1], jnp.uint32)[None, :]


def _scrambled(key: KeyScalar, directions: jax.Array, below: bool) -> jax.Array:
    """Direction numbers times a random lower triangular matrix of ones and zeros for each axis.

    The rows `below` the first 32 have their diagonal beyond the 32 bits of a direction number.
    """
    place = np.arange(32, dtype=np.uint32)
    own = np.uint32(1) << (np.uint32(31) - place)
    # Row r of a matrix reads bit r itself and, where its random bits say so, the bits above it.
    rows = jax.random.bits(key, (directions.shape[0], 32), jnp.uint32)
    if not below:
        rows = (rows & ~jnp.asarray(2 * own - np.uint32(1))[None, :]) | own[None, :]
    parity = jax.lax.population_count(rows[:, None, :] & directions[:, :, None]) & 1
    return jnp.sum(parity * own[None, None, :], axis=-1, dtype=jnp.uint32)


def _sequence(directions: jax.Array, count: int) -> jax.Array:
    """The first points as 32-bit words, uint32 of shape `(count, num_axes)`."""
    index = jnp.arange(count, dtype=jnp.uint32)
    gray = index ^ (index >> 1)
    words = jnp.zeros((count, directions.shape[0]), jnp.uint32)
    for bit in range(directions.shape[1]):
        chosen = (gray >> bit) & 1
        words = words ^ (chosen[:, None] * directions[None, :, bit])
    return words


def _unit(words: jax.Array) -> jax.Array:
    """The upper 24 bits as float32 in [0, 1), exact."""
    return (words >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _unit_of_two(high: jax.Array, low: jax.Array) -> jax.Array:
    """The upper 53 of 64 bits as float64 in [0, 1), exact."""
    bits = (high.astype(jnp.uint64) << 21) | (low >> 11).astype(jnp.uint64)
    return bits.astype(jnp.float64) * jnp.float64(2.0**-53)


@pytrees.record(data=("domain",), meta=("dtype",))
@dataclasses.dataclass(frozen=True, eq=False)
class LatinHypercubeSampler(_PointSet):
    """One point in each of `size` equal intervals of every axis (McKay, Beckman and Conover, 1979).

    For each axis a keyed permutation of the intervals (`shuffle.permute_index`) and a place within
    each. A batch of `n` points costs O(n) at every `n`; its rows depend on `n`.

    Attributes:
        domain: a geometry; its `place` takes the points of the unit cube.
        dtype: as in `SobolSampler`.
    """

    kind: ClassVar[str] = "LatinHypercubeSampler"

    domain: Any
    _: dataclasses.KW_ONLY
    dtype: Any = None
    largest = MAX_LATIN_SIZE

    def __post_init__(self) -> None:
        self._check_domain()

    def sample(self, key: KeyScalar, size: BatchSize) -> Rows:
        """Points by field name.

        Args:
            key: a typed key of shape `()`; may be traced.
            size: points to draw; static, at most `2**20`.
        """
        count = self._checked(size, "size")
        num_axes = int(self.domain.num_uniforms)
        require_available(self.dtype)
        order_key, place_key = jax.random.split(key)
        index = jnp.arange(count, dtype=jnp.int32)
        orders = [shuffle.permute_index(k, index, count) for k in jax.random.split(order_key, num_axes)]
        u = _within_intervals(jnp.stack(orders, axis=1), _places(place_key, (count, num_axes), self.dtype))
        return self.domain.place(u)


def _places(key: KeyScalar, shape: tuple[int, int], dtype: np.dtype[Any]) -> jax.Array:
    """Places strictly inside an interval of length one, so few that their sum with its number is exact."""
    word, wanted = (jnp.uint32, 21) if dtype == np.float32 else (jnp.uint64, 50)
    bits = wanted - (shape[0] - 1).bit_length()
    drawn = jax.random.bits(key, shape, word) >> (8 * np.dtype(word).itemsize - bits)
    return (drawn.astype(dtype) + 0.5) * jnp.asarray(2.0**-bits, dtype)


def _within_intervals(intervals: jax.Array, places: jax.Array) -> jax.Array:
    # By the rounded reciprocal: XLA would turn a division by a constant into one, but not always.
    # Both roundings together stay below the distance of a place from the ends of its interval.
    reciprocal = jnp.asarray(1 / intervals.shape[0], places.dtype)
    return (intervals.astype(places.dtype) + places) * reciprocal
