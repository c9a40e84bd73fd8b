"""Balancers, adaptive samplers and callbacks: eight devices and two processes give what one device gives."""

import ast
import json
import tempfile

import numpy as np
import pytest

from tests import _devices, _pair
from tests._bitwise import assert_trees_bitwise_equal

pytestmark = pytest.mark.full


def on_one_and_on_eight():
    """Both problems on one device and on eight, and resumed on eight; the results as JSON."""
    found = {}
    for kind in ("gradnorm", "ntk"):
        for count in (1, 8):
            options = {"devices": count, "progress": False}
            result, checkpoints = _devices.watched_fit(kind, 40, folder=tempfile.mkdtemp(), **options)
            saved = {"best": checkpoints.best_step, "on disk": checkpoints.steps}
            found[f"{kind} {count}"] = {**_devices.summary(result), **saved}
            if count == 8:
                folder = tempfile.mkdtemp()
                _devices.watched_fit(kind, 6, folder=folder, **options)
                again, checkpoints = _devices.watched_fit(kind, 40, folder=folder, **options)
                assert_trees_bitwise_equal(again.state, result.state)
                assert again.history == result.history
                assert {"best": checkpoints.best_step, "on disk": checkpoints.steps} == saved
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(in_eight):
    return json.loads(in_eight(on_one_and_on_eight))


def require_alike(one, other):
    """Equal steps, stops and saves; numbers equal within rounding."""
    for name in ("steps", "iterations", "stopped", "best", "on disk"):
        assert one[name] == other[name], name
    for name in ("distances", "weights"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4)
    for leaf, wanted in zip(one["model"], other["model"], strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["gradnorm", "ntk"])
def test_a_run_with_callbacks_on_eight_devices_equals_that_on_one(found, kind):
    require_alike(found[f"{kind} 8"], found[f"{kind} 1"])
    assert found[f"{kind} 1"]["stopped"] and found[f"{kind} 1"]["iterations"] < 40
    assert not np.allclose(found[f"{kind} 1"]["weights"], 1, rtol=1e-3), "the weights moved"
    with pytest.raises(AssertionError):
        require_alike(found["gradnorm 8"], found["ntk 1"])


def test_two_processes_write_one_log(found, tmp_path):
    first, second = (output.splitlines() for output in _pair.run_pair(_pair.watched, tmp_path))
    assert first == second, "both processes have the same memory and results"
    together, memories, digests = json.loads(first[0]), json.loads(first[1]), ast.literal_eval(first[2])
    assert digests[0] == digests[1], "a resumed run has the bits of the uninterrupted run"
    require_alike(together, found["gradnorm 1"])
    assert {"EarlyStopping/evaluation/distance", "WandbLogger"} < {*memories[-1]["callbacks"]}
    table = (tmp_path / "whole" / "history.csv").read_text()
    for name, fits in (("whole", 1), ("again", 2)):
        folder = tmp_path / name
        assert (folder / "history.csv").read_text() == table
        assert len(list((folder / "events").iterdir())) == fits, "one writer"
        assert [path.name for path in folder.glob("board-*")] == ["board-0"], "one writer"
        # A resumed fit logs the last row of the fit before it again; dashboards ignore the repetition.
        logged = [int(line.split()[0]) for line in (folder / "board-0").read_text().splitlines()]
        assert sorted({*logged}) == together["steps"] and len(logged) == len(together["steps"]) + fits - 1
    assert [int(row.split(",")[0]) for row in table.splitlines()[1:]] == together["steps"]
