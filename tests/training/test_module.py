"""What a user supplies: how losses are called, what they may return, what is refused."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import DataModule, LossModule, StepOutput
from phijax_rng.training.module import takes_key
from tests._bitwise import assert_trees_bitwise_equal

MODEL = {"w": jnp.arange(3.0)}
BATCHES = {"pde": {"inputs": jnp.ones((2, 1))}}
KEY = jax.random.key(5)


def module(losses, **options):
    return LossModule(lambda key: MODEL, losses, **{"batch_keys": ("pde",), **options})


def without(model_state, batches):
    return {"fit": jnp.sum(model_state["w"])}


def variadic(*args):
    model_state, batches = args
    return without(model_state, batches)


def with_key(model_state, batches, key):
    return {"fit": jnp.sum(model_state["w"]) + jax.random.uniform(key)}


def keyword_only(model_state, batches, *, key):
    return with_key(model_state, batches, key)


def positional_only(model_state, batches, key, /):
    return with_key(model_state, batches, key)


def with_default(model_state, batches, key=None):
    return with_key(model_state, batches, key)


def keywords(model_state, batches, **rest):
    return with_key(model_state, batches, **rest)


def scaled(scale, model_state, batches, key):
    return with_key(model_state, batches, key)


class Losses:
    def method(self, model_state, batches, key):
        return with_key(model_state, batches, key)

    def __call__(self, model_state, batches, key):
        return with_key(model_state, batches, key)


WITH_KEY = {
    "third argument": with_key,
    "keyword-only": keyword_only,
    "positional-only": positional_only,
    "with a default": with_default,
    "keywords": keywords,
    "partial": functools.partial(scaled, 2.0),
    "jitted": jax.jit(with_key),
    "method": Losses().method,
    "callable object": Losses(),
}

WITHOUT_KEY = {
    "two arguments": without,
    "partial": functools.partial(lambda scale, model_state, batches: without(model_state, batches), 2.0),
    "jitted": jax.jit(without),
    "another name": lambda model_state, batches, rng=None: without(model_state, batches),
    "variadic": variadic,
}


@pytest.mark.parametrize("losses", WITH_KEY.values(), ids=WITH_KEY)
def test_losses_with_a_parameter_named_key_get_the_runtime_key(losses):
    own = module(losses)
    assert own.wants_key
    expected = with_key(MODEL, BATCHES, KEY)
    assert_trees_bitwise_equal(own.evaluate(MODEL, BATCHES, KEY).losses, expected)
    other = own.evaluate(MODEL, BATCHES, jax.random.key(6)).losses
    assert float(other["fit"]) != float(expected["fit"])


@pytest.mark.parametrize("losses", WITHOUT_KEY.values(), ids=WITHOUT_KEY)
def test_losses_without_such_a_parameter_are_called_without_the_key(losses):
    own = module(losses)
    assert not own.wants_key
    assert_trees_bitwise_equal(own.evaluate(MODEL, BATCHES, KEY).losses, without(MODEL, BATCHES))


def test_a_callable_without_a_signature_is_called_without_the_key():
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(max)
    assert not takes_key(max)


def test_a_dict_of_losses_is_a_step_output_without_more():
    output = module(without).evaluate(MODEL, BATCHES, KEY)
    assert isinstance(output, StepOutput)
    assert output.model_state is None
    assert output.diagnostics == {}


def test_a_step_output_is_handed_on_with_its_variables_and_diagnostics():
    renewed = {"w": MODEL["w"], "mean": jnp.float32(3)}
    given = StepOutput({"fit": jnp.float32(1)}, renewed, {"residual": jnp.float32(2)})
    output = module(lambda model_state, batches: given).evaluate(MODEL, BATCHES, KEY)
    assert output.losses == given.losses
    assert output.model_state is renewed
    assert output.diagnostics == given.diagnostics


def test_losses_keep_the_order_they_are_returned_in():
    losses = {"pde": jnp.float32(1), "bc": jnp.float32(2), "a": jnp.float32(3)}
    output = module(lambda model_state, batches: losses).evaluate(MODEL, BATCHES, KEY)
    assert list(output.losses) == ["pde", "bc", "a"]


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (3.0, TypeError, "losses must return scalars by name, got 3.0. Return {'name': loss}."),
        ({}, ValueError, "losses must name at least one entry, got (). Add a name."),
        ({1: 2.0}, TypeError, "losses[0] must be a non-empty string, got 1. Name it."),
        (
            {"fit": np.ones((2, 1))},
            ValueError,
            "losses['fit'] must be a scalar, got shape (2, 1). Reduce it, for example with jnp.mean.",
        ),
        (
            StepOutput({"fit": 1.0}, diagnostics={"rows": np.ones(2)}),
            ValueError,
            "diagnostics['rows'] must be a scalar, got shape (2,). Reduce it, for example with jnp.mean.",
        ),
        (
            StepOutput({"fit": 1.0}, diagnostics=[1.0]),
            TypeError,
            "diagnostics must be a mapping, got [1.0]. Pass a dict keyed by name.",
        ),
    ],
    ids=["a number", "nothing", "a number as name", "rows", "rows as diagnostic", "a list of diagnostics"],
)
def test_what_are_no_losses_is_refused(returned, error, message):
    with pytest.raises(error) as caught:
        module(lambda model_state, batches: returned).evaluate(MODEL, BATCHES, KEY)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: LossModule(3, without, batch_keys=("pde",)),
            TypeError,
            "init must be callable, got 3. Pass a function.",
        ),
        (
            lambda: module({"fit": 1}),
            TypeError,
            "losses must be callable, got {'fit': 1}. Pass a function.",
        ),
        (
            lambda: module(without, residuals=1),
            TypeError,
            "residuals must be callable, got 1. Pass a function.",
        ),
        (
            lambda: module(without, predict="x"),
            TypeError,
            "predict must be callable, got 'x'. Pass a function.",
        ),
        (
            lambda: module(without, batch_keys="pde"),
            TypeError,
            "batch_keys must be a sequence of names, got 'pde'. Pass a tuple of strings.",
        ),
        (
            lambda: module(without, batch_keys=()),
            ValueError,
            "batch_keys must name at least one entry, got (). Add a name.",
        ),
        (
            lambda: module(without, loss_names=("a", "a")),
            ValueError,
            "loss_names must not repeat a name, got ('a', 'a'). Drop the repeated one.",
        ),
    ],
    ids=["init", "losses", "residuals", "predict", "one string", "no batch", "a name twice"],
)
def test_what_makes_no_module_is_refused(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_a_module_is_frozen_and_holds_its_names_as_tuples():
    own = module(without, batch_keys=["pde", "bc"], loss_names=["fit"])
    assert (own.batch_keys, own.loss_names) == (("pde", "bc"), ("fit",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.losses = without


def test_a_data_module_is_known_by_what_it_offers():
    class Own:
        def train_batch_source(self, batch_keys, key): ...

    assert isinstance(Own(), DataModule)
    assert not isinstance(object(), DataModule)


def test_losses_that_bind_the_key_are_refused():
    message = (
        "losses is a functools.partial that binds key, which the runtime key of each step would replace. "
        "Leave key unbound, or rename the parameter."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(functools.partial(lambda model_state, batches, key: {"fit": 1.0}, key=KEY))


# Which rows count


def with_mask(model_state, batches, mask):
    return {"fit": jnp.sum(model_state["w"]) + jnp.sum(mask["pde"])}


def mask_and_key_by_place(model_state, batches, mask, key, /):
    return with_mask(model_state, batches, mask)


WITH_MASK = {
    "third argument": with_mask,
    "keyword-only": lambda model_state, batches, *, key, mask: with_mask(model_state, batches, mask),
    "positional-only": mask_and_key_by_place,
    "with a default": lambda model_state, batches, mask=None: with_mask(model_state, batches, mask),
    "jitted": jax.jit(with_mask),
}


@pytest.mark.parametrize("losses", WITH_MASK.values(), ids=WITH_MASK)
def test_losses_with_a_parameter_named_mask_are_told_which_rows_count(losses):
    own = module(losses)
    assert own.wants_mask
    assert float(own.evaluate(MODEL, BATCHES, KEY).losses["fit"]) == 3 + 2
    given = {"pde": jnp.array([True, False])}
    assert float(own.evaluate(MODEL, BATCHES, KEY, given).losses["fit"]) == 3 + 1


def test_residuals_that_name_a_mask_are_told_that_every_row_counts():
    own = module(without, residuals=lambda model_state, batches, mask: {"pde": mask["pde"]})
    assert own.residual_rows(MODEL, BATCHES, KEY)["pde"].tolist() == [True, True]


def test_losses_that_take_any_name_have_not_said_that_they_honor_a_mask():
    def losses(model_state, batches, **given):
        assert set(given) == {"key"}
        return without(model_state, batches)

    own = module(losses)
    own.evaluate(MODEL, BATCHES, KEY)
    assert not own.wants_mask
    with pytest.raises(ValueError, match="the losses of module 'module' take no mask"):
        own.evaluate(MODEL, BATCHES, KEY, {"pde": jnp.ones(2, bool)})


def test_a_mask_that_nobody_asks_for_is_not_dropped_in_silence():
    assert not module(without).wants_mask
    message = (
        "uneven='pad' pads batches with rows that must not count, and the losses of module 'module' "
        "take no mask. Add a parameter named mask, {batch name: bool of shape (rows,)}, and average with "
        "masked_mean(values, mask[name]); or pass another `uneven`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(without).evaluate(MODEL, BATCHES, KEY, {"pde": jnp.ones(2, bool)})


def test_a_partial_that_binds_the_mask_is_refused():
    message = (
        "losses is a functools.partial that binds mask, which the mask of rows that count would replace. "
        "Leave mask unbound, or rename the parameter."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(functools.partial(with_mask, mask=None))
