"""What an audit records: one event for each random primitive that ran, with the bits of its keys."""

import dataclasses
from typing import Any

import numpy as np

from phijax_rng.auditing.call_sites import Place


@dataclasses.dataclass(frozen=True)
class Words:
    """The bits of an array of keys: one row of uint32 words for each key, and the shape of the array."""

    implementation: str
    rows: np.ndarray[Any, Any]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mapped:
    """One `vmap` around a draw: its size, and whether it maps over the key."""

    size: int
    mapped: bool

    @property
    def shared(self) -> bool:
        """Whether all rows draw from one key."""
        return not self.mapped and self.size > 1


def words_of(keys: Any) -> Words:
    """The bits of concrete typed keys."""
    # `jax.random.key_data` would run a primitive, which the audit would record.
    base = np.asarray(keys._base_array)
    return Words(keys._impl.name, base.reshape(-1, base.shape[-1]), tuple(keys.shape))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function of `jax.random` (or, outside of those, one primitive)."""

    number: int
    function: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    seed: int | None = None  # as passed, before JAX cuts it to 32 bits


Row = tuple[int, int, Mapped]
"""Group, position in the group, and the `vmap` whose rows they are."""


@dataclasses.dataclass
class Event:
    """One random primitive that ran, or one change of a global generator of the host.

    Attributes:
        kind: a kind of `jax_hooks.names.PRIMITIVES`, `"wrap"`, `"unwrap"`, `"clone"`, or `"host"`.
        keys: its input; `None` for a seed or raw words.
        out: the keys it returned.
        data: the seeds, the shape of a split, the numbers folded in, or the name of a host generator.
        shape, bits: of a draw for one key.
        place: the line of the call.
        call: the call of `jax.random` it belongs to.
        helper: a function of this package around it, and its arguments.
        maps: every `vmap` around it.
        rows: `(group, row, map)` for every `vmap` around it that ran row by row.
        differentiations: `(number, digest of its arguments)` for every differentiation around it.
        backward: whether `checkpoint` computed its block a second time, for a derivative.
        forward: whether a forward derivative (`jvp`, `jacfwd`, `hessian`) is around it.
        loops: frames of `lax.while_loop` around it.
        request: number and text of the `Session.request` block around it.
        code: the innermost function of the user around it.
    """

    kind: str
    keys: Words | None
    out: Words | None
    place: Place
    call: Call
    data: Any = None
    shape: tuple[int, ...] = ()
    bits: int = 32
    helper: tuple[str, Any] | None = None
    maps: tuple[Mapped, ...] = ()
    rows: tuple[Row, ...] = ()
    differentiations: tuple[tuple[int, str], ...] = ()
    backward: bool = False
    forward: bool = False
    loops: tuple[int, ...] = ()
    request: tuple[int, str] | None = None
    code: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, order=True)
class Unseen:
    """A region that may contain draws and could not be observed."""

    what: str
    place: Place
