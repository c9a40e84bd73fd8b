"""One pure update of a `TrainState`. Optax is imported in this wing alone.

    batches, key --losses--> named losses --balancer--> one scalar --grad--> Optax --> next state

A train step is any function `(state, batches, key) -> (state, {name: loss})` that raises `state.step` by one.
A `StepOutput` in place of the dict adds diagnostics. `LossTrainStep` is the usual one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from phijax_rng import keys
from phijax_rng._base import validation
from phijax_rng._base.frozen import assign
from phijax_rng._base.types import Batches, KeyScalar, Mask, ModelState
from phijax_rng.state import TrainState, merge, trainable
from phijax_rng.training.averaging import averaged, optimizer_part
from phijax_rng.training.balancing.adapter import AdaptedBalancer, adapt_balancer
from phijax_rng.training.balancing.protocol import LossBalancer
from phijax_rng.training.balancing.weights import fraction
from phijax_rng.training.donation import with_cloned_keys
from phijax_rng.training.microbatches import evaluated
from phijax_rng.training.module import LossModule, StepOutput
from phijax_rng.training.optimizer_call import (
    optimizer_update,
    require_fitting_optimizer,
    require_optimizer,
)
from phijax_rng.training.variables import is_none, separated

TOTAL = "total_loss"
"""The name under which the balanced sum of the losses is recorded."""


@runtime_checkable
class TrainStep(Protocol):
    """One update as a pure function; what `Trainer.fit_state(train_step=...)` takes."""

    def __call__(
        self, state: TrainState, batches: Batches, key: KeyScalar
    ) -> tuple[TrainState, Mapping[str, jax.Array] | StepOutput]:
        """The state after one update, with `step` raised by one, and the losses of this step by name.

        `state.rng_key` is advanced already; `key` is the runtime key of this step. With `uneven="pad"` a
        train step must have a parameter named `mask`: `{batch name: bool of shape (rows,)}`, true for the
        rows that count. Give it a default of `None`, for all rows.
        """
        ...


@runtime_checkable
class Optimizer(Protocol):
    """An Optax `GradientTransformation`, or anything with its two functions."""

    @property
    def init(self) -> Callable[..., Any]:
        """`init(params) -> optimizer_state`."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """`update(gradients, optimizer_state, params) -> (updates, optimizer_state)`."""
        ...


@dataclasses.dataclass(frozen=True)
class LossTrainStep:
    """The update of a `LossModule` by an Optax transformation.

    An optimizer whose `update` takes more than gradients receives it: `value`, `grad`, `value_fn`, `obj_fn`,
    `grad_fn`, and `residual_fn` where the module has residuals.

    With micro-batches, row i of a batch of b rows belongs to micro-batch `i // (b / microbatches)`. They are
    evaluated one after the other, the j-th with the key `split(key, microbatches)[j]`. Each loss is the mean
    of its values; of a loss given as `(sum, weight)`, sums and weights add up, so that it is that of the
    whole batch. The balancer combines these losses. Variables are carried from one to the next. Floating
    diagnostics are averaged, others are those of the last micro-batch. The gradient is that of the whole
    batch; each micro-batch is evaluated again for it (`jax.checkpoint`), so that the activations of one are
    in memory at a time.

    Attributes:
        module: the losses.
        optimizer: an Optax `GradientTransformation`.
        balancer: combines the losses; the plain sum for `None`.
        microbatches: into how many slices of equal size each batch is cut; it must divide every size.
        ema_decay: in [0, 1), averages the model state over the updates; see `with_average`, which makes the
            first state, and `evaluation_params`, which has the average. `None` keeps none.

    Raises:
        TypeError: `balancer` is not a `LossBalancer`, or `optimizer` no optimizer, or one whose `update`
            requires other arguments.
        ValueError: `ema_decay` is out of range.
    """

    module: LossModule
    optimizer: Any
    balancer: LossBalancer | None = None
    microbatches: int = 1
    ema_decay: float | None = None
    _adapted: AdaptedBalancer = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_optimizer(self.optimizer, self.module)
        assign(self, _adapted=adapt_balancer(self.balancer))
        if self.ema_decay is not None:
            fraction(self.ema_decay, "ema_decay")

    def __call__(
        self,
        state: TrainState,
        batches: Batches,
        key: KeyScalar,
        mask: Mapping[str, Any] | None = None,
    ) -> tuple[TrainState, StepOutput]:
        """See `TrainStep`; the recorded losses are `total_loss`, then each loss by name.

        Weights of a balancer that adapts are recorded as diagnostics, `weight/<name>`.
        """
        return self.in_two(state, batches, key, mask)()

    def in_two(
        self, state: TrainState, batches: Batches, key: KeyScalar, mask: Mask | None = None
    ) -> Callable[[], tuple[TrainState, StepOutput]]:
        """Computes the gradient, and returns the rest of the update as a function.

        It may be called twice, and then the optimizer is; unless the optimizer evaluates the losses, as a
        line search does: then the second call returns the result of the first.
        """
        params = trainable(state.model_state)
        kept = optimizer_part(state.optimizer_state, self.ema_decay)
        require_fitting_optimizer(kept, params)
        objective = functools.partial(self._objective, state, batches, key, mask)
        seen, depends = _watched(objective)
        (total, aux), grads = jax.value_and_grad(seen, has_aux=True)(params)
        variables, losses, diagnostics, observed = aux
        if not (depends or jax.tree.leaves(variables)):
            _require_no_parameters(params)
        # What the losses wrote into an `nnx.Param` is where its update starts from.
        moved, variables = separated(variables)
        params = merge(moved, params)
        grads = jax.tree.map(_descent_direction, grads, variables, is_leaf=is_none)
        residual_fn = self._residual_fn(state, batches, key)
        evaluations: list[Callable[..., Any]] = []

        def counted(function: Callable[[ModelState], Any]) -> Callable[[ModelState], Any]:
            def call(params: ModelState) -> Any:
                evaluations.append(function)
                return function(params)

            return call

        def update() -> tuple[Any, Any]:
            return optimizer_update(
                self.optimizer,
                grads,
                with_cloned_keys(kept),
                params,
                value=total,
                value_fn=counted(lambda params: objective(params)[0]),
                grad_fn=counted(lambda params: _gradient(objective, params)),
                residual_fn=None if residual_fn is None else counted(residual_fn),
            )

        def complete() -> tuple[TrainState, StepOutput]:
            following = self._following(state, *update(), variables, observed)
            return following, self._output(following, total, losses, diagnostics)

        return _called_again(complete, unless=evaluations)

    def _following(
        self, state: TrainState, params: Any, optimizer_state: Any, variables: Any, observed: Any
    ) -> TrainState:
        # Parameters first, then variables: a leaf that the losses replaced keeps its new value.
        model_state = merge(variables, merge(params, state.model_state))
        if self.ema_decay is not None:
            optimizer_state = averaged(state.optimizer_state, optimizer_state, model_state, self.ema_decay)
        following = state.replace(
            model_state=model_state,
            optimizer_state=optimizer_state,
            step=state.step + 1,
        )
        return following if observed is None else following.replace(balancer_state=observed)

    def _output(self, following: TrainState, total: jax.Array, losses: Any, diagnostics: Any) -> StepOutput:
        recorded = {TOTAL: total, **losses.named()}
        # The weights of a balancer that does not adapt are among its settings.
        weights = self._adapted.weights(following.balancer_state)
        diagnosed = {**diagnostics.named(), **{f"weight/{name}": weight for name, weight in weights.items()}}
        return StepOutput(recorded, diagnostics=diagnosed)

    def gradient_norm(
        self, state: TrainState, batches: Batches, key: KeyScalar, mask: Mask | None = None
    ) -> jax.Array:
        """The 2-norm of the gradient that an update with these arguments gives to the optimizer."""
        objective = functools.partial(self._objective, state, batches, key, mask)
        grads = _gradient(objective, trainable(state.model_state))
        return jnp.sqrt(sum((jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(grads)), jnp.float32(0)))

    def _objective(
        self, state: TrainState, batches: Batches, key: KeyScalar, mask: Mask | None, params: ModelState
    ) -> tuple[jax.Array, Any]:
        """What is minimized over the floating and complex leaves: `grad` refuses integers and keys."""
        model_state = merge(params, state.model_state)
        variables, losses, diagnostics = evaluated(
            self.module, model_state, batches, key, mask, count=self.microbatches
        )
        total, observed = self._combine(losses.named(), state)
        return total, (variables, losses, diagnostics, observed)

    def _residual_fn(
        self, state: TrainState, batches: Batches, key: KeyScalar
    ) -> Callable[[ModelState], Mapping[str, jax.Array]] | None:
        """The rows of the residuals as a function of the parameters; `None` without residuals."""
        if self.module.residuals is None:
            return None
        return lambda params: self.module.residual_rows(merge(params, state.model_state), batches, key)

    def _combine(self, losses: Mapping[str, jax.Array], state: TrainState) -> tuple[jax.Array, Any]:
        """The total, and the balancer's next state if it observes the losses."""
        balancer = self._adapted
        balancer_state, observed = state.balancer_state, None
        _require_same_losses(losses, self.module.loss_names, "the module's loss_names")
        _require_same_losses(losses, balancer.loss_names, "the balancer's loss_names")
        # In the order that the module names them: another order of the sum rounds differently.
        ordered = {name: losses[name] for name in self.module.loss_names or losses}
        if balancer.observe_method is not None:
            # A stream of its own, so that a balancer that draws moves no batch and no dropout mask.
            key = keys.fold_in(keys.stream(state.balancer_key, "balancer", "observe"), state.step)
            # No gradient flows through what the balancer learns from the losses.
            seen = {name: jax.lax.stop_gradient(loss) for name, loss in ordered.items()}
            balancer_state = observed = balancer.observed(seen, key, balancer_state)
        return balancer.total(ordered, balancer_state), observed


def _watched(objective: Callable[[ModelState], Any]) -> tuple[Callable[[ModelState], Any], Sequence[object]]:
    """`objective`, and a list that its gradient fills if the value depends on any parameter.

    JAX calls the backward rule of a function only where a gradient reaches it, and an identity leaves nothing
    in the program.
    """
    reached: list[bool] = []

    def backward(_: None, cotangents: Any) -> tuple[Any]:
        reached.append(True)
        return (cotangents,)

    identity = jax.custom_vjp(lambda params: params)
    identity.defvjp(lambda params: (params, None), backward)
    return lambda params: objective(identity(params)), reached


def _require_no_parameters(params: ModelState) -> None:
    """Raises where losses that no parameter moves would train nothing."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if paths:
        raise ValueError(
            f"no loss depends on any of the {len(paths)} trainable leaves of the model state (the first is "
            f"model_state{paths[0]}), so nothing would be trained. Compute the losses from the model_state "
            "that they receive, not from a model outside, and without stop_gradient or rounding."
        )


def _called_again(function: Callable[[], Any], *, unless: Sequence[object]) -> Callable[[], Any]:
    """`function`, of which the first result serves every call if that call filled the list."""
    known: list[Any] = []

    def call() -> Any:
        if not (known and unless):
            known[:] = [function()]
        return known[0]

    return call


def _gradient(objective: Callable[[ModelState], Any], params: ModelState) -> Any:
    grads, (variables, *_) = jax.grad(objective, has_aux=True)(params)
    return jax.tree.map(_descent_direction, grads, separated(variables)[1], is_leaf=is_none)


def _descent_direction(grad: jax.Array | None, variable: jax.Array | None) -> Any:
    """The gradient of a parameter; zero for a variable, which the optimizer must not change."""
    if grad is None:
        return None
    if variable is not None:
        return jnp.zeros_like(grad)
    # JAX's gradient of a real function of complex parameters is the conjugate of the ascent direction.
    return jnp.conj(grad) if jnp.iscomplexobj(grad) else grad


def _require_same_losses(losses: Mapping[str, Any], names: tuple[str, ...] | None, label: str) -> None:
    if names is not None and set(names) != set(losses):
        raise ValueError(
            f"losses returned {validation.shown(losses)}, but {label} are {validation.shown(names)}. "
            "Make them agree."
        )
    if TOTAL in losses:
        raise ValueError(
            f"losses must not return {TOTAL!r}, the name of their balanced sum. Rename that loss."
        )
