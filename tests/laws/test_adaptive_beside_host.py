"""Samplers that follow residuals beside rows that stay on the host: one source, one run, one sequence.

The reference is the same source with its rows on the device. Stacks are five steps long here, so that
refreshes fall at their ends, beside them and in the middle.
"""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    DatasetSampler,
    LossModule,
    NamedBatchSource,
    RandomRowSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    ShuffledRowSampler,
    Trainer,
    UniformDomainSampler,
    keys,
)
from phijax_rng._base import validation
from phijax_rng.sampling import HostedRowSampler
from phijax_rng.sampling.geometry import Box
from phijax_rng.training import prefetch
from phijax_rng.training.adaptive_refresh import with_sampler_state
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import Samplers, resumed
from tests._problems import Problem
from tests._selection import mostly_full

STOP, EVERY, STACK = 17, 4, 5
BOX = [(0.0, 1.0), (-1.0, 1.0)]
ROWS = np.random.default_rng(0).random((40, 2), dtype=np.float32)
POOL = {"inputs": ROWS, "targets": np.abs(ROWS[:, 1])}
SIZES = {"first": 3, "pde": 8, "data": 7, "grown": 4, "bc": 4}  # hosted and drawn by turns


@pytest.fixture(autouse=True, scope="module")
def short_stacks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "_STACK_STEPS", STACK)
        yield


def model(params, inputs):
    return jnp.tanh(inputs @ params["a"]) @ params["b"]


def init_model(key):
    first, second = jax.random.split(key)
    return {"a": jax.random.normal(first, (2, 6)), "b": jax.random.normal(second, (6,))}


def residual(params, rows):
    return model(params, rows["inputs"]) - jnp.abs(rows["inputs"][:, 1])


def residuals(params, batches):
    """Those of the refined points are seen beside the rows of the step."""
    beside = jnp.mean(batches["data"]["targets"])
    return {"pde": residual(params, batches["pde"]), "grown": residual(params, batches["grown"]) * beside}


def losses(params, batches):
    def misfit(rows):
        return jnp.mean((model(params, rows["inputs"]) - rows["targets"]) ** 2)

    return {
        "bc": jnp.mean(model(params, batches["bc"]["inputs"]) ** 2),
        "data": misfit(batches["data"]) + misfit(batches["first"]),
        "pde": jnp.mean(batches["pde"]["weights"] * residual(params, batches["pde"]) ** 2),
        "grown": jnp.mean(residual(params, batches["grown"]) ** 2),
    }


def points(on_host):
    """Rows that lie on the host or, to compare with, on the device; beside points that follow residuals."""
    place = HostedRowSampler if on_host else (lambda sampler: sampler)
    samplers = {
        "first": place(RandomRowSampler(POOL)),
        "pde": ResidualDistributionSampler(Box(BOX), EVERY, num_candidates=64),
        "data": place(ShuffledRowSampler(POOL)),
        "grown": ResidualRefinementSampler(
            Box(BOX), EVERY, capacity=20, num_initial=12, num_added=4, num_candidates=32
        ),
        "bc": UniformDomainSampler(BOX),
    }
    return Samplers(samplers, SIZES)


MODULE = LossModule(init_model, losses, batch_keys=tuple(SIZES), residuals=residuals)
PROBLEMS = {on_host: Problem(MODULE, points(on_host), optax.adam(1e-2)) for on_host in (False, True)}


@functools.cache
def begun():
    """The state that a fit begins with."""
    return with_sampler_state(PROBLEMS[True].state(), PROBLEMS[True].source())


def train(stop, folder=None, *, on_host=True, every_n_steps=None, **options):
    saves = {"every_n_steps": every_n_steps}
    return resumed(PROBLEMS[on_host], stop, folder, saves=saves, **options).state


@functools.cache
def resident():
    return train(STOP, on_host=False)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.full
def test_a_source_asked_by_step_and_state_does_not_show_where_its_rows_lie():
    hosted, whole = PROBLEMS[True].source(), PROBLEMS[False].source()
    assert (hosted.traceable, whole.traceable) == (False, True)
    for state in (begun().sampler_state, resident().sampler_state):
        for step in (0, 5, 2**31 - 1):
            batch = on_host(whole(step, state))
            assert list(hosted(step, state)) == list(SIZES)
            assert_trees_bitwise_equal(on_host(hosted(step, state)), batch, dict_order=False)
            assert first_difference(on_host(hosted(step ^ 1, state)), batch) is not None


@pytest.mark.full
def test_a_run_is_that_of_resident_rows():
    whole = train(STOP)
    assert_trees_bitwise_equal(whole, resident())
    assert int(whole.sampler_state["grown"]["count"]) == 20


@pytest.mark.parametrize("chunk_size", mostly_full([1, 3], everyday=[3]))
def test_where_the_host_looks_in_changes_no_number(chunk_size):
    assert_trees_bitwise_equal(train(STOP, trainer={"chunk_size": chunk_size}), resident())


@pytest.mark.full
def test_rows_of_the_wrong_step_or_key_are_told_apart():
    assert first_difference(train(STOP - 1), resident()) is not None
    whole = PROBLEMS[True].source()
    fed, inside = whole.host_and_device_parts()
    assert (fed.names, inside.names) == (("first", "data"), ("pde", "grown", "bc"))
    for half in (fed, inside):
        for name, key in half.sampler_keys(3).items():
            assert_trees_bitwise_equal(key, whole.sampler_keys(3)[name])
    alone = NamedBatchSource({"bc": UniformDomainSampler(BOX)}, {"bc": 4}, whole.key)
    batches = whole(3, begun().sampler_state)
    assert_trees_bitwise_equal(inside(3, begun().sampler_state)["bc"], batches["bc"])
    assert first_difference(alone(3)["bc"], batches["bc"]) is not None


@pytest.mark.parametrize(
    "carry",
    [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy, lambda s: jax.tree.map(lambda leaf: leaf, s)],
    ids=["pickle", "deepcopy", "tree.map"],
)
def test_parts_keep_their_keys_when_they_are_carried(carry):
    whole, state = PROBLEMS[True].source(), begun().sampler_state
    fed, inside = map(carry, carry(whole).host_and_device_parts())
    batches = on_host(whole(7, state))
    for half in (fed(7), inside(7, state)):
        assert_trees_bitwise_equal(on_host(half), {name: batches[name] for name in half}, dict_order=False)


def test_x64_moves_no_batch_of_a_mixed_source():
    state = on_host(begun().sampler_state)
    plain = on_host(PROBLEMS[True].source()(7, state))
    with jax.enable_x64(True):
        assert_trees_bitwise_equal(on_host(PROBLEMS[True].source()(7, state)), plain, dict_order=False)


@pytest.mark.full
def test_an_audit_of_such_a_run_finds_no_fault():
    report = Trainer(2, progress=False).audit(MODULE, steps=1, **PROBLEMS[True].arguments)
    assert [finding for finding in report.findings if finding.rank == "fault"] == []
    first = "root.sampling.stream('adaptive', 'pde').fold_in(2147483648)"
    assert any(first in str(finding) and finding.kind == "replay" for finding in report.findings)


# Resumes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The root of a run that was saved at every step."""
    root = tmp_path_factory.mktemp("saved") / "run"
    train(STOP, root, every_n_steps=1)
    return root


@pytest.mark.parametrize("cut", mostly_full([1, 3, 4, 5, 8, 9, 10, 16], everyday=[1, 4, 5, 16]))
def test_a_resume_around_a_refresh_is_the_whole_run(saved, tmp_path, cut):
    again = train(STOP, tmp_path / "run", ckpt_path=saved, ckpt_step=cut)
    assert_trees_bitwise_equal(again, resident())


@pytest.mark.parametrize("cut", mostly_full([5, 9], everyday=[5]))
def test_a_resume_that_lost_the_sampler_state_is_told_apart(saved, cut):
    restored = Checkpoints(saved).restore(begun(), cut)
    options = {"optimizer": PROBLEMS[True].optimizer, "source": PROBLEMS[True].source()}
    ended = Trainer(STOP, progress=False).fit_state(MODULE, restored, **options).state
    assert_trees_bitwise_equal(ended, resident())
    lost = restored.replace(sampler_state=begun().sampler_state)
    ended = Trainer(STOP, progress=False).fit_state(MODULE, lost, **options).state
    assert first_difference(ended.model_state, resident().model_state) is not None


@pytest.mark.full
def test_a_resume_with_the_rows_elsewhere_goes_on_alike(saved, tmp_path):
    # Silently: no batch moves, and the programs of rows on the host and on the device are not compared.
    moved = train(STOP, tmp_path / "run", on_host=False, ckpt_path=saved, ckpt_step=6)
    assert_trees_bitwise_equal(moved, resident())


# What is refused


@pytest.mark.parametrize(
    "domain",
    [HostedRowSampler(RandomRowSampler(POOL)), DatasetSampler(ROWS)],
    ids=["rows on the host", "a dataset"],
)
def test_candidates_whose_rows_lie_on_the_host_are_refused(domain):
    sampler = ResidualDistributionSampler(domain, 5, num_candidates=16)
    with pytest.raises(ValueError) as caught:
        NamedBatchSource({"pde": sampler}, {"pde": 4}, keys.split_root(0).sampling)
    assert str(caught.value) == (
        "samplers['pde'] draws candidates in the compiled loop, and their rows are on the host, got "
        f"{validation.formatted(sampler)}. Take a domain on the device, such as a geometry or a "
        "RandomRowSampler."
    )


def test_batches_of_a_state_are_not_drawn_ahead():
    with pytest.raises(ValueError) as caught:
        PROBLEMS[True].source().stacked_batches(range(3), 3)
    assert str(caught.value) == (
        "sampler 'pde' draws from a state, which is not known in advance. Call source(step, sampler_state) "
        "step by step, or stack the first of source.host_and_device_parts()."
    )
