"""A training run that is meant to be stopped from outside: `_run.py FOLDER MAX_STEPS [on_sigterm]`.

The same command line starts and continues it. It saves every few steps, prints a line to standard
output at every look, and at its end the words "done" and the step.
"""

import sys

from phijax_rng import Checkpoints, Trainer, progress
from tests import _problems

EVERY = 10


def main(folder: str, max_steps: str, on_sigterm: str = "exit") -> None:
    progress._SECONDS_BETWEEN_LINES = 0.0  # a line for every look
    sys.stderr = sys.stdout
    problem = _problems.dropout()
    trainer = Trainer(
        int(max_steps),
        checkpoints=Checkpoints(folder, every_n_steps=EVERY),
        on_sigterm=on_sigterm,
        chunk_size=3,
    )
    result = trainer.fit(problem.module, seed=0, resume="auto", **problem.arguments)
    print("interrupted" if result.interrupted else "done", int(result.state.step))


if __name__ == "__main__":
    main(*sys.argv[1:])
