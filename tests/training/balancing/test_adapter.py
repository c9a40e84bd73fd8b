"""A balancer of a user's own: what is wrong with it is said in our words, before an update is made."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import GradNormBalancer, HostPool, LossModule, PoolDataModule, Trainer
from phijax_rng.training.balancing.adapter import adapt_balancer, stays_finite
from tests import _problems

HEAT = _problems.heat()
LOSSES = ("pde", "initial", "boundary")
UNTRACED = dataclasses.replace(
    HEAT.module, losses=lambda model_state, batches: pytest.fail("the losses were traced")
)


class Own:
    """Twenty lines of a user, as they should be."""

    loss_names = LOSSES
    update_every_n_steps = 2

    def initialize(self):
        return {"weights": jnp.ones(3)}

    def combine(self, losses, state):
        return jnp.vdot(state["weights"], jnp.stack([losses[name] for name in LOSSES]))

    def diagnostics(self, state):
        return dict(zip(LOSSES, state["weights"], strict=True))

    def update(self, module, model_state, batches, key, state):
        return {"weights": 2 * state["weights"]}


class Observing(Own):
    update = None

    def observe(self, losses, key, state):
        return {"weights": 2 * state["weights"]}


def with_members(kind=Own, **members):
    return type("Own", (kind,), members)()


def fit(balancer, module=UNTRACED, stop=4):
    trainer = Trainer(stop, progress=False)
    return trainer.fit(module, seed=0, **HEAT.arguments, balancer=balancer)


def returning(value):
    return lambda self, *given: value


MEND_STATE = "Return every array that `initialize` gives, with its shape and dtype."
MEND_TOTAL = "Fix it: its gradient is what trains the model."


@pytest.mark.parametrize(
    ("balancer", "error", "message"),
    [
        (Own, TypeError, "balancer must be an object, got the class Own. Call it: Own(...)."),
        (
            3,
            TypeError,
            "balancer must be a LossBalancer, got 3, which has no loss_names, no initialize, no combine, "
            "no diagnostics. Add what is missing, or use StaticLossBalancer.",
        ),
        (with_members(combine=3), TypeError, "balancer.combine must be callable, got 3. Pass a function."),
        (with_members(update=3), TypeError, "balancer.update must be callable, got 3. Pass a function."),
        (
            with_members(observe="x"),
            TypeError,
            "balancer.observe must be callable, got 'x'. Pass a function.",
        ),
        (
            with_members(combine=lambda self, losses: 0.0),
            TypeError,
            "balancer.combine must take (losses, state), got (losses). Fix its parameters.",
        ),
        (
            with_members(update=lambda self, losses, state: state),
            TypeError,
            "balancer.update must take (module, model_state, batches, key, state), got (losses, state). "
            "Fix its parameters.",
        ),
        (
            with_members(loss_names={"pde"}),
            TypeError,
            "balancer.loss_names must be in an order, got the set {'pde'}. Pass a tuple of strings.",
        ),
        (
            with_members(loss_names="pde"),
            TypeError,
            "balancer.loss_names must be a sequence of names, got 'pde'. Pass a tuple of strings.",
        ),
        (
            with_members(update_every_n_steps="often"),
            TypeError,
            "balancer.update_every_n_steps must be a whole number, got 'often'. "
            "Pass an int or a NumPy integer.",
        ),
        (
            with_members(update_start_step=-1),
            ValueError,
            "balancer.update_start_step must be in [0, 2**31), got -1. "
            "A step counts completed optimizer updates.",
        ),
        (
            with_members(diagnostic_batch_sizes="all"),
            TypeError,
            "diagnostic_batch_sizes must be a whole number, got 'all'. Pass an int or a NumPy integer.",
        ),
        (
            with_members(initialize=returning(None)),
            TypeError,
            "Own.initialize() must be a pytree of arrays, got None. Return {} to keep nothing.",
        ),
        (
            with_members(initialize=returning("ones")),
            TypeError,
            "Own.initialize() must be an array, got 'ones'. Return a pytree of arrays.",
        ),
        (
            with_members(initialize=returning({"weights": np.array(["a"])})),
            TypeError,
            "Own.initialize()['weights'] must be an array, got array(['a'], dtype='<U1'). "
            "Return a pytree of arrays.",
        ),
        (
            with_members(combine=returning(None)),
            TypeError,
            f"Own.combine must return one real scalar, got None. {MEND_TOTAL}",
        ),
        (
            with_members(combine=returning("sum")),
            TypeError,
            f"Own.combine must return one real scalar, got 'sum'. {MEND_TOTAL}",
        ),
        (
            with_members(combine=lambda self, losses, state: state["weights"]),
            ValueError,
            f"Own.combine must return one real scalar, got float32[3]. {MEND_TOTAL}",
        ),
        (
            with_members(combine=lambda self, losses, state: state),
            TypeError,
            f"Own.combine must return one real scalar, got ['weights']: float32[3] (dict). {MEND_TOTAL}",
        ),
        (
            with_members(combine=returning(3)),
            ValueError,
            f"Own.combine must return one real scalar, got int32[]. {MEND_TOTAL}",
        ),
        (
            with_members(diagnostics=lambda self, state: {"pde": state["weights"]}),
            ValueError,
            "Own.diagnostics['pde'] must be a scalar, got shape (3,). Reduce it, for example with jnp.mean.",
        ),
        (
            with_members(diagnostics=returning(None)),
            TypeError,
            "Own.diagnostics must be a mapping, got None. Pass a dict keyed by name.",
        ),
        (
            with_members(diagnostics=returning({"pde": "large"})),
            TypeError,
            "Own.diagnostics['pde'] must be a real scalar, got 'large'. Return a number.",
        ),
        (
            with_members(diagnostics=returning({"pde": None})),
            TypeError,
            "Own.diagnostics['pde'] must be a real scalar, got None. Return a number.",
        ),
        (
            with_members(diagnostics=returning({"pde": 1j})),
            ValueError,
            "Own.diagnostics['pde'] must be a real scalar, got complex64[]. "
            "Take its real part, or its modulus.",
        ),
        (
            with_members(diagnostics=returning({3: 1.0})),
            TypeError,
            "Own.diagnostics[0] must be a non-empty string, got 3. Name it.",
        ),
        (
            with_members(Observing, observe=returning(None)),
            ValueError,
            "Own.observe changed the form of the balancer's state\n"
            "  given:    ['weights']: float32[3]\n"
            f"  returned: None\n{MEND_STATE}",
        ),
        (
            with_members(Observing, observe=returning({"weights": 1.0})),
            ValueError,
            "Own.observe changed the form of the balancer's state\n"
            "  given:    ['weights']: float32[3]\n"
            f"  returned: ['weights']: float32[]\n{MEND_STATE}",
        ),
    ],
)
def test_a_balancer_that_breaks_its_protocol_is_refused_before_anything_is_traced(balancer, error, message):
    with pytest.raises(error) as caught:
        fit(balancer)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "None"),
        ("text", "'text'"),
        ({"weights": "text"}, "['weights']: 'text'"),
        ({"weights": np.ones(2, np.float32)}, "['weights']: float32[2]"),
        ({"weights": np.ones(3, np.float16)}, "['weights']: float16[3]"),
        ({"other": np.ones(3, np.float32)}, "['other']: float32[3]"),
    ],
)
def test_an_update_that_gives_something_else_is_refused_before_a_step_is_made(returned, shown):
    with pytest.raises(ValueError) as caught, _problems.compilations() as compiled:
        fit(with_members(update=returning(returned)), HEAT.module)
    assert str(caught.value) == (
        "Own.update changed the form of the balancer's state\n"
        "  given:    ['weights']: float32[3]\n"
        f"  returned: {shown}\n{MEND_STATE}"
    )
    assert [name for name in compiled if "program" in name] == []


def test_control_the_same_balancer_without_a_fault_trains():
    assert [fit(Own(), HEAT.module, stop).state.balancer_state["weights"][0] for stop in (2, 4)] == [1, 2]
    adapt_balancer(Observing()).require_consistent(LOSSES)


def test_an_error_of_the_users_own_says_whose_it_is():
    def broken(self, losses, state):
        return losses["walls"]

    with pytest.raises(KeyError) as caught:
        fit(with_members(combine=broken))
    assert caught.value.__notes__[0] == "raised by Own.combine"


# Names


def one_loss(loss_names=None):
    def losses(model_state, batches):
        return {"fit": jnp.sum(model_state["w"] ** 2)}

    return LossModule(lambda key: {"w": jnp.ones(2)}, losses, batch_keys=("data",), loss_names=loss_names)


DATA = PoolDataModule({"data": HostPool(np.zeros((2, 1), np.float32))}, {"data": 1})
TOO_MANY = "the balancer's loss_names are 'fit', 'nope', and the module's are 'fit'. Make them agree."


@pytest.mark.parametrize("loss_names", [("fit",), None], ids=["named", "known once they are traced"])
def test_a_loss_that_the_module_does_not_have_is_refused_with_both_sides(loss_names):
    balancer = GradNormBalancer(("fit", "nope"), update_every_n_steps=1)
    with pytest.raises(ValueError) as caught:
        Trainer(4, progress=False).fit(
            one_loss(loss_names), datamodule=DATA, optimizer=optax.sgd(0.1), seed=0, balancer=balancer
        )
    assert str(caught.value) == TOO_MANY


def test_a_loss_that_the_balancer_does_not_have_is_refused():
    adapt_balancer(Own()).require_consistent(LOSSES)
    adapt_balancer(Own()).require_consistent(
        (*LOSSES, "walls"), alone=False
    )  # beside a train step that combines
    with pytest.raises(ValueError) as caught:
        adapt_balancer(Own()).require_consistent((*LOSSES, "walls"))
    assert str(caught.value) == (
        "the balancer's loss_names are 'pde', 'initial', 'boundary', and the module's are "
        "'pde', 'initial', 'boundary', 'walls'. Make them agree."
    )


# What stays finite


def test_a_number_that_began_as_infinite_is_the_balancers_own_affair():
    old = {"best": jnp.float32(jnp.inf), "count": jnp.int32(0), "w": jnp.ones(2)}
    assert bool(stays_finite(old, old))
    assert bool(stays_finite(old | {"best": jnp.float32(3)}, old))
    assert not bool(stays_finite(old | {"w": jnp.array([1, jnp.nan])}, old))
    assert bool(jax.jit(stays_finite)({}, {}))
