"""Points that follow the residuals: refreshed at fixed global steps, remembered in the train state.

    step == start + n * every    candidates from the sampling stream --module.residuals--> refresh
    every step                   a batch from what the last refresh left, with this step's key

Between two refreshes a batch is a pure function of key, step and state; the state itself is arrays in
`TrainState.sampler_state`, saved with every checkpoint. So a run that is killed between two
refreshes continues as if it had not been. Rows are picked by integers alone: given the state, row i of a
batch is the same bits in every program and does not depend on the size of the batch.

| sampler | state | after a refresh, a batch is drawn |
|---|---|---|
| `ResidualDistributionSampler` | candidates and a density | in proportion to the density |
| `ResidualRefinementSampler` | a set that grows | uniformly, from more points |

Both are from Wu, Zhu, Tan, Kartha and Lu (2023), doi:10.1016/j.cma.2022.115671, who call them RAD, and
RAR-D or RAR-G. There a refresh draws a new training set; here a refresh draws many
candidates, and every step draws its batch from them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from phijax_rng._base import pytrees, validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.plain_data import described, kind_of
from phijax_rng._base.types import BatchSize, KeyScalar, Rows, Step
from phijax_rng._base.validation import formatted
from phijax_rng.sampling.geometry.base import contents
from phijax_rng.sampling.protocols import Sampler
from phijax_rng.sampling.rows import take

# Densities are kept as whole numbers with this sum, up to rounding: their cumulative sums are then
# exact in int32, in whatever order they are added.
_TOTAL = 2**30

# Between them the reciprocal of a residual is a normal number; XLA divides by multiplying with it.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100

Residuals: TypeAlias = Callable[[Rows], jax.Array]
"""From rows to residuals, one row for each."""

MAX_CANDIDATES = 2**22
"""Above it the average density would be kept in less than eight bits."""

METHODS = ("distribution", "greedy")
"""How a refresh adds points: drawn in proportion to a density (RAR-D), or the largest (RAR-G)."""


@pytrees.record(
    data=("domain",),
    meta=(
        *("refresh_every_n_steps", "num_candidates", "exponent", "offset"),
        *("refresh_start_step", "residual_names"),
    ),
)
@dataclasses.dataclass(frozen=True, eq=False)
class ResidualDistributionSampler:
    """Points drawn from a density that follows the residuals (RAD; Wu et al., 2023, algorithm 2).

    A refresh draws `num_candidates` points of the domain and gives each the density
    `residual**exponent / mean(residual**exponent) + offset`. A batch draws from them with replacement,
    in proportion to it. Before the first refresh the density is uniform.

    More points where residuals are large also means that a plain mean over the batch counts those places
    for more. The field `weights` is the uniform density over that of the point: `mean(weights * loss)` is
    the loss of uniform points again, with less noise (importance sampling; Nabian, Gladstone and Meidani,
    2021). They are at most `(1 + offset) / offset`. Wu et al. take the plain mean.

    A residual that is not finite counts as zero, one above `2**100` as `2**100`; where all are below
    `2**-100`, the density is uniform.

    Attributes:
        domain: a sampler of points, such as a geometry; candidates are `domain.sample(key, num_candidates)`.
        refresh_every_n_steps: steps between two refreshes.
        num_candidates: how many points carry the density, at most `2**22`.
        exponent: how sharply the density follows the residuals; 0 ignores them. `k` of the paper.
        offset: how much of the density is uniform; 0 for none. `c` of the paper.
        refresh_start_step: the step before which the first refresh comes; `refresh_every_n_steps` for `None`.
        residual_names: which of the module's residuals are followed, together by the root of the sum of
            their squares; the one that bears the name of the batch for `None`.
    """

    kind: ClassVar[str] = "ResidualDistributionSampler"

    domain: Any
    refresh_every_n_steps: int
    _: dataclasses.KW_ONLY
    num_candidates: int = 8192
    exponent: float = 1.0
    offset: float = 1.0
    refresh_start_step: int | None = None
    residual_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_options(self)
        _check_count(self, "num_candidates", MAX_CANDIDATES)

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many points."""
        validation.num_points(size, name)

    def init(self, key: KeyScalar) -> Any:
        """Candidates of equal weight.

        Returns:
            `rows`, the fields of the candidates, their `cumulative` density as int32, and their `weights`.
        """
        rows = self.domain.sample(key, self.num_candidates)
        if "weights" in rows:
            raise ValueError(
                "domain must not give the field 'weights', which says how a point was drawn. Rename it."
            )
        return {"rows": rows, **_weighted(jnp.ones(self.num_candidates, jnp.float32), rows)}

    def due(self, step: Step, state: object) -> jax.Array:
        """Whether the state is refreshed before the batch of `step` is drawn; may be traced."""
        return _due(self, step)

    def refresh(self, key: KeyScalar, state: object, residuals: Residuals) -> Any:
        """New candidates, and the weights that their residuals give them.

        Args:
            key: a typed key of shape `()`; may be traced.
            state: as from `init`.
            residuals: from rows of the domain to arrays with one row for each; components together by
                the root of the sum of their squares.
        """
        rows = self.domain.sample(key, self.num_candidates)
        size = _magnitude(residuals(rows), self.num_candidates)
        return {"rows": rows, **_weighted(_density(size, self.exponent, self.offset), rows)}

    def sample(self, key: KeyScalar, size: BatchSize, state: Any) -> Rows:
        """Candidates in proportion to their density, with replacement, and their `weights`; may be traced."""
        count = validation.num_points(size, "size")
        cumulative = state["cumulative"]
        tickets = jax.random.randint(key, (count,), 0, cumulative[-1], dtype=jnp.int32)
        places = jnp.searchsorted(cumulative, tickets, side="right")
        return take({**state["rows"], "weights": state["weights"]}, places)

    def contents(self) -> dict[str, Any]:
        """What the domain picks from, whose digest goes into the contract."""
        return contents(self.domain)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return _description(self)


@pytrees.record(
    data=("domain",),
    meta=(
        *("refresh_every_n_steps", "capacity", "num_initial", "num_added", "num_candidates", "method"),
        *("exponent", "offset", "refresh_start_step", "residual_names"),
    ),
)
@dataclasses.dataclass(frozen=True, eq=False)
class ResidualRefinementSampler:
    """Points drawn uniformly from a set that grows where residuals are large (RAR; Wu et al., 2023).

    The set begins with `num_initial` points of the domain. A refresh draws `num_candidates` more and
    adds `num_added` of them: with `method="distribution"` distinct ones in proportion to
    `residual**exponent / mean(residual**exponent) + offset` (RAR-D), with `method="greedy"` those of the
    largest residuals (RAR-G; Lu et al., 2021). Nothing leaves the set. When it has reached `capacity`, it
    stays as it is and no more residuals are taken.

    Attributes:
        domain: a sampler of points, such as a geometry.
        refresh_every_n_steps: steps between two refreshes.
        capacity: how many points the set can hold: `num_initial` and a multiple of `num_added`.
        num_initial: points before the first refresh.
        num_added: points that a refresh adds, at most `num_candidates`.
        num_candidates: points whose residuals a refresh takes, at most `2**22`.
        method: `"distribution"` or `"greedy"`.
        exponent: as in `ResidualDistributionSampler`; without influence when greedy.
        offset: as in `ResidualDistributionSampler`.
        refresh_start_step: the step before which the first refresh comes; `refresh_every_n_steps` for `None`.
        residual_names: as in `ResidualDistributionSampler`.
    """

    kind: ClassVar[str] = "ResidualRefinementSampler"

    domain: Any
    refresh_every_n_steps: int
    _: dataclasses.KW_ONLY
    capacity: int
    num_initial: int
    num_added: int
    num_candidates: int = 8192
    method: str = "distribution"
    exponent: float = 2.0
    offset: float = 0.0
    refresh_start_step: int | None = None
    residual_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_options(self)
        validation.one_of(self.method, "method", METHODS)
        _check_count(self, "num_candidates", MAX_CANDIDATES)
        for name in ("capacity", "num_initial", "num_added"):
            _check_count(self, name, 2**31 - 1)
        if self.num_added > self.num_candidates:
            raise ValueError(
                f"num_added must be at most the {self.num_candidates} candidates, got {self.num_added}. "
                "Raise num_candidates."
            )
        growth = self.capacity - self.num_initial
        if growth < 0 or growth % self.num_added:
            fitting = self.num_initial + max(1, growth // self.num_added) * self.num_added
            raise ValueError(
                "capacity must be num_initial and a multiple of num_added, got "
                f"capacity={self.capacity}, num_initial={self.num_initial}, num_added={self.num_added}. "
                f"Use for example capacity={fitting}."
            )

    def check_size(self, size: BatchSize, name: str) -> None:
        """Raises if a batch cannot have this many points."""
        validation.num_points(size, name)

    def init(self, key: KeyScalar) -> Any:
        """The set with its first points.

        Returns:
            `rows`, fields with a leading axis of `capacity`, of which the first `count` (int32) hold points.
        """
        first = self.domain.sample(key, self.num_initial)
        empty = self.capacity - self.num_initial
        rows = jax.tree.map(lambda row: jnp.pad(row, [(0, empty)] + [(0, 0)] * (row.ndim - 1)), first)
        return {"count": jnp.int32(self.num_initial), "rows": rows}

    def due(self, step: Step, state: Any) -> jax.Array:
        """Whether the state is refreshed before the batch of `step` is drawn; may be traced."""
        return _due(self, step) & (state["count"] < self.capacity)

    def refresh(self, key: KeyScalar, state: Any, residuals: Residuals) -> Any:
        """The set with the chosen candidates added; the same set if it is full.

        Args:
            key: a typed key of shape `()`; may be traced.
            state: as from `init`.
            residuals: as in `ResidualDistributionSampler.refresh`.
        """
        candidate_key, noise_key = jax.random.split(key)
        candidates = self.domain.sample(candidate_key, self.num_candidates)
        score = _magnitude(residuals(candidates), self.num_candidates)
        if self.method == "distribution":
            # The largest of log-weights with Gumbel noise are a weighted draw without replacement
            # (Efraimidis and Spirakis, 2006).
            noise = jax.random.gumbel(noise_key, score.shape, jnp.float32)
            score = jnp.log(_density(score, self.exponent, self.offset)) + noise
        chosen = jax.lax.top_k(score, self.num_added)[1]
        added = take(candidates, chosen)
        full = state["count"] >= self.capacity
        # An update that would not fit is moved to the front of the end by XLA, and then not taken.
        grown = jax.tree.map(
            lambda row, new: jax.lax.dynamic_update_slice_in_dim(row, new, state["count"], 0),
            state["rows"],
            added,
        )
        rows = jax.tree.map(lambda old, new: jnp.where(full, old, new), state["rows"], grown)
        return {"count": jnp.where(full, state["count"], state["count"] + self.num_added), "rows": rows}

    def sample(self, key: KeyScalar, size: BatchSize, state: Any) -> Rows:
        """Points of the set, uniformly and with replacement; may be traced."""
        count = validation.num_points(size, "size")
        places = jax.random.randint(key, (count,), 0, state["count"], dtype=jnp.int32)
        return take(state["rows"], places)

    def contents(self) -> dict[str, Any]:
        """What the domain picks from, whose digest goes into the contract."""
        return contents(self.domain)

    def describe(self) -> dict[str, Any]:
        """Plain data for the contract."""
        return _description(self)


def _due(sampler: Any, step: Step) -> jax.Array:
    since = jnp.asarray(step, jnp.int32) - sampler.refresh_start_step
    return (since >= 0) & (since % sampler.refresh_every_n_steps == 0)


def _magnitude(residuals: jax.Array, count: int) -> jax.Array:
    """One non-negative number for each candidate; zero where it is not finite."""
    if jnp.ndim(residuals) == 0 or jnp.shape(residuals)[0] != count:
        raise ValueError(
            f"residuals must have one row for each of the {count} candidates, got shape "
            f"{jnp.shape(residuals)}. Return them unreduced."
        )
    rows = jnp.abs(residuals).reshape(count, -1).astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(rows), axis=1)
    rows = jnp.minimum(rows, _LARGEST)
    # The root of a sum of squares, scaled so that no square overflows.
    largest = jnp.max(rows, axis=1, keepdims=True)
    scaled = rows / jnp.where(largest >= _SMALLEST, largest, 1)
    return jnp.where(finite, largest[:, 0] * jnp.sqrt(jnp.sum(scaled**2, axis=1)), 0)


def _density(size: jax.Array, exponent: float, offset: float) -> jax.Array:
    """A density of mean `1 + offset`; uniform where there is nothing to follow."""
    largest = jnp.max(size)
    powers = (size / jnp.where(largest >= _SMALLEST, largest, 1)) ** jnp.float32(exponent)
    mean = jnp.mean(powers)
    follows = (largest >= _SMALLEST) & (mean > 0)
    density = powers / jnp.where(follows, mean, 1) + jnp.float32(offset)
    return jnp.where(follows, density, 1)


def _weighted(density: jax.Array, rows: Rows) -> dict[str, jax.Array]:
    """Cumulative sums of the density as whole numbers, the last close to `2**30`; and what undoes it.

    What undoes it is float64 beside float64 rows: a product with losses must not need a promotion.
    """
    share = density / jnp.sum(density)
    whole = jnp.round(share * jnp.float32(_TOTAL)).astype(jnp.int32)
    is_wide = any(row.dtype == jnp.float64 for row in jax.tree.leaves(rows))
    weights = (jnp.mean(density) / density).astype(jnp.float64 if is_wide else jnp.float32)
    # What is never drawn has no weight.
    return {
        "cumulative": jnp.cumsum(whole, dtype=jnp.int32),
        "weights": jnp.where(whole > 0, weights, 0),
    }


def _check_options(sampler: Any) -> None:
    """Checks the options that both samplers have, and fills in what was left out."""
    if not isinstance(sampler.domain, Sampler):
        raise TypeError(
            f"domain must offer sample(key, size), got {formatted(sampler.domain)}. "
            "Pass for example a geometry."
        )
    _check_count(sampler, "refresh_every_n_steps", 2**31 - 1)
    start = sampler.refresh_start_step
    start = (
        sampler.refresh_every_n_steps
        if start is None
        else validation.step_number(start, "refresh_start_step")
    )
    assign(sampler, refresh_start_step=start)
    for name in ("exponent", "offset"):
        value = validation.finite_array(getattr(sampler, name), name, ())
        if value < 0:
            raise ValueError(
                f"{name} must not be negative, got {formatted(getattr(sampler, name))}. Use 0 or more."
            )
        assign(sampler, **{name: float(value)})
    if sampler.residual_names is not None:
        names = validation.names(sampler.residual_names, "residual_names")
        assign(sampler, residual_names=names)


def _check_count(sampler: object, name: str, most: int) -> None:
    number = validation.whole_number(getattr(sampler, name), name, most + 1, start=1)
    assign(sampler, **{name: number})


def _description(sampler: Any) -> dict[str, Any]:
    options = [field.name for field in dataclasses.fields(sampler) if field.name != "domain"]
    names = sampler.residual_names
    return {
        "kind": kind_of(sampler),
        "domain": described(sampler.domain),
        **{name: getattr(sampler, name) for name in options},
        "residual_names": None if names is None else list(names),
    }
