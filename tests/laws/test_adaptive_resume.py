"""A run that adapts, evaluates, stops early and keeps its best steps is one run at every cut.

The updates of a balancer fall before, at and behind each cut; patience is running; evaluation draws from its
own stream; the history, the CSV file and the best steps are those of the run that was never stopped. Each
comparison has its control: a run that lost weights, memory or schedule must fail it.
"""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    CSVHistory,
    EarlyStopping,
    Evaluate,
    GradNormBalancer,
    NTKBalancer,
    Trainer,
)
from phijax_rng.training.balancing import ReLoBRaLoBalancer, UncertaintyBalancer
from tests import _balancing, _problems
from tests._balancing import LOSSES
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full

STOP = 16
END = 12
"""Where early stopping ends the run: the error at step 3 is never beaten by 100, and patience is 3 looks."""

BALANCERS = {
    "gradnorm": GradNormBalancer(LOSSES, update_every_n_steps=4, update_start_step=3),
    "ntk": NTKBalancer(LOSSES, update_every_n_steps=5, update_start_step=0, diagnostic_batch_sizes=4),
    "relobralo": ReLoBRaLoBalancer(LOSSES, alpha=0.9, lookback=0.5),
    "uncertainty": UncertaintyBalancer(LOSSES, learning_rate=0.1),
}
CUTS = [(kind, cut) for kind in ("gradnorm", "ntk") for cut in range(END + 1)]
CUTS += [("relobralo", cut) for cut in (0, 1, 7)] + [("uncertainty", cut) for cut in (0, 1, 7)]
# The ends, an update of the weights and the step behind it.
EVERYDAY = [("gradnorm", cut) for cut in (0, 3, 4, END)] + [("ntk", 5)]
OPTIMIZER = optax.adam(1e-2)
MODULE, DATA = _balancing.make_module(), _balancing.make_data()


def error(model_state, key):
    points = jax.random.uniform(key, (20, 2))
    return {"error": jnp.mean(jax.vmap(lambda p: _balancing.network(model_state, p))(points) ** 2)}


def fit(kind, folder, stop=STOP, *, csv=None, saves=None, patience=3, balancer=None, **words):
    """One fit of the problem; kept in `folder` if there is one."""
    callbacks = (
        Evaluate(error, every_n_steps=3),
        EarlyStopping("evaluation/error", patience=patience, min_delta=100, every_n_steps=3),
        *((CSVHistory(csv, every_n_steps=2),) if csv else ()),
    )
    checkpoints = None if folder is None else Checkpoints(folder, asynchronous=False, **saves or {})
    trainer = Trainer(stop, checkpoints=checkpoints, callbacks=callbacks, progress=False, log_every_n_steps=2)
    return trainer.fit(
        MODULE,
        datamodule=DATA,
        optimizer=OPTIMIZER,
        seed=0,
        balancer=balancer or BALANCERS[kind],
        **words,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """For each balancer, the run that was never stopped, and the folder of its saves at every step."""

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        saves = {"every_n_steps": 1, "max_to_keep": None}
        fit(kind, folder / "run", 0, saves=saves)
        result = fit(kind, folder / "run", csv=folder / "history.csv", saves=saves, resume=True)
        return result, folder

    return run


@pytest.mark.parametrize(("kind", "cut"), mostly_full(CUTS, everyday=EVERYDAY))
def test_a_cut_at_every_step_leaves_one_run(whole, tmp_path, kind, cut):
    straight, folder = whole(kind)
    assert int(straight.state.step) == END
    csv = tmp_path / "history.csv"
    if cut % 2:
        # The run's own directory, and a file that a killed process had written further.
        shutil.copytree(folder / "run", tmp_path / "run")
        csv.write_bytes((folder / "history.csv").read_bytes())
        resumed = fit(kind, tmp_path / "run", csv=csv, resume=True, ckpt_step=cut)
    else:
        resumed = fit(kind, None, csv=csv, ckpt_path=folder / "run", ckpt_step=cut)
    assert (resumed.iterations, resumed.stopped_early) == (END - cut, True)
    assert_trees_bitwise_equal(resumed.state, straight.state)
    assert_trees_bitwise_equal(resumed.history, straight.history)
    assert csv.read_bytes() == (folder / "history.csv").read_bytes()


@pytest.mark.parametrize("kind", BALANCERS)
def test_the_runs_above_do_what_they_are_to_show(whole, kind):
    result, folder = whole(kind)
    weights = jnp.asarray([[row[f"weight/{name}"] for name in LOSSES] for row in result.history])
    assert len({tuple(row) for row in weights.tolist()}) > 1
    assert [row["step"] for row in result.history] == [2, 3, 4, 6, 8, 9, 10, 12]
    assert [row["step"] for row in result.history if "evaluation/error" in row] == [3, 6, 9, 12]
    memory = Checkpoints(folder / "run").memory(6)["callbacks"]["EarlyStopping/evaluation/error"]
    assert (memory["waited"], memory["best_step"]) == (1, 3)


def altered(folder, place, *, change=lambda state: state, keep_memory=True):
    """A checkpoint of step 5 with something changed, at another place."""
    old = Checkpoints(folder)
    state = change(old.restore(fit("gradnorm", None, 0).state, 5))
    with Checkpoints(place, asynchronous=False) as new:
        new.save(state, old.contract(5), old.memory(5) if keep_memory else {})
    return place


def _fresh_weights(state):
    return state.replace(balancer_state=BALANCERS["gradnorm"].initialize())


def test_control_lost_weights_are_noticed(whole, tmp_path):
    straight, folder = whole("gradnorm")
    same = altered(folder / "run", tmp_path / "same")
    assert_trees_bitwise_equal(fit("gradnorm", None, ckpt_path=same).state, straight.state)
    lost = altered(folder / "run", tmp_path / "lost", change=_fresh_weights)
    assert first_difference(fit("gradnorm", None, ckpt_path=lost).state, straight.state) is not None


def test_control_lost_memory_is_noticed(whole, tmp_path):
    _, folder = whole("gradnorm")
    lost = altered(folder / "run", tmp_path / "lost", keep_memory=False)
    resumed = fit("gradnorm", None, csv=tmp_path / "history.csv", ckpt_path=lost)
    assert int(resumed.state.step) == 15  # its first look is at step 6
    assert [row["step"] for row in resumed.history][:2] == [6, 8]
    assert (tmp_path / "history.csv").read_bytes() != (folder / "history.csv").read_bytes()


def test_control_an_update_at_another_step_is_noticed(whole):
    straight, folder = whole("gradnorm")
    moved = dataclasses.replace(BALANCERS["gradnorm"], update_start_step=2)
    with pytest.warns(
        UserWarning, match=r"training\.balancer\.update_start_step: 3 in the checkpoint, 2 in this"
    ):
        resumed = fit("gradnorm", None, balancer=moved, ckpt_path=folder / "run", ckpt_step=5)
    assert first_difference(resumed.state, straight.state) is not None


def test_another_schedule_needs_no_other_program_and_moves_no_bit_before_it_fires(whole):
    straight, folder = whole("gradnorm")
    # Updates at 3, 7, 11 in one run, and at 3, 9, 15 in the other: they part behind step 7.
    other = dataclasses.replace(BALANCERS["gradnorm"], update_every_n_steps=6)
    with _problems.compilations() as compiled:
        early, late = (fit("gradnorm", None, stop, balancer=other) for stop in (7, 8))
    assert [name for name in compiled if "program" in name] == []
    saved = Checkpoints(folder / "run")
    assert_trees_bitwise_equal(early.state, saved.restore(straight.state, 7))
    assert first_difference(late.state, saved.restore(straight.state, 8)) is not None


@pytest.mark.parametrize("cut", mostly_full([1, 5, 6], everyday=[]))
def test_the_best_steps_are_those_of_the_run_that_was_never_stopped(tmp_path, cut):
    best = {"every_n_steps": 2, "max_to_keep": 1, "keep_best": ("pde", 2)}
    kept = []
    for folder, stops in (("straight", (END,)), ("cut", (cut, END))):
        for stop in stops:
            fit("gradnorm", tmp_path / folder, stop, saves=best, patience=10, resume="auto")
        kept.append(Checkpoints(tmp_path / folder, **best))
    assert kept[1].steps == kept[0].steps
    assert kept[1].best_step == kept[0].best_step
    values = {step: kept[0].memory(step)["metrics"]["pde"] for step in kept[0].steps}
    assert values == {step: kept[1].memory(step)["metrics"]["pde"] for step in kept[1].steps}
    every = fit("gradnorm", None, END, patience=10).history
    lowest = sorted((row["pde"], row["step"]) for row in every if row["step"] % 2 == 0)
    assert kept[0].best_step == lowest[0][1]
    assert set(kept[0].steps) == {END, *(step for _, step in lowest[:2])}


@pytest.mark.full
def test_control_a_save_that_is_not_a_multiple_does_not_compete(tmp_path):
    best = {"every_n_steps": 2, "max_to_keep": 1, "keep_best": ("pde", 20)}
    for stop in (5, END):
        fit("gradnorm", tmp_path, stop, saves=best, patience=10, resume="auto")
    assert Checkpoints(tmp_path).steps == (2, 4, 6, 8, 10, 12)
