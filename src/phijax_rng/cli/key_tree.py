"""Which key of a run comes from which."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from phijax_rng import keys
from phijax_rng._base import validation

_MOST_STEPS = 10_001  # nobody reads more


@dataclasses.dataclass(frozen=True)
class KeyNode:
    """A key and those that are derived from it.

    Attributes:
        name: what it is for.
        derivation: how it comes from its parent.
        fingerprint: its implementation and words, as `keys.fingerprint` gives them.
        children: derived from it.
    """

    name: str
    derivation: str
    fingerprint: str
    children: tuple["KeyNode", ...] = ()

    def plain(self) -> dict[str, Any]:
        """All of it as JSON can store it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(self._lines("", ""))

    def _lines(self, first: str, rest: str) -> Iterator[str]:
        yield f"{first}{self.name}  {self.fingerprint}" + (f"  {self.derivation}" if self.derivation else "")
        for index, child in enumerate(self.children):
            last = index == len(self.children) - 1
            yield from child._lines(rest + ("`- " if last else "|- "), rest + ("   " if last else "|  "))


def key_tree(seed: int, steps: int = 3, samplers: tuple[str, ...] = ()) -> KeyNode:
    """The keys of a run with this seed.

    Args:
        seed: as `fit` takes it.
        steps: for so many steps, from 0 on, the keys of the batch.
        samplers: names of the samplers in the order of their declaration; their keys are added.

    Raises:
        TypeError, ValueError: the seed or a number is out of range.
    """
    root = keys.root_key(seed)
    steps = validation.whole_number(steps, "steps", _MOST_STEPS, fix="Pass how many steps to show.")
    streams = keys.split_root(root)
    nodes = []
    for index, name in enumerate(("model", "runtime", "sampling", "balancer")):
        children = [_step(streams.sampling, step, samplers) for step in range(steps)] if index == 2 else []
        nodes.append(_node(name, f"split(root, 4)[{index}]", streams.__dict__[name], children))
    return _node("root", f"seed {seed}", root, nodes)


def _step(sampling: Any, step: int, samplers: tuple[str, ...]) -> KeyNode:
    key = keys.step_key(sampling, step)
    split = jax.random.split(key, len(samplers)) if samplers else ()
    children = [
        _node(name, f"split({len(samplers)})[{index}]", split[index]) for index, name in enumerate(samplers)
    ]
    return _node(f"step {step}", f"fold_in(sampling, {step})", key, children)


def _node(
    name: str, derivation: str, key: Any, children: list[KeyNode] | tuple[KeyNode, ...] = ()
) -> KeyNode:
    return KeyNode(name, derivation, keys.fingerprint(key), tuple(children))
