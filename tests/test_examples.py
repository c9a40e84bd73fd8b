"""Every example runs from top to bottom and finds its own check fulfilled."""

from pathlib import Path

import pytest

from tests._selection import mostly_full
from tests._subprocess import ROOT, run_python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EVERYDAY = [ROOT / "examples" / "custom_loop.py"]

ENVIRONMENT = {
    "PHIJAX_RNG_EXAMPLE_FAST": "1",  # long examples shorten themselves
    "JAX_DEBUG_KEY_REUSE": "1",
}


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", mostly_full(EXAMPLES, everyday=EVERYDAY), ids=lambda path: path.stem)
def test_an_example_runs_and_fulfils_its_check(path: Path, tmp_path: Path) -> None:
    assert "assert " in path.read_text(encoding="utf-8"), f"{path.name} ends in no checked fact"
    run_python(path, env=ENVIRONMENT, cwd=tmp_path, timeout=900)
