"""Combine named losses into the one number whose gradient is taken.

A balancer is a few pure functions over a state that training carries and checkpoints save:

    initialize() -> state      combine(losses, state) -> scalar      diagnostics(state) -> {name: scalar}

A balancer that adapts also has one or both of these:

    observe(losses, key, state) -> state                          at every step, from its losses
    update(module, model_state, batches, key, state) -> state     at scheduled steps, from the model

Losses are summed in the order of `loss_names`, so the sum rounds the same way in every run. Everything a
balancer learns is in its state, so a resumed run continues with the same weights.

"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from phijax_rng._base.types import BalancerState, Batches, KeyScalar, ModelState
from phijax_rng.training.module import LossModule


@runtime_checkable
class LossBalancer(Protocol):
    """Combines named losses into one scalar.

    Optional members, which `adapt_balancer` reads once:

    | member | without it |
    |---|---|
    | `update(module, model_state, batches, key, state)` | the state does not change at scheduled steps |
    | `update_every_n_steps` | required with `update` |
    | `update_start_step` | `update_every_n_steps` |
    | `diagnostic_batch_sizes` | `update` receives the batch of the step |
    | `observe(losses, key, state)` | the state does not change with every step |
    | `check_module(module)` | any `LossModule` is accepted |
    | `describe()` | the contract records the class and its fields |

    `AdaptiveBalancer` and `ObservingBalancer` show them with their types.
    """

    @property
    def loss_names(self) -> tuple[str, ...] | None:
        """The losses it combines, in the order they are summed; `None` for any."""
        ...

    def initialize(self) -> Any:
        """The state before the first step, a pytree of arrays."""
        ...

    def combine(self, losses: Mapping[str, jax.Array], state: BalancerState) -> jax.Array:
        """One scalar; its gradient trains the model. May be traced."""
        ...

    def diagnostics(self, state: BalancerState) -> Mapping[str, jax.Array]:
        """The weights in use, by loss name; recorded as `weight/<name>` if the balancer adapts."""
        ...


@runtime_checkable
class AdaptiveBalancer(LossBalancer, Protocol):
    """Updates its state at scheduled steps, inside the compiled loop.

    Before the update from step t, `update` is called if t is `update_start_step` or a multiple of
    `update_every_n_steps` after it. `diagnostic_batch_sizes` is name -> size, or one size for every batch:
    these batches are drawn from `fold_in(balancer_key, 0)` and are the same at every update and after every
    resume.
    """

    update_every_n_steps: int

    def update(
        self,
        module: LossModule,
        model_state: ModelState,
        batches: Batches,
        key: KeyScalar,
        state: BalancerState,
    ) -> Any:
        """The next state, of the same structure, shapes and dtypes. Traced.

        A state in which a finite number became non-finite is discarded. `on_nonfinite="raise"` then stops
        the run before the step; the other policies continue with the old state.

        Args:
            module: the `LossModule`; `module.evaluate(model_state, batches, key)` gives its losses.
            model_state: before the update from this step.
            batches: the diagnostic batches, or those of the step.
            key: a key of this step, from a stream of its own.
            state: the balancer's.
        """
        ...


@runtime_checkable
class ObservingBalancer(LossBalancer, Protocol):
    """Updates its state at every step, from the losses of that step."""

    def observe(self, losses: Mapping[str, jax.Array], key: KeyScalar, state: BalancerState) -> Any:
        """The next state, with which these losses are then combined. Traced.

        Args:
            losses: by name; no gradient is taken through them.
            key: a key of this step, from a stream of its own.
            state: the balancer's.
        """
        ...
