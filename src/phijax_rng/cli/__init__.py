"""The command `phijax-rng`: what each command finds is an object, for Python and for `--json`."""

from phijax_rng._base.exports import publish
from phijax_rng.cli.commands import main
from phijax_rng.cli.doctor import Diagnosis, diagnose
from phijax_rng.cli.inspection import RunSummary, SavedStep, inspect_run
from phijax_rng.cli.key_tree import KeyNode, key_tree

__all__ = [
    "Diagnosis",
    "KeyNode",
    "RunSummary",
    "SavedStep",
    "diagnose",
    "inspect_run",
    "key_tree",
    "main",
]

publish(globals())
