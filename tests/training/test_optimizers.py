"""Which optimizers train and resume is in `tests/_optimizers.py` and `docs/optimizers.md`."""

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from phijax_rng import (
    LossModule,
    LossTrainStep,
    PoolDataModule,
    Trainer,
    TrainLoop,
    initialize_train_state,
    keys,
)
from tests import _optimizers
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._optimizers import CASES, LIBRARIES, MODULE, Fixed, factories

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "optimizers.md"
EVERYDAY = (
    "optax.contrib.dpsgd",
    "optax.contrib.sam",
    "optax.lookahead",
    "lookahead, with `LookaheadParams`",
    "sam in a chain",
    "Gauss-Newton by `residual_fn`",
)


def table() -> list[str]:
    return PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n\n")[2].splitlines()


def test_every_transformation_of_optax_is_in_the_list_and_on_the_page():
    for name, (library, cases) in LIBRARIES.items():
        assert set(factories(library)) - set(cases) == set(), f"new in {name}"
    names = [row.split(" | ")[0].removeprefix("| ") for row in table()[2:]]
    assert names == [_optimizers.shown(name) for name in CASES]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.full) for name in CASES]
)
@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')  # `dpsgd` takes nothing else
# What Optax itself deprecates is trained as long as it is there.
@pytest.mark.filterwarnings("ignore:.*is deprecated, (please )?use:DeprecationWarning")
def test_an_optimizer_trains_and_resumes_or_is_refused_as_the_page_says(name):
    assert _optimizers.row(name, _optimizers.outcome(name)) in table()


def loop_of(optimizer, module=MODULE):
    state = initialize_train_state(module.init(keys.root_key(0)), optimizer, {}, keys.split_root(0))
    loop = TrainLoop(LossTrainStep(module, optimizer), state, Fixed())
    return loop, loop.place(state)


def test_a_resume_without_the_optimizers_state_is_another_run():
    # The control of the table.
    loop, start = loop_of(optax.adam(0.05))
    whole = loop.run(start, 24).state
    half = loop.run(start, 11).state
    assert_trees_bitwise_equal(loop.run(half, 24).state, whole)
    forgotten = half.replace(optimizer_state=start.optimizer_state)
    assert first_difference(loop.run(forgotten, 24).state, whole) is not None


# Extra arguments


def test_each_extra_argument_is_what_its_name_says():
    seen = {}

    def update(
        gradients, state, params, *, value, grad, grad_pt, value_fn, obj_fn, grad_fn, residual_fn, mine=3
    ):
        same = jax.tree.map(lambda one, other: jnp.all(one == other), (grad, grad_pt), (gradients, gradients))
        seen["mine"] = mine
        checks = {
            "value": jnp.allclose(value, value_fn(params)) & (obj_fn(params) == value_fn(params)),
            "grad": jnp.all(jnp.asarray(jax.tree.leaves(same))),
            "grad_fn": jnp.allclose(grad_fn(params, 1)["w"], gradients["w"]),
            "residual_fn": jnp.allclose(jnp.mean(residual_fn(params)["fit"] ** 2), value, rtol=1e-5),
        }
        return jax.tree.map(lambda gradient: -0.1 * gradient, gradients), checks

    first = dict.fromkeys(("value", "grad", "grad_fn", "residual_fn"), jnp.asarray(False))
    loop, start = loop_of(optax.GradientTransformationExtraArgs(lambda params: first, update))
    end = loop.run(start, 3).state
    assert {name: bool(found) for name, found in end.optimizer_state.items()} == dict.fromkeys(first, True)
    assert seen == {"mine": 3}


def test_what_update_does_not_name_is_left_out():
    def update(gradients, state, params):
        return jax.tree.map(lambda gradient: -0.1 * gradient, gradients), state

    by_hand, start = loop_of(optax.scale(-0.1))
    own, begin = loop_of(types.SimpleNamespace(init=lambda params: (), update=update))
    assert_trees_bitwise_equal(own.run(begin, 3).state.model_state, by_hand.run(start, 3).state.model_state)
    assert own.program == by_hand.program


def test_an_error_of_the_optimizer_itself_stays_as_it_is():
    def update(gradients, state, params, **extra):
        raise TypeError("something else")

    with pytest.raises(TypeError, match=r"^something else$"):
        loop_of(optax.GradientTransformationExtraArgs(lambda params: (), update))


@pytest.mark.full
def test_a_line_search_in_a_partition_moves_its_part_alone():
    optimizer = optax.partition(
        {"main": optax.lbfgs(), "rest": optax.set_to_zero()},
        {"b": "rest", "w": "main"},
        mask_compatible_extra_args=True,
    )
    loop, start = loop_of(optimizer)
    chunk = loop.run(start, 6)
    assert chunk.records["fit"][-1] < 0.5 * chunk.records["fit"][0]
    assert_trees_bitwise_equal(chunk.state.model_state["b"], start.model_state["b"])


# Refused before anything is traced


def _untraced(*arguments):
    raise AssertionError("traced")


UNTRACED = LossModule(MODULE.init, _untraced, batch_keys=("data",))


def fit(optimizer, module=UNTRACED):
    data = PoolDataModule({"data": {"inputs": np.zeros((4, 3), np.float32)}}, {"data": 2})
    return Trainer(2, progress=False).fit(module, datamodule=data, optimizer=optimizer, seed=0)


def _requires(gradients, state, params, *, curvature, residual_fn=None):
    raise AssertionError("called")


def _follows_residuals(gradients, state, params, *, residual_fn):
    raise AssertionError("called")


def _two(gradients, state):
    raise AssertionError("called")


def own(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


OFFERED = "'value', 'grad', 'grad_pt', 'value_fn', 'obj_fn', 'grad_fn'"


class TorchLike:
    """As an optimizer of PyTorch."""

    def step(self):
        raise AssertionError("called")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.adam, "optimizer must offer init and update, got a function. Call it with its learning rate."),
        (
            optax.MultiSteps,
            "optimizer must be an object, got the class MultiSteps. Call it: MultiSteps(...).",
        ),
        (0.001, "optimizer must offer init and update, got 0.001. Pass an Optax optimizer."),
        ("adam", "optimizer must offer init and update, got 'adam'. Pass an Optax optimizer."),
        (None, "optimizer must offer init and update, got None. Pass an Optax optimizer."),
        (
            [optax.adam(0.1), optax.sgd(0.1)],
            "optimizer must offer init and update, got [a GradientTransformationExtraArgs, "
            "a GradientTransformationExtraArgs]. Join several into one with optax.chain(...).",
        ),
        (TorchLike(), "optimizer must offer init and update, got a TorchLike. Pass an Optax optimizer."),
        (
            own(_requires),
            f"the optimizer requires 'curvature', and an update of a LossModule has {OFFERED}. "
            "Call it in a train_step of your own, for fit_state.",
        ),
        (
            own(_follows_residuals),
            "the optimizer follows the rows of residuals, and the module has none. "
            "Pass LossModule(..., residuals=...).",
        ),
        (
            own(_two),
            "optimizer.update must take (gradients, optimizer_state, params), got (gradients, state). "
            "Fix its parameters.",
        ),
        (
            optax.chain(optax.clip(1.0), optax.lookahead(optax.sgd(0.1), 2, 0.5)),
            "optax.lookahead trains a pair of parameters, and the model state is no pair. Return "
            "optax.LookaheadParams.init_synced(params) from init, and use model_state.fast in losses.",
        ),
    ],
    ids=[
        "not called",
        "a class",
        "a rate",
        "a name",
        "nothing",
        "a list",
        "torch",
        "unknown argument",
        "no residuals",
        "two parameters",
        "lookahead in a chain",
    ],
)
def test_what_is_no_optimizer_or_cannot_work_is_refused_in_words(optimizer, message):
    with pytest.raises(TypeError) as caught:
        fit(optimizer)
    assert str(caught.value) == message


def test_what_a_part_of_a_chain_requires_is_named():
    with pytest.raises(TypeError) as caught:
        loop_of(optax.chain(optax.clip(1.0), own(_requires)))
    assert str(caught.value).startswith(
        "the optimizer requires 'curvature', and an update of a LossModule has "
    )


def test_a_step_of_ones_own_is_checked_in_the_same_way():
    with pytest.raises(TypeError, match=r"^the optimizer requires 'curvature'"):
        LossTrainStep(MODULE, own(_requires))
