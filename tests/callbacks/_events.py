"""An event made by hand, for callbacks that are called without a run."""

from phijax_rng import Event
from phijax_rng.callbacks.history import History


def make_event(step, *, history=None, metrics=None, state=None, timing=None):
    return Event(
        step=step,
        metrics=metrics or {},
        history=History() if history is None else history,
        start=0,
        memory={},
        _state=state,
        _report=lambda numbers: None,
        timing=History() if timing is None else timing,
    )
