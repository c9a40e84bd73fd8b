"""Which callback of a resumed run gets which saved memory.

By name; of callbacks with one name, which are numbered in their order, by their settings, so that a memory
never goes to another callback when one of them was removed, added or moved.
"""

import hashlib
import json
import re
from collections.abc import Mapping

from phijax_rng._base.plain_data import described
from phijax_rng.callbacks.protocol import AdaptedCallback, Memory


def settings_of(callback: AdaptedCallback) -> str:
    """A digest of class and settings, the same for callbacks that cannot be told apart."""
    text = json.dumps(described(callback.callback, settings=True), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def assigned(
    callbacks: tuple[AdaptedCallback, ...], memories: Mapping[str, Memory], settings: Mapping[str, str]
) -> dict[str, Memory]:
    """The memory of each callback that has one, by its name in this run.

    Args:
        callbacks: of this run.
        memories: of the saved run, by the names there.
        settings: digests of the saved callbacks, by the names there; empty for a run of version 0.1.0.

    Raises:
        ValueError: callbacks of one name changed, and it is not clear whose a memory is.
    """
    found: dict[str, Memory] = {}
    for base in dict.fromkeys(_base(callback.name) for callback in callbacks):
        now = [callback for callback in callbacks if _base(callback.name) == base]
        before = [name for name in (settings or memories) if _base(name) == base]
        count = max([len(before), *(_number(name) for name in before)], default=0)
        if len(now) == count == 1 or (not settings and len(now) == count):
            found |= {callback.name: memories[callback.name] for callback in now if callback.name in memories}
        elif any(memories.get(name) for name in before):
            found |= _by_settings(base, now, {name: settings.get(name, "") for name in before}, memories)
    return found


def _by_settings(
    base: str, now: list[AdaptedCallback], before: Mapping[str, str], memories: Mapping[str, Memory]
) -> dict[str, Memory]:
    found, left = {}, dict(before)
    unmatched = []
    for callback in now:
        own = settings_of(callback)
        same = next((name for name, saved in left.items() if saved == own), None)
        if same is None:
            unmatched.append(callback)
        else:
            del left[same]
            found[callback.name] = memories.get(same, {})
    twins = set(left.values()) & {before[name] for name in before if name not in left}
    if (unmatched and any(memories.get(name) for name in left)) or (twins and len(now) != len(before)):
        raise ValueError(
            f"{len(before)} callbacks named {base!r} were saved and {len(now)} are given, and it is not "
            "clear which memory belongs to which. Give each of them a name, or pass those of the saved run."
        )
    return {name: memory for name, memory in found.items() if memory}


def _base(name: str) -> str:
    return re.sub(r"#\d+$", "", name)


def _number(name: str) -> int:
    numbered = re.search(r"#(\d+)$", name)
    return int(numbered.group(1)) if numbered else 1
