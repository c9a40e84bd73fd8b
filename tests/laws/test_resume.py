"""k updates, a save, a restore and the rest are the same run as all updates at once, bit for bit.

Each comparison has its control: a run that lost its sampling key, its runtime key, its step or the
order of its samplers must fail it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from phijax_rng import Checkpoints
from tests import _fit, _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full

STOP = 20
PROBLEMS = {"adam": _problems.heat, "dropout": _problems.dropout}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def train(problem, stop, folder, *, chunk_size=None, every_n_steps=None, log=100, **options):
    """One fit of a run that is kept in `folder`."""
    saves = {"every_n_steps": every_n_steps}
    trainer = {"chunk_size": chunk_size, "log_every_n_steps": log}
    return _fit.resumed(problem, stop, folder, saves=saves, trainer=trainer, **options)


@pytest.fixture(scope="module")
def cuts(tmp_path_factory):
    """For each problem, the root of a run that was saved at every step from 0 to 20."""
    roots = {}

    def root_of(problem):
        if problem not in roots:
            roots[problem] = tmp_path_factory.mktemp("cut") / "run"
            train(problem(), 0, roots[problem])
            train(problem(), STOP, roots[problem], every_n_steps=1)
        return roots[problem]

    return root_of


@each_problem
def test_what_was_saved_on_the_way_is_what_as_many_steps_give(cuts, problem):
    checkpoints = Checkpoints(cuts(problem))
    assert checkpoints.steps == tuple(range(STOP + 1))
    for step in range(1, STOP + 1):
        assert_trees_bitwise_equal(checkpoints.restore(problem().state(), step), problem().run(step))


@pytest.mark.parametrize("cut", mostly_full(range(STOP + 1), everyday=(0, 1, STOP - 1, STOP)))
@each_problem
def test_k_steps_and_a_resume_to_20_are_20_steps(cuts, tmp_path, problem, cut):
    resumed = train(problem(), STOP, tmp_path / "run", ckpt_path=cuts(problem), ckpt_step=cut)
    assert resumed.iterations == STOP - cut
    assert_trees_bitwise_equal(resumed.state, problem().run(STOP))


@pytest.mark.parametrize(
    ("problem", "chunk_size"),
    mostly_full(
        {
            "adam-1": (_problems.heat, 1),
            "dropout-7": (_problems.dropout, 7),
            "statistics-64": (_problems.statistics, 64),
        },
        everyday=["dropout-7"],
    ),
)
def test_three_resumes_with_other_chunks_logs_and_saves_are_one_run(tmp_path, problem, chunk_size):
    whole = problem().run(90)
    plans = [(3, chunk_size, None, 1), (17, 7, 5, 100), (66, 64, 13, 4), (90, 1, 2, 3)]
    for stop, size, every_n_steps, log in plans:
        result = train(problem(), stop, tmp_path, chunk_size=size, every_n_steps=every_n_steps, log=log)
    assert_trees_bitwise_equal(result.state, whole)
    assert_trees_bitwise_equal(Checkpoints(tmp_path).restore(problem().state(), 65), problem().run(65))


@each_problem
def test_going_back_and_training_again_gives_the_same_bits(cuts, tmp_path, problem):
    train(problem(), STOP, tmp_path, ckpt_path=cuts(problem), ckpt_step=4, every_n_steps=4)
    for back in (16, 8, 12):
        again = train(problem(), STOP, tmp_path, resume=True, ckpt_step=back, every_n_steps=4)
        assert again.iterations == STOP - back
        assert_trees_bitwise_equal(again.state, problem().run(STOP))


# Controls: each of these must fail the comparison above at every cut.


def _another_sampling_key(state):
    return state.replace(sampling_key=jax.random.fold_in(state.sampling_key, 1))


def _a_shifted_step(state):
    return state.replace(step=state.step - 1)


def _a_reset_runtime_key(state):
    return state.replace(rng_key=_problems.dropout().state().rng_key)


def _a_fresh_optimizer(state):
    zeros = jax.tree.map(jnp.zeros_like, state.optimizer_state)
    return state.replace(optimizer_state=zeros)


DAMAGES = {
    "another sampling key": (_another_sampling_key, _problems.heat),
    "the step shifted by one": (_a_shifted_step, _problems.heat),
    "a fresh optimizer": (_a_fresh_optimizer, _problems.heat),
    "the runtime key reset": (_a_reset_runtime_key, _problems.dropout),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_a_resume_that_lost_something_is_told_apart(cuts, damage, problem):
    whole = problem().run(STOP)
    loop, names = problem().loop(), problem().module.batch_keys
    for cut in (1, 7, 19):
        restored = Checkpoints(cuts(problem)).restore(problem().state(), cut)
        assert_trees_bitwise_equal(loop.run(loop.place(restored), STOP).state, whole)
        lost = damage(restored)
        source = problem().datamodule.train_batch_source(names, lost.sampling_key)
        ended = loop.run(loop.place(lost), STOP, source).state
        for part in ("model_state", "optimizer_state"):
            assert first_difference(getattr(ended, part), getattr(whole, part)) is not None


def test_a_resume_with_reordered_samplers_is_told_apart(cuts, tmp_path):
    problem = _problems.heat()
    module = dataclasses.replace(problem.module, batch_keys=("pde", "boundary", "initial"))
    reordered = dataclasses.replace(problem, module=module)
    with pytest.warns(UserWarning, match="source.samplers.order"):
        resumed = train(
            reordered, STOP, tmp_path, ckpt_path=cuts(_problems.heat), ckpt_step=19, on_change="warn"
        )
    assert first_difference(resumed.state.model_state, problem.run(STOP).model_state) is not None
