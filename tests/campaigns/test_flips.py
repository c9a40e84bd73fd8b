"""Two hundred random single-bit flips: every restore is exact or falls back by name."""

import collections
import os

import numpy as np
import pytest

from tests._bitwise import first_difference
from tests.faults import _damage
from tests.faults.test_damage import _restored

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

FLIPS = int(os.environ.get("PHIJAX_RNG_FLIPS", "200"))
# All of them, with 1, take hours.
STRIDE = int(os.environ.get("PHIJAX_RNG_FLIP_STRIDE", "11"))


def test_no_flip_restores_a_wrong_state(tmp_path):
    _damage.save_all(tmp_path / "good")
    rng = np.random.Generator(np.random.PCG64(1))
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(FLIPS):
        folder = _damage.fresh_copy(tmp_path / "good", tmp_path / "run")
        what = _damage.flip_one_bit(folder, rng)
        state, step, told = _damage.restore_after(folder)
        assert step is not None, (what, told)
        assert first_difference(state, _restored(step)) is None, what
        assert step == _damage.STEPS[-1] or told, what
        outcomes["exact" if step == _damage.STEPS[-1] else "fell back by name"] += 1
    print(f"{FLIPS} flips: {dict(outcomes)}")


def test_no_bit_of_any_file_restores_a_wrong_state(tmp_path, monkeypatch):
    """Every bit of every file of the newest step, or every so-manieth."""
    monkeypatch.setattr("phijax_rng.checkpoints.directory._PAUSES", (0.0,) * 3)
    _damage.save_all(tmp_path)
    outcomes: collections.Counter[str] = collections.Counter()
    for path in sorted(path for path in (tmp_path / "30").rglob("*") if path.is_file()):
        good = path.read_bytes()
        for place in range(0, 8 * len(good), STRIDE):
            data = bytearray(good)
            data[place // 8] ^= 1 << place % 8
            path.write_bytes(data)
            state, step, told = _damage.restore_after(tmp_path)
            assert step is not None, (path, place, told)
            assert first_difference(state, _restored(step)) is None, (path, place)
            outcomes["exact" if step == _damage.STEPS[-1] else "fell back by name"] += 1
        path.write_bytes(good)
    print(f"{sum(outcomes.values())} flips: {dict(outcomes)}")
