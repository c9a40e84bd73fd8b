"""Beside PhiJAX 0.2.0b5: the weights of its GradNorm and NTK balancers over five updates.

PhiJAX is asked through its public interface only. What it gave is also kept in
`golden/phijax-balancing-0.2.0b5.json`, which tests without PhiJAX compare with.
"""

import contextlib
import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import GradNormBalancer, NTKBalancer, Trainer, keys
from tests import _balancing
from tests._balancing import KERNEL_SIZE, LOSSES, NUM_STEPS, SEED, SIZES, UPDATES
from tests._subprocess import ROOT

phijax = pytest.importorskip(
    "phijax", reason="phijax is not installed; `make compare` has an environment with it"
)

GOLDEN = json.loads((ROOT / "tests/golden/phijax-balancing-0.2.0b5.json").read_text())
THEIRS = {
    "gradnorm": lambda: phijax.balancers.GradNormBalancer(LOSSES, update_every_n_steps=3),
    "ntk": lambda: phijax.balancers.ExactNTKBalancer(LOSSES, update_every_n_steps=3, kernel_size=KERNEL_SIZE),
}
OURS = {
    "gradnorm": GradNormBalancer(LOSSES, update_every_n_steps=3),
    "ntk": NTKBalancer(LOSSES, update_every_n_steps=3, diagnostic_batch_sizes=KERNEL_SIZE),
}


class Objective:
    loss_names = batch_keys = LOSSES

    def losses(self, model_apply: Any, model_state: Any, batches: Any) -> dict[str, jax.Array]:
        return _balancing.losses(model_state, batches)

    def residual_stream(self, name: str, model_apply: Any, model_state: Any, batches: Any) -> jax.Array:
        return _balancing.residuals(model_state, batches)[name]


class Data(phijax.DataModule):  # type: ignore[misc]
    def setup(self, stage: str) -> None:
        self.pools = {
            name: phijax.data.HostPool(fields["inputs"], fields.get("targets"))
            for name, fields in _balancing.make_fields().items()
        }

    def train_batch_source(self, batch_keys: Any, key: jax.Array) -> Any:
        return phijax.data.NamedBatchSource.from_pools(self.pools, SIZES, key, names=tuple(batch_keys))


class Watch(phijax.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.weights: list[list[float]] = []

    def on_train_batch_end(self, context: Any) -> bool:
        self.weights.append([float(context.metrics[f"train/weight/{name}"]) for name in LOSSES])
        return False


def their_weights(balancer: Any) -> np.ndarray[Any, Any]:
    """The weights that each step was trained with."""
    watch = Watch()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = phijax.Trainer(
            NUM_STEPS,
            accelerator="cpu",
            callbacks=(watch,),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )

    def factory(*, key: jax.Array, **_: Any) -> Any:
        return phijax.InitializedModel(apply=_balancing.network, state=_balancing.init(key))

    trainer.fit(
        phijax.PhiModule(factory, Objective()),
        datamodule=Data(),
        optimizer=optax.adam(1e-2),
        seed=SEED,
        balancer=balancer,
    )
    return np.asarray(watch.weights)


def our_weights(balancer: Any) -> np.ndarray[Any, Any]:
    trainer = Trainer(NUM_STEPS, progress=False, log_every_n_steps=1)
    result = trainer.fit(
        _balancing.make_module(),
        datamodule=_balancing.make_data(),
        optimizer=optax.adam(1e-2),
        seed=SEED,
        balancer=balancer,
    )
    return np.asarray([[row[f"weight/{name}"] for name in LOSSES] for row in result.history])


@pytest.mark.parametrize("kind", OURS)
def test_weights_of_a_fresh_run_equal_theirs_over_five_updates(kind: str) -> None:
    theirs, ours = their_weights(THEIRS[kind]()), our_weights(OURS[kind])
    changed = [step for step in range(1, NUM_STEPS) if (theirs[step] != theirs[step - 1]).any()]
    assert tuple(changed) == UPDATES
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    np.testing.assert_allclose(theirs[list(UPDATES)], GOLDEN["weights"][kind], rtol=2e-5)
    assert not np.allclose(ours[1:], theirs[:-1], rtol=1e-3)  # control: a step apart


@pytest.mark.parametrize("kind", OURS)
def test_one_update_on_the_same_batches_equals_theirs(kind: str) -> None:
    module = _balancing.make_module()
    params = _balancing.init(jax.random.key(3))
    source = _balancing.make_data().train_batch_source(LOSSES, keys.split_root(5).sampling)
    batches = source.sample(jax.random.key(8), dict.fromkeys(LOSSES, KERNEL_SIZE))
    theirs = THEIRS[kind]()
    module_of_theirs, state = phijax.PhiModule(
        phijax.InitializedModel(apply=_balancing.network, state=params), Objective()
    ).prepare_model(key=jax.random.key(0), input_mean=None, input_std=None, precision=None)
    plan = theirs.build_update_plan(module_of_theirs, LOSSES)
    other = plan.update(state, batches, theirs.initialize())
    start = OURS[kind].initialize()
    mine = jax.jit(lambda: OURS[kind].update(module, params, batches, jax.random.key(0), start))()
    np.testing.assert_allclose(mine["weights"], other.weights, rtol=5e-6)
    measured = mine["norms" if kind == "gradnorm" else "traces"]
    np.testing.assert_allclose(measured, other.traces, rtol=5e-6)
    assert not np.allclose(mine["weights"], jnp.ones(3), rtol=1e-2)  # control
