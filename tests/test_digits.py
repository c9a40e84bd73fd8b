"""A Flax NNX classifier with batch normalization and dropout on digits, beside a loop written by hand.

Statistics that stay frozen and a mask that never changes cost a fifth of the accuracy without an error, and
the resumed run repeats the bits all the same. So the accuracy itself is what is compared.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

from phijax_rng import LossModule, PoolDataModule, StepOutput, Trainer, keys

ROWS = 128


@functools.cache
def digits():
    """Rows to train on and rows to test, in an order of their own."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images, rngs=None):
        return self.outer(self.dropout(nnx.relu(self.norm(self.hidden(images))), rngs=rngs))


def init(key):
    return Classifier(nnx.Rngs(params=keys.stream(key, "params"), dropout=keys.stream(key, "dropout")))


GRAPH = nnx.graphdef(init(keys.root_key(0)))


def cross_entropy(logits, batch):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))


def output(model, batches, rngs=None):
    loss = cross_entropy(model(batches["digits"]["images"], rngs=rngs), batches["digits"])
    return StepOutput({"class": loss}, model_state=model)


def split_init(key):
    return nnx.state(init(key))


def merged(model_state, batches, copy=False):
    model = nnx.merge(GRAPH, model_state, copy=copy)
    return StepOutput(output(model, batches).losses, model_state=nnx.state(model))


def reseeded(model_state, batches, key):
    nnx.reseed(model_state, dropout=key)
    return output(model_state, batches)


SPELLINGS = {
    "module": (init, output),
    "clone": (init, lambda model_state, batches: output(nnx.clone(model_state), batches)),
    "merge": (split_init, merged),
    "merge a copy": (split_init, lambda model_state, batches: merged(model_state, batches, copy=True)),
    "reseed": (init, reseeded),
    "rngs of the step": (
        init,
        lambda model_state, batches, key: output(model_state, batches, rngs=nnx.Rngs(dropout=key)),
    ),
}


def accuracy(model):
    model = nnx.merge(GRAPH, model) if isinstance(model, nnx.State) else nnx.clone(model)
    model.eval()
    _, (images, labels) = digits()
    return float(jnp.mean(jnp.argmax(model(images), axis=1) == labels))


def fit(spelling, steps):
    make, losses = SPELLINGS[spelling]
    (images, labels), _ = digits()
    data = PoolDataModule({"digits": {"images": images, "labels": labels}}, batch_sizes={"digits": ROWS})
    module = LossModule(make, losses, batch_keys=("digits",))
    trainer = Trainer(steps, progress=False, log_every_n_steps=1)
    return trainer.fit(module, datamodule=data, optimizer=optax.adam(1e-3), seed=0), data


def by_hand(steps, data):
    """The loop of Flax's own guide on the batches of the run; the model and its losses."""
    streams = keys.split_root(0)
    source = data.train_batch_source(("digits",), streams.sampling)
    model = init(streams.model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, index):
        batch = source(index)["digits"]
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["images"]), batch))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, jnp.int32(index))) for index in range(steps)]
    return model, losses


@pytest.mark.full
def test_the_first_losses_are_those_of_a_loop_written_by_hand():
    result, data = fit("module", 5)
    model, losses = by_hand(5, data)
    np.testing.assert_allclose([row["class"] for row in result.history], losses, rtol=1e-4)
    np.testing.assert_allclose(
        result.state.model_state.norm.mean[...], model.norm.mean[...], rtol=1e-3, atol=1e-6
    )


@pytest.mark.full
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_accuracy_is_that_of_a_loop_written_by_hand(spelling):
    result, data = fit(spelling, 300)
    reached = accuracy(result.state.model_state)
    assert abs(reached - _accuracy_by_hand(data)) < 0.01
    assert reached > 0.95


_REACHED = []


def _accuracy_by_hand(data):
    if not _REACHED:
        _REACHED.append(accuracy(by_hand(300, data)[0]))
    return _REACHED[0]
