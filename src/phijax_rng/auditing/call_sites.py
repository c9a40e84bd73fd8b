"""Lines of code, and who owns them.

A line is the user's if its file is neither part of JAX, of the standard library, of an installed package, nor
of this package. Without such a line, a report shows the innermost one outside of JAX.
"""

import dataclasses
import functools
import os
import site
import sysconfig
from types import CodeType
from typing import Any

import jax

_JAX = os.path.dirname(jax.__file__) + os.sep
# Frames in this folder are calls of `jax.random`. The folder is private; if JAX moves it, draws lose the name
# of their function, and `tests/auditing/test_call_sites.py` fails.
_JAX_RANDOM = os.path.join(_JAX, "_src", "random") + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(
    sorted({path + os.sep for path in (*site.getsitepackages(), sysconfig.get_path("stdlib"))})
)
# They wrap functions to check annotations; the caller is one frame further out.
_TRANSPARENT = tuple(f"{os.sep}{name}{os.sep}" for name in ("jaxtyping", "beartype"))
_AUDIT = os.path.join(_OWN, "auditing", "audit.py")
# The audit's own frames; `trainer/dry_run.py` is not among them, as its lines say what a run does.
_HIDDEN = tuple(
    os.path.join(_OWN, "auditing", name) for name in ("jax_hooks", "recorder.py", "session.py", "audit.py")
)


Frame = tuple[CodeType, int]
"""Code, and a line number or an offset into the code."""


@dataclasses.dataclass(frozen=True, order=True)
class Line:
    """A line of code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.number}" if self.file else self.function


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """The line of a call.

    Attributes:
        line: the innermost line of the user's code.
        through: the line of a library in between, if there is one.
        callers: the user's lines around it, innermost first; equality ignores them.
    """

    line: Line
    through: Line | None = None
    callers: tuple[Line, ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        return str(self.line) if self.through is None else f"{self.line} (through {self.through})"


NOWHERE = Place(Line("", 0, "an unknown line"))


def frames_of(equation: Any) -> list[Frame]:
    """Code and offset of each frame at the time an equation was traced, innermost first."""
    traceback = None if equation is None else equation.source_info.traceback
    return [] if traceback is None else list(zip(*traceback.raw_frames(), strict=True))


def read_frames(frames: list[Frame]) -> tuple[Place, str | None, Frame] | None:
    """The place, the function of `jax.random` it called, and its frame; `None` if all frames are JAX's."""
    through = function = None
    users: list[Frame] = []
    for code, offset in frames:
        owner = owner_of(code.co_filename)
        if owner == "hidden" and is_audit(code) and users:
            break
        if owner == "random" and through is None:
            function = code.co_name
        elif owner in ("own", "installed", "user"):
            through = through or (code, offset)
            if owner == "user":
                users.append((code, _line_number(code, offset)))
    if through is None:
        return None
    return place_of(users, (through[0], _line_number(*through))), function, through


def is_audit(code: CodeType) -> bool:
    """Whether a frame belongs to `audit`: the frames around it are not part of the audited code."""
    return bool(code.co_filename == _AUDIT)


def _line_number(code: CodeType, offset: int) -> int:
    # Offsets count bytes, and an instruction with its argument has two.
    positions = list(code.co_positions())
    line = positions[offset // 2][0] if offset // 2 < len(positions) else None
    return int(line or code.co_firstlineno)


def place_of(users: list[Frame], through: Frame | None) -> Place:
    """The place of these `(code, line)` pairs, innermost first."""
    if through is None:
        return NOWHERE
    lines = [Line(code.co_filename, number, code.co_name) for code, number in users or [through]]
    if not users or through[0] is users[0][0]:
        return Place(lines[0], None, tuple(lines[1:]))
    library = Line(through[0].co_filename, through[1], through[0].co_name)
    return Place(lines[0], library, tuple(lines[1:]))


# Every frame of every event asks, and a process has a few thousand files at most.
@functools.lru_cache(maxsize=4096)
def owner_of(file: str) -> str:
    """Who owns a file: user, own, installed, jax, random, hidden or transparent."""
    # "<stdin>", "<ipython-input-1>": code without a file is the user's.
    path = os.path.abspath(file) if not file.startswith("<") else file
    if path.startswith(_HIDDEN):
        return "hidden"
    if path.startswith("<@beartype") or any(name in path for name in _TRANSPARENT):
        return "transparent"
    if path.startswith(_JAX):
        return "random" if path.startswith(_JAX_RANDOM) else "jax"
    if path.startswith(_OWN):
        return "own"
    if path.startswith(_INSTALLED) or path.startswith("<frozen"):
        return "installed"
    return "user"


def library_of(place: Place) -> str | None:
    """The installed package of the innermost line; `None` for a line of the user or of this package."""
    if place.through is None or owner_of(place.through.file) != "installed":
        return None
    folder = max((path for path in _INSTALLED if place.through.file.startswith(path)), key=len, default="")
    return place.through.file[len(folder) :].split(os.sep)[0].removesuffix(".py")


def _short(file: str) -> str:
    relative = os.path.relpath(file) if file and not file.startswith("<") else file
    return file if relative.startswith("..") else relative
