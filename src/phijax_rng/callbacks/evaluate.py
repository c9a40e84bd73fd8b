"""Numbers of the model that are taken now and then, and influence nothing.

What is drawn for an evaluation comes from a stream of its own and from the step, so the numbers are the same
whenever, and however often, the run is stopped and resumed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from phijax_rng._base import validation
from phijax_rng.callbacks.protocol import Event
from phijax_rng.training.module import called, require_parameters


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """A callback that reports what a function says of the model state, as `<name>/<entry>`.

    Attributes:
        function: `function(model_state, key) -> {entry: number}`; the parameter named `key` may be left out.
            It is given a copy of the model state, and the key of its stream at this step. Wrap it in
            `jax.jit` where it is worth compiling.
        every_n_steps: updates between two evaluations.
        name: of the numbers, and of the stream.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """

    function: Callable[..., Mapping[str, Any]]
    _: dataclasses.KW_ONLY
    every_n_steps: int = 1000
    name: str = "evaluation"

    def __post_init__(self) -> None:
        require_parameters(self.function, "function", "model_state")
        validation.positive(self.every_n_steps, "every_n_steps")
        validation.names((self.name,), "name")

    def may_report(self, name: str) -> bool:
        """Its numbers begin with its name."""
        return name.startswith(f"{self.name}/")

    def __call__(self, event: Event) -> None:
        """Evaluates, and reports the numbers."""
        numbers = called(self.function, event.state.model_state, key=event.key("evaluation", self.name))
        validation.mapping(numbers, f"what {self.name!r} returns")
        event.report({f"{self.name}/{entry}": number for entry, number in numbers.items()})
