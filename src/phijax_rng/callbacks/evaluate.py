"""Evaluate the model at chosen steps and at the end of a run, without influence on the training.

The key of an evaluation comes from a separate stream and from the step, so the numbers do not depend on
where, and how often, the run is stopped and resumed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from phijax_rng._base import validation
from phijax_rng.callbacks.protocol import Event
from phijax_rng.training.module import called, require_parameters


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """A callback that reports what a function returns for the model state, as `<name>/<entry>`.

    It is called every so many steps, and when the run ends.

    Attributes:
        function: `function(model_state, key) -> {entry: number}`; the parameter `key` is optional. The
            function gets the model state to evaluate (see `Event.evaluation_params`), and the key of its
            stream at this step. Wrap it in `jax.jit` if it is worth compiling.
        every_n_steps: updates between two evaluations; `None` for one when the run ends.
        name: the first part of the names of the numbers, and the name of the stream.
    """

    function: Callable[..., Mapping[str, Any]]
    _: dataclasses.KW_ONLY
    every_n_steps: int | None = None
    name: str = "evaluation"
    at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_parameters(self.function, "function", "model_state")
        if self.every_n_steps is not None:
            validation.positive(self.every_n_steps, "every_n_steps")
        validation.names((self.name,), "name")

    def may_report(self, name: str) -> bool:
        """Whether the name begins with that of this callback."""
        return name.startswith(f"{self.name}/")

    def __call__(self, event: Event) -> None:
        """Evaluates, and reports the numbers."""
        key = event.key("evaluation", self.name)
        numbers = called(self.function, event.evaluation_params, key=key)
        validation.mapping(numbers, f"the result of {self.name!r}")
        event.report({f"{self.name}/{entry}": number for entry, number in numbers.items()})


def require_distinct(callbacks: Iterable[object]) -> None:
    """Raises a `ValueError` for two evaluations of one name: one key stream, and names that may collide."""
    names = [one.name for one in callbacks if isinstance(one, Evaluate)]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(
            f"two Evaluate callbacks have the name {repeated!r}, so they would draw from one key stream and "
            "report under the same names. Pass another name= to one of them."
        )
