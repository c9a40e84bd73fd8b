"""A run that is killed and resumed ends in the same bits as an uninterrupted run.

    python examples/demo.py             the demonstration
    python examples/demo.py train DIR   the run that it kills: the heat problem, saved in DIR

The second command is an ordinary training script. The demonstration starts it three times: once for an
uninterrupted run, once to kill it half-way with SIGTERM, as a scheduler would, and once more, with the same
command line, to resume. Then it compares the two final states leaf by leaf.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import heat
import jax
import numpy as np
import optax
from matplotlib.figure import Figure

from phijax_rng import Checkpoints, Trainer, initialize_train_state, keys

SEED = 42
STEPS = 20_000
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
PICTURE = Path("demo-output", "heat.png")


def train(directory):
    """Trains to the last step, from the newest checkpoint in this directory."""
    trainer = Trainer(STEPS, checkpoints=Checkpoints(directory, every_n_steps=3000))
    trainer.fit(heat.module, datamodule=heat.data, optimizer=OPTIMIZER, seed=SEED, resume="auto")


def start(directory):
    """Starts the run as a separate process; the command line is the same every time."""
    return subprocess.Popen([sys.executable, __file__, "train", str(directory)])


def kill_at(step, process, checkpoints):
    """Sends SIGTERM once a checkpoint of `step` or later is on disk; returns the exit status."""
    while process.poll() is None and (checkpoints.latest_step or 0) < step:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    return process.wait()


def bits(leaf):
    """What to compare of a leaf: the words of a key, the bytes of an array."""
    return keys.fingerprint(leaf) if keys.is_typed_key(leaf) else np.asarray(leaf).tobytes()


def compare(state, other):
    """Prints a line for every leaf; returns the number of equal leaves, and of all leaves."""
    named = jax.tree_util.tree_leaves_with_path(state)
    equal = [bits(leaf) == bits(twin) for (_, leaf), twin in zip(named, jax.tree.leaves(other), strict=True)]
    print(f"\n{'leaf':32} {'dtype':10} {'shape':10} equal bits")
    for (path, leaf), same in zip(named, equal, strict=True):
        name = jax.tree_util.keystr(path).removeprefix(".")
        print(f"{name:32} {leaf.dtype!s:10} {leaf.shape!s:10} {'yes' if same else 'NO'}")
    return sum(equal), len(equal)


def draw(state, batches, step):
    """Writes the picture: exact solution, network, error, and the points of one step."""
    ticks, size = heat.ticks, len(heat.ticks)
    points = heat.grid(ticks, ticks)
    exact = heat.exact(points).reshape(size, size).T
    network = np.asarray(heat.predict(state.model_state, points)).reshape(size, size).T
    error = 1e3 * (network - exact)
    panels = [
        ("Exact solution $u(t, x)$", exact, "viridis", 0, 1),
        (f"Network after {state.step} steps", network, "viridis", 0, 1),
        ("Network minus exact, in thousandths", error, "RdBu_r", -abs(error).max(), abs(error).max()),
    ]
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(
        f"$u_t = 0.1\\,u_{{xx}}$, trained from seed {SEED}, killed after {step} steps, and resumed"
    )
    axes = figure.subplots(2, 2).ravel()
    for axis, (title, values, colors, low, high) in zip(axes, panels, strict=False):
        image = axis.pcolormesh(ticks, ticks, values, cmap=colors, vmin=low, vmax=high, shading="gouraud")
        axis.contour(ticks, ticks, values, 7, colors="black", linewidths=0.5, alpha=0.4)
        figure.colorbar(image, ax=axis)
        axis.set_title(title)
    for name, color in (("pde", "tab:blue"), ("boundary", "tab:orange"), ("initial", "tab:red")):
        t, x = batches[name]["inputs"].T
        label = f"{name}: {len(t)}"
        axes[3].scatter(
            t, x, s=22, c=color, edgecolors="white", linewidths=0.4, label=label, clip_on=False, zorder=3
        )
    axes[3].set_title(f"Points of step {step}, the first after the resume")
    axes[3].legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False, handletextpad=0)
    for axis in axes:
        axis.set(xlabel="t", ylabel="x", xlim=(0, 1), ylim=(0, 1))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


def demonstrate(folder):
    """Trains twice, once with a kill and a resume, and compares."""
    whole, killed = (Checkpoints(Path(folder, name)) for name in ("whole", "killed"))
    print(f"1. The heat equation, {STEPS} steps in one go", flush=True)
    assert start(whole.directory).wait() == 0
    print("\n2. The same run, killed half-way by SIGTERM", flush=True)
    # The signal takes a moment to arrive; the run then continues to about the middle.
    status = kill_at(9000, start(killed.directory), killed)
    assert status == 128 + signal.SIGTERM, f"expected exit status 143, got {status}"
    step = killed.latest_step
    print(f"exit status {status}; step {step} is saved")
    print("\n3. The same command line again", flush=True)
    assert start(killed.directory).wait() == 0

    streams = keys.split_root(SEED)
    fresh = initialize_train_state(heat.init(streams.model), OPTIMIZER, {}, streams)
    state, resumed = whole.restore(like=fresh), killed.restore(like=fresh)
    equal, total = compare(state, resumed)
    source = heat.data.train_batch_source(heat.module.batch_keys, resumed.sampling_key)
    draw(resumed, source(step), step)
    print(f"\nPicture: {PICTURE.resolve()}")
    print(f"bit for bit equal: {equal} of {total} leaves")
    return 0 if equal == total else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(demonstrate(folder))
