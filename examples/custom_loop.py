"""A loop of your own: the state, the batches and the checkpoints without the Trainer.

A jitted step fits a polynomial to a noisy sine. Every random number depends on the step: the batch on the
sampling stream, the noise on the runtime stream. So a run that is saved and restored ends in the same bits.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phijax_rng import Checkpoints, NamedBatchSource, advance, initialize_train_state, keys

x = np.linspace(-1, 1, 500, dtype=np.float32)
pools = {"fit": {"inputs": x, "targets": np.sin(3 * x)}}
optimizer = optax.adam(2e-2)


def start(seed):
    streams = keys.split_root(seed)
    coefficients = 0.1 * jax.random.normal(streams.model, (6,))
    source = NamedBatchSource.from_pools(pools, {"fit": 64}, streams.sampling)
    return source, initialize_train_state(coefficients, optimizer, {}, streams)


def loss(coefficients, batch, key):
    noisy = batch["targets"] + 0.1 * jax.random.normal(key, batch["targets"].shape)
    return jnp.mean((jnp.polyval(coefficients, batch["inputs"]) - noisy) ** 2)


@jax.jit
def train_step(source, state):
    state, key = advance(state)  # advances the runtime stream; `key` is for this step
    grads = jax.grad(loss)(state.model_state, source(state.step)["fit"], key)
    updates, optimizer_state = optimizer.update(grads, state.optimizer_state)
    return state.replace(
        model_state=optax.apply_updates(state.model_state, updates),
        optimizer_state=optimizer_state,
        step=state.step + 1,
    )


def train(source, state, stop):
    while state.step < stop:
        state = train_step(source, state)
    return state


def bits(leaf):
    return keys.fingerprint(leaf) if keys.is_typed_key(leaf) else np.asarray(leaf).tobytes()


uninterrupted = train(*start(seed=7), stop=2000)

with tempfile.TemporaryDirectory() as folder:
    with Checkpoints(folder) as checkpoints:  # leaving the block waits for the save
        checkpoints.save(train(*start(seed=7), stop=777))
    source, fresh = start(seed=7)
    restored = Checkpoints(folder).restore(like=fresh)
resumed = train(source, restored, stop=2000)

error = np.sqrt(np.mean((jnp.polyval(resumed.model_state, x) - np.sin(3 * x)) ** 2))
print(f"saved at step {restored.step}, resumed to step {resumed.step}; the fit is off by {error:.3f}")
assert error < 0.05
assert jax.tree.map(bits, resumed) == jax.tree.map(bits, uninterrupted)
print("the resumed and the uninterrupted run are equal bit for bit")
