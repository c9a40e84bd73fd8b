"""Names of the array types and batch shapes that several modules speak of."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jaxtyping import Key

KeyScalar: TypeAlias = Key[jax.Array, ""]
"""One typed JAX key of shape `()`."""

Seed: TypeAlias = int | np.integer[Any] | jax.Array | np.ndarray[Any, Any] | None
"""What `keys.root_key` takes: an integer in [0, 2**64), `None`, or one key."""

Step: TypeAlias = int | np.integer[Any] | jax.Array
"""Completed optimizer updates; a whole number in [0, 2**31), traced or not."""

ModelState: TypeAlias = Any
"""Parameters and variables of a model: any pytree."""

BalancerState: TypeAlias = Any
"""What a balancer carries from step to step: any pytree of arrays."""

SamplerState: TypeAlias = Any
"""What an adaptive sampler carries from step to step: any pytree of arrays."""

SamplerStates: TypeAlias = Mapping[str, SamplerState]
"""The states of the adaptive samplers of a source, by name."""

Tree: TypeAlias = Any
"""Any pytree."""

Mask: TypeAlias = Mapping[str, jax.Array]
"""Which rows of a padded batch count: batch name -> bool of shape `(rows,)`."""

BatchSize: TypeAlias = int | Literal["all"]
Rows: TypeAlias = dict[str, Any]
"""One batch of one sampler: field name -> array whose leading axis counts rows."""

Batches: TypeAlias = dict[str, Rows]
"""One training batch: sampler name -> `Rows`, in declaration order."""

BatchSizes: TypeAlias = Mapping[str, BatchSize]
