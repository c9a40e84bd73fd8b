"""Documents are read through one schema: what was edited and sealed again is named, or changes nothing."""

import copy
import json

import jax
import pytest

from phijax_rng import Checkpoints
from phijax_rng.checkpoints import document
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError
from tests._bitwise import first_difference
from tests.faults import _damage

LIKE = _damage.state_at(0)
MISSING = object()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    memory = {
        "metrics": {"loss": 0.5},
        "history": {"names": ["loss"], "rows": [[1, 0.5], [2, None]]},
        "callbacks": {},
    }
    contract = {
        "keys": {"root": "a:1"},
        "run": {"id": "one", "parent_step": 10, "origin": None, "changes": []},
    }
    with Checkpoints(folder, asynchronous=False, every_n_steps=1, keep_best=("loss", 1)) as checkpoints:
        checkpoints.save(_damage.state_at(10))
        checkpoints.save(_damage.state_at(20), contract, memory)
    return folder


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("phijax_rng.checkpoints.directory._PAUSES", (0.0,) * 3)


def places(value, path=()):
    """Every place in plain data; of a list the first two entries."""
    if path:
        yield path
    for name in value if isinstance(value, dict) else range(len(value[:2]) if isinstance(value, list) else 0):
        yield from places(value[name], (*path, name))


def changed(contents, path, value):
    edited = copy.deepcopy(contents)
    parent = edited
    for name in path[:-1]:
        parent = parent[name]
    if value is MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return edited


def test_every_edit_is_named_or_changes_nothing(folder):
    path = folder / "20" / document.DOCUMENT / document.DOCUMENT_FILE
    text = path.read_text()
    contents = json.loads(text)["contract"]
    right = jax.tree.map(jax.numpy.asarray, _damage.state_at(20))
    named = 0
    try:
        for place in places(contents):
            for value in (MISSING, None, 5, -1, True, "x", [], {}, [[]], 1.5):
                path.write_text(json.dumps(document.dumps(changed(contents, place, value))))
                reader = Checkpoints(folder)
                try:
                    found = reader.restored(LIKE, 20)
                    reader.best_step  # noqa: B018
                except (DamagedCheckpointError, CheckpointMismatchError) as error:
                    named += 1
                    assert f"step 20 in {folder}" in str(error) or "does not fit" in str(error), (
                        place,
                        value,
                    )
                else:
                    assert first_difference(found.state, right) is None, (place, value)
                    assert place[0] in ("contract", "memory", "parent", "step", "tables"), (place, value)
    finally:
        path.write_text(text)
    assert named > 300


@pytest.mark.parametrize(
    ("place", "value", "mistake"),
    [
        (("leaves",), MISSING, "leaves is missing"),
        (("leaves",), None, "leaves is null, not an object"),
        (("leaves", "rest"), MISSING, "leaves.rest is missing"),
        (("leaves", "rest", 0), ["a", "b"], "leaves.rest[0] is not a list of 3 entries"),
        (("leaves", "rest", 0, 2), [-1], "leaves.rest[0][2] has a negative size"),
        (("digests", "rest"), 5, "digests.rest is a whole number, not a text"),
        (("contract", "run"), "x", "contract.run is a text, not an object"),
        (("contract", "run", "parent_step"), "x", "contract.run.parent_step is a text, not a whole number"),
        (("memory", "metrics", "loss"), "x", "memory.metrics.loss is a text, not a whole number"),
        (
            ("memory", "history", "rows", 0),
            [1],
            "memory.history.rows has a row that is not a step and 1 numbers",
        ),
    ],
)
def test_the_mistake_is_named(folder, place, value, mistake):
    path = folder / "20" / document.DOCUMENT / document.DOCUMENT_FILE
    text = path.read_text()
    try:
        path.write_text(json.dumps(document.dumps(changed(json.loads(text)["contract"], place, value))))
        with pytest.raises(DamagedCheckpointError) as caught:
            Checkpoints(folder).contract(20)
        assert str(caught.value) == (
            f"the document of step 20 in {folder} was edited, or not written by phijax_rng: {mistake}. "
            "Restore another step."
        )
    finally:
        path.write_text(text)


def test_a_wrong_count_of_leaves_is_damage_and_no_other_model(folder):
    path = folder / "20" / document.DOCUMENT / document.DOCUMENT_FILE
    text = path.read_text()
    contents = json.loads(text)["contract"]
    contents["leaves"]["rest"].pop()
    try:
        path.write_text(json.dumps(document.dumps(contents)))
        with pytest.raises(DamagedCheckpointError, match=r"it lists 8 arrays in rest, and 9 are stored"):
            Checkpoints(folder).restore(LIKE, 20)
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("contract", "memory", "message"),
    [
        ({"run": 5}, {}, "contract.run is a whole number, not an object"),
        ({}, {"metrics": {"loss": "low"}}, "memory.metrics.loss is a text, not a whole number"),
    ],
)
def test_what_no_restore_could_read_is_not_saved(tmp_path, contract, memory, message):
    with pytest.raises(TypeError, match=message):
        Checkpoints(tmp_path / "run").save(LIKE, contract, memory)
    assert not (tmp_path / "run").exists()


def test_a_nested_document_is_damage(folder, tmp_path):
    run = _damage.fresh_copy(folder, tmp_path / "run")
    path = run / "20" / document.DOCUMENT / document.DOCUMENT_FILE
    for text in ("[" * 100_000, "\x00", '{"contract": 1e999, "sha256": 1}', "{}", ""):
        path.write_text(text)
        with pytest.raises(DamagedCheckpointError, match=r"^the (document|contract) of step 20 in "):
            Checkpoints(run).contract(20)
