"""The command line: useful output or one line, never a traceback, and nothing written but by `clean`."""

import json
import shutil

import numpy as np
import pytest

from phijax_rng import Checkpoints, keys
from phijax_rng.cli import main
from tests._subprocess import run_python
from tests.replay.test_compare import EVERY, POOL, STOP, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    train(folder)
    train(folder, resume=True, ckpt_step=EVERY)
    return folder


def called(capsys, *arguments):
    """Status, output and errors of a command."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return status, captured.out, captured.err


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_inspect_shows_a_run_and_writes_nothing(run, capsys):
    before = files(run)
    status, text, _ = called(capsys, "inspect", run)
    assert status == 0
    assert "loss 2.25 at step 1 |" in text or "at step 1 |" in text
    assert text.count("intact") == STOP // EVERY
    assert f"superseded: {', '.join(sorted(p.name for p in (run / 'superseded').iterdir()))}" in text
    assert files(run) == before
    status, text, _ = called(capsys, "inspect", run, "--json", "--verify", "--step", 8)
    found = json.loads(text)
    assert (found["intact"], found["verified"]) == (True, True)
    assert [step["step"] for step in found["steps"]] == list(range(EVERY, STOP + 1, EVERY))
    assert found["keys"]["sampling"] == keys.fingerprint(keys.split_root(0).sampling)
    assert [row[0] for row in found["losses"]] == list(range(1, 9))


def test_inspect_reads_a_run_that_trains(run, capsys):
    with Checkpoints(run) as owner:
        owner.lock()
        assert called(capsys, "inspect", run)[0] == 0


# Readers of Orbax that fail leave tasks behind.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_damage_is_named(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "8" / "document" / "document.json").write_text("{")
    status, text, _ = called(capsys, "inspect", tmp_path / "run")
    assert status == 1
    assert "the document of step 8" in text
    data = next((tmp_path / "run" / "12" / "state").rglob("d/*"))
    data.write_bytes(bytes(len(data.read_bytes())))
    status, text, _ = called(capsys, "inspect", tmp_path / "run", "--verify")
    assert (status, text.count("intact")) == (1, STOP // EVERY - 2)


def test_compare_has_three_statuses(run, tmp_path, capsys):
    train(tmp_path / "same")
    train(tmp_path / "other", seed=1)
    train(tmp_path / "short", 3, log=100, every=100)
    assert called(capsys, "compare", run, tmp_path / "same")[0] == 0
    status, text, _ = called(capsys, "compare", run, tmp_path / "other")
    assert status == 1
    assert text.splitlines()[-1] == "different at step 1: keys differ"
    assert called(capsys, "compare", run, tmp_path / "short")[0] == 2
    status, text, _ = called(capsys, "compare", run, tmp_path / "other", "--json")
    assert (status, json.loads(text)["cause"]) == (1, "keys")


def test_the_tree_has_the_keys_of_a_run(capsys):
    status, text, _ = called(capsys, "tree", 42, "--steps", 2, "--samplers", "pde", "walls", "--json")
    tree = json.loads(text)
    names = [child["name"] for child in tree["children"]]
    assert (status, names) == (0, ["model", "runtime", "sampling", "balancer"])
    sampling = keys.split_root(42).sampling
    step = tree["children"][2]["children"][1]
    assert step["fingerprint"] == keys.fingerprint(keys.step_key(sampling, 1))
    assert step["fingerprint"] != tree["children"][2]["children"][0]["fingerprint"]
    from phijax_rng import NamedBatchSource

    pools = {"pde": {"x": [1.0, 2.0]}, "walls": {"x": [1.0, 2.0]}}
    source = NamedBatchSource.from_pools(pools, {"pde": 1, "walls": 1}, sampling)
    drawn = {name: keys.fingerprint(key) for name, key in source.sampler_keys(1).items()}
    assert {child["name"]: child["fingerprint"] for child in step["children"]} == drawn
    assert "step 1" in called(capsys, "tree", 42)[1]


def test_doctor_looks_at_a_directory_and_leaves_nothing(tmp_path, capsys):
    status, text, _ = called(capsys, "doctor", tmp_path / "new", "--json")
    found = json.loads(text)
    assert (status, found["directory"]["lock"], found["advice"]) == (0, "works", [])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    status, text, _ = called(capsys, "doctor", tmp_path / "file")
    assert (status, "is a file; name a directory" in text) == (1, True)
    assert called(capsys, "doctor")[0] == 0


def test_clean_asks_first(run, tmp_path, capsys, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    left = tmp_path / "run" / "superseded"
    names = sorted(path.name for path in left.iterdir())
    monkeypatch.setattr("builtins.input", lambda question: "")
    status, text, _ = called(capsys, "clean", tmp_path / "run")
    assert (status, sorted(path.name for path in left.iterdir())) == (1, names)
    assert "nothing was deleted" in text
    with Checkpoints(tmp_path / "run") as owner:
        owner.lock()
        status, _, error = called(capsys, "clean", tmp_path / "run", "--yes")
        assert (status, "is in use by" in error) == (2, True)
    assert called(capsys, "clean", tmp_path / "run", "--yes")[0] == 0
    assert list(left.iterdir()) == []
    assert called(capsys, "inspect", tmp_path / "run", "--verify")[0] == 0
    assert called(capsys, "clean", tmp_path / "run")[0] == 0


def test_exec_sets_the_flags_and_runs_the_command():
    code = """
        import sys
        from phijax_rng.cli import main
        show = "import os; print(os.environ['XLA_FLAGS'])"
        main(["exec", "--deterministic", "--", sys.executable, "-c", show])
    """
    assert "--xla_gpu_exclude_nondeterministic_ops=true" in run_python(code, env={"XLA_FLAGS": ""}).stdout


MISTAKES = {
    "no such directory": (("inspect", "{tmp}/none"), "no checkpoint"),
    "an empty directory": (("inspect", "{tmp}"), "no checkpoint"),
    "no such step": (("inspect", "{run}", "--step", "7"), "no checkpoint at step 7"),
    "a negative step": (("inspect", "{run}", "--step", "-1"), "step must"),
    "a huge step": (("inspect", "{run}", "--step", "9" * 30), "step must"),
    "a file": (("inspect", __file__), "is not a directory"),
    "an address": (("inspect", "s3://bucket/run"), "must be in a file system"),
    "compare with nothing": (("compare", "{run}", "{tmp}"), "no checkpoint"),
    "a negative seed": (("tree", "-5"), "seed must"),
    "a seed out of range": (("tree", str(2**64)), "seed must"),
    "steps out of range": (("tree", "1", "--steps", "-1"), "steps must"),
    "too many steps": (("tree", "1", "--steps", "1000000"), "steps must"),
    "no command": (("exec", "--deterministic", "--"), "is no command"),
    "an unknown command": (("exec", "--deterministic", "--", "no-such-program"), "is no command"),
    "nothing to clean": (("clean", "{tmp}"), "no checkpoint"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(run, tmp_path, capsys, arguments, message):
    status, text, error = called(capsys, *(one.format(run=run, tmp=tmp_path) for one in arguments))
    assert (status, text) == (2, "")
    assert error.startswith("phijax-rng: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_package_does_not_load_the_command_line():
    code = """
        import sys
        import phijax_rng
        print([name for name in sys.modules if name.startswith(("phijax_rng.cli", "phijax_rng.replay"))])
    """
    assert run_python(code).stdout.strip() == "[]"


def test_numbers_that_are_not_finite_are_shown_and_are_json(tmp_path, capsys):
    pool = {"x": POOL["x"] * np.float32("nan")}
    train(tmp_path / "a", pool=pool, trainer={"on_nonfinite": "ignore"})
    train(tmp_path / "b", pool=pool, rate=0.2, trainer={"on_nonfinite": "ignore"})
    status, text, _ = called(capsys, "inspect", tmp_path / "a", "--json")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (status, found["losses"][0]) == (0, [1, "NaN"])
    assert f"|{'?' * STOP}|" in called(capsys, "inspect", tmp_path / "a")[1]
    # Equal bits of two programs are no proof that they are one.
    status, text, error = called(capsys, "compare", tmp_path / "a", tmp_path / "b")
    assert (status, error) == (0, "")
    assert text.splitlines()[-1] == f"equal to step {STOP}, although training differ"
