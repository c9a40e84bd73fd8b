"""The compiled loop has the program it had: a changed text may move the last bits of what is trained."""

import json
from pathlib import Path

import jax
import pytest

from tests._subprocess import EIGHT_DEVICES, run_python

PINNED = json.loads(Path(__file__).with_name("programs.json").read_text(encoding="utf-8"))


@pytest.mark.full  # on both versions of JAX in .ci/run
@pytest.mark.skipif(jax.__version__ not in PINNED, reason="programs are pinned for each version of JAX")
def test_the_heat_problem_has_the_program_it_had():
    printed = run_python(
        "import runpy; runpy.run_module('tests._programs', run_name='__main__')", env=EIGHT_DEVICES
    )
    found = json.loads(printed.stdout.splitlines()[-1])
    assert found == {jax.__version__: PINNED[jax.__version__]}
    # Four programs and not one: the digests do tell them apart.
    assert len(set(found[jax.__version__].values())) == 4
