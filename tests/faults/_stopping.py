"""A run that a test interrupts at one place.

    _stopping.py FOLDER PLACE

It prints "at PLACE" when it is there, at its end the words "returned" and the step, and "atexit" last.
"""

import atexit
import signal
import sys
import threading
from typing import Any

from phijax_rng import Checkpoints, Trainer
from phijax_rng.checkpoints.writer import DocumentHandler
from phijax_rng.training import compile_cache
from tests import _problems

STOP = 10**6
_for_ever = threading.Event()


def stay(place: str) -> None:
    print(f"at {place}", flush=True)
    _for_ever.wait(120)


class Hangs:
    """A source on the host that hangs at a step far behind the first save."""

    def __init__(self, source: Any):
        self._source = source

    def __call__(self, step: int) -> Any:
        if step == 200:
            stay("source")
        return self._source(step)


class InCallback:
    every_n_steps = 40

    def __call__(self, event: Any) -> None:
        print("at callback", flush=True)
        # Here and not between chunks, as a long evaluation would be.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)


def main(folder: str, place: str) -> None:
    atexit.register(print, "atexit")
    problem = _problems.dropout()
    callbacks: tuple[Any, ...] = ()
    source: Any = problem.source()
    if place == "source":
        source = Hangs(source)
    elif place == "save":
        save, count = DocumentHandler.save, [0]

        def slow(self: Any, *arguments: Any) -> None:
            count[0] += 1
            if count[0] > 2:
                stay("save")
            save(self, *arguments)

        DocumentHandler.save = slow  # type: ignore[method-assign]
    elif place == "compile":
        compile_ = compile_cache._compile

        def slow_compile(lowered: Any, while_compiling: Any) -> Any:
            class Slow:
                def compile(self) -> Any:
                    stay("compile")
                    return lowered.compile()

            return compile_(Slow(), while_compiling)  # type: ignore[arg-type]

        compile_cache._compile = slow_compile
    elif place == "callback":
        callbacks = (InCallback(),)
    elif place == "ignored":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = Trainer(
        STOP if place != "ignored" else 400,
        checkpoints=Checkpoints(folder, every_n_steps=40),
        callbacks=callbacks,
        chunk_size=20,
        progress=False,
    )
    print("fitting", flush=True)
    result = trainer.fit_state(
        problem.module, problem.state(), optimizer=problem.optimizer, source=source, resume="auto"
    )
    print("returned", int(result.state.step), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
