"""Dropout on handwritten digits: each step drops other units, and a resumed run drops the same ones.

`losses` has a parameter named `key`, so the trainer passes the step's key of the runtime stream.
That stream is part of the checkpoint.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from phijax_rng import Checkpoints, LossModule, PoolDataModule, Trainer, advance, keys

SEED = 42
WIDTHS = (64, 128, 128, 10)
KEEP = 0.5

digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
order = keys.host_rng(keys.stream(keys.root_key(SEED), "split")).permutation(len(images))
train, test = order[:1400], order[1400:]


def init(key):
    layers = zip(jax.random.split(key, len(WIDTHS) - 1), WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [
        {"w": jax.random.normal(key, (fan_in, fan_out)) * (2 / fan_in) ** 0.5, "b": jnp.zeros(fan_out)}
        for key, fan_in, fan_out in layers
    ]


def logits(params, images, key=None):
    *hidden, last = params
    values = images
    for index, layer in enumerate(hidden):
        values = jax.nn.relu(values @ layer["w"] + layer["b"])
        if key is not None:
            kept = jax.random.bernoulli(jax.random.fold_in(key, index), KEEP, values.shape)
            values = jnp.where(kept, values / KEEP, 0)
    return values @ last["w"] + last["b"]


def losses(params, batches, key):
    batch = batches["train"]
    scores = logits(params, batch["inputs"], key)
    return {
        "entropy": optax.losses.softmax_cross_entropy_with_integer_labels(scores, batch["targets"]).mean()
    }


def fit(max_steps, folder):
    trainer = Trainer(max_steps, checkpoints=Checkpoints(folder))
    return trainer.fit(module, datamodule=data, optimizer=optax.adam(1e-3), seed=SEED, resume="auto").state


data = PoolDataModule({"train": {"inputs": images[train], "targets": labels[train]}}, {"train": 128})
module = LossModule(init, losses, batch_keys=("train",), predict=logits)

with tempfile.TemporaryDirectory() as folder:
    uninterrupted = fit(1500, f"{folder}/uninterrupted")
    halfway = fit(700, f"{folder}/resumed")
    resumed = fit(1500, f"{folder}/resumed")

# One state and one batch with the keys of two steps give two losses, because other units are dropped.
moved, key = advance(halfway)
_, next_key = advance(moved)
batch = data.train_batch_source(module.batch_keys, halfway.sampling_key)(700)
first, second = (losses(halfway.model_state, batch, k)["entropy"] for k in (key, next_key))
print(f"one batch under the keys of two steps: loss {first:.4f} and {second:.4f}")
assert first != second

accuracy = np.mean(logits(resumed.model_state, images[test]).argmax(-1) == labels[test])
print(f"accuracy on {len(test)} test images: {accuracy:.1%}")
assert accuracy > 0.95

same = jax.tree.map(np.array_equal, resumed.model_state, uninterrupted.model_state)
assert all(jax.tree.leaves(same)), "the resumed run dropped other units"
print("stopped at step 700 and resumed: the same weights, bit for bit")
