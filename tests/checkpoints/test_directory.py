"""Which folders are steps, of which run each is, and what stands in their place."""

import json
import os
import re
import shutil

import jax
import pytest

from phijax_rng import Checkpoints
from phijax_rng.checkpoints import document, stored_leaves
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError
from tests._bitwise import assert_trees_bitwise_equal
from tests.faults import _damage

LIKE = _damage.state_at(0)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    _damage.save_all(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path, monkeypatch):
    monkeypatch.setattr("phijax_rng.checkpoints.directory._PAUSES", (0.0,) * 3)
    return _damage.fresh_copy(good, tmp_path / "run")


def restored(step):
    return jax.tree.map(jax.numpy.asarray, _damage.state_at(step))


def save_other_run(path, steps):
    with Checkpoints(path, asynchronous=False, max_to_keep=None) as checkpoints:
        before = None
        for step in steps:
            state = _damage.state_at(step + 1).replace(step=jax.numpy.int32(step))
            checkpoints.save(state, {"run": {"id": "two", "parent_step": before}})
            before = step
    return path


def edit(folder, step, change):
    """Changes the document of a step, and seals it again."""
    path = folder / str(step) / document.DOCUMENT / document.DOCUMENT_FILE
    contents = json.loads(path.read_text())["contract"]
    change(contents)
    path.write_text(json.dumps(document.dumps(contents)))


def test_a_renamed_step_is_told_and_passed_over(folder):
    (folder / "10").rename(folder / "40")
    message = (
        f"^step 40 in {re.escape(str(folder))} is step 10 of a run, in a folder that was renamed or copied"
    )
    for read in (lambda c: c.restore(LIKE, 40), lambda c: c.contract(40), lambda c: c.memory()):
        with pytest.raises(DamagedCheckpointError, match=message):
            read(Checkpoints(folder))
    state, step, told = _damage.restore_after(folder)
    assert step == 30
    assert told[0].startswith("checkpoint at step 40 is damaged, going back to step 30: step 40 in ")
    assert_trees_bitwise_equal(state, restored(30))


@pytest.mark.parametrize("copied", [10, 30, 40])
def test_a_step_of_another_run_stops_the_resume(folder, tmp_path, copied):
    other = save_other_run(tmp_path / "other", (10, 20, 30, 40))
    shutil.rmtree(folder / str(copied), ignore_errors=True)
    shutil.copytree(other / str(copied), folder / str(copied))
    before = sorted(path for path in folder.rglob("*"))
    message = f"^{re.escape(str(folder))} has steps of two runs: step .* of run (one|two), step "
    with pytest.raises(CheckpointMismatchError, match=message):
        Checkpoints(folder).restore_intact(LIKE)
    assert sorted(path for path in folder.rglob("*")) == before


def test_a_step_of_a_branch_that_was_left_is_passed_over(folder):
    with Checkpoints(folder, asynchronous=False, max_to_keep=None) as checkpoints:
        checkpoints.supersede_after(10)
        state = restored(21).replace(step=jax.numpy.int32(20))
        checkpoints.save(state, {"run": {"id": "one", "parent_step": 10}})
    (folder / "superseded" / "30-0").rename(folder / "30")
    found, step, told = _damage.restore_after(folder)
    assert step == 20
    assert "does not continue the step 20 that is there" in told[0]
    assert_trees_bitwise_equal(found, state)


def test_a_step_of_a_newer_version_stops_the_resume(folder):
    edit(folder, 30, lambda contents: contents.update(schema=document.SCHEMA + 1))
    message = (
        f"step 30 in {folder} was written by a newer version of phijax_rng, with schema 3; "
        "this version reads 1 to 2. Update phijax_rng, or name an older step."
    )
    for read in (lambda c: c.restore_intact(LIKE), lambda c: c.contract(), lambda c: c.readable_contract()):
        with pytest.raises(CheckpointMismatchError, match=f"^{re.escape(message)}$"):
            read(Checkpoints(folder))
    assert_trees_bitwise_equal(Checkpoints(folder).restore(LIKE, 20), restored(20))


def test_steps_without_the_fields_of_this_version_are_restored(folder):
    for step in _damage.STEPS:
        edit(folder, step, lambda contents: [contents.pop(name) for name in ("step", "parent")])
    assert_trees_bitwise_equal(Checkpoints(folder).restore(LIKE), restored(30))


def test_names_of_superseded_steps_never_collide(folder):
    (folder / "superseded" / "30-1").mkdir(parents=True)
    (folder / "superseded" / "30-0").symlink_to(folder / "nowhere")
    assert Checkpoints(folder).supersede_after(20) == [30]
    assert (folder / "superseded" / "30-2" / "document").is_dir()


def test_links_are_followed_and_their_targets_stay(folder, tmp_path):
    (folder / "20").rename(tmp_path / "elsewhere")
    (folder / "20").symlink_to(tmp_path / "elsewhere")
    (folder / "50").symlink_to(folder / "nowhere")
    (folder / "60").symlink_to(folder / "60")
    assert Checkpoints(folder).steps == (10, 20, 30)
    assert_trees_bitwise_equal(Checkpoints(folder).restore(LIKE, 20), restored(20))
    with Checkpoints(folder, asynchronous=False, max_to_keep=1) as checkpoints:
        checkpoints.save(restored(40))
    assert checkpoints.steps == (40,)
    assert (tmp_path / "elsewhere" / "document").is_dir()


def test_what_stands_in_the_place_of_a_step_is_named(folder):
    (folder / "40").mkdir()
    with Checkpoints(folder, asynchronous=False) as checkpoints:
        with pytest.raises(OSError, match=r"40 is there, and is no step that phijax_rng wrote; move it"):
            checkpoints.save(restored(40))
        assert checkpoints.steps == (10, 20, 30)


def test_a_step_that_goes_away_while_it_is_read_is_looked_up_again(folder, monkeypatch):
    real, saved = stored_leaves.read_arrays, []

    def beside_a_writer(path, parts):
        if not saved:
            saved.append(path)
            with Checkpoints(folder, asynchronous=False, max_to_keep=1) as writer:
                writer.save(restored(40), {"run": {"id": "one", "parent_step": 30}})
        return real(path, parts)

    monkeypatch.setattr(stored_leaves, "read_arrays", beside_a_writer)
    state, step, told = _damage.restore_after(folder)
    assert (step, told, [path.parent.name for path in saved]) == (40, [], ["30"])
    assert_trees_bitwise_equal(state, restored(40))
    saved.clear()
    with pytest.raises(FileNotFoundError, match=r"^no checkpoint at step 40 in .*; there are steps 50\. "):
        monkeypatch.setattr(
            stored_leaves, "read_arrays", lambda path, parts: os.rename(path.parent, folder / "50")
        )
        Checkpoints(folder).restore(LIKE, 40)


KINDS = {
    "w.npy": (b"\x93NUMPY\x01", "a file of NumPy or Equinox"),
    "w.msgpack": (b"\x81\xa6params\x80", "a MessagePack file, as Flax writes them"),
    "w.pkl": (b"\x80\x04\x95", "a pickle"),
    "w.h5": (b"\x89HDF\r\n", "an HDF5 file"),
    "w.safetensors": (b"\x40" + bytes(7) + b'{"a"', "a safetensors file"),
    "old.pt": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a file of PyTorch"),
}


@pytest.mark.parametrize(("name", "head", "kind"), [(name, *known) for name, known in KINDS.items()])
def test_files_of_other_programs_are_told(tmp_path, name, head, kind):
    path = tmp_path / name
    path.write_bytes(head)
    message = (
        f"^{re.escape(str(path))} is {kind}, and not the directory of a run of phijax_rng. Load it with "
    )
    with pytest.raises(NotADirectoryError, match=message):
        Checkpoints(path).restore(LIKE)
    message = (
        f"^{re.escape(str(tmp_path))} has no checkpoint of phijax_rng; {name} is {kind}. Check the path.$"
    )
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoints(tmp_path).restore(LIKE)


def test_archives_are_told_by_what_is_in_them(tmp_path):
    import zipfile

    for name, member, kind in (
        ("w.pt", "w/data.pkl", "a file of PyTorch"),
        ("w.npz", "a.npy", "an archive of"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, b"")
        with pytest.raises(NotADirectoryError, match=f" is {kind}"):
            Checkpoints(tmp_path / name).restore(LIKE)


def test_a_checkpoint_of_orbax_and_a_step_are_told(folder, tmp_path):
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as plain:
        plain.save(tmp_path / "plain", {"a": jax.numpy.ones(3)})
    with pytest.raises(FileNotFoundError, match="has checkpoints of Orbax that phijax_rng did not write"):
        Checkpoints(tmp_path / "plain").restore(LIKE)
    with pytest.raises(
        FileNotFoundError, match=f"30 is one step of a run. Pass {re.escape(str(folder))}, and"
    ):
        Checkpoints(folder / "30").restore(LIKE)
