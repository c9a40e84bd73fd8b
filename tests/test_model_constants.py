"""A model with functions, text and numbers in its fields, under everything that reads the model of a run."""

import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    GradNormBalancer,
    LossModule,
    NamedBatchSource,
    NTKBalancer,
    ResidualDistributionSampler,
    Trainer,
    initialize_train_state,
    keys,
)
from phijax_rng.sampling.geometry import Box
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full

NAMES = ("pde", "wall")
BOX = Box([(0.0, 1.0), (0.0, 1.0)])
CUT, STOP = 4, 8


class Model(eqx.Module):
    """An MLP times a constant; the activation is a function."""

    mlp: eqx.nn.MLP
    factor: float
    name: str

    def __init__(self, key, factor=0.5):
        self.mlp = eqx.nn.MLP(2, "scalar", 8, 1, activation=jnp.tanh, key=key)
        self.factor, self.name = factor, "net"

    def __call__(self, point):
        return self.factor * self.mlp(point)


def residuals(model, batches):
    return {name: jax.vmap(model)(rows["inputs"]) - 1 for name, rows in batches.items()}


def losses(model, batches):
    return {name: jnp.mean(rows**2) for name, rows in residuals(model, batches).items()}


@dataclasses.dataclass(frozen=True)
class Data:
    """Two samplers of points, of which one may follow the residuals."""

    adaptive: bool = False

    def train_batch_source(self, batch_keys, key):
        follows = ResidualDistributionSampler(
            BOX, num_candidates=16, refresh_every_n_steps=3, residual_names=("pde",)
        )
        samplers = {"pde": follows if self.adaptive else BOX, "wall": BOX}
        return NamedBatchSource(samplers, dict.fromkeys(NAMES, 8), key)


def module(factor=0.5):
    return LossModule(
        lambda key: Model(key, factor), losses, batch_keys=NAMES, loss_names=NAMES, residuals=residuals
    )


def fit(stop, folder=None, *, factor=0.5, adaptive=False, seed=3, optimizer=None, trainer=None, **options):
    checkpoints = None if folder is None else Checkpoints(folder, asynchronous=False)
    made = Trainer(stop, progress=False, checkpoints=checkpoints, **(trainer or {}))
    return made.fit(
        module(factor),
        datamodule=Data(adaptive),
        optimizer=optimizer or optax.adam(1e-2),
        seed=seed,
        **options,
    )


CASES = {
    "alone": {},
    "adaptive points": {"adaptive": True},
    "GradNorm": {"balancer": GradNormBalancer(NAMES, update_every_n_steps=3)},
    "NTK": {"balancer": NTKBalancer(NAMES, update_every_n_steps=3, diagnostic_batch_sizes=4)},
    "averages in micro-batches": {"trainer": {"ema_decay": 0.9, "microbatches": 2}},
    "schedule-free": {"optimizer": optax.contrib.schedule_free_sgd(0.1)},
}


@pytest.mark.parametrize("case", mostly_full(list(CASES), everyday=["adaptive points"]))
def test_a_cut_run_has_the_bits_and_the_constants_of_the_whole_run(case, tmp_path):
    options = CASES[case]
    whole = fit(STOP, **options)
    cut = fit(CUT, tmp_path, **options)
    resumed = fit(STOP, tmp_path, resume=True, **options)
    assert_trees_bitwise_equal(resumed.state, whole.state)
    assert first_difference(cut.state, whole.state)  # the control: it did train on
    assert first_difference(fit(STOP, seed=4, **options).state, whole.state)
    model = resumed.state.model_state
    assert (model.factor, model.name, model.mlp.activation) == (0.5, "net", jnp.tanh)
    assert model(jnp.ones(2)) == whole.state.model_state(jnp.ones(2))
    assert resumed.metrics["total_loss"] < fit(1, **options).metrics["total_loss"]


def test_weights_are_taken_beside_the_constants_of_the_new_run(tmp_path):
    old = fit(CUT, tmp_path / "old").state.model_state
    options = {"factor": 0.25, "seed": 9}
    new = fit(0, tmp_path / "new", ckpt_path=tmp_path / "old", weights_only=True, **options).state.model_state
    assert [np.array_equal(a, b) for a, b in zip(*map(_arrays, (new, old)), strict=True)] == [True] * 4
    assert (new.factor, old.factor) == (0.25, 0.5)
    # The control: without them the weights are those of the other seed.
    assert not np.array_equal(_arrays(fit(0, **options).state.model_state)[0], _arrays(old)[0])


def _arrays(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_array))


def test_a_constant_that_changed_is_named_at_a_resume(tmp_path):
    fit(CUT, tmp_path)
    with pytest.warns(UserWarning, match=r"training\.program: .*(loss, model or captured array)"):
        resumed = fit(STOP, tmp_path, factor=0.25, resume=True)
    assert resumed.state.model_state.factor == 0.25


@pytest.mark.full
def test_an_audit_reads_such_a_model():
    report = Trainer(STOP, progress=False).audit(
        module(), datamodule=Data(), optimizer=optax.adam(1e-2), seed=3
    )
    assert report.clean


def test_a_state_with_constants_passes_through_transformations():
    model = {"w": jnp.arange(2.0), "f": jnp.tanh, "name": "net", "flag": True, "depth": 3}
    state = initialize_train_state(model, optax.adam(1e-2), {}, keys.split_root(0))
    constants = {name: model[name] for name in ("f", "name", "flag", "depth")}

    def raised(state):
        return state.replace(step=state.step + state.model_state["depth"])

    for passed in (jax.jit(raised)(state), jax.lax.scan(lambda s, _: (raised(s), None), state, length=1)[0]):
        assert int(passed.step) == 3
        assert constants.items() <= passed.model_state.items()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    assert jax.vmap(lambda s: s.model_state["w"])(stacked).tolist() == [[0, 1], [0, 1]]
    assert constants.items() <= stacked.model_state.items()
    gradient = jax.grad(lambda w: jnp.sum(state.replace(model_state={**model, "w": w}).model_state["w"] ** 2))
    assert gradient(model["w"]).tolist() == [0, 2]


def test_the_constants_of_a_model_survive_pickling():
    model = {"w": np.arange(2, dtype=np.float32), "name": "net", "depth": 3}
    state = initialize_train_state(model, optax.sgd(0.1), {}, keys.split_root(0))
    loaded = pickle.loads(pickle.dumps(state.model_state))
    assert (loaded["name"], loaded["depth"], loaded["w"].tolist()) == ("net", 3, [0, 1])
