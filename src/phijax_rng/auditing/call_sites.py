"""Lines of code, and whose they are.

A line is the user's if its file lies neither in JAX, nor in the standard library, nor among installed
packages, nor in this package. Where there is no such line, the innermost one outside of JAX is taken.
"""

import dataclasses
import functools
import os
import site
import sysconfig
from typing import Any

import jax

_JAX = os.path.dirname(jax.__file__) + os.sep
_JAX_RANDOM = os.path.join(_JAX, "_src", "random") + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(
    sorted({path + os.sep for path in (*site.getsitepackages(), sysconfig.get_path("stdlib"))})
)
# They wrap other functions, to check annotations; who asked lies further out.
_TRANSPARENT = tuple(f"{os.sep}{name}{os.sep}" for name in ("jaxtyping", "beartype"))
_AUDIT = os.path.join(_OWN, "auditing", "audit.py")
_HIDDEN = tuple(
    os.path.join(_OWN, "auditing", name) for name in ("jax_hooks", "recorder.py", "session.py", "audit.py")
)


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
    """Where something was asked for.

    Attributes:
        line: the innermost line of the user's code.
        through: the library line that did it, if it is another.
        callers: the user's lines around it, from the inside out; without influence on equality.
    """

    line: Line
    through: Line | None = None
    callers: tuple[Line, ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        return str(self.line) if self.through is None else f"{self.line} (through {self.through})"


NOWHERE = Place(Line("", 0, "an unknown line"))


def frames_of(equation: Any) -> list[tuple[Any, int]]:
    """Code and offset for each frame that was there when an equation was traced, from the inside out."""
    traceback = None if equation is None else equation.source_info.traceback
    return [] if traceback is None else list(zip(*traceback.raw_frames(), strict=True))


def read_frames(frames: list[tuple[Any, int]]) -> tuple[Place, str | None, Any] | None:
    """Who asked, the function of `jax.random` they called, and from where; `None` if all frames are JAX's."""
    through = function = None
    users: list[tuple[Any, int]] = []
    for code, offset in frames:
        room = room_of(code.co_filename)
        if room == "hidden" and is_audit(code) and users:
            break
        if room == "random" and through is None:
            function = code.co_name
        elif room in ("own", "installed", "user"):
            through = through or (code, offset)
            if room == "user":
                users.append((code, _line_number(code, offset)))
    if through is None:
        return None
    return place_of(users, (through[0], _line_number(*through))), function, through


def is_audit(code: Any) -> bool:
    """Whether a frame belongs to `audit` itself: what called it is not a caller of the audited code."""
    return bool(code.co_filename == _AUDIT)


def _line_number(code: Any, offset: int) -> int:
    positions = list(code.co_positions())
    line = positions[offset // 2][0] if offset // 2 < len(positions) else None
    return int(line or code.co_firstlineno)


def place_of(users: list[Any], through: Any) -> Place:
    """The place of these `(code, line)`s, from the inside out."""
    if through is None:
        return NOWHERE
    lines = [Line(code.co_filename, number, code.co_name) for code, number in users or [through]]
    if not users or through[0] is users[0][0]:
        return Place(lines[0], None, tuple(lines[1:]))
    library = Line(through[0].co_filename, through[1], through[0].co_name)
    return Place(lines[0], library, tuple(lines[1:]))


@functools.lru_cache(maxsize=4096)
def room_of(file: str) -> str:
    """Whose code a file is: user, own, installed, jax, random, hidden or transparent."""
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
    """The installed package whose line did it; `None` if that was a line of the user or of this package."""
    if place.through is None or room_of(place.through.file) != "installed":
        return None
    folder = max((path for path in _INSTALLED if place.through.file.startswith(path)), key=len, default="")
    return place.through.file[len(folder) :].split(os.sep)[0].removesuffix(".py")


def _short(file: str) -> str:
    relative = os.path.relpath(file) if file and not file.startswith("<") else file
    return file if relative.startswith("..") else relative
