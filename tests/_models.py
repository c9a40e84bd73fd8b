"""One small classifier in every library, with batch statistics and dropout, for tests of models.

    layer -> batch normalization -> tanh -> dropout -> layer

The first layer has no bias: its gradient would be zero but for rounding, which Adam makes as large as any
other. Each library has the losses that a user would write, and the running mean to look at.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from phijax_rng import LossModule, StepOutput

FEATURES, WIDTH, ROWS, RATE = 3, 8, 16, 0.25
_RNG = np.random.default_rng(0)
INPUTS = _RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
TARGETS = np.sin(INPUTS.sum(axis=1, keepdims=True)).astype(np.float32)
BATCHES = {"data": {"inputs": INPUTS, "targets": TARGETS}}


def source(step):
    """The same rows at every step, so that what differs between steps is the dropout."""
    return jax.tree.map(jnp.asarray, BATCHES)


source.fixed = True  # else the trainer warns that every step has the same rows


def squared(outputs, batches):
    return jnp.mean((outputs - batches["data"]["targets"]) ** 2)


def optimizer():
    return optax.adam(1e-2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of a library.

    Attributes:
        init: as of a `LossModule`.
        losses: as of a `LossModule`.
        mean: the running mean in a model state.
        predict: as of a `LossModule`.
    """

    init: Callable[..., Any]
    losses: Callable[..., Any]
    mean: Callable[[Any], Any]
    predict: Callable[..., Any] | None = None

    @property
    def module(self) -> LossModule:
        return LossModule(self.init, self.losses, batch_keys=("data",), predict=self.predict)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, inputs, **options):
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(inputs))), **options))


def nnx_model(key):
    params, dropout = jax.random.split(key)
    return NNXModel(nnx.Rngs(params=params, dropout=dropout))


GRAPH = nnx.graphdef(nnx_model(jax.random.key(0)))


def nnx_inside(model_state, batches):
    loss = squared(model_state(batches["data"]["inputs"]), batches)
    return StepOutput({"fit": loss}, model_state=model_state)


def nnx_cloned(model_state, batches):
    return nnx_inside(nnx.clone(model_state), batches)


def nnx_reseeded(model_state, batches, key):
    nnx.reseed(model_state, dropout=key)
    return nnx_inside(model_state, batches)


def nnx_rngs_passed(model_state, batches, key):
    outputs = model_state(batches["data"]["inputs"], rngs=nnx.Rngs(dropout=key))
    return StepOutput({"fit": squared(outputs, batches)}, model_state=model_state)


def nnx_rematerialized(model_state, batches):
    outputs = nnx.remat(lambda model, inputs: model(inputs))(model_state, batches["data"]["inputs"])
    return StepOutput({"fit": squared(outputs, batches)}, model_state=model_state)


def nnx_compiled(model_state, batches):
    outputs = nnx.jit(lambda model, inputs: model(inputs))(model_state, batches["data"]["inputs"])
    return StepOutput({"fit": squared(outputs, batches)}, model_state=model_state)


def nnx_merged(model_state, batches):
    model = nnx.merge(GRAPH, model_state)
    loss = squared(model(batches["data"]["inputs"]), batches)
    return StepOutput({"fit": loss}, model_state=nnx.state(model))


def nnx_merged_copy(model_state, batches):
    model = nnx.merge(GRAPH, model_state, copy=True)
    loss = squared(model(batches["data"]["inputs"]), batches)
    return StepOutput({"fit": loss}, model_state=nnx.state(model))


def nnx_pair(model_state, batches):
    model = nnx.merge(*model_state)
    loss = squared(model(batches["data"]["inputs"]), batches)
    return StepOutput({"fit": loss}, model_state=nnx.split(model))


def nnx_parts(model_state, batches):
    model = nnx.merge(GRAPH, model_state["params"], model_state["rest"])
    loss = squared(model(batches["data"]["inputs"]), batches)
    _, params, rest = nnx.split(model, nnx.Param, ...)
    return StepOutput({"fit": loss}, model_state={"params": params, "rest": rest})


def nnx_predict(model_state, inputs):
    model_state.eval()
    return model_state(inputs)


def _parts_of(key):
    _, params, rest = nnx.split(nnx_model(key), nnx.Param, ...)
    return {"params": params, "rest": rest}


def _state_mean(model_state):
    return model_state["norm"]["mean"][...]


NNX = {
    "module": Case(nnx_model, nnx_inside, lambda model: model.norm.mean[...], nnx_predict),
    "clone": Case(nnx_model, nnx_cloned, lambda model: model.norm.mean[...]),
    "reseed": Case(nnx_model, nnx_reseeded, lambda model: model.norm.mean[...]),
    "rngs passed": Case(nnx_model, nnx_rngs_passed, lambda model: model.norm.mean[...]),
    "remat": Case(nnx_model, nnx_rematerialized, lambda model: model.norm.mean[...]),
    "jit": Case(nnx_model, nnx_compiled, lambda model: model.norm.mean[...]),
    "state": Case(lambda key: nnx.state(nnx_model(key)), nnx_merged, _state_mean),
    "state, copied": Case(lambda key: nnx.state(nnx_model(key)), nnx_merged_copy, _state_mean),
    "graphdef and state": Case(
        lambda key: nnx.split(nnx_model(key)), nnx_pair, lambda pair: _state_mean(pair[1])
    ),
    "parameters and rest": Case(_parts_of, nnx_parts, lambda parts: _state_mean(parts["rest"])),
}


class EquinoxModel(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    outer: eqx.nn.Linear
    activation: Callable[..., Any]
    omega: float = 1.5
    name: str = "classifier"

    def __init__(self, key):
        inner, outer = jax.random.split(key)
        self.inner = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, key=inner)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="rows", mode="batch")
        self.dropout = eqx.nn.Dropout(RATE)
        self.outer = eqx.nn.Linear(WIDTH, 1, key=outer)
        self.activation = jnp.tanh

    def __call__(self, inputs, state, key=None):
        hidden, state = self.norm(self.omega * self.inner(inputs), state)
        return self.outer(self.dropout(self.activation(hidden), key=key)), state


def equinox_losses(model_state, batches, key):
    model, state = model_state
    keys = jax.random.split(key, ROWS)
    mapped = jax.vmap(model, axis_name="rows", in_axes=(0, None, 0), out_axes=(0, None))
    outputs, state = mapped(batches["data"]["inputs"], state, keys)
    return StepOutput({"fit": squared(outputs, batches)}, model_state=(model, state))


def equinox_predict(model_state, inputs):
    model, state = model_state
    model = eqx.nn.inference_mode(model)
    return jax.vmap(lambda row: model(row, state)[0])(inputs)


EQUINOX = Case(
    eqx.nn.make_with_state(EquinoxModel),
    equinox_losses,
    lambda pair: pair[1].get(pair[0].norm.batch_state_index)[0],
    equinox_predict,
)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, inputs, train):
        hidden = linen.BatchNorm(use_running_average=not train)(linen.Dense(WIDTH, use_bias=False)(inputs))
        return linen.Dense(1)(linen.Dropout(RATE, deterministic=not train)(jnp.tanh(hidden)))


def linen_losses(model_state, batches, key):
    outputs, updated = LinenModel().apply(
        model_state, batches["data"]["inputs"], train=True, rngs={"dropout": key}, mutable=["batch_stats"]
    )
    return StepOutput({"fit": squared(outputs, batches)}, model_state={**model_state, **updated})


LINEN = Case(
    lambda key: dict(LinenModel().init(key, INPUTS, train=False)),
    linen_losses,
    lambda variables: variables["batch_stats"]["BatchNorm_0"]["mean"],
    lambda model_state, inputs: LinenModel().apply(model_state, inputs, train=False),
)


def _haiku_model(inputs, train):
    hidden = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(
        hk.Linear(WIDTH, with_bias=False)(inputs), train
    )
    hidden = jnp.tanh(hidden)
    if train:
        hidden = hk.dropout(hk.next_rng_key(), RATE, hidden)
    return hk.Linear(1)(hidden)


HAIKU_MODEL = hk.transform_with_state(_haiku_model)


def haiku_losses(model_state, batches, key):
    params, state = model_state
    outputs, state = HAIKU_MODEL.apply(params, state, key, batches["data"]["inputs"], True)
    return StepOutput({"fit": squared(outputs, batches)}, model_state=(params, state))


HAIKU = Case(
    lambda key: HAIKU_MODEL.init(key, INPUTS, True),
    haiku_losses,
    lambda pair: pair[1]["batch_norm/~/mean_ema"]["hidden"],
    lambda model_state, inputs: HAIKU_MODEL.apply(*model_state, None, inputs, False)[0],
)


def plain_init(key):
    inner, outer = jax.random.split(key)
    return {
        "params": {
            "inner": 0.5 * jax.random.normal(inner, (FEATURES, WIDTH)),
            "outer": 0.5 * jax.random.normal(outer, (WIDTH, 1)),
        },
        "mean": jnp.zeros(WIDTH),
        "count": jnp.int32(0),
        "name": "classifier",
        "activation": jnp.tanh,
        "train": True,
    }


def plain_losses(model_state, batches, key):
    hidden = batches["data"]["inputs"] @ model_state["params"]["inner"]
    mean = jnp.mean(hidden, axis=0)
    kept = jax.random.bernoulli(key, 1 - RATE, hidden.shape) if model_state["train"] else True
    outputs = (kept * model_state["activation"](hidden - mean)) @ model_state["params"]["outer"]
    updated = {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "count": model_state["count"] + 1}
    return StepOutput({"fit": squared(outputs, batches)}, model_state={**model_state, **updated})


PLAIN = Case(plain_init, plain_losses, lambda model_state: model_state["mean"])

CASES = {
    **{f"nnx, {name}": case for name, case in NNX.items()},
    "equinox": EQUINOX,
    "linen": LINEN,
    "haiku": HAIKU,
    "plain": PLAIN,
}
