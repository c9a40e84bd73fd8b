"""Burgers' equation, the benchmark of Raissi, Perdikaris and Karniadakis (2019).

    u_t + u u_x = (0.01 / pi) u_xx   for -1 < x < 1,   u(0, x) = -sin(pi x),   u(t, -1) = u(t, 1) = 0

The wave steepens into a shock at x = 0. There are no pools here: every step draws new points from the
domain and its edges. A check compares the network with the closed solution of Cole and Hopf.
"""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.io

from phijax_rng import (
    LossModule,
    NamedBatchSource,
    StaticLossBalancer,
    Trainer,
    UniformDomainSampler,
)

VISCOSITY = 0.01 / np.pi
WIDTHS = (2, 32, 32, 32, 32, 1)
FAST = "PHIJAX_RNG_EXAMPLE_FAST" in os.environ
STEPS, TOLERANCE = (3000, 0.2) if FAST else (20_000, 5e-3)
BOXES = {"pde": [(0, 1), (-1, 1)], "initial": [(-1, 1)], "boundary": [(0, 1)]}  # of (t, x), of x, of t
SIZES = {"pde": 256, "initial": 64, "boundary": 64}


class FreshPoints:
    """A data module of our own: uniform points of every box, at every step."""

    def train_batch_source(self, batch_keys, key):
        """The source that the trainer asks for, drawing from the sampling stream `key`."""
        samplers = {name: UniformDomainSampler(BOXES[name]) for name in batch_keys}
        return NamedBatchSource(samplers, SIZES, key)


def init(key):
    layers = zip(jax.random.split(key, len(WIDTHS) - 1), WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [
        {"w": jax.random.normal(key, (fan_in, fan_out)) / fan_in**0.5, "b": jnp.zeros(fan_out)}
        for key, fan_in, fan_out in layers
    ]


def network(params, t, x):
    *hidden, last = params
    values = jnp.stack([2 * t - 1, x], axis=-1)
    for layer in hidden:
        values = jnp.tanh(values @ layer["w"] + layer["b"])
    return (values @ last["w"] + last["b"])[..., 0]


def residual(params, points):
    """What is left of the equation at each point."""
    t, x = points.T
    one = jnp.ones_like(t)

    def u_and_u_x(x):
        return jax.jvp(lambda x: network(params, t, x), (x,), (one,))

    # Derivatives in the direction of one input, for all points at once: cheaper than a gradient each.
    (u, u_x), (_, u_xx) = jax.jvp(u_and_u_x, (x,), (one,))
    u_t = jax.jvp(lambda t: network(params, t, x), (t,), (one,))[1]
    return u_t + u * u_x - VISCOSITY * u_xx


def losses(params, batches):
    x0, both_ends = batches["initial"]["inputs"][:, 0], jnp.array([-1.0, 1.0])
    edges = network(params, *jnp.broadcast_arrays(batches["boundary"]["inputs"], both_ends))
    return {
        "pde": jnp.mean(residual(params, batches["pde"]["inputs"]) ** 2),
        "initial": jnp.mean((network(params, jnp.zeros_like(x0), x0) + jnp.sin(jnp.pi * x0)) ** 2),
        "boundary": jnp.mean(edges**2),
    }


def cole_hopf(t, x, order=200):
    """The solution as a quotient of two Gaussian integrals, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(order)
    y = x[..., None] - 2 * np.sqrt(VISCOSITY * t)[..., None] * nodes
    density = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * VISCOSITY))
    return -(density * np.sin(np.pi * y)).sum(-1) / density.sum(-1)


def relative_error(values, reference):
    return np.linalg.norm(values - reference) / np.linalg.norm(reference)


# Initial and boundary values make the solution unique; with weight 1 the network learns them too late.
WEIGHTS = {"initial": 100.0, "boundary": 100.0}


def optimizer(steps):
    # Muon orthogonalizes the updates of weight matrices; with Adam the error is six times as large.
    return optax.contrib.muon(optax.cosine_decay_schedule(5e-3, steps))


def solution(params):
    """The network where the reference solution is known, and the closed solution there."""
    t, x = np.meshgrid(np.linspace(0, 0.99, 100), np.linspace(-1, 1, 256))
    return network(params, jnp.asarray(t, jnp.float32), jnp.asarray(x, jnp.float32)), cole_hopf(t, x)


def main():
    module = LossModule(init, losses, batch_keys=("pde", "initial", "boundary"))
    balancer = StaticLossBalancer(module.batch_keys, weights=WEIGHTS)
    began = time.perf_counter()
    trainer = Trainer(max_steps=STEPS)
    result = trainer.fit(
        module, datamodule=FreshPoints(), optimizer=optimizer(STEPS), balancer=balancer, seed=0
    )
    seconds = time.perf_counter() - began

    values, exact = solution(result.state.model_state)
    error = relative_error(values, exact)
    print(f"{STEPS} steps in {seconds:.0f} s; relative L2 error {error:.1e} against Cole and Hopf")

    reference = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "burgers_shock.mat"
    if reference.exists():
        against_file = relative_error(values, scipy.io.loadmat(reference)["usol"])
        print(f"relative L2 error {against_file:.1e} against {reference.name}")
    assert error < TOLERANCE


if __name__ == "__main__":
    main()
