"""The folder of a save that is not complete, and the moment at which it becomes a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity


def fenced_path(
    require_lock: Callable[[], None], save_number: Callable[[], int]
) -> type[atomicity.AtomicRenameTemporaryPath]:
    """Orbax's class that writes a folder and renames it to its name at the end.

    This one calls `require_lock` just before, and the unfinished folder has a name of its own: threads of a
    job that lost its lease may still write to theirs, when another job saves the same step.
    """

    class FencedPath(atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
        @classmethod
        def from_final(cls, final_path: Path, **options: Any) -> "FencedPath":
            name = f"{final_path.name}{atomicity.TMP_DIR_SUFFIX}-{save_number()}"
            return cls(final_path.parent / name, final_path, **options)

        def finalize(self, *args: Any, **options: Any) -> Any:
            require_lock()
            return super().finalize(*args, **options)

    return FencedPath
