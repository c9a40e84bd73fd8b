"""The folder of a save that is not complete, and the moment at which it becomes a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity

# Of `etils.epath`, by which Orbax opens paths: for it `/gs/bucket` is `gs://bucket`.
_ROOTS_OF_BUCKETS = ("gs", "s3", "az", "hf")


def require_local(directory: Path) -> None:
    """Raises a `ValueError` for an absolute path that Orbax would take for the address of a bucket."""
    if directory.parts[0] == "/" and directory.parts[1:2] and directory.parts[1] in _ROOTS_OF_BUCKETS:
        root = directory.parts[1]
        raise ValueError(
            f"directory must not be below /{root}, which Orbax takes for {root}://, got {str(directory)!r}. "
            "Pass another name of it, such as a link or another mount point."
        )


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
