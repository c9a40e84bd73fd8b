"""From one seed to any key of a run, by name, by step or by coordinate.

    seed --root_key--> root --split(4)--> model      once, to the model factory
                                          runtime    advanced every step
                                          sampling   never moves; fold the step in
                                          balancer   never moves

The invariant: a key is a pure function of the seed and of the path that leads to it. No function
here has a state, reads a global generator, or depends on `jax_default_prng_impl`, x64 or
`jax_random_seed_offset`. (`jax_threefry_partitionable` does move keys: it is JAX's own derivation.)

Read it qualified:

>>> from phijax_rng import keys
>>> streams = keys.split_root(0)
>>> keys.fingerprint(streams.model)
'threefry2x32:1797259609-2579123966'
>>> keys.fingerprint(keys.step_key(streams.sampling, 1))
'threefry2x32:3777617834-145086855'
"""

import dataclasses
import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phijax_rng._base import validation
from phijax_rng._base.types import KeyScalar, Seed, Step

_log = logging.getLogger("phijax_rng")

TESTED_IMPLEMENTATIONS = ("threefry2x32", "threefry4x32", "philox4x32", "rbg")
"""Key implementations whose derivations this package tests; others are rejected."""

_REFUSED = {
    "unsafe_rbg": "its fold_in and split are not a hash, so keys of different steps collide",
    "philox2x32": "its keys have 32 bits, so of 100000 steps two are more likely than not to share a key",
}

_EXACT_UNDER_VMAP = ("threefry2x32", "threefry4x32", "philox4x32", "philox2x32")

_NUM_WORDS = {"threefry2x32": 2, "threefry4x32": 4, "philox4x32": 2, "rbg": 4}

# Any tag of at least 2**31 is out of reach of steps and split indices (with partitionable Threefry
# `split(k, n)[i]` is `fold_in(k, i)`), so no stream of ours can meet a step key or a sampler key.
_STREAM_TAG = 0xF17A_0001


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamKeys:
    """The four streams of a run; iterates in the order they were split.

    Attributes:
        model: given once to the model factory.
        runtime: split once per step; the second half goes to the module.
        sampling: the step is folded in to draw a batch; never moves itself.
        balancer: diagnostic batches of adaptive loss balancing; never moves itself.
    """

    model: KeyScalar
    runtime: KeyScalar
    sampling: KeyScalar
    balancer: KeyScalar

    def __iter__(self) -> Iterator[KeyScalar]:
        return iter((self.model, self.runtime, self.sampling, self.balancer))

    def __repr__(self) -> str:
        streams = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return f"StreamKeys({', '.join(f'{name}={formatted(key)}' for name, key in streams.items())})"


def root_key(seed: Seed) -> KeyScalar:
    """The root key of a run.

    An integer becomes the Threefry key with the words `[seed >> 32, seed & 0xffffffff]`, whatever
    the process settings are. Below 2**32 that is `jax.random.key(seed)`.

    Args:
        seed: an integer of Python, NumPy or JAX (shape `()`) in [0, 2**64); one typed key of a tested
            implementation; one legacy `uint32[2]` key, which is wrapped as Threefry with a log line;
            or `None` for 64 bits of entropy, logged as a seed to repeat the run with.

    Returns:
        A typed key of shape `()`.

    Raises:
        TypeError: `seed` is none of these (`True`, `3.0`, `"3"`, an array of numbers).
        ValueError: the integer is out of range, or the key is a batch or of a rejected implementation.
    """
    if seed is None:
        seed = entropy_seed()
    if is_typed_key(seed):
        return require_key(seed, "seed")
    if isinstance(seed, (jax.Array, np.ndarray)) and seed.dtype == np.uint32 and seed.shape == (2,):
        _log.warning(
            "seed is a legacy uint32[2] key; it is used as a typed threefry2x32 key. "
            "Pass jax.random.key(...) to be explicit."
        )
        return jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
    if isinstance(seed, jax.core.Tracer):
        raise TypeError("seed must be known before tracing, got a tracer. Make the root key outside jit.")
    number = validation.whole_number(
        seed,
        "seed",
        2**64,
        fix="Pick a non-negative integer, or pass a key made by jax.random.key.",
    )
    words = np.array([number >> 32, number & 0xFFFF_FFFF], dtype=np.uint32)
    return _wrap(words, "threefry2x32")


def entropy_seed() -> int:
    """A fresh 64-bit seed from the operating system, logged so that the run can be repeated."""
    seed = secrets.randbits(64)
    _log.warning("seed=None: drew seed %d. Pass seed=%d to repeat this run.", seed, seed)
    return seed


def seed_of(root: KeyScalar) -> int | None:
    """The integer that `root_key` turns into `root`; `None` for other implementations.

    >>> seed_of(root_key(2**40 + 5)) == 2**40 + 5
    True
    """
    if implementation_of(root) != "threefry2x32":
        return None
    high, low = _words(root)
    return high << 32 | low


def split_root(seed_or_root: Seed) -> StreamKeys:
    """The four streams of the run with this seed (or root key): `jax.random.split(root, 4)`."""
    return _split_four(root_key(seed_or_root))


@jax.jit
def _split_four(root: KeyScalar) -> StreamKeys:
    return StreamKeys(*jax.random.split(root, 4))


def step_key(sampling_key: KeyScalar, step: Step) -> KeyScalar:
    """The key of one step: `jax.random.fold_in(sampling_key, step)`.

    Args:
        sampling_key: a typed key of shape `()`; may be traced.
        step: completed updates, a whole number in [0, 2**31); may be traced.

    Raises:
        TypeError: `step` is not a whole number (`True`, `1.5`).
        ValueError: `step` is out of range.
    """
    return _fold(require_key(sampling_key, "sampling_key"), _coordinate(step, "step", 2**31))


def fold_in(key: KeyScalar, *coordinates: Step) -> KeyScalar:
    """The key at these coordinates: one `jax.random.fold_in` after the other.

    `fold_in(key, example, step)` is the key of one example at one step.

    Args:
        key: a typed key of shape `()`; may be traced.
        *coordinates: whole numbers in [0, 2**32), at least one; each may be traced.

    Raises:
        TypeError: no coordinate, or one that is not a whole number.
        ValueError: a coordinate is out of range. JAX would silently truncate it to 32 bits.
    """
    if not coordinates:
        raise TypeError("fold_in needs at least one coordinate, got none. Pass a step or an index.")
    checked = [_coordinate(c, f"coordinates[{i}]", 2**32) for i, c in enumerate(coordinates)]
    return functools.reduce(_fold, checked, require_key(key, "key"))


def stream(key: KeyScalar, *names: str) -> KeyScalar:
    """A stream with a name that you choose: `stream(root, "evaluation", "noise")`.

    The path is hashed (SHA-256 of each name with its length before it, so `("ab",)` and
    `("a", "b")` differ), and folded in after a tag that no step or split index can reach.

    Args:
        key: a typed key of shape `()`; may be traced.
        *names: non-empty strings, at least one.

    Raises:
        TypeError: no name, or one that is not a non-empty string.
        ValueError: a name holds a lone surrogate, which UTF-8 cannot encode.
    """
    key = require_key(key, "key")
    if not names:
        raise TypeError("stream needs at least one name, got none. Name the stream.")
    path = hashlib.sha256()
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"names[{index}] must be a non-empty string, got {validation.formatted(name)}. "
                "Name the stream."
            )
        encoded = _encoded(name, f"names[{index}]")
        path.update(len(encoded).to_bytes(8, "big") + encoded)
    words = np.frombuffer(path.digest()[:8], dtype=">u4").astype(np.uint32)
    return _fold_words(key, np.array([_STREAM_TAG, *words], dtype=np.uint32))


def _encoded(name: str, argument: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{argument} must be text that UTF-8 can encode, got {validation.formatted(name)}. "
            "Leave out lone surrogates."
        ) from error


def exact_vmap(fn: Callable[..., Any], in_axes: object = 0) -> Callable[..., Any]:
    """`fn` over a leading axis of keys, every key drawing what it would draw alone.

    `jax.vmap` keeps that promise for Threefry and Philox. For `rbg` it does not: all rows come from
    the first key (JAX's documentation of `jax.random` says so). There the rows are drawn one
    after the other by `jax.lax.map`, which is exact and slower. Arithmetic around the draws may
    differ in the last bits from an unbatched call, as under any `vmap`.

    Args:
        fn: a function whose first argument is a key.
        in_axes: 0 or `None` for all arguments, or one of them for each, as in `jax.vmap`. The keys
            must be mapped.

    Returns:
        A function of the same arguments, the first an array of typed keys with a leading axis.

    Raises:
        TypeError: the first argument is not an array of typed keys.
        ValueError: it has no leading axis, or `in_axes` is not made of 0 and `None`.
    """
    validation.function(fn, "fn")

    @functools.wraps(fn)
    def mapped(keys: jax.Array, *args: object) -> Any:
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * (1 + len(args))
        if len(axes) != 1 + len(args) or any(not (a is None or a == 0) for a in axes) or axes[0] is None:
            raise ValueError(
                f"in_axes must be 0 or None for each of {1 + len(args)} arguments and 0 for the keys, "
                f"got {validation.formatted(in_axes)}. Use jax.vmap for other axes."
            )
        if not is_typed_key(keys):
            raise TypeError(
                f"keys must be an array of typed keys, got {validation.formatted(keys)}. "
                "Use jax.random.split."
            )
        if keys.ndim == 0:
            raise ValueError("keys must have a leading axis, got one key. Split it first.")
        if implementation_of(keys) in _EXACT_UNDER_VMAP:
            return jax.vmap(fn, in_axes=axes)(keys, *args)
        over = [arg for arg, axis in zip(args, axes[1:], strict=True) if axis == 0]

        def alone(row: tuple[Any, ...]) -> Any:
            key, *rest = row
            taken = iter(rest)
            return fn(
                key,
                *(next(taken) if axis == 0 else arg for arg, axis in zip(args, axes[1:], strict=True)),
            )

        return jax.lax.map(alone, (keys, *over))

    return mapped


def fingerprint(key: KeyScalar) -> str:
    """The key as text for people and logs: `'threefry2x32:1797259609-2579123966'`.

    It holds the whole key; `from_fingerprint` reads it back.
    """
    key = require_key(key, "key")
    if isinstance(key, jax.core.Tracer):
        raise TypeError("key must be known to be shown, got a tracer. Take its fingerprint outside jit.")
    return f"{implementation_of(key)}:{'-'.join(str(word) for word in _words(key))}"


def formatted(key: object) -> str:
    """The fingerprint of a key that this process can read; of anything else dtype and shape."""
    if not isinstance(key, jax.Array) or isinstance(key, jax.core.Tracer) or not is_typed_key(key):
        return validation.formatted(key)
    # A donated key has no words left, and of one on other machines this process has none.
    if key.shape != () or key.is_deleted() or not key.is_fully_addressable:
        return validation.formatted(key)
    return f"{implementation_of(key)}:{'-'.join(str(word) for word in _words(key))}"


def from_fingerprint(text: str) -> KeyScalar:
    """The key that `fingerprint` turned into `text`."""
    implementation, _, data = str(text).partition(":")
    words = [int(word) for word in data.split("-") if word.isascii() and word.isdecimal()]
    expected = _NUM_WORDS.get(implementation)
    if len(words) != expected or len(data.split("-")) != expected or max(words) >= 2**32:
        raise ValueError(
            f"text must be a fingerprint such as 'threefry2x32:0-42', got {validation.formatted(text)}. "
            "Copy it whole."
        )
    return _wrap(np.array(words, dtype=np.uint32), implementation)


def host_rng(key: KeyScalar) -> np.random.Generator:
    """A NumPy generator seeded by the words of `key`, for preparation on the host.

    It is a function of the key alone (PCG64 through `numpy.random.SeedSequence`); the global
    generators of NumPy and Python are neither read nor changed. A call per key: two generators made
    from one key repeat each other.
    """
    key = require_key(key, "key")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(_words(key))))


def is_typed_key(value: object) -> bool:
    """Whether `value` is a typed JAX key or an array or tracer of them."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def implementation_of(keys: Any) -> str:
    """The implementation of typed keys, traced or not, or of an abstract value of them."""
    if isinstance(keys, jax.ShapeDtypeStruct):
        found: list[str] = []
        jax.eval_shape(lambda traced: found.append(str(jax.random.key_impl(traced))), keys)
        return found[0]
    return str(jax.random.key_impl(keys))


def require_key(value: Any, name: str) -> KeyScalar:
    """`value`, if it is one typed key (traced or not) of a tested implementation."""
    if not is_typed_key(value):
        raise TypeError(
            f"{name} must be one typed JAX key, got {validation.formatted(value)}. "
            "Make one with keys.root_key(seed)."
        )
    implementation = implementation_of(value)
    if implementation not in TESTED_IMPLEMENTATIONS:
        reason = _REFUSED.get(implementation, "it is not one of those tested here")
        raise ValueError(
            f"{name} must be a key of {', '.join(TESTED_IMPLEMENTATIONS)}; got one of "
            f"{implementation!r}, rejected because {reason}. Make the key with jax.random.key(seed)."
        )
    if value.shape != ():
        raise ValueError(
            f"{name} must be one key of shape (), got keys of shape {value.shape}. "
            "Pick one, or use keys.exact_vmap."
        )
    return value


def require_same_implementation(**named: KeyScalar) -> None:
    """Raises `ValueError` unless all these keys are of one implementation."""
    found = {name: implementation_of(key) for name, key in named.items()}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} is {kind!r}" for name, kind in found.items())
        raise ValueError(f"the keys of one state must share an implementation; {listed}. Use one root.")


def settled(keys: jax.Array) -> jax.Array:
    """Inserts an optimization barrier after key derivation (`threefry4x32` only).

    Otherwise XLA on CPU recomputes the chain of hashes for every word: three samplers took 40 s
    to their first batch.
    """
    return jax.lax.optimization_barrier(keys) if implementation_of(keys) == "threefry4x32" else keys


def _coordinate(value: object, name: str, stop: int) -> Any:
    """A checked NumPy uint32, or the tracer itself."""
    if isinstance(value, jax.core.Tracer):
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(
                f"{name} must be a whole number of shape (), got a traced {value.dtype}{list(value.shape)}. "
                "Trace it as an integer."
            )
        return value
    fix = "A step counts completed optimizer updates." if name == "step" else ""
    return np.uint32(validation.whole_number(value, name, stop, fix=fix))


@jax.jit
def _fold(key: KeyScalar, data: Any) -> KeyScalar:
    return settled(jax.random.fold_in(key, data))


def _fold_words(key: KeyScalar, words: Any) -> KeyScalar:
    # One program for each fold: XLA on CPU took 0.4 s to run three threefry4x32 hashes fused into one.
    return functools.reduce(_fold, words, key)


def _wrap(words: np.ndarray[Any, Any], implementation: str) -> KeyScalar:
    return jax.random.wrap_key_data(jnp.asarray(words), impl=implementation)


def _words(key: KeyScalar) -> list[int]:
    return [int(word) for word in np.asarray(jax.random.key_data(key)).ravel()]
