"""Errors of the file system, raised at chosen calls below one folder."""

import contextlib
import errno
import io
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from phijax_rng.checkpoints import stored_leaves

CODES = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ENOSPC, errno.ETIMEDOUT)
READS = ("os.stat", "os.listdir", "io.open", "arrays")
WRITES = ("os.rename", "os.mkdir", "os.replace", "io.open")


class Hiccups:
    """Counts the calls below a folder, and raises at those from `first` on, `count` of them.

    TensorStore reads the arrays; its errors are `ValueError`s with the code in the text, below one of Orbax.
    """

    def __init__(self, folder: pathlib.Path, first: int, count: float, code: int):
        self.folder, self.first, self.count, self.code = str(folder), first, count, code
        self.calls = 0

    def __call__(self, path: object) -> bool:
        if not isinstance(path, (str, os.PathLike)) or not str(path).startswith(self.folder):
            return False
        self.calls += 1
        return self.first <= self.calls < self.first + self.count

    @contextlib.contextmanager
    def at(self, names: tuple[str, ...]) -> Iterator["Hiccups"]:
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                if name == "arrays":
                    patch.setattr(stored_leaves, "read_arrays", self._arrays(stored_leaves.read_arrays))
                else:
                    module, _, function = name.partition(".")
                    of = {"os": os, "io": io}[module]
                    patch.setattr(of, function, self._system(getattr(of, function)))
            yield self

    def _system(self, real: Any) -> Any:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if self(path):
                raise OSError(self.code, os.strerror(self.code), str(path))
            return real(path, *arguments, **options)

        return call

    def _arrays(self, real: Any) -> Any:
        def call(path: pathlib.Path, parts: Any) -> Any:
            if self(path):
                why = f"{os.strerror(self.code)} [os_error_code='{self.code}']"
                text = f'UNKNOWN: Error reading "{path}": {why}'
                raise Exception("Encountered error while reading array index") from ValueError(text)
            return real(path, parts)

        return call
