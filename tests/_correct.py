"""Programs that use their keys correctly, in JAX and in the libraries around it.

The audit must find no fault in any of them. Each is as small as its library allows: the first time, an audit
compiles every operation separately.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phijax_rng import NamedBatchSource, SpaceTimeSampler, UniformDomainSampler, keys

Program = Callable[[jax.Array], Any]
PROGRAMS: dict[str, Program] = {}


def program(fn: Program) -> Program:
    PROGRAMS[fn.__name__.replace("_", " ")] = fn
    return fn


def dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)


@program
def our_samplers_over_steps(key: jax.Array) -> Any:
    rows = {"inputs": np.zeros((8, 2), np.float32)}
    samplers = {
        "box": UniformDomainSampler([(0.0, 2.0)]),
        "moments": SpaceTimeSampler(rows, (0.0, 1.0)),
    }
    source = NamedBatchSource(samplers, {"box": 4, "moments": 4}, key)
    return [source(step) for step in range(3)]


@program
def our_rows_without_replacement(key: jax.Array) -> Any:
    pools = {"all": {"inputs": np.zeros((8, 1), np.float32)}, "few": {"inputs": np.zeros((8, 1), np.float32)}}
    source = NamedBatchSource.from_pools(pools, {"all": "all", "few": 4}, key, replace=False)
    return [source(step) for step in range(2)]


@program
def our_streams(key: jax.Array) -> Any:
    model, runtime, sampling, balancer = keys.split_root(key)
    noise = [jax.random.normal(keys.stream(key, "evaluation", str(i))) for i in range(2)]
    batch = [
        jax.random.normal(keys.fold_in(sampling, example, step)) for example in (0, 1) for step in (0, 1)
    ]
    return noise, batch, jax.random.normal(model), keys.host_rng(runtime).normal(), jax.random.bits(balancer)


@program
def a_scan_that_carries_its_key(key: jax.Array) -> Any:
    def body(key: jax.Array, x: jax.Array) -> Any:
        key, own = jax.random.split(key)
        return key, x + jax.random.normal(own)

    return jax.jit(lambda key: jax.lax.scan(body, key, jnp.arange(3.0)))(key)


@program
def a_key_for_every_row_and_step(key: jax.Array) -> Any:
    def row(key: jax.Array, x: jax.Array) -> jax.Array:
        return sum(x + jax.random.normal(jax.random.fold_in(key, step)) for step in range(2))

    return jax.vmap(row)(jax.random.split(key, 3), jnp.arange(3.0))


@program
def a_while_loop_with_a_trip_count_per_row(key: jax.Array) -> Any:
    def row(key: jax.Array, stop: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            count, key, total = carry
            key, own = jax.random.split(key)
            return count + 1, key, total + jax.random.normal(own)

        return jax.lax.while_loop(lambda carry: carry[0] < stop, body, (0, key, 0.0))[2]

    return jax.vmap(row)(jax.random.split(key, 3), jnp.asarray([1, 3, 2]))


@program
def a_cond_under_vmap(key: jax.Array) -> Any:
    def row(key: jax.Array, kind: jax.Array) -> Any:
        return jax.lax.cond(kind, jax.random.normal, jax.random.uniform, key)

    kinds = jnp.asarray([True, False, True])
    return jax.grad(lambda scale: jnp.sum(scale * jax.vmap(row)(jax.random.split(key, 3), kinds)))(1.0)


@program
def remat(key: jax.Array) -> Any:
    layer = jax.checkpoint(lambda x, key: jnp.sum(jnp.sin(dropout(key, x * x))))
    return jax.grad(lambda x: layer(x, key))(jnp.arange(4.0))


@program
def a_gradient_per_loss_term(key: jax.Array) -> Any:
    def losses(x: jax.Array) -> dict[str, jax.Array]:
        kept = dropout(key, x)
        return {"fit": jnp.sum(kept**2), "size": jnp.sum(kept)}

    return {name: jax.grad(lambda x, name=name: losses(x)[name])(jnp.arange(3.0)) for name in ("fit", "size")}


@program
def a_gradient_per_loss_term_by_two_functions(key: jax.Array) -> Any:
    def losses(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = dropout(key, x)
        return jnp.sum(kept**2), jnp.sum(kept)

    return [jax.grad(term)(jnp.ones(3)) for term in (lambda x: losses(x)[0], lambda x: losses(x)[1])]


@program
def one_gradient_taken_again(key: jax.Array) -> Any:
    loss = jax.grad(lambda x: jnp.sum(dropout(key, x)))
    return [loss(jnp.ones(3)) for _ in range(2)]


@program
def the_vjp_of_every_term(key: jax.Array) -> Any:
    terms, pull = jax.vjp(lambda x: jnp.stack([jnp.sum(dropout(key, x)), jnp.sum(x)]), jnp.arange(3.0))
    return [pull(row) for row in jnp.eye(len(terms))]


@program
def a_custom_derivative(key: jax.Array) -> Any:
    @jax.custom_vjp
    def noisy(x: jax.Array, key: jax.Array) -> jax.Array:
        return x + jax.random.normal(key, x.shape)

    noisy.defvjp(lambda x, key: (noisy(x, key), None), lambda _, g: (g, None))
    return jax.grad(lambda x: jnp.sum(noisy(x, key)))(jnp.arange(2.0))


@program
def draws_that_loop_inside(key: jax.Array) -> Any:
    first, second, third = jax.random.split(key, 3)
    drawn = jax.random.poisson(first, 3.0, (2,))
    return drawn, jax.random.gamma(second, 2.0, (2,)), jax.random.permutation(third, 5)


@program
def poisson_for_every_row(key: jax.Array) -> Any:
    return jax.vmap(lambda key: jax.random.poisson(key, 3.0))(jax.random.split(key, 2))


@program
def rows_of_rbg_one_by_one(key: jax.Array) -> Any:
    root = jax.random.wrap_key_data(jnp.tile(jax.random.key_data(key), 2), impl="rbg")
    return keys.exact_vmap(jax.random.normal)(jax.random.split(root, 3))


@program
def optax_noise(key: jax.Array) -> Any:
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=int(jax.random.bits(key)) % 100), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
    return params


@program
def flax_nnx(key: jax.Array) -> Any:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Linear(1, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.mean(self.dropout(self.inner(x)) ** 2)

    model = Model(nnx.Rngs(params=jax.random.fold_in(key, 0), dropout=jax.random.fold_in(key, 1)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: model(jnp.ones((2, 1))))(model))

    for _ in range(2):
        step(model, optimizer)
    return nnx.state(model)


@program
def flax_linen(key: jax.Array) -> Any:
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dropout(0.5, deterministic=False)(linen.Dense(3)(x))

    start, train = jax.random.split(key)
    x = jnp.ones((2, 1))
    params = Model().init({"params": start, "dropout": jax.random.fold_in(train, 99)}, x)
    for step in range(2):
        rngs = {"dropout": jax.random.fold_in(train, step)}
        loss = lambda params, rngs=rngs: jnp.sum(Model().apply(params, x, rngs=rngs) ** 2)  # noqa: E731
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    return params


@program
def equinox(key: jax.Array) -> Any:
    import equinox as eqx

    start, train = jax.random.split(key)
    model = eqx.nn.Sequential([eqx.nn.Linear(1, 3, key=start), eqx.nn.Dropout(0.5)])

    @eqx.filter_jit
    def step(model: Any, key: jax.Array) -> Any:
        def loss(model: Any) -> jax.Array:
            out = jax.vmap(lambda x, key: model(x, key=key))(jnp.ones((2, 1)), jax.random.split(key, 2))
            return jnp.mean(out**2)

        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, eqx.filter_grad(loss)(model)))

    for index in range(2):
        model = step(model, jax.random.fold_in(train, index))
    return model


@program
def numpyro_predictive(key: jax.Array) -> Any:
    import numpyro
    from numpyro import distributions, handlers

    def model() -> None:
        scale = numpyro.sample("scale", distributions.HalfNormal(1.0))
        with numpyro.plate("rows", 2):
            numpyro.sample("x", distributions.Normal(0.0, scale))

    first, second = jax.random.split(key)
    return [handlers.trace(handlers.seed(model, own)).get_trace() for own in (first, second)]


@program
def blackjax_random_walk(key: jax.Array) -> Any:
    import blackjax

    walk = blackjax.additive_step_random_walk(
        lambda x: -jnp.sum(x**2), blackjax.mcmc.random_walk.normal(jnp.asarray(0.5))
    )
    state = walk.init(jnp.zeros(2))
    for own in jax.random.split(key, 2):
        state, _ = walk.step(own, state)
    return state


@program
def grain_augmentation(key: jax.Array) -> Any:
    import grain

    class AddNoise(grain.transforms.RandomMap):
        def random_map(self, element: Any, rng: np.random.Generator) -> Any:
            return element + rng.normal()

    seed = int(jax.random.bits(key)) % 2**31
    data = grain.MapDataset.source(np.zeros(4)).seed(seed).shuffle().random_map(AddNoise())
    return [data[index] for index in range(4)]


@program
def second_derivatives(key: jax.Array) -> Any:
    features = jax.random.normal(key, (3,))
    return jax.hessian(lambda x: jnp.sum(jnp.sin(features * x)))(1.0)


@program
def the_rows_of_a_mapped_gradient(key: jax.Array) -> Any:
    loss = functools.partial(lambda x, key: jnp.sum(dropout(key, x) ** 2))
    return jax.vmap(jax.grad(loss))(jnp.ones((3, 2)), jax.random.split(key, 3))


def _dropped(key: jax.Array, w: jax.Array) -> jax.Array:
    return w * jax.random.bernoulli(key, 0.5, w.shape)


@program
def a_jacobian_forward(key: jax.Array) -> Any:
    return jax.jacfwd(lambda w: _dropped(key, w))(jnp.ones(3))


@program
def a_jacobian_backward_through_remat(key: jax.Array) -> Any:
    return jax.jacrev(jax.checkpoint(lambda w: _dropped(key, jnp.sin(w))))(jnp.ones(3))


@program
def a_hessian_of_a_loss_that_draws(key: jax.Array) -> Any:
    return jax.jit(jax.hessian(lambda w: jnp.sum(_dropped(key, w) ** 3)))(jnp.ones(3))


@program
def a_hessian_for_every_row(key: jax.Array) -> Any:
    rows = jax.vmap(jax.hessian(lambda w, key: jnp.sum(_dropped(key, w) ** 3)))
    return rows(jnp.ones((2, 3)), jax.random.split(key, 2))


@program
def a_linear_map_of_a_function_that_draws(key: jax.Array) -> Any:
    block = jax.checkpoint(lambda w: _dropped(key, jnp.sin(w)))
    return jax.vmap(jax.linearize(block, jnp.ones(3))[1])(jnp.eye(3))


@program
def a_step_that_empties_its_copy_of_the_batch(key: jax.Array) -> Any:
    @jax.jit
    def step(batch: dict[str, jax.Array]) -> jax.Array:
        return jax.random.normal(batch.pop("key")) + batch["x"]

    batches = [{"x": jnp.float32(index), "key": own} for index, own in enumerate(jax.random.split(key))]
    return [step(batch) for batch in batches], [sorted(batch) == ["key", "x"] for batch in batches]


@program
def layers_that_are_skipped_by_chance(key: jax.Array) -> Any:
    """Which branches are taken differs from call to call, and what they close over does not."""

    @jax.jit
    def forward(x: jax.Array, keys: jax.Array, on: jax.Array) -> jax.Array:
        for index in range(3):
            own = jax.random.fold_in(keys, index)
            x = jax.lax.cond(
                on[index], lambda x, own=own, i=index: x * (i + 2.0) + jax.random.normal(own), lambda x: x, x
            )
        return x

    gates = jnp.asarray([[True, False, True], [False, True, True]])
    return [forward(jnp.ones(()), own, on) for own, on in zip(jax.random.split(key), gates, strict=True)]


@program
def a_scan_of_no_steps(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    none = jax.lax.scan(
        lambda total, own: (total + jax.random.normal(own), None), 0.0, jax.random.split(first)[:0]
    )
    one = jax.lax.scan(lambda total, own: (total, jax.random.normal(own)), 0, second[None], reverse=True)
    return none, one
