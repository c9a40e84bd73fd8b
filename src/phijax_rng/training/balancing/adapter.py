"""One complete balancer from what a user passes.

`adapt_balancer` checks members, parameters and schedule once, before anything is traced. Behind it nothing
asks which optional members there are. What a method returns is checked where the method is traced, so a wrong
shape ends the fit before its first update and never reaches a number of the run.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp

from phijax_rng._base import validation
from phijax_rng._base.model_leaves import is_trainable
from phijax_rng._base.types import BalancerState, Batches, BatchSizes, KeyScalar, ModelState
from phijax_rng.training.balancing.protocol import LossBalancer
from phijax_rng.training.balancing.static import StaticLossBalancer
from phijax_rng.training.balancing.weights import checked_sizes
from phijax_rng.training.module import LossModule, array_type, is_array, scalars

_METHODS = {"initialize": (), "combine": ("losses", "state"), "diagnostics": ("state",)}
_OPTIONAL = {
    "observe": ("losses", "key", "state"),
    "update": ("module", "model_state", "batches", "key", "state"),
    "check_module": ("module",),
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When `update` is called, and on which batches.

    Attributes:
        every_n_steps: steps between two updates.
        start_step: the step of the first.
        diagnostic_batch_sizes: sizes of fixed batches by name, or one for all; `None` for the batch of the
            step.
    """

    every_n_steps: int
    start_step: int
    diagnostic_batch_sizes: BatchSizes | int | None


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedBalancer:
    """A balancer with every member present. It compares by identity, so it can be static in a program.

    Attributes:
        balancer: what the user passed; the plain sum for `None`.
        given: whether the user passed one.
        loss_names: the losses it combines, in the order they are summed; `None` for any.
        schedule: when its state is updated; `None` if it offers no `update`.
        observe_method: its `observe`, or `None`.
        update_method: its `update`, or `None`.
        check_module_method: its `check_module`, or `None`.
    """

    balancer: LossBalancer
    given: bool
    loss_names: tuple[str, ...] | None
    schedule: Schedule | None
    observe_method: Callable[..., BalancerState] | None
    update_method: Callable[..., BalancerState] | None
    check_module_method: Callable[[LossModule], None] | None

    @property
    def adapts(self) -> bool:
        """Whether its weights change during training."""
        return self.schedule is not None or self.observe_method is not None

    @property
    def kind(self) -> str:
        """The name of its class, for messages."""
        return type(self.balancer).__name__

    def require_consistent(self, known: tuple[str, ...] | None, *, alone: bool = True) -> None:
        """Calls every method that needs no model, on shapes.

        Args:
            known: names of the losses, where they are known before the first trace.
            alone: whether the balancer combines all losses; with a custom train step it may know some.

        Raises:
            TypeError: a method returns something other than arrays.
            ValueError: a name or shape is wrong.
        """
        if self.loss_names is not None:
            _require_known(self.loss_names, known, alone)
        state = self.initial_state()
        if self.adapts:
            jax.eval_shape(self.weights, state)
        names = self.loss_names or known
        if names:
            jax.eval_shape(lambda state: self._first_total(names, state), state)

    def require_module(self, module: LossModule) -> None:
        """Raises if the module lacks what `update` needs, as far as the balancer can tell."""
        if self.check_module_method is not None:
            self.check_module_method(module)

    def initial_state(self) -> BalancerState:
        """The state before the first step."""
        with self._noted("initialize"):
            state = self.balancer.initialize()
        name = f"{self.kind}.initialize()"
        # `None` is an empty pytree to JAX, so a forgotten `return` would pass as a balancer without state.
        if state is None:
            raise TypeError(f"{name} must be a pytree of arrays, got None. Return {{}} to keep nothing.")
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if not is_array(leaf):
                where = f"{name}{jax.tree_util.keystr(path)}"
                raise TypeError(f"{where} must be an array, got {leaf!r}. Return a pytree of arrays.")
        return state

    def require_fitting_state(self, state: BalancerState) -> None:
        """Raises unless this state has the structure, shapes and dtypes of an initial one."""
        if not self.adapts:
            return
        fresh = self.initial_state()
        wanted, given = _outline(fresh), _outline(state)
        if wanted != given or str(jax.tree.structure(fresh)) != str(jax.tree.structure(state)):
            raise ValueError(
                "state.balancer_state does not fit the balancer\n"
                f"  the balancer's: {wanted}\n"
                f"  given:          {given}\n"
                "Pass balancer.initialize() to initialize_train_state."
            )

    def total(self, losses: Mapping[str, jax.Array], state: BalancerState) -> jax.Array:
        """The combined losses, a real scalar."""
        with self._noted("combine"):
            total = self.balancer.combine(losses, state)
        is_scalar = is_array(total) and jnp.shape(total) == ()
        if is_scalar and jnp.issubdtype(jnp.result_type(total), jnp.floating):
            return jnp.asarray(total)
        raise (ValueError if is_array(total) else TypeError)(
            f"{self.kind}.combine must return one real scalar, got {_formatted(total)}. "
            "Fix it: its gradient is what trains the model."
        )

    def weights(self, state: BalancerState) -> dict[str, jax.Array]:
        """What `diagnostics` returns for a state: real scalars by name; empty if the weights are fixed."""
        if not self.adapts:
            return {}
        with self._noted("diagnostics"):
            found = self.balancer.diagnostics(state)
        if isinstance(found, Mapping) and not found:
            return {}
        return dict(scalars(found, f"{self.kind}.diagnostics"))

    def observed(
        self, losses: Mapping[str, jax.Array], key: KeyScalar, state: BalancerState
    ) -> BalancerState:
        """The state after `observe` has seen the losses of a step."""
        assert self.observe_method is not None
        with self._noted("observe"):
            new = self.observe_method(losses, key, state)
        _require_same_form(new, state, f"{self.kind}.observe")
        return new

    def updated(
        self,
        module: LossModule,
        model_state: ModelState,
        batches: Batches,
        *,
        key: KeyScalar,
        state: BalancerState,
    ) -> BalancerState:
        """The state after a scheduled update."""
        assert self.update_method is not None
        if self.loss_names is not None and module.loss_names is None:
            # Names that the module does not declare are known only while it is traced.
            found = jax.eval_shape(lambda: module.evaluate(model_state, batches, key).losses)
            _require_known(self.loss_names, tuple(found), alone=False)
        with self._noted("update"):
            new = self.update_method(module, model_state, batches, key, state)
        _require_same_form(new, state, f"{self.kind}.update")
        return new

    def _first_total(self, names: tuple[str, ...], state: BalancerState) -> jax.Array:
        # Ones, since a shape is all that is checked and zero would divide in some weightings.
        losses = dict.fromkeys(names, jnp.float32(1))
        if self.observe_method is not None:
            state = self.observed(losses, jax.random.key(0), state)
        return self.total(losses, state)

    @contextlib.contextmanager
    def _noted(self, method: str) -> Iterator[None]:
        """A call of the user's code; its errors get a note that names the method."""
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by {self.kind}.{method}")
            raise


def adapt_balancer(balancer: LossBalancer | None) -> AdaptedBalancer:
    """A balancer with every member present.

    Args:
        balancer: a `LossBalancer`; `None` for the plain sum.

    Raises:
        TypeError: a member is missing or of the wrong type, or a method lacks a parameter.
        ValueError: a name or number is wrong.
    """
    if balancer is None:
        # No names: the plain sum follows whatever losses the module returns.
        return AdaptedBalancer(StaticLossBalancer(), False, None, None, None, None, None)
    validation.instance(balancer, "balancer")
    missing = [name for name in ("loss_names", *_METHODS) if not hasattr(balancer, name)]
    if missing:
        raise TypeError(
            f"balancer must be a LossBalancer, got {balancer!r}, which has no {', no '.join(missing)}. "
            "Add what is missing, or use StaticLossBalancer."
        )
    methods = {name: getattr(balancer, name, None) for name in (*_METHODS, *_OPTIONAL)}
    for name, arguments in (_METHODS | _OPTIONAL).items():
        # A member that is `None` counts as absent, so that a subclass can switch one off.
        if name in _METHODS or methods[name] is not None:
            validation.takes(methods[name], f"balancer.{name}", *arguments)
    names = balancer.loss_names
    return AdaptedBalancer(
        balancer,
        True,
        None if names is None else validation.names(names, "balancer.loss_names"),
        None if methods["update"] is None else _schedule(balancer),
        methods["observe"],
        methods["update"],
        methods["check_module"],
    )


def _schedule(balancer: LossBalancer) -> Schedule:
    every = getattr(balancer, "update_every_n_steps", None)
    if every is None:
        raise ValueError(
            f"balancer offers update and must say how often, got {balancer!r}. Give it update_every_n_steps."
        )
    sizes = checked_sizes(getattr(balancer, "diagnostic_batch_sizes", None))
    every = validation.positive(every, "balancer.update_every_n_steps")
    start = getattr(balancer, "update_start_step", None)
    start = every if start is None else validation.step_number(start, "balancer.update_start_step")
    return Schedule(every, start, sizes)


def stays_finite(new: BalancerState, old: BalancerState) -> jax.Array:
    """Whether every number that is finite in `old` is finite in `new`; bool of shape `()`.

    Entries that are non-finite in the initial state (for example `best = inf`) are not checked.
    """
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    # Integers and keys are always finite; `isfinite` refuses keys.
    finite = [jnp.all(jnp.isfinite(a) | ~jnp.isfinite(b)) for a, b in pairs if is_trainable(b)]
    return jnp.all(jnp.asarray(finite, bool))


def _require_known(names: tuple[str, ...], known: tuple[str, ...] | None, alone: bool) -> None:
    if known is None or set(names) == set(known) or (not alone and set(names) <= set(known)):
        return
    raise ValueError(
        f"the balancer's loss_names are {validation.shown(names)}, and the module's are "
        f"{validation.shown(known)}. Make them agree."
    )


def _require_same_form(new: BalancerState, old: BalancerState, method: str) -> None:
    """Raises unless a method returned a state of the structure, shapes and dtypes that it received."""
    before, after = _outline(old), _outline(new)
    # The structures are compared as text: JAX compares static metadata with the user's own `==`.
    if before != after or str(jax.tree.structure(new)) != str(jax.tree.structure(old)):
        raise ValueError(
            f"{method} changed the form of the balancer's state\n"
            f"  given:    {before}\n"
            f"  returned: {after}\n"
            "Return every array that `initialize` gives, with its shape and dtype."
        )


def _outline(tree: BalancerState) -> str:
    """The arrays of a tree with their paths, for a message."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return repr(tree)
    return ", ".join(": ".join(filter(None, (jax.tree_util.keystr(p), array_type(v)))) for p, v in leaves)


def _formatted(value: object) -> str:
    """An array by its type, another value by its repr unless that would print a tracer."""
    # The repr of a tracer means nothing to a user.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    return (
        f"{_outline(value)} ({type(value).__name__})" if traced and not is_array(value) else array_type(value)
    )
