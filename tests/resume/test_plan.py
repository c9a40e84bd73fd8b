import itertools
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from phijax_rng import Checkpoints, TrainState, keys
from phijax_rng.errors import DamagedCheckpointError, RunExistsError
from phijax_rng.resume.plan import Resume, ResumePlan, make_plan
from tests._bitwise import assert_trees_bitwise_equal


def state_at(step):
    key = jax.random.key(0)
    return TrainState({"w": jnp.full(2, float(step))}, (), {}, key, key, key, jnp.int32(step))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An empty directory, the trainer's own run and another one; nothing here writes into them."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("own", (10, 20)), ("other", (5, 7))):
        rule = {"every_n_steps": 5, "max_to_keep": None, "keep_best": ("loss", 1)}
        with Checkpoints(folder / name, asynchronous=False, **rule) as checkpoints:
            for step in steps:
                contract = {"keys": {"root": f"threefry2x32:0-{step}"}}
                checkpoints.save(state_at(step), contract, {"metrics": {"loss": float(step)}})
    (folder / "own" / "superseded").mkdir()
    return folder


def planned(runs, directory, **options):
    """The plan for these options, with paths by their names."""
    checkpoints = None if directory is None else Checkpoints(runs / directory)
    path = options.get("ckpt_path")
    if path in ("own", "other", "empty", "absent"):
        options["ckpt_path"] = runs / path
    return make_plan(checkpoints, Resume(**options))


def outline(plan: ResumePlan):
    """The fields of a plan; a step only where the options name one."""
    directory = None if plan.checkpoints is None else plan.checkpoints.directory.name
    return directory, plan.step, plan.weights_only, plan.is_own_run, plan.continues


FRESH = (None, None, False, False, False)


@pytest.mark.parametrize(
    ("directory", "options", "expected"),
    [
        (None, {}, FRESH),
        ("absent", {}, FRESH),
        ("absent", {"resume": "auto"}, FRESH),
        ("own", {"resume": "auto"}, ("own", None, False, True, True)),
        ("own", {"resume": True}, ("own", None, False, True, True)),
        ("own", {"ckpt_path": "last"}, ("own", None, False, True, True)),
        ("own", {"resume": True, "ckpt_path": "last"}, ("own", None, False, True, True)),
        ("own", {"resume": True, "ckpt_step": 10}, ("own", 10, False, True, True)),
        ("own", {"ckpt_path": "last", "ckpt_step": 10}, ("own", 10, False, True, True)),
        ("own", {"resume": "best"}, ("own", 10, False, True, True)),
        ("own", {"resume": "best", "ckpt_path": "own"}, ("own", 10, False, True, True)),
        ("own", {"resume": True, "ckpt_step": "best"}, ("own", 10, False, True, True)),
        (None, {"ckpt_path": "other", "ckpt_step": "best"}, ("other", 5, False, False, True)),
        (
            "absent",
            {"ckpt_path": "other", "ckpt_step": "best", "weights_only": True},
            ("other", 5, True, False, False),
        ),
        ("own", {"ckpt_path": "own"}, ("own", None, False, True, True)),
        ("own", {"ckpt_path": "own", "ckpt_step": 10}, ("own", 10, False, True, True)),
        ("own", {"resume": "auto", "ckpt_path": "own"}, ("own", None, False, True, True)),
        (None, {"ckpt_path": "other"}, ("other", None, False, False, True)),
        ("absent", {"ckpt_path": "other"}, ("other", None, False, False, True)),
        ("absent", {"ckpt_path": "other", "ckpt_step": 5}, ("other", 5, False, False, True)),
        (None, {"ckpt_path": "other", "weights_only": True}, ("other", None, True, False, False)),
        ("absent", {"ckpt_path": "other", "weights_only": True}, ("other", None, True, False, False)),
        (
            "absent",
            {"ckpt_path": "other", "ckpt_step": 5, "weights_only": True},
            ("other", 5, True, False, False),
        ),
        ("absent", {"resume": "auto", "ckpt_path": "other"}, ("other", None, False, False, True)),
        (
            "absent",
            {"resume": "auto", "ckpt_path": "other", "ckpt_step": 5},
            ("other", 5, False, False, True),
        ),
        (
            "absent",
            {"resume": "auto", "ckpt_path": "other", "weights_only": True},
            ("other", None, True, False, False),
        ),
        # A run that was started from another one and killed continues its own.
        ("own", {"resume": "auto", "ckpt_path": "other"}, ("own", None, False, True, True)),
        ("own", {"resume": "auto", "ckpt_path": "other", "ckpt_step": 5}, ("own", None, False, True, True)),
        (
            "own",
            {"resume": "auto", "ckpt_path": "other", "weights_only": True},
            ("own", None, False, True, True),
        ),
        ("own", {"resume": "auto", "ckpt_path": "absent"}, ("own", None, False, True, True)),
    ],
)
def test_a_run_starts_where_its_options_say(runs, directory, options, expected):
    assert outline(planned(runs, directory, **options)) == expected


@pytest.mark.parametrize(
    ("directory", "options", "error", "message"),
    [
        (
            "own",
            {},
            RunExistsError,
            "{runs}/own has a run at step 20, and this call would start a fresh one. "
            "Pass resume='auto' to continue it, another directory to keep both, or delete it.",
        ),
        (
            "own",
            {"ckpt_path": "other"},
            RunExistsError,
            "{runs}/own has a run at step 20, and this call would start another one from {runs}/other. "
            "Pass resume='auto' to continue it, another directory to keep both, or delete it.",
        ),
        (
            "own",
            {"ckpt_path": "other", "weights_only": True},
            RunExistsError,
            "{runs}/own has a run at step 20, and this call would start another one from {runs}/other. "
            "Pass resume='auto' to continue it, another directory to keep both, or delete it.",
        ),
        (
            None,
            {"resume": True},
            ValueError,
            "resume=True needs a directory to continue from; the trainer has checkpoints=None. "
            "Pass Trainer(..., checkpoints=Checkpoints(directory)).",
        ),
        (
            None,
            {"resume": "auto"},
            ValueError,
            "resume='auto' needs a directory to continue from; the trainer has checkpoints=None. "
            "Pass Trainer(..., checkpoints=Checkpoints(directory)).",
        ),
        (
            None,
            {"resume": "auto", "ckpt_path": "other"},
            ValueError,
            "resume='auto' needs a directory to continue from; the trainer has checkpoints=None. "
            "Pass Trainer(..., checkpoints=Checkpoints(directory)).",
        ),
        (
            "own",
            {"resume": True, "ckpt_path": "other"},
            ValueError,
            "resume=True continues this trainer's run and ckpt_path='{runs}/other' names another. "
            "Pass resume='auto' to start from the other run and continue this one from then on.",
        ),
        (
            "own",
            {"resume": "auto", "ckpt_path": "last"},
            ValueError,
            "ckpt_path='last' needs a checkpoint and resume='auto' works without one; "
            "they contradict each other. Pass one of them.",
        ),
        (
            "own",
            {"resume": "best", "ckpt_path": "last"},
            ValueError,
            "ckpt_path='last' names the newest step and resume='best' another. Pass one of them.",
        ),
        (
            "own",
            {"resume": "best", "ckpt_path": "other"},
            ValueError,
            "resume='best' continues this trainer's run and ckpt_path='{runs}/other' names another. "
            "Pass resume='auto' to start from the other run and continue this one from then on.\n"
            "Add ckpt_step='best' for the other's best step.",
        ),
        (
            "own",
            {"resume": "best", "ckpt_step": 10},
            ValueError,
            "resume='best' goes back to the best step and ckpt_step=10 names one too. Pass one of them.",
        ),
        (
            "own",
            {"resume": True, "ckpt_step": "newest"},
            ValueError,
            "ckpt_step must be one of 'best', got 'newest'. Pick one of them.",
        ),
        (
            "absent",
            {"resume": "best"},
            FileNotFoundError,
            "no checkpoint in {runs}/absent. Check the path, or start a fresh run.",
        ),
        (
            "own",
            {"resume": "auto", "ckpt_step": 10},
            ValueError,
            "resume='auto' continues from the newest step and ckpt_step=10 names another. "
            "Pass resume=True to go back to that step.",
        ),
        (
            "own",
            {"resume": "auto", "ckpt_path": "own", "ckpt_step": 10},
            ValueError,
            "resume='auto' continues from the newest step and ckpt_step=10 names another. "
            "Pass resume=True to go back to that step.",
        ),
        (
            "absent",
            {"ckpt_step": 10},
            ValueError,
            "ckpt_step=10 needs a run. Pass resume=True or ckpt_path too.",
        ),
        (
            "absent",
            {"weights_only": True},
            ValueError,
            "weights_only=True needs the root of another run to take the weights from. Pass ckpt_path.",
        ),
        (
            "own",
            {"resume": True, "weights_only": True},
            ValueError,
            "weights_only=True needs the root of another run to take the weights from. Pass ckpt_path.",
        ),
        (
            "own",
            {"resume": "auto", "weights_only": True},
            ValueError,
            "weights_only=True needs the root of another run to take the weights from. Pass ckpt_path.",
        ),
        (
            "own",
            {"ckpt_path": "own", "weights_only": True},
            ValueError,
            "weights_only=True needs the root of another run to take the weights from. Pass ckpt_path.",
        ),
        (
            "own",
            {"ckpt_path": "last", "weights_only": True},
            ValueError,
            "weights_only=True needs the root of another run to take the weights from. Pass ckpt_path.",
        ),
        (
            "absent",
            {"resume": True},
            FileNotFoundError,
            "no checkpoint in {runs}/absent. Check the path, or start a fresh run.",
        ),
        (
            "absent",
            {"ckpt_path": "last"},
            FileNotFoundError,
            "no checkpoint in {runs}/absent. Check the path, or start a fresh run.",
        ),
        (
            None,
            {"ckpt_path": "absent"},
            FileNotFoundError,
            "no checkpoint in {runs}/absent. Check the path, or start a fresh run.",
        ),
        (
            "own",
            {"resume": True, "ckpt_step": 11},
            FileNotFoundError,
            "no checkpoint at step 11 in {runs}/own; there are steps 10, 20. Pick one of them.",
        ),
        (
            None,
            {"ckpt_path": "other", "ckpt_step": 10},
            FileNotFoundError,
            "no checkpoint at step 10 in {runs}/other; there are steps 5, 7. Pick one of them.",
        ),
        (
            "own",
            {"resume": True, "ckpt_step": True},
            TypeError,
            "step must be a whole number, got True. A step counts completed optimizer updates.",
        ),
        (
            None,
            {"ckpt_path": 5},
            TypeError,
            "ckpt_path must be a path or 'last', got 5. Pass the root of a run.",
        ),
        (
            "own",
            {"resume": "always"},
            ValueError,
            "resume must be one of False, True, 'auto', 'best', got 'always'. Pick one of them.",
        ),
        (
            "own",
            {"resume": 1},
            ValueError,
            "resume must be one of False, True, 'auto', 'best', got 1. Pick one of them.",
        ),
        (
            "own",
            {"resume": None},
            ValueError,
            "resume must be one of False, True, 'auto', 'best', got None. Pick one of them.",
        ),
        (
            "own",
            {"weights_only": "yes"},
            TypeError,
            "weights_only must be True or False, got 'yes'. Pass a bool.",
        ),
    ],
)
def test_options_that_contradict_each_other_raise(runs, directory, options, error, message):
    with pytest.raises(error) as caught:
        planned(runs, directory, **options)
    assert type(caught.value) is error
    assert str(caught.value) == message.format(runs=runs)


def test_every_combination_of_options_gives_a_plan_or_raises_a_message_of_ours(runs):
    outcomes = set()
    for directory, resume, path, step, weights_only in itertools.product(
        (None, "absent", "own"),
        (False, True, "auto"),
        (None, "last", "own", "other"),
        (None, 5, 10),
        (False, True),
    ):
        options = {"resume": resume, "ckpt_path": path, "ckpt_step": step, "weights_only": weights_only}
        try:
            outcomes.add(outline(planned(runs, directory, **options)))
        except (ValueError, FileNotFoundError) as error:
            assert re.search(r"(Pass|Check|Pick) [^.]*.*\.$", str(error)), options
            outcomes.add(type(error).__name__)
    assert {"ValueError", "FileNotFoundError", "RunExistsError", FRESH} < outcomes


def test_deciding_writes_nothing(runs):
    before = sorted(runs.rglob("*"))
    for options in ({"resume": "auto"}, {"ckpt_path": "other"}):
        planned(runs, "absent", **options)
    assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize("spelling", ["{runs}/./own", "{runs}/other/../own", "{link}"])
def test_the_own_directory_is_known_by_any_spelling(runs, tmp_path, spelling):
    (tmp_path / "link").symlink_to(runs / "own")
    path = spelling.format(runs=runs, link=tmp_path / "link")
    assert outline(planned(runs, "own", ckpt_path=path)) == ("own", None, False, True, True)


def test_a_folder_named_last_is_named_by_a_path(runs, tmp_path, monkeypatch):
    (tmp_path / "last").symlink_to(runs / "other")
    monkeypatch.chdir(tmp_path)
    for path in (Path("last"), "./last"):
        assert outline(planned(runs, None, ckpt_path=path)) == ("last", None, False, False, True)


# What a start gives


def test_a_fresh_start_gives_what_it_was_given():
    fresh = state_at(0)
    restored = ResumePlan().restore(fresh)
    assert restored.state is fresh
    assert (restored.contract, restored.step) == ({}, None)


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"resume": True}, 20),
        ({"resume": True, "ckpt_step": 10}, 10),
        ({"resume": "auto"}, 20),
    ],
    ids=["newest", "named", "auto"],
)
def test_a_start_gives_state_contract_and_root_of_one_step(runs, options, step):
    start = planned(runs, "own", **options)
    restored = start.restore(state_at(0))
    assert_trees_bitwise_equal(restored.state, state_at(step))
    assert restored.step == step
    assert restored.contract == {"keys": {"root": f"threefry2x32:0-{step}"}}
    assert keys.fingerprint(start.root()) == f"threefry2x32:0-{step}"


def test_a_warm_start_gives_the_weights_and_its_own_fresh_rest(runs):
    fresh = state_at(0)
    restored = planned(runs, None, ckpt_path="other", weights_only=True).restore(fresh)
    assert_trees_bitwise_equal(restored.state, fresh.replace(model_state=state_at(7).model_state))
    assert restored.step == 7


@pytest.fixture
def damaged(runs, tmp_path):
    """The own run, its newest step without its model state."""
    folder = tmp_path / "own"
    shutil.copytree(runs / "own", folder)
    shutil.rmtree(folder / "20" / "state")
    return folder


DAMAGED_READ = pytest.mark.filterwarnings(
    # Orbax leaves coroutines unawaited when a read fails half-way.
    "ignore::RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@DAMAGED_READ
def test_without_a_named_step_a_damaged_one_is_passed_over(damaged):
    start = make_plan(Checkpoints(damaged), Resume(True))
    with pytest.warns(UserWarning, match="checkpoint at step 20 is damaged, going back to step 10"):
        restored = start.restore(state_at(0))
    assert_trees_bitwise_equal(restored.state, state_at(10))
    assert (restored.step, restored.contract["keys"]["root"]) == (10, "threefry2x32:0-10")


@DAMAGED_READ
def test_a_named_step_must_be_intact(damaged):
    start = make_plan(Checkpoints(damaged), Resume(True, ckpt_step=20))
    with pytest.raises(DamagedCheckpointError, match=r"^the arrays of step 20 in "):
        start.restore(state_at(0))


@pytest.mark.parametrize("contract", [None, {}, {"keys": {"root": None}}])
def test_a_root_that_is_not_recorded_is_asked_for(tmp_path, contract):
    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(state_at(3), contract)
    message = "seed=None takes the checkpoint's seed, and this checkpoint records none. Pass the seed."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_plan(Checkpoints(tmp_path), Resume(True)).root()
