"""Programs that misuse a key, each in another way; `# here` marks the lines that the audit must name.

A line that does both is marked once.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phijax_rng import initialize_train_state
from tests._correct import dropout

Program = Callable[[jax.Array], Any]
FAULTS: dict[str, tuple[str, Program]] = {}


def fault(kind: str) -> Callable[[Program], Program]:
    def plant(fn: Program) -> Program:
        FAULTS[fn.__name__.replace("_", " ")] = (kind, fn)
        return fn

    return plant


def marked_lines(fn: Program) -> set[int]:
    lines, first = inspect.getsourcelines(fn)
    return {first + index for index, line in enumerate(lines) if line.rstrip().endswith("# here")}


@fault("drawn twice")
def one_key_for_two_layers(key: jax.Array) -> Any:
    inner = jax.random.normal(key, (2, 3))  # here
    outer = jax.random.normal(key, (3,))  # here
    return inner @ outer


@fault("drawn twice")
def a_key_that_a_python_loop_forgets_to_move(key: jax.Array) -> Any:
    total = 0.0
    for _ in range(3):
        total += jax.random.normal(key)  # here
    return total


@fault("drawn twice")
def a_scan_that_returns_its_old_key(key: jax.Array) -> Any:
    def body(key: jax.Array, x: jax.Array) -> Any:
        _, own = jax.random.split(key)
        return key, x + jax.random.normal(own) + jax.random.uniform(own)  # here

    return jax.lax.scan(body, key, jnp.arange(1.0))


@fault("restarted")
def a_scan_that_does_not_carry_the_split(key: jax.Array) -> Any:
    def body(key: jax.Array, x: jax.Array) -> Any:
        _, own = jax.random.split(key)
        return key, x + jax.random.normal(own)  # here

    return jax.lax.scan(body, key, jnp.arange(3.0))


@fault("drawn twice")
def one_function_called_from_two_lines(key: jax.Array) -> Any:
    x = dropout(key, jnp.ones(3))  # here
    return dropout(key, x)  # here


@fault("drawn twice")
def two_losses_on_one_line(key: jax.Array) -> Any:
    draw = jax.random.normal
    losses = [lambda x: (x * draw(key)) ** 2, lambda x: jnp.sin(x + draw(key))]  # here
    return [jax.grad(loss)(1.0) for loss in losses]


@fault("drawn twice")
def two_blocks_of_checkpoint_on_one_line(key: jax.Array) -> Any:
    draw = jax.random.normal
    losses = [lambda x: jnp.sin(x * draw(key)), lambda x: jnp.cos(x + draw(key))]  # here
    return [jax.grad(jax.checkpoint(loss))(1.0) for loss in losses]


@fault("drawn twice")
def two_compiled_functions_with_one_key(key: jax.Array) -> Any:
    noise = jax.jit(lambda key: jax.random.normal(key, (2,)))  # here
    mask = jax.jit(lambda key: jax.random.bernoulli(key, 0.5, (2,)))  # here
    return noise(key) * mask(key)


@fault("drawn twice")
def a_branch_and_what_comes_after_it(key: jax.Array) -> Any:
    first = jax.lax.cond(
        jnp.asarray(True),
        lambda key: 1 + jax.random.normal(key),  # here
        lambda key: 0.0,
        key,
    )
    return first + jax.random.uniform(key)  # here


@fault("drawn twice")
def micro_batches_that_share_a_mask(key: jax.Array) -> Any:
    grads = []
    for rows in jnp.arange(4.0).reshape(2, 2):
        grads.append(
            jax.grad(lambda w, rows=rows: jnp.sum(w * jax.random.normal(key, (2,)) * rows))(1.0)  # here
        )
    return grads


@fault("drawn twice")
def training_steps_with_one_mask(key: jax.Array) -> Any:
    w = jnp.ones(2)
    for _ in range(2):
        w = w - jax.grad(lambda w: jnp.sum(w**2 * jax.random.normal(key, (2,))))(w)  # here
    return w


@fault("drawn twice")
def a_checkpointed_block_with_one_key_twice(key: jax.Array) -> Any:
    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        x = jnp.sin(x * jax.random.normal(key, (2,)))  # here
        return jnp.sum(x + jax.random.uniform(key, (2,)))  # here

    return jax.grad(block)(jnp.ones(2))


@fault("drawn twice")
def fresh_noise_in_a_backward_rule(key: jax.Array) -> Any:
    @jax.custom_vjp
    def noisy(x: jax.Array) -> jax.Array:
        return x + jax.random.normal(key)  # here

    noisy.defvjp(lambda x: (noisy(x), None), lambda _, g: (g * jax.random.normal(key),))  # here
    return jax.grad(noisy)(1.0)


@fault("drawn twice")
def validation_with_the_key_of_training(key: jax.Array) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(w * dropout_here(key, x))

    def dropout_here(key: jax.Array, x: jax.Array) -> jax.Array:
        return x * jax.random.bernoulli(key, 0.5, x.shape)  # here

    grads = jax.grad(loss)(1.0, jnp.ones(2))
    return grads, loss(jnp.float32(1.0), jnp.zeros(2))


@fault("two paths")
def a_short_split_and_a_long_one(key: jax.Array) -> Any:
    layers = jax.random.split(key, 3)
    streams = jax.random.split(key, 4)
    weights = jax.random.normal(layers[1])  # here
    return weights + jax.random.normal(streams[1])  # here


@fault("two paths")
def a_split_and_a_fold(key: jax.Array) -> Any:
    first = jax.random.split(key, 2)[1]
    again = jax.random.fold_in(key, 1)
    noise = jax.random.normal(first)  # here
    return noise + jax.random.uniform(again)  # here


@fault("two paths")
def a_key_rebuilt_from_its_data(key: jax.Array) -> Any:
    saved = np.asarray(jax.random.key_data(key))
    first = jax.random.normal(key)  # here
    restored = jax.random.wrap_key_data(jnp.asarray(saved))
    return first + jax.random.normal(restored)  # here


@fault("two paths")
def a_model_and_a_state_from_one_key(key: jax.Array) -> Any:
    layers = jax.random.split(key, 4)
    params = {"w": jax.random.normal(layers[0], (2,))}  # here
    state = initialize_train_state(params, optax.sgd(0.1), {}, key)
    _, own = jax.random.split(state.rng_key)  # here
    return jax.random.normal(own)


@fault("drawn and split")
def a_draw_before_the_split(key: jax.Array) -> Any:
    shift = jax.random.normal(key)  # here
    _, own = jax.random.split(key)  # here
    return shift + jax.random.normal(own)


@fault("drawn and split")
def a_root_that_is_drawn_from(key: jax.Array) -> Any:
    own = jax.random.fold_in(key, 7)  # here
    return jax.random.normal(own) + jax.random.uniform(key)  # here


@fault("restarted")
def a_resumed_loop_that_repeats_step_zero(key: jax.Array) -> Any:
    def train(key: jax.Array, start: int, stop: int) -> jax.Array:
        total = jnp.zeros(())
        for _ in range(start, stop):
            key, own = jax.random.split(key)
            total += jax.random.normal(own)  # here
        return total

    return train(key, 0, 3) + train(key, 3, 5)


@fault("restarted")
def a_resumed_run_that_begins_with_its_seed(key: jax.Array) -> Any:
    seed = jax.random.bits(key)

    def train(start: int, stop: int) -> jax.Array:
        key = jax.random.key(seed)
        total = jnp.zeros(())
        for _ in range(start, stop):
            key, own = jax.random.split(key)
            total += jax.random.normal(own)  # here
        return total

    return train(0, 3) + train(3, 5)


@fault("restarted")
def a_step_that_is_not_folded_in(key: jax.Array) -> Any:
    return [jax.random.normal(jax.random.fold_in(key, 0)) for step in range(3)]  # here


@fault("restarted")
def a_seed_inside_the_step(key: jax.Array) -> Any:
    def step(x: jax.Array) -> jax.Array:
        return x + jax.random.normal(jax.random.key(0))  # here

    return step(step(jax.random.normal(key)))


@fault("restarted")
def rows_without_replacement_from_a_key_that_stands_still(key: jax.Array) -> Any:
    from phijax_rng import shuffle

    def rows(step: int) -> jax.Array:
        own = jax.random.fold_in(key, step // 10)
        return shuffle.permute_index(own, jnp.arange(3), 8)  # here

    return [rows(step) for step in range(2)]


@fault("broadcast")
def a_key_closed_over_by_vmap(key: jax.Array) -> Any:
    return jax.vmap(lambda x: x + jax.random.normal(key))(jnp.arange(3.0))  # here


@fault("broadcast")
def a_key_that_is_not_mapped(key: jax.Array) -> Any:
    def loss(w: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.sum(w * jax.random.bernoulli(key, 0.5, (2,)))  # here

    return jax.vmap(jax.grad(loss), (0, None))(jnp.ones(3), key)


@fault("broadcast")
def a_key_repeated_for_every_row(key: jax.Array) -> Any:
    keys = jnp.broadcast_to(key, (3,))
    return jax.vmap(jax.random.normal)(keys)  # here


@fault("broadcast")
def one_key_in_loops_of_different_length(key: jax.Array) -> Any:
    def row(stop: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            own = jax.random.fold_in(key, carry[0])
            return carry[0] + 1, carry[1] + jax.random.normal(own)  # here

        return jax.lax.while_loop(lambda carry: carry[0] < stop, body, (0, 0.0))

    return jax.vmap(row)(jnp.asarray([1, 2]))


@fault("broadcast")
def one_key_for_many_rates(key: jax.Array) -> Any:
    return jax.vmap(lambda rate: jax.random.poisson(key, rate))(jnp.asarray([2.0, 3.0]))  # here


@fault("drawn twice")
def reuse_in_loops_of_different_length(key: jax.Array) -> Any:
    def row(key: jax.Array, stop: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            return carry[0] + 1, carry[1] + jax.random.normal(key)  # here

        return jax.lax.while_loop(lambda carry: carry[0] < stop, body, (0, 0.0))

    return jax.vmap(row)(jax.random.split(key, 2), jnp.asarray([1, 2]))


@fault("batched rbg")
def rows_of_rbg_at_once(key: jax.Array) -> Any:
    root = jax.random.wrap_key_data(jnp.tile(jax.random.key_data(key), 2), impl="rbg")
    return jax.vmap(jax.random.normal)(jax.random.split(root, 3))  # here


@fault("drawn twice")
def a_legacy_key_used_twice(key: jax.Array) -> Any:
    legacy = jax.random.key_data(key)
    return jax.random.normal(legacy) + jax.random.uniform(legacy)  # here


@fault("constant seed")
def a_seed_written_into_a_function(key: jax.Array) -> Any:
    return jax.random.normal(key) + jax.random.normal(jax.random.key(7))  # here


@fault("legacy key")
def a_legacy_key(key: jax.Array) -> Any:
    return jax.random.normal(key) + jax.random.normal(jax.random.PRNGKey(7))  # here


@fault("drawn twice")
def two_layers_of_nnx_with_one_key(key: jax.Array) -> Any:
    from flax import nnx

    inner = nnx.Linear(1, 2, rngs=nnx.Rngs(key))  # here
    outer = nnx.Linear(1, 2, rngs=nnx.Rngs(key))  # here
    return inner.kernel[...] + outer.kernel[...]


@fault("drawn and split")
def an_equinox_key_for_model_and_noise(key: jax.Array) -> Any:
    import equinox as eqx

    model = eqx.nn.Linear(1, 2, key=key)  # here
    return model(jax.random.normal(key, (1,)))  # here


@fault("drawn twice")
def a_helper_in_a_library_called_from_two_lines(key: jax.Array) -> Any:
    from phijax_rng.sampling import rows

    rows = rows.RandomRowSampler({"x": np.zeros((5, 1), np.float32)})
    first = rows.sample(key, 2)  # here
    return first, rows.sample(key, 2)  # here
