"""A training run that is meant to be stopped from outside.

    _run.py FOLDER MAX_STEPS [on_sigterm [announce [balanced]]]

The same command line starts and continues it. It saves every few steps, prints a line to standard
output at every look, and at its end the words "done" and the step. With `announce` it says "fitting"
before it restores and compiles, and a callback copies the state every few steps. With `balanced` it
trains the heat problem with GradNorm.
"""

import sys

import jax

from phijax_rng import Checkpoints, GradNormBalancer, Trainer
from phijax_rng.callbacks import progress
from phijax_rng.callbacks.protocol import Event
from tests import _problems

EVERY = 10
BALANCER = GradNormBalancer(("pde", "initial", "boundary"), update_every_n_steps=12)


class Copy:
    """Asks for the whole state, so that a signal can meet a callback at work."""

    every_n_steps = 4

    def __call__(self, event: Event) -> None:
        jax.block_until_ready(event.state)


def main(
    folder: str, max_steps: str, on_sigterm: str = "exit", announce: str = "", balanced: str = ""
) -> None:
    progress._SECONDS_BETWEEN_LINES = (0.0, 0.0)  # a line for every look
    sys.stderr = sys.stdout
    problem = _problems.heat() if balanced else _problems.dropout()
    trainer = Trainer(
        int(max_steps),
        checkpoints=Checkpoints(folder, every_n_steps=EVERY),
        on_sigterm=on_sigterm,
        chunk_size=3,
        callbacks=[Copy()] if announce else [],
    )
    if announce:
        print("fitting", flush=True)
    result = trainer.fit(
        problem.module,
        seed=0,
        resume="auto",
        balancer=BALANCER if balanced else None,
        **problem.arguments,
    )
    print("interrupted" if result.interrupted else "done", int(result.state.step))


if __name__ == "__main__":
    main(*sys.argv[1:])
