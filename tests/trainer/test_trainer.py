import collections
import contextlib
import dataclasses
import logging
import re
import signal
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phijax_rng
from phijax_rng import (
    Checkpoints,
    HostPool,
    LossModule,
    LossTrainStep,
    PoolDataModule,
    RandomRowSampler,
    SpaceTimeSampler,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
    initialize_train_state,
    keys,
)
from phijax_rng.callbacks.progress import Silent
from phijax_rng.errors import NonFiniteError, RunChangedError, RunExistsError, SaveError
from tests import _fit, _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full
from tests._subprocess import run_python

HEAT = _problems.heat()


def fit(stop, folder=None, *, problem=HEAT, **options):
    """A fit of `problem` to `stop`, kept in `folder` if there is one."""
    return _fit.fit(problem, stop, folder, **options)


def steps(folder):
    return Checkpoints(folder).steps


# Results


@pytest.mark.parametrize("chunk_size", mostly_full([1, 7, 64, None], everyday=[7, None]))
def test_history_holds_multiples_of_log_every_n_steps_whatever_the_chunks(chunk_size):
    result = fit(50, trainer={"log_every_n_steps": 6, "chunk_size": chunk_size})
    loop = HEAT.loop()
    records = loop.run(loop.place(HEAT.state()), 50).records
    expected = [
        {
            "step": step,
            **{name: float(column[step - 1]) for name, column in records.items()},
            **{
                f"mean/{name}": sum(map(float, column[step - 6 : step])) / 6
                for name, column in records.items()
            },
        }
        for step in range(6, 51, 6)
    ]
    assert list(result.history) == expected
    losses = ["total_loss", "pde", "initial", "boundary"]
    assert list(result.history[0]) == ["step", *losses, *(f"mean/{name}" for name in losses)]
    assert result.metrics == {name: float(column[-1]) for name, column in records.items()}
    assert_trees_bitwise_equal(result.state, HEAT.run(50))


def test_a_result_says_what_this_call_did(tmp_path):
    first = fit(7, tmp_path, seed=3, trainer={"log_every_n_steps": 5})
    assert (first.iterations, first.stopped_early, first.interrupted, first.seed) == (7, False, False, 3)
    assert first.module is HEAT.module
    assert [entry["step"] for entry in first.history] == [5]
    second = fit(12, tmp_path, seed=3, resume=True, trainer={"log_every_n_steps": 5})
    assert (second.iterations, int(second.state.step)) == (5, 12)
    assert [entry["step"] for entry in second.history] == [5, 10]
    assert second.history[0] == first.history[0]


def test_logging_saving_and_showing_change_no_number(tmp_path, capsys):
    quiet = fit(40)
    Trainer(
        40,
        checkpoints=Checkpoints(tmp_path, every_n_steps=3),
        log_every_n_steps=1,
        progress=True,
        chunk_size=4,
    ).fit(HEAT.module, seed=0, **HEAT.arguments)
    assert "step 40/40  total_loss" in capsys.readouterr().err
    assert_trees_bitwise_equal(Checkpoints(tmp_path).restore(HEAT.state()), quiet.state)


def test_a_run_without_progress_prints_nothing(capsys):
    fit(5)
    assert tuple(capsys.readouterr()) == ("", "")


def test_the_last_step_is_saved_and_those_asked_for(tmp_path):
    fit(20, tmp_path, saves={"every_n_steps": 8})
    assert steps(tmp_path) == (8, 16, 20)
    for step in (8, 16, 20):
        assert_trees_bitwise_equal(Checkpoints(tmp_path).restore(HEAT.state(), step), HEAT.run(step))
    parents = [Checkpoints(tmp_path).contract(step)["run"]["parent_step"] for step in (8, 16, 20)]
    assert parents == [None, 8, 16]


def test_a_finished_run_that_is_started_again_says_so_and_saves_nothing(tmp_path, capsys):
    def start(stop=6, **options):
        result = fit(stop, tmp_path, resume="auto", trainer={"progress": True, **options})
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        return result, files, capsys.readouterr().err.splitlines()

    _, before, lines = start()
    assert lines[-1] == f"step 6 is saved in {tmp_path}"
    for stop in (6, 4):
        result, after, lines = start(stop)
        assert lines == [
            f"this run is finished: step 6, max_steps={stop}. Nothing is trained and nothing is saved. "
            "Raise max_steps to continue it."
        ]
        assert (result.iterations, after) == (0, before)
    assert start(7)[0].iterations == 1


def test_a_run_of_no_step_keeps_the_state_it_started_from(tmp_path):
    result = fit(0, tmp_path)
    assert (result.iterations, dict(result.metrics), result.history) == (0, {}, ())
    assert steps(tmp_path) == (0,)
    assert_trees_bitwise_equal(result.state, HEAT.state(), dict_order=False)


# Seeds


@pytest.mark.parametrize(
    "seed",
    [
        *(
            pytest.param(seed, marks=pytest.mark.full)
            for seed in (np.int32(5), jnp.int32(5), jax.random.key(5))
        ),
        np.uint64(5),
    ],
    ids=["int32", "jax", "key", "uint64"],
)
def test_one_seed_in_other_clothes_is_one_run(tmp_path, seed):
    result = fit(10, tmp_path, seed=seed)
    assert result.seed == 5
    assert_trees_bitwise_equal(result.state, fit(10, seed=5).state)
    assert first_difference(result.state, fit(10, seed=5 + 2**32).state) is not None
    assert fit(12, tmp_path, seed=5, resume=True).iterations == 2


def test_a_resume_without_a_seed_takes_that_of_the_checkpoint(tmp_path):
    seed = 2**40 + 9
    fit(10, tmp_path, seed=seed)
    resumed = fit(20, tmp_path, seed=None, resume=True)
    assert resumed.seed == seed
    assert_trees_bitwise_equal(resumed.state, fit(20, seed=seed).state)


def test_a_fresh_run_without_a_seed_says_how_to_repeat_it(caplog):
    result = fit(10, seed=None)
    assert [record.getMessage() for record in caplog.records] == [
        f"seed=None: drew seed {result.seed}. Pass seed={result.seed} to repeat this run."
    ]
    assert_trees_bitwise_equal(fit(10, seed=result.seed).state, result.state)


def test_a_checkpoint_without_a_seed_wants_one(tmp_path):
    trainer = Trainer(5, checkpoints=Checkpoints(tmp_path), progress=False)
    trainer.fit_state(HEAT.module, HEAT.state(), **HEAT.arguments)
    message = "seed=None takes the checkpoint's seed, and this checkpoint records none. Pass the seed."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(10, tmp_path, seed=None, resume=True)
    assert_trees_bitwise_equal(fit(10, tmp_path, seed=0, resume=True).state, HEAT.run(10))


# Starts


def test_max_steps_is_a_total(tmp_path):
    fit(10, tmp_path)
    resumed = fit(25, tmp_path, resume="auto")
    assert (resumed.iterations, int(resumed.state.step)) == (15, 25)
    assert_trees_bitwise_equal(resumed.state, HEAT.run(25))


def test_resuming_a_finished_run_performs_no_update_and_compiles_nothing(tmp_path):
    finished = fit(10, tmp_path)
    fit(10, tmp_path, resume=True)
    before = sorted(tmp_path.rglob("*"))
    with _problems.compilations() as compiled:
        again = fit(10, tmp_path, resume="auto")
    assert compiled == []
    assert (again.iterations, again.stopped_early, again.interrupted) == (0, False, False)
    assert_trees_bitwise_equal(again.state, finished.state)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_past_max_steps_is_left_as_it_is(tmp_path):
    fit(10, tmp_path)
    again = fit(5, tmp_path, resume=True)
    assert (again.iterations, int(again.state.step), again.stopped_early) == (0, 10, False)
    assert steps(tmp_path) == (10,)


def test_a_fresh_run_into_the_directory_of_another_is_refused(tmp_path):
    fit(10, tmp_path)
    message = (
        f"{tmp_path} has a run at step 10, and this call would start a fresh one. "
        "Pass resume='auto' to continue it, another directory to keep both, or delete it."
    )
    with pytest.raises(RunExistsError, match=f"^{re.escape(message)}$"):
        fit(20, tmp_path)
    assert steps(tmp_path) == (10,)


def test_a_rewind_sets_the_later_steps_aside(tmp_path):
    fit(20, tmp_path, saves={"every_n_steps": 5})
    rewound = fit(15, tmp_path, resume=True, ckpt_step=10)
    assert rewound.iterations == 5
    assert steps(tmp_path) == (5, 10, 15)
    assert sorted(entry.name for entry in (tmp_path / "superseded").iterdir()) == ["15-0", "20-0"]
    assert_trees_bitwise_equal(rewound.state, HEAT.run(15))
    assert Checkpoints(tmp_path).contract(15)["run"]["parent_step"] == 10


def test_a_run_from_another_ones_checkpoint_records_its_origin_and_continues_its_own(tmp_path):
    fit(10, tmp_path / "old")
    warm = fit(15, tmp_path / "new", ckpt_path=tmp_path / "old", resume="auto")
    assert warm.iterations == 5
    old, new = (Checkpoints(tmp_path / name).contract()["run"] for name in ("old", "new"))
    assert new["origin"] == {
        "directory": str(tmp_path / "old"),
        "step": 10,
        "weights_only": False,
        "id": old["id"],
    }
    assert new["id"] != old["id"]
    fit(12, tmp_path / "old", resume=True)
    continued = fit(20, tmp_path / "new", ckpt_path=tmp_path / "old", resume="auto")
    assert continued.iterations == 5
    assert_trees_bitwise_equal(continued.state, HEAT.run(20))
    after = Checkpoints(tmp_path / "new").contract()["run"]
    assert (after["id"], after["origin"]) == (new["id"], new["origin"])


@pytest.mark.full
def test_weights_only_from_adam_to_sgd_keeps_all_else_fresh(tmp_path):
    old = fit(10, tmp_path / "old", seed=0)
    balancer = StaticLossBalancer(("pde", "initial", "boundary"), weights={"pde": 2.0})
    sgd = dataclasses.replace(HEAT, optimizer=optax.sgd(0.1, momentum=0.9))
    words = {"ckpt_path": tmp_path / "old", "weights_only": True, "balancer": balancer}
    warm = fit(0, tmp_path / "new", problem=sgd, seed=1, **words)
    streams = keys.split_root(1)
    expected = initialize_train_state(
        sgd.module.init(streams.model), sgd.optimizer, balancer.initialize(), streams
    )
    expected = expected.replace(model_state=old.state.model_state)
    assert_trees_bitwise_equal(warm.state, expected, dict_order=False)
    assert (int(warm.state.step), warm.seed) == (0, 1)
    assert Checkpoints(tmp_path / "new").contract()["run"]["origin"]["weights_only"] is True
    # It trains from there, and a killed warm start continues its own run.
    again = fit(6, tmp_path / "new", problem=sgd, seed=1, resume="auto", **words)
    assert again.iterations == 6
    whole = fit(6, problem=sgd, seed=1, **words)
    assert_trees_bitwise_equal(again.state, whole.state)


@pytest.mark.parametrize(
    "optimizer", [optax.contrib.schedule_free_sgd(0.1), optax.adam(1e-3)], ids=["schedule-free", "adam"]
)
def test_an_optimizer_that_copies_parameters_begins_at_the_weights_taken(optimizer, tmp_path):
    old = fit(4, tmp_path / "old", seed=0)
    problem = dataclasses.replace(HEAT, optimizer=optimizer)
    warm = fit(0, tmp_path / "new", problem=problem, seed=1, ckpt_path=tmp_path / "old", weights_only=True)
    assert_trees_bitwise_equal(warm.state.optimizer_state, optimizer.init(old.state.model_state))
    # It evaluates the weights it took, up to rounding, and not those of `init`.
    for found, taken in zip(
        *map(jax.tree.leaves, (warm.evaluation_params, old.state.model_state)), strict=True
    ):
        np.testing.assert_allclose(found, taken, rtol=1e-5, atol=1e-7)


# What may not change


def reordered_problem():
    """The heat problem with its samplers in another order."""
    module = dataclasses.replace(HEAT.module, batch_keys=("boundary", "initial", "pde"))
    return dataclasses.replace(HEAT, module=module)


def resized_problem():
    sizes = HEAT.datamodule.batch_sizes | {"pde": 9}
    return dataclasses.replace(HEAT, datamodule=PoolDataModule(HEAT.datamodule.pools, sizes))


def shown_keys(seed):
    streams = keys.split_root(seed)
    return {
        "root": keys.fingerprint(keys.root_key(seed)),
        "sampling": keys.fingerprint(streams.sampling),
        "balancer": keys.fingerprint(streams.balancer),
    }


CHANGES = {
    "seed": (
        {"seed": 1},
        "  this is another run:\n"
        + "\n".join(
            f"    keys.{name}: {shown_keys(0)[name]} in the checkpoint, {shown_keys(1)[name]} in this run"
            for name in ("root", "sampling", "balancer")
        ),
    ),
    "sampler order": (
        {"problem": reordered_problem()},
        "  the keys stay, the batches differ:\n"
        '    source.samplers.order: ["initial", "boundary", "pde"] in the checkpoint, '
        '["boundary", "initial", "pde"] in this run',
    ),
    "batch size": (
        {"problem": resized_problem()},
        "  the keys stay, the batches differ:\n"
        "    source.samplers.pde.size: 8 in the checkpoint, 9 in this run",
    ),
}


@pytest.mark.parametrize(("change", "report"), CHANGES.values(), ids=CHANGES)
def test_a_run_that_would_draw_otherwise_is_not_continued(tmp_path, change, report):
    fit(10, tmp_path, saves={"every_n_steps": 5})
    message = (
        f"resuming at step 5 changes the run:\n{report}\n"
        "Undo the change, pass on_change='warn' to continue with it, or start a fresh run."
    )
    with pytest.raises(RunChangedError) as caught:
        fit(20, tmp_path, resume=True, ckpt_step=5, **change)
    assert str(caught.value) == message
    # Nothing was moved or saved, and the run itself continues.
    assert steps(tmp_path) == (5, 10)
    assert fit(11, tmp_path, resume=True).iterations == 1


@pytest.mark.full
@pytest.mark.parametrize(("change", "report"), mostly_full(CHANGES, everyday=["sampler order"]))
def test_a_change_that_is_let_pass_is_warned_of_and_recorded(tmp_path, change, report):
    fit(10, tmp_path)
    # The report continues with the consequences of the change: the key of the source, the canary.
    message = f"resuming at step 10 changes the run:\n{report}\n"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}") as found:
        changed = fit(12, tmp_path, resume=True, on_change="warn", **change)
    assert int(changed.state.step) == 12
    contract = Checkpoints(tmp_path).contract(12)
    (record,) = contract["run"]["changes"]
    assert (record["step"], record["survives"]) == (10, "none" if "seed" in change else "keys")
    assert [entry["setting"] for entry in record["settings"]] == [
        line.split(":")[0].strip() for line in str(found[0].message).split("\n") if line.startswith("    ")
    ]
    # What was let pass is the run from now on, and the record of it stays.
    again = fit(13, tmp_path, resume=True, **change)
    assert again.iterations == 1
    assert Checkpoints(tmp_path).contract(13)["run"]["changes"] == [record]


def test_another_seed_that_is_let_pass_draws_from_its_own_streams(tmp_path):
    old = fit(10, tmp_path)
    with pytest.warns(UserWarning, match="this is another run"):
        changed = fit(15, tmp_path, seed=1, resume=True, on_change="warn")
    own = HEAT.state(1)
    assert_trees_bitwise_equal(changed.state.sampling_key, own.sampling_key)
    assert changed.seed == 1
    loop = HEAT.loop()
    started = own.replace(
        model_state=old.state.model_state,
        optimizer_state=old.state.optimizer_state,
        step=old.state.step,
    )
    expected = loop.run(loop.place(started), 15, HEAT.source(1)).state
    assert_trees_bitwise_equal(changed.state, expected)


@pytest.fixture
def without_contract(tmp_path):
    """A run of seed 0 that was saved by hand at step 5, without a contract."""
    with Checkpoints(tmp_path / "run", asynchronous=False) as checkpoints:
        checkpoints.save(HEAT.run(5))
    return tmp_path / "run"


def test_a_checkpoint_without_a_contract_is_continued_with_its_seed(without_contract):
    with pytest.raises(ValueError, match=r"^seed=None takes the checkpoint's seed, and this checkpoint"):
        fit(7, without_contract, seed=None, resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = fit(7, without_contract, seed=0, resume=True)
    assert_trees_bitwise_equal(resumed.state, HEAT.run(7))
    recorded = Checkpoints(without_contract).contract(7)
    assert recorded["keys"]["root"] == shown_keys(0)["root"]
    assert recorded["run"]["changes"] == []


STREAMS_OF_ANOTHER_SEED = "resuming at step 5 changes the run:\n  this is another run:\n" + "\n".join(
    f"    keys.{name}: {shown_keys(0)[name]} in the checkpoint, {shown_keys(1)[name]} in this run"
    for name in ("sampling", "balancer")
)


def test_a_checkpoint_without_a_contract_is_not_continued_with_another_seed(without_contract):
    with pytest.raises(RunChangedError, match=f"^{re.escape(STREAMS_OF_ANOTHER_SEED)}\nUndo the change"):
        fit(7, without_contract, seed=1, resume=True)
    assert steps(without_contract) == (5,)


def test_another_seed_on_a_checkpoint_without_a_contract_is_warned_of_and_recorded(without_contract):
    with pytest.warns(UserWarning, match=f"^{re.escape(STREAMS_OF_ANOTHER_SEED)}"):
        resumed = fit(7, without_contract, seed=1, resume=True, on_change="warn")
    contract = Checkpoints(without_contract).contract(7)
    assert contract["keys"]["sampling"] == keys.fingerprint(resumed.state.sampling_key)
    assert contract["keys"]["sampling"] == shown_keys(1)["sampling"]
    (change,) = contract["run"]["changes"]
    assert (change["step"], change["survives"]) == (5, "none")


@pytest.mark.parametrize("name", mostly_full(["rows", "box", "space-time"], everyday=["box"]))
def test_every_kind_of_sampler_resumes_without_a_word(tmp_path, name):
    rows = {"inputs": np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2)}
    sampler = {
        "rows": RandomRowSampler(rows, replace=False, sort_axis=1),
        "box": UniformDomainSampler([(0.0, 0.6), (-1.7, 1.7)], sort_axis=0),
        "space-time": SpaceTimeSampler(rows, (0.1, 0.3), time_axis=1),
    }[name]
    module = LossModule(
        lambda key: {"w": jnp.zeros(2)},
        lambda params, batches: {"fit": jnp.mean((batches["data"]["inputs"] - params["w"]) ** 2)},
        batch_keys=("data",),
    )

    problem = _problems.Problem(module, _fit.Samplers({"data": sampler}, {"data": 4}), optax.sgd(0.1))
    fit(3, tmp_path, problem=problem)
    assert_trees_bitwise_equal(
        fit(6, tmp_path, problem=problem, resume=True).state, fit(6, problem=problem).state
    )


# Hooks and faults


class Hooked:
    """A data module that writes down what is called."""

    def __init__(self):
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def train_batch_source(self, batch_keys, key):
        self.calls.append(f"source {batch_keys}")
        return HEAT.datamodule.train_batch_source(batch_keys, key)

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")


HOOKS = ["prepare_data", "setup fit", "source ('initial', 'boundary', 'pde')", "teardown fit"]


def test_hooks_are_called_in_order(tmp_path):
    data = Hooked()
    fit(3, problem=dataclasses.replace(HEAT, datamodule=data))
    assert data.calls == HOOKS
    data = Hooked()
    trainer = Trainer(3, progress=False)
    trainer.fit_state(HEAT.module, HEAT.state(), optimizer=HEAT.optimizer, datamodule=data)
    assert data.calls == HOOKS


class BrokenModelError(Exception):
    pass


def _broken_losses(params, batches):
    raise BrokenModelError("no such layer")


def test_an_error_of_the_losses_tears_down_and_leaves_no_checkpoint(tmp_path):
    data = Hooked()
    module = dataclasses.replace(HEAT.module, losses=_broken_losses)
    broken = dataclasses.replace(HEAT, module=module, datamodule=data)
    with pytest.raises(BrokenModelError, match=r"^no such layer"):
        fit(3, tmp_path / "run", problem=broken)
    assert data.calls == HOOKS
    assert steps(tmp_path / "run") == ()
    assert fit(3, tmp_path / "run").iterations == 3


def test_an_error_of_the_losses_on_a_resume_leaves_the_run_as_it_was(tmp_path):
    fit(10, tmp_path)
    module = dataclasses.replace(HEAT.module, losses=_broken_losses)
    with pytest.raises(BrokenModelError):
        fit(20, tmp_path, problem=dataclasses.replace(HEAT, module=module), resume=True)
    assert steps(tmp_path) == (10,)
    assert_trees_bitwise_equal(fit(20, tmp_path, resume=True).state, HEAT.run(20))


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "train_batch_source"])
def test_an_error_of_a_hook_surfaces_and_leaves_no_checkpoint(tmp_path, monkeypatch, hook):
    def broken(self, *arguments):
        raise BrokenModelError(hook)

    monkeypatch.setattr(Hooked, hook, broken)
    with pytest.raises(BrokenModelError, match=f"^{hook}$"):
        fit(3, tmp_path / "run", problem=dataclasses.replace(HEAT, datamodule=Hooked()))
    assert steps(tmp_path / "run") == ()


def _diverging_losses(params, batches):
    # Grows past the largest float within a few updates.
    return {"fit": jnp.sum(params["w"] ** 2)}


DIVERGING = _problems.Problem(
    LossModule(lambda key: {"w": jnp.ones(2)}, _diverging_losses, batch_keys=("data",)),
    PoolDataModule({"data": HostPool(np.zeros((2, 1), np.float32))}, {"data": 1}),
    optax.sgd(1e6),
)


def test_a_run_that_becomes_non_finite_keeps_the_last_good_state(tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        fit(30, tmp_path, problem=DIVERGING)
    last = caught.value.step
    assert 1 < last < 10
    assert steps(tmp_path) == (last,)
    restored = Checkpoints(tmp_path).restore(DIVERGING.state())
    assert_trees_bitwise_equal(restored, DIVERGING.run(last))
    assert np.isfinite(restored.model_state["w"]).all()
    with pytest.raises(NonFiniteError, match=f"at step {last}: "):
        fit(30, tmp_path, problem=DIVERGING, resume="auto")


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_a_run_that_goes_on_says_once_that_it_is_non_finite(caplog, policy):
    with pytest.raises(NonFiniteError) as caught:
        fit(30, problem=DIVERGING)
    result = fit(30, problem=DIVERGING, trainer={"on_nonfinite": policy, "chunk_size": 4})
    assert result.iterations == 30
    assert [record.getMessage() for record in caplog.records] == [
        f"training became non-finite at step {caught.value.step} (fit) and continues, as on_nonfinite says; "
        f"its batch is source({caught.value.step})"
    ]
    assert np.isfinite(result.state.model_state["w"]).all() == (policy == "skip")


class Planted:
    """The heat problem's batches on the host, with a NaN in the PDE points of one step."""

    def __init__(self, step):
        self.step = step

    def train_batch_source(self, batch_keys, key):
        source = HEAT.datamodule.train_batch_source(batch_keys, key)

        def batches(step):
            drawn = source(step)
            if step == self.step:
                points = np.array(drawn["pde"]["inputs"])
                points[3, 0] = np.nan
                drawn["pde"] = {**drawn["pde"], "inputs": points}
            return drawn

        return batches


def test_a_nan_planted_at_step_137_is_reported_with_its_term_and_drawn_again(tmp_path):
    datamodule = Planted(137)
    planted = dataclasses.replace(HEAT, datamodule=datamodule)
    with pytest.raises(NonFiniteError) as caught:
        fit(300, tmp_path, problem=planted, trainer={"log_every_n_steps": 100})
    error = caught.value
    assert (error.step, error.terms, int(error.state.step)) == (137, ("pde",), 137)
    assert str(error).startswith("training became non-finite at step 137: 'pde' is nan, and the ")
    assert "model_state['hidden']['kernel']" in error.leaves
    assert steps(tmp_path) == (137,)
    # The lines of the report, as users run them.
    lines = error.__notes__[-1].split("\n")
    assert lines[0] == "to draw the batch of step 137 again, and its losses one by one:"
    names = {"error": error, "datamodule": datamodule, "module": HEAT.module, "phijax_rng": phijax_rng}
    exec("\n".join(line.strip() for line in lines[1:]), names)
    assert np.isnan(names["batches"]["pde"]["inputs"]).sum() == 1
    values = {name: float(value) for name, value in names["output"].losses.items()}
    assert [name for name, value in values.items() if np.isnan(value)] == ["pde"]
    # Fixed, the saved run continues to the bits of one without the fault.
    fixed = dataclasses.replace(HEAT, datamodule=Planted(None))
    with pytest.warns(UserWarning, match="canary"):  # the batch of step 137 has changed
        resumed = fit(150, tmp_path, problem=fixed, resume="auto", on_change="warn")
    assert_trees_bitwise_equal(resumed.state, fit(150, problem=fixed).state)


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_a_run_that_goes_on_says_step_and_term(caplog, policy):
    planted = dataclasses.replace(HEAT, datamodule=Planted(5))
    fit(8, problem=planted, trainer={"on_nonfinite": policy})
    assert [record.getMessage() for record in caplog.records] == [
        "training became non-finite at step 5 (pde) and continues, as on_nonfinite says; "
        "its batch is source(5)"
    ]


def test_a_save_that_fails_is_raised_and_the_one_before_it_stands(tmp_path, monkeypatch):
    fit(10, tmp_path)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("os.rename", "os.replace", "pathlib.Path.rename", "pathlib.Path.replace"):
            patch.setattr(name, full)
        trainer = Trainer(20, checkpoints=Checkpoints(tmp_path), progress=False)
        with pytest.raises(SaveError, match=r"^step 20 could not be saved .*No space left") as caught:
            trainer.fit(HEAT.module, seed=0, resume=True, **HEAT.arguments)
    assert steps(tmp_path) == (10,)
    assert_trees_bitwise_equal(caught.value.state, HEAT.run(20))
    assert_trees_bitwise_equal(fit(20, tmp_path, resume="auto").state, HEAT.run(20))


# Signals


class Signalling(Silent):
    """A display that sends signals to its own process when it is shown a step."""

    def __init__(self, at, *numbers):
        self.at = at
        self.numbers = numbers

    def show(self, step, metrics):
        if step == self.at:
            for number in self.numbers:
                signal.raise_signal(number)


def signalled(monkeypatch, tmp_path, at, *numbers, **options):
    display = Signalling(at, *numbers)
    monkeypatch.setattr("phijax_rng.trainer.trainer.make_progress", lambda *_: display)
    try:
        return fit(20, tmp_path, trainer={"chunk_size": 1, **options}, saves={"every_n_steps": 5})
    finally:
        monkeypatch.undo()


def test_sigint_stops_at_the_next_look_saves_and_returns(monkeypatch, tmp_path):
    result = signalled(monkeypatch, tmp_path, 7, signal.SIGINT)
    assert (result.iterations, result.interrupted, result.stopped_early) == (7, True, False)
    assert steps(tmp_path) == (5, 7)
    assert_trees_bitwise_equal(result.state, HEAT.run(7))
    resumed = fit(20, tmp_path, resume="auto")
    assert (resumed.iterations, resumed.interrupted) == (13, False)
    assert_trees_bitwise_equal(resumed.state, HEAT.run(20))


def test_sigterm_saves_and_leaves_with_143(monkeypatch, tmp_path):
    with pytest.raises(SystemExit) as caught:
        signalled(monkeypatch, tmp_path, 7, signal.SIGTERM)
    assert caught.value.code == 143
    assert steps(tmp_path) == (5, 7)
    assert_trees_bitwise_equal(fit(20, tmp_path, resume="auto").state, HEAT.run(20))


def test_sigterm_returns_where_it_is_asked_to(monkeypatch, tmp_path):
    result = signalled(monkeypatch, tmp_path, 7, signal.SIGTERM, on_sigterm="return")
    assert (result.iterations, result.interrupted) == (7, True)
    assert steps(tmp_path) == (5, 7)


def test_a_second_sigint_names_the_save_that_stands(monkeypatch, tmp_path):
    message = f"interrupted twice: the newest checkpoint is step 5 in {tmp_path}"
    with pytest.raises(KeyboardInterrupt, match=f"^{re.escape(message)}$"):
        signalled(monkeypatch, tmp_path, 7, signal.SIGINT, signal.SIGINT)
    assert 5 in steps(tmp_path)
    assert_trees_bitwise_equal(fit(20, tmp_path, resume="auto").state, HEAT.run(20))


def test_a_second_sigint_ends_a_run_that_a_sigterm_stops(monkeypatch, tmp_path):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted twice: the newest checkpoint is step 5 in "):
        signalled(monkeypatch, tmp_path, 7, *numbers)
    assert_trees_bitwise_equal(fit(20, tmp_path, resume="auto").state, HEAT.run(20))


@pytest.mark.parametrize("number", mostly_full([signal.SIGINT, signal.SIGTERM], everyday=[signal.SIGTERM]))
def test_a_signal_during_compilation_saves_at_once_and_updates_nothing(monkeypatch, tmp_path, number):
    compile_, saved_before = jax.stages.Lowered.compile, []

    def slow(self, *arguments, **options):
        if not saved_before:
            signal.raise_signal(number)
            end = time.monotonic() + 60
            while steps(tmp_path) != (0,) and time.monotonic() < end:
                time.sleep(0.01)
            saved_before.append(steps(tmp_path))
        return compile_(self, *arguments, **options)

    monkeypatch.setattr("phijax_rng.training.compile_cache._programs", collections.OrderedDict())
    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    stopped = fit(20, tmp_path, trainer={"on_sigterm": "return"})
    monkeypatch.undo()
    assert saved_before == [(0,)]
    assert (stopped.iterations, stopped.interrupted) == (0, True)
    assert_trees_bitwise_equal(Checkpoints(tmp_path).restore(HEAT.state()), HEAT.state(), dict_order=False)
    assert_trees_bitwise_equal(fit(20, tmp_path, resume="auto").state, HEAT.run(20))


class SignallingData:
    """A data module that is sent a signal while it makes ready."""

    def __init__(self, data):
        self.data = data

    def setup(self, stage):
        signal.raise_signal(signal.SIGINT)

    def train_batch_source(self, batch_keys, key):
        return self.data.train_batch_source(batch_keys, key)


def test_a_signal_before_the_first_update_saves_a_fresh_run_at_step_0(tmp_path):
    early = dataclasses.replace(HEAT, datamodule=SignallingData(HEAT.datamodule))
    stopped = fit(20, tmp_path, problem=early)
    assert (stopped.iterations, stopped.interrupted) == (0, True)
    assert steps(tmp_path) == (0,)
    assert_trees_bitwise_equal(fit(20, tmp_path, resume="auto").state, HEAT.run(20))


def test_a_signal_before_the_first_update_lets_no_change_pass_unnoticed(tmp_path):
    fit(5, tmp_path / "old")
    pools = dict(HEAT.datamodule.pools)
    rows = np.asarray(pools["boundary"].inputs) + np.float32(0.25)
    changed = PoolDataModule(pools | {"boundary": HostPool(rows)}, HEAT.datamodule.batch_sizes)
    words = {"ckpt_path": tmp_path / "old", "resume": "auto"}
    early = dataclasses.replace(HEAT, datamodule=SignallingData(changed))
    with contextlib.suppress(RunChangedError):
        fit(10, tmp_path / "new", problem=early, **words)
    # With and without the signal before: the pool is not the one that the old run drew from.
    for folder in ("control", "new"):
        with pytest.raises(RunChangedError, match=r"contents\.boundary"):
            fit(10, tmp_path / folder, problem=dataclasses.replace(HEAT, datamodule=changed), **words)


def test_a_signal_at_the_last_step_interrupts_nothing(monkeypatch, tmp_path):
    result = signalled(monkeypatch, tmp_path, 20, signal.SIGINT)
    assert (result.iterations, result.interrupted, result.stopped_early) == (20, False, False)


def test_handlers_of_the_caller_are_back_after_a_fit():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    fit(3)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_fit_outside_the_main_thread_gives_the_same_bits(tmp_path):
    results = []
    settings = (jax.config.jax_debug_key_reuse,)

    def run():
        with jax.debug_key_reuse(*settings):
            results.append(fit(20, tmp_path))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert_trees_bitwise_equal(results[0].state, HEAT.run(20))
    assert steps(tmp_path) == (20,)


# fit_state


def test_fit_state_with_an_optimizer_equals_fit(tmp_path):
    state = HEAT.state()
    before = jax.tree.map(lambda leaf: leaf if keys.is_typed_key(leaf) else np.array(leaf), state)
    checkpoints = Checkpoints(tmp_path)
    result = Trainer(20, checkpoints=checkpoints, progress=False).fit_state(
        HEAT.module, state, **HEAT.arguments
    )
    assert_trees_bitwise_equal(result.state, fit(20).state)
    assert result.seed is None
    assert_trees_bitwise_equal(state, before)
    again = Trainer(25, checkpoints=checkpoints, progress=False).fit_state(
        HEAT.module, state, resume=True, **HEAT.arguments
    )
    assert again.iterations == 5
    assert_trees_bitwise_equal(again.state, HEAT.run(25))


def test_fit_state_goes_on_from_the_step_of_its_state():
    halfway = HEAT.run(12)
    result = Trainer(20, progress=False).fit_state(
        HEAT.module, halfway, optimizer=HEAT.optimizer, source=HEAT.source()
    )
    assert result.iterations == 8
    assert_trees_bitwise_equal(result.state, HEAT.run(20))


def test_fit_state_is_not_continued_with_a_source_of_another_key(tmp_path):
    def run(stop, source, **words):
        trainer = Trainer(stop, checkpoints=Checkpoints(tmp_path), progress=False)
        return trainer.fit_state(HEAT.module, HEAT.state(), optimizer=HEAT.optimizer, source=source, **words)

    run(5, HEAT.source(0))
    with pytest.raises(RunChangedError):
        run(10, HEAT.source(1), resume=True)
    assert_trees_bitwise_equal(run(10, HEAT.source(0), resume=True).state, HEAT.run(10))


def _plan(state, batches, key):
    """A training plan of one's own: a signed step with a decaying rate."""

    def loss(model_state):
        return jnp.mean((batches["data"]["inputs"] @ model_state["w"] - 1) ** 2)

    value, grad = jax.value_and_grad(loss)(state.model_state)
    rate = 0.1 / (1 + state.step.astype(jnp.float32))
    model_state = jax.tree.map(lambda w, g: w - rate * jnp.sign(g), state.model_state, grad)
    return state.replace(model_state=model_state, step=state.step + 1), {"mine": value}


def test_fit_state_with_a_custom_train_step_saves_and_resumes(tmp_path):
    problem = _problems.dropout()
    start = problem.state().replace(model_state={"w": jnp.array([0.3, -0.2])})
    options = {"train_step": _plan, "source": problem.source()}

    def run(stop, folder, **words):
        trainer = Trainer(stop, checkpoints=Checkpoints(folder), progress=False, log_every_n_steps=1)
        return trainer.fit_state("my plan", start, **options, **words)

    whole = run(20, tmp_path / "whole")
    assert whole.module == "my plan"
    assert list(whole.metrics) == ["mine"]
    assert len({entry["mine"] for entry in whole.history}) > 10
    run(9, tmp_path / "cut")
    assert_trees_bitwise_equal(run(20, tmp_path / "cut", resume=True).state, whole.state)


def test_fit_state_with_the_usual_train_step_equals_fit():
    train_step = LossTrainStep(HEAT.module, HEAT.optimizer)
    result = Trainer(10, progress=False).fit_state(
        HEAT.module, HEAT.state(), train_step=train_step, datamodule=HEAT.datamodule
    )
    assert_trees_bitwise_equal(result.state, HEAT.run(10))


# Arguments


def _untraced(*arguments):
    raise AssertionError("traced")


UNTRACED = LossModule(_untraced, _untraced, batch_keys=("data",))
FIT = {"module": UNTRACED, "datamodule": HEAT.datamodule, "optimizer": HEAT.optimizer, "seed": 0}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"module": 5},
            TypeError,
            "module must be a LossModule, got 5. Build one: LossModule(init, losses, batch_keys=...).",
        ),
        (
            {"datamodule": 5},
            TypeError,
            "datamodule must offer train_batch_source(batch_keys, key), got 5. Use PoolDataModule.",
        ),
        (
            {"optimizer": 5},
            TypeError,
            "optimizer must offer init and update, got 5. Pass an Optax optimizer.",
        ),
        (
            {"balancer": 5},
            TypeError,
            "balancer must be a LossBalancer, got 5, which has no loss_names, no initialize, no combine, "
            "no diagnostics. Add what is missing, or use StaticLossBalancer.",
        ),
        (
            {"on_change": "ask"},
            ValueError,
            "on_change must be one of 'error', 'warn', got 'ask'. Pick one of them.",
        ),
        (
            {"resume": "yes"},
            ValueError,
            "resume must be one of False, True, 'auto', 'best', got 'yes'. Pick one of them.",
        ),
        (
            {"seed": -1},
            ValueError,
            "seed must be in [0, 2**64), got -1. "
            "Pick a non-negative integer, or pass a key made by jax.random.key.",
        ),
        (
            {"seed": 2**64},
            ValueError,
            f"seed must be in [0, 2**64), got {2**64}. "
            "Pick a non-negative integer, or pass a key made by jax.random.key.",
        ),
        (
            {"seed": True},
            TypeError,
            "seed must be a whole number, got True. "
            "Pick a non-negative integer, or pass a key made by jax.random.key.",
        ),
        (
            {"seed": "3"},
            TypeError,
            "seed must be a whole number, got '3'. "
            "Pick a non-negative integer, or pass a key made by jax.random.key.",
        ),
    ],
)
def test_arguments_of_fit_are_refused_before_anything_is_traced(change, error, message):
    arguments = FIT | change
    with pytest.raises(error, match=f"^{re.escape(message)}$"), _problems.compilations() as compiled:
        Trainer(5, progress=False).fit(arguments.pop("module"), **arguments)
    assert compiled == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"state": {"w": np.zeros(3)}},
            "state must be a TrainState, got {'w': float64[3]}. Use initialize_train_state.",
        ),
        ({"optimizer": None}, "pass one of optimizer and train_step, got neither."),
        ({"train_step": _plan}, "pass one of optimizer and train_step, got both."),
        ({"source": HEAT.source()}, "pass one of datamodule and source, got both."),
        ({"datamodule": None}, "pass one of datamodule and source, got neither."),
        (
            {"module": 5},
            "module must be a LossModule, got 5. Build one: LossModule(init, losses, batch_keys=...).",
        ),
    ],
)
def test_arguments_of_fit_state_are_refused_before_anything_is_traced(change, message):
    arguments = {
        "module": UNTRACED,
        "state": HEAT.state(),
        "optimizer": HEAT.optimizer,
        "datamodule": HEAT.datamodule,
    } | change
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        Trainer(5, progress=False).fit_state(arguments.pop("module"), arguments.pop("state"), **arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"max_steps": -1},
            ValueError,
            "max_steps must be in [0, 2**31), got -1. A step counts completed optimizer updates.",
        ),
        (
            {"max_steps": 2**31},
            ValueError,
            "max_steps must be in [0, 2**31), got 2147483648. A step counts completed optimizer updates.",
        ),
        (
            {"max_steps": 1.5},
            TypeError,
            "max_steps must be a whole number, got 1.5. A step counts completed optimizer updates.",
        ),
        (
            {"log_every_n_steps": 0},
            ValueError,
            "log_every_n_steps must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        (
            {"chunk_size": 0},
            ValueError,
            "chunk_size must be in [1, 2**31), got 0. Pick a number inside the range.",
        ),
        ({"progress": 1}, TypeError, "progress must be True or False, got 1. Pass a bool."),
        (
            {"on_nonfinite": "stop"},
            ValueError,
            "on_nonfinite must be one of 'raise', 'skip', 'ignore', got 'stop'. Pick one of them.",
        ),
        (
            {"on_sigterm": "die"},
            ValueError,
            "on_sigterm must be one of 'exit', 'return', got 'die'. Pick one of them.",
        ),
        (
            {"checkpoints": "runs"},
            TypeError,
            "checkpoints must be a Checkpoints or None, got 'runs'. Pass Checkpoints(directory).",
        ),
    ],
)
def test_options_of_the_trainer_are_checked_at_construction(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Trainer(**{"max_steps": 5} | options)


def test_a_state_with_two_key_implementations_is_refused():
    with pytest.raises(ValueError, match="implementation"):
        initialize_train_state(
            {},
            HEAT.optimizer,
            {},
            jax.random.key(0),
            sampling_key=jax.random.key(0, impl="rbg"),
            balancer_key=jax.random.key(1),
        )


# Globals


def test_global_generators_are_neither_read_nor_written(tmp_path):
    # In a process of its own: the checker of annotations draws from Python's generator.
    run_python(
        """
        import pathlib, random, sys
        import numpy as np
        from phijax_rng import Checkpoints, Trainer
        from tests import _fit, _problems
        from tests._bitwise import assert_trees_bitwise_equal

        problem = _problems.dropout()
        ends = []
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            python, numpy = random.getstate(), np.random.get_state()
            checkpoints = Checkpoints(pathlib.Path(sys.argv[1], str(seed)), every_n_steps=4)
            trainer = Trainer(10, checkpoints=checkpoints)
            ends.append(trainer.fit(problem.module, seed=0, **problem.arguments).state)
            assert random.getstate() == python
            assert_trees_bitwise_equal(np.random.get_state(), numpy)
        assert_trees_bitwise_equal(ends[1], ends[0])
        """,
        tmp_path,
    )


def test_the_trainer_sets_no_process_wide_option(tmp_path):
    before = dict(jax.config.values)
    levels = [logging.getLogger(name).level for name in (None, "phijax_rng", "jax", "absl")]
    fit(5, tmp_path)
    assert dict(jax.config.values) == before
    assert [logging.getLogger(name).level for name in (None, "phijax_rng", "jax", "absl")] == levels
