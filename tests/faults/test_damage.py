import gc
import json
import re
import shutil

import numpy as np
import pytest

from phijax_rng import Checkpoints
from phijax_rng.errors import DamagedCheckpointError
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests.faults import _damage

# Orbax leaves coroutines unawaited when a read fails half-way.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _collected():
    """What Orbax left is collected here, where it is expected, and not in a later test."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """Between two attempts at a file."""
    monkeypatch.setattr("phijax_rng.checkpoints.directory._PAUSES", (0.0,) * 3)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    _damage.save_all(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return _damage.fresh_copy(good, tmp_path / "run")


def files_of(folder, step=30):
    return sorted(path for path in (folder / str(step)).rglob("*") if path.is_file())


def assert_exact_or_named(folder, what):
    state, step, told = _damage.restore_after(folder)
    assert step is not None, (what, told)
    assert_trees_bitwise_equal(state, _restored(step))
    if step != _damage.STEPS[-1]:
        assert told, what
        assert told[0].startswith("checkpoint at step 30 is damaged, going back to step 20: "), what


def _restored(step):
    """What an intact restore gives: every leaf a JAX array."""
    import jax

    return jax.tree.map(jax.numpy.asarray, _damage.state_at(step))


def test_an_intact_directory_gives_the_newest_step_without_a_word(folder):
    state, step, told = _damage.restore_after(folder)
    assert (step, told) == (30, [])
    assert_trees_bitwise_equal(state, _restored(30))
    assert first_difference(state, _restored(20)) is not None


def test_no_flipped_bit_restores_another_state(good, tmp_path):
    rng = np.random.Generator(np.random.PCG64(0))
    for _ in range(25):
        folder = _damage.fresh_copy(good, tmp_path / "run")
        assert_exact_or_named(folder, _damage.flip_one_bit(folder, rng))


@pytest.mark.parametrize("damage", ["truncated", "emptied", "deleted"])
def test_every_broken_file_is_survived_by_name(folder, tmp_path, damage):
    for index, path in enumerate(files_of(folder)):
        broken = _damage.fresh_copy(folder, tmp_path / f"broken-{index}") / path.relative_to(folder)
        if damage == "deleted":
            broken.unlink()
        else:
            broken.write_bytes(
                path.read_bytes()[: len(path.read_bytes()) // 2 if damage == "truncated" else 0]
            )
        assert_exact_or_named(tmp_path / f"broken-{index}", f"{path.name} {damage}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"parent_step": 20', '"parent_step": 21'),
        ('"parent_step"', '"qarent_step"'),
        ('"digests"', '"digestr"'),
    ],
    ids=["a value", "a name", "a name of ours"],
)
def test_an_edited_document_is_damage_and_never_a_changed_seed(folder, old, new):
    path = folder / "30" / "document" / "document.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    message = (
        f"the contract of step 30 in {folder} does not match its SHA-256: it was damaged or edited. "
        "Restore another step."
    )
    with pytest.raises(DamagedCheckpointError, match=re.escape(message)):
        Checkpoints(folder).restore(_damage.state_at(0), 30)
    assert_exact_or_named(folder, old)


def test_an_explicit_step_that_is_damaged_is_an_error(folder):
    for path in (folder / "30" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=f"^the arrays of step 30 in {re.escape(str(folder))} "):
        Checkpoints(folder).restore(_damage.state_at(0), 30)


def test_foreign_entries_are_ignored(folder):
    (folder / "notes.txt").write_text("40")
    (folder / "50").write_text("a file, not a step")
    (folder / "60.orbax-checkpoint-tmp-1").mkdir()
    (folder / "007").mkdir()
    (folder / "40").mkdir()
    (folder / "20241130").mkdir()
    (folder / "20241130" / "measured.csv").write_text("1,2")
    state, step, told = _damage.restore_after(folder)
    assert (step, told, Checkpoints(folder).steps) == (30, [], (10, 20, 30))
    assert_trees_bitwise_equal(state, _restored(30))


def test_a_directory_of_another_program_says_so(tmp_path):
    (tmp_path / "2024").mkdir()
    with pytest.raises(FileNotFoundError, match=r"^no checkpoint in "):
        Checkpoints(tmp_path).restore(_damage.state_at(0))


def test_a_file_in_place_of_the_directory_says_so(tmp_path):
    (tmp_path / "run").write_text("")
    message = f"{tmp_path / 'run'} is not a directory. Name another for this run."
    with pytest.raises(NotADirectoryError, match=re.escape(message)):
        Checkpoints(tmp_path / "run").restore(_damage.state_at(0))


def test_nothing_intact_names_every_step(folder):
    for step in (10, 20, 30):
        shutil.rmtree(folder / str(step) / "document")
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(DamagedCheckpointError) as error:
        Checkpoints(folder).restore_intact(_damage.state_at(0))
    assert str(error.value).startswith("no checkpoint is intact:\n  step 30 in ")
    assert str(error.value).count("\n  step ") == 3


def test_a_fall_back_follows_the_parent_chain(folder):
    # Step 30 says it came from 10: 20 belongs to a branch that was left.
    path = folder / "30" / "document" / "document.json"
    from phijax_rng.checkpoints.document import dumps

    document = json.loads(path.read_text())["contract"]
    document["contract"]["run"]["parent_step"] = 10
    path.write_text(json.dumps(dumps(document)))
    for array in (folder / "30" / "state").rglob("*"):
        if array.is_file():
            array.unlink()
    _, step, told = _damage.restore_after(folder)
    assert step == 10
    assert told[0].startswith("checkpoint at step 30 is damaged, going back to step 10: ")
