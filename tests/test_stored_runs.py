"""Runs saved by earlier versions restore to the same bits and resume to the same end, without a warning."""

import json
import warnings

import jax
import pytest

from phijax_rng import Checkpoints
from tests import _stored_runs
from tests._bitwise import assert_trees_bitwise_equal
from tests._selection import mostly_full
from tests._stored_runs import RUNS, SAVED, STORED

FIRST, LAST = SAVED
FILES = sorted(tuple(path.stem.split("-jax-")) for path in STORED.glob("*.zip"))
# Each run is a program of its own.
# The files of this JAX, which are compared to the bit; the others, up to rounding, are in `make test-full`.
_VERSION = max(version for _, version in FILES if version <= jax.__version__)
EVERYDAY = [file for file in FILES if file[0] in ("adaptive", "gradnorm", "static") and file[1] == _VERSION]
DIGESTS = json.loads((STORED / "digests.json").read_text(encoding="utf-8"))
# Another version, processor or number of cores may move the last bits of what is trained, no key and no row.
_MACHINE = ("versions.", "machine.")


@pytest.fixture(scope="module")
def fresh():
    """The state a run starts from, for the structure to restore into."""
    states = {}

    def state(run, directory):
        if run not in states:
            states[run] = RUNS[run].fit(directory).state
        return states[run]

    return state


@pytest.mark.parametrize(("run", "version"), mostly_full(FILES, everyday=EVERYDAY))
def test_a_stored_state_is_restored_bit_for_bit(run, version, tmp_path, fresh):
    like = fresh(run, tmp_path / "fresh")
    stored = Checkpoints(_stored_runs.unpack(run, version, tmp_path / "stored"))
    found = {str(step): digest(stored.restore(like, step)) for step in SAVED}
    assert found == DIGESTS[f"{run}-jax-{version}"]
    # The digest tells states apart.
    assert found[str(FIRST)] != found[str(LAST)]


@pytest.mark.parametrize(("run", "version"), mostly_full(FILES, everyday=EVERYDAY))
def test_a_stored_run_resumes_without_a_warning_and_ends_as_it_ended(run, version, tmp_path):
    directory = _stored_runs.unpack(run, version, tmp_path)
    last = Checkpoints(directory)
    contract, memory = last.contract(LAST), last.memory(LAST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = RUNS[run].fit(directory, resume=True, ckpt_step=FIRST)
    lines = [line.strip() for warning in caught for line in str(warning.message).splitlines()]
    changed = [line for line in lines if line[:1].islower() and not line.startswith(("resuming", "the "))]
    elsewhere = any(line.startswith(_MACHINE) for line in changed)
    others = [line for line in changed if not line.startswith(_MACHINE)]
    assert [line for line in others if not line.startswith("training.program")] == []
    assert others == [] or elsewhere
    assert (resumed.iterations, int(resumed.state.step)) == (LAST - FIRST, LAST)
    ended = last.restore(resumed.state, LAST)
    if elsewhere:
        return
    # Nothing about the machine differs: every bit of the state, the history and the memory is the stored one.
    stored = Checkpoints(_stored_runs.unpack(run, version, tmp_path / "again")).restore(resumed.state, LAST)
    assert_trees_bitwise_equal(ended, stored)
    assert_trees_bitwise_equal(resumed.state, stored)
    assert _known_to(memory, Checkpoints(directory).memory(LAST)) == memory
    assert Checkpoints(directory).contract(LAST)["canary"] == contract["canary"]


def test_this_version_of_jax_has_stored_runs_or_a_newer_one_than_they():
    versions = {tuple(map(int, version.split("."))) for _, version in FILES}
    assert min(versions) <= tuple(map(int, jax.__version__.split(".")[:3]))


def digest(state) -> str:
    """SHA-256 over path, dtype, shape and bits of every leaf, written here apart from the package's own."""
    import hashlib

    import numpy as np

    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        words = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        array = np.asarray(words)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def _known_to(stored, memory):
    """The part of a memory that the version of the stored one knew: no means, learning rates or wall time."""
    columns = [0, *(1 + memory["history"]["names"].index(name) for name in stored["history"]["names"])]
    rows = [[row[index] for index in columns] for row in memory["history"]["rows"]]
    known = {name: memory[name] for name in stored}
    return {**known, "history": {"names": stored["history"]["names"], "rows": rows}}
