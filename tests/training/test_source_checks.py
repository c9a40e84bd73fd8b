import re
import warnings

import jax
import numpy as np
import pytest

from phijax_rng import HostPool, NamedBatchSource, PoolDataModule, Trainer, keys
from phijax_rng.errors import ImpureSourceError
from phijax_rng.training.source_checks import check_source
from tests import _problems

KEY = keys.split_root(0).sampling
HEAT = _problems.heat()


class Counter:
    """A source that answers by how often it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, step):
        self.asked += 1
        return {"data": {"inputs": np.full(3, self.asked, np.float32)}, "same": {"inputs": np.full(3, step)}}


class Frozen:
    """A sampler whose NumPy draw is frozen into the program when it is traced."""

    def sample(self, key, size):
        return {"inputs": np.random.default_rng(0).random((size, 2), np.float32)}


class Drawn:
    def sample(self, key, size):
        return {"inputs": jax.random.uniform(key, (size, 2))}


def frozen_source(**attributes):
    sampler = Frozen()
    for name, value in attributes.items():
        setattr(sampler, name, value)
    return NamedBatchSource({"good": Drawn(), "bad": sampler}, {"good": 3, "bad": 3}, KEY)


def test_a_source_that_counts_its_calls_is_refused_by_name():
    message = (
        "source(4) returned another 'data' when it was called again. Draw from the key and the step alone: "
        "neither from a global generator, nor from a counter, nor from a loader that shuffles"
    )
    with pytest.raises(ImpureSourceError, match=re.escape(message)):
        check_source(Counter(), 4, 100, {})


def test_a_frozen_draw_is_named():
    with pytest.warns(UserWarning, match=r"the source returns the same 'bad' at steps 0 to 3\."):
        check_source(frozen_source(), 0, 100, {})


def test_what_says_it_is_fixed_is_believed():
    fixed = lambda step: {"data": np.zeros(3)}  # noqa: E731
    with pytest.warns(UserWarning, match="the source returns the same 'data'"):
        check_source(fixed, 0, 100, {})
    fixed.fixed = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_source(fixed, 0, 100, {})
        check_source(frozen_source(fixed=True), 0, 100, {})


def test_a_source_is_not_asked_beyond_the_end():
    asked = []

    def source(step):
        asked.append(step)
        return {"data": np.full(3, step)}

    check_source(source, 8, 10, {})
    assert asked == [8, 8, 9]


def test_samplers_of_this_package_are_not_asked(monkeypatch):
    pool = {"a": HostPool(np.zeros((1, 2), np.float32))}
    source = NamedBatchSource.from_pools(pool, {"a": 1}, KEY)
    monkeypatch.setattr(NamedBatchSource, "__call__", lambda *_: pytest.fail("asked"))
    check_source(source, 0, 100, {})


def test_a_fit_refuses_an_impure_source_before_its_first_step(tmp_path):
    class Impure:
        def train_batch_source(self, batch_keys, key):
            inner = PoolDataModule(HEAT.datamodule.pools, HEAT.datamodule.batch_sizes)
            source, calls = inner.train_batch_source(batch_keys, key), []

            def asked(step):
                calls.append(step)
                return source(len(calls))

            return asked

    with pytest.raises(ImpureSourceError):
        Trainer(4, progress=False).fit(HEAT.module, datamodule=Impure(), optimizer=HEAT.optimizer, seed=0)


def test_hosted_rows_are_known_to_be_pure_and_all_of_them_may_stay_the_same():
    pools = {"bc": {"inputs": np.zeros((3, 1), np.float32)}, "pde": {"inputs": np.ones((9, 1), np.float32)}}
    key = keys.split_root(0).sampling
    source = NamedBatchSource.from_pools(pools, {"bc": "all", "pde": 2}, key, resident=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_source(source, 0, 10, {})
