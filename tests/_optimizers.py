"""Every optimizer of Optax, `optax.contrib` and jinns, on a linear regression: what becomes of it.

    python -m tests._optimizers

prints the table of `docs/optimizers.md`, which a test compares with what it observes.
"""

import dataclasses
import functools
import inspect
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from phijax_rng import Checkpoints, LossModule, LossTrainStep, TrainLoop, initialize_train_state, keys
from phijax_rng.testing import first_difference

INPUTS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
TARGETS = INPUTS @ np.array([[1, -1], [0.5, 2], [-0.7, 0.3]], np.float32) + np.float32(0.5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same rows at every step."""

    inputs: Any = dataclasses.field(default_factory=lambda: INPUTS)
    targets: Any = dataclasses.field(default_factory=lambda: TARGETS)

    def __call__(self, step: Any) -> Any:
        return {"data": {"inputs": self.inputs, "targets": self.targets}}


def _params(key: Any) -> Any:
    return {"b": jnp.full(2, 0.1), "w": jnp.full((3, 2), 0.1)}


def _pair(key: Any) -> Any:
    return optax.LookaheadParams.init_synced(_params(key))


def _rows(params: Any, batches: Any) -> dict[str, Any]:
    data = batches["data"]
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    return {"fit": data["inputs"] @ params["w"] + params["b"] - data["targets"]}


def _losses(params: Any, batches: Any) -> dict[str, Any]:
    return {"fit": jnp.mean(_rows(params, batches)["fit"] ** 2)}


MODULE = LossModule(_params, _losses, batch_keys=("data",), residuals=_rows)
PAIR = dataclasses.replace(MODULE, init=_pair)


def gauss_newton(damping: float = 1e-3) -> Any:
    """An optimizer of one's own, which follows the rows of the residuals."""

    def update(gradients: Any, state: Any, params: Any, *, residual_fn: Any) -> Any:
        flat, unravel = jax.flatten_util.ravel_pytree(params)

        def rows(flat: Any) -> Any:
            return jax.flatten_util.ravel_pytree(residual_fn(unravel(flat)))[0]

        found, jacobian = rows(flat), jax.jacfwd(rows)(flat)
        matrix = jacobian.T @ jacobian + damping * jnp.eye(flat.size)
        return unravel(-jnp.linalg.solve(matrix, jacobian.T @ found)), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def _scaled(transformation: Any, size: float = 0.05) -> Any:
    return optax.chain(transformation, optax.scale(-size))


def _sam(opaque: bool) -> Any:
    inner = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1), inner, opaque_mode=opaque)


def _jinns(name: str, **options: Any) -> Any:
    import jinns.optimizers

    return getattr(jinns.optimizers, name)(**options)


_PLAIN = (
    "adabelief",
    "adagrad",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "fromage",
    "lamb",
    "lion",
    "nadam",
    "nadamw",
    "novograd",
    "optimistic_adam",
    "optimistic_adam_v2",
    "optimistic_gradient_descent",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
    "sign_sgd",
    "signum",
    "sm3",
    "yogi",
)
_SCALED = (
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_adan",
    "scale_by_amsgrad",
    "scale_by_belief",
    "scale_by_lion",
    "scale_by_novograd",
    "scale_by_optimistic_gradient",
    "scale_by_param_block_norm",
    "scale_by_param_block_rms",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_sign",
    "scale_by_sm3",
    "scale_by_stddev",
    "scale_by_trust_ratio",
    "scale_by_yogi",
    "centralize",
    "identity",
    "normalize_by_update_norm",
    "zero_nans",
    "apply_every",
)
_CONTRIB_PLAIN = (
    "acprop",
    "ademamix",
    "adopt",
    "galore",
    "madgrad",
    "muon",
    "simplified_ademamix",
    "sophia",
)
_CONTRIB_SCALED = (
    "scale_by_acprop",
    "scale_by_ademamix",
    "scale_by_adopt",
    "scale_by_galore",
    "scale_by_simplified_ademamix",
    "normalize",
)

MASK = {"b": False, "w": True}
LABELS = {"b": "rest", "w": "main"}
SOME = {"main": optax.adam(0.05), "rest": optax.sgd(0.05)}
_always: Any = lambda step, **extra: jnp.asarray(step >= 0)  # noqa: E731


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: optax.contrib.MuonDimensionNumbers(), params)


def _norm(updates: Any) -> Any:
    return optax.tree.norm(updates)


OPTAX: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(getattr(optax, name), 0.05) for name in _PLAIN},
    **{name: lambda name=name: _scaled(getattr(optax, name)()) for name in _SCALED},
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.05), 2),
    "adadelta": lambda: optax.adadelta(1.0),
    "adafactor": lambda: optax.adafactor(0.05),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(1.0), optax.sgd(0.05)),
    "add_decayed_weights": lambda: _scaled(optax.add_decayed_weights(1e-3)),
    "add_noise": lambda: _scaled(optax.add_noise(1e-3, 0.55, key=jax.random.key(0))),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.05), 5),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05)),
    "clip": lambda: _scaled(optax.clip(1.0)),
    "clip_by_block_rms": lambda: _scaled(optax.clip_by_block_rms(1.0)),
    "clip_by_global_norm": lambda: _scaled(optax.clip_by_global_norm(1.0)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(0.05), _always),
    "conditionally_transform": lambda: _scaled(
        optax.conditionally_transform(optax.scale_by_adam(), _always, forward_extra_args=True)
    ),
    "ema": lambda: _scaled(optax.ema(0.9)),
    "flatten": lambda: optax.flatten(optax.adam(0.05)),
    "freeze": lambda: optax.chain(optax.adam(0.05), optax.freeze({"b": True, "w": False})),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 20)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(0.05),
    "keep_params_nonnegative": lambda: optax.chain(optax.adam(0.05), optax.keep_params_nonnegative()),
    "lars": lambda: optax.lars(0.5, trust_coefficient=0.1),
    "lbfgs": optax.lbfgs,
    "lookahead": lambda: optax.lookahead(optax.adam(0.05), 5, 0.5),
    "masked": lambda: optax.chain(
        optax.masked(optax.adam(0.05), MASK), optax.masked(optax.scale(-0.05), {"b": True, "w": False})
    ),
    "measure_with_ema": lambda: optax.chain(
        optax.monitor({"norm": optax.measure_with_ema(_norm, 0.9)}), optax.adam(0.05)
    ),
    "multi_transform": lambda: optax.multi_transform(SOME, LABELS),
    "noisy_sgd": lambda: optax.noisy_sgd(0.05, key=jax.random.key(0)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(0.05))),
    "partition": lambda: optax.partition(SOME, LABELS),
    "polyak_sgd": optax.polyak_sgd,
    "scale": lambda: optax.scale(-0.05),
    "scale_by_adadelta": lambda: _scaled(optax.scale_by_adadelta(), 1.0),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)
    ),
    "scale_by_distance_over_gradients": lambda: _scaled(optax.scale_by_distance_over_gradients(0.1), 1.0),
    "scale_by_lbfgs": lambda: _scaled(optax.scale_by_lbfgs(), 0.2),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.05),
    "scale_by_polyak": lambda: _scaled(optax.scale_by_polyak(), 1.0),
    "scale_by_rprop": lambda: _scaled(optax.scale_by_rprop(0.05), 1.0),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: -0.1 / (1 + step / 10)),
    "scale_by_zoom_linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(0.05), freeze_mask={"b": True, "w": False}
    ),
    "set_to_zero": lambda: optax.partition({"main": optax.adam(0.05), "rest": optax.set_to_zero()}, LABELS),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", _norm), optax.adam(0.05)),
    "stateless": lambda: optax.stateless(lambda updates, params: jax.tree.map(lambda u: -0.05 * u, updates)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda update, param: -0.05 * update),
    "trace": lambda: _scaled(optax.trace(0.9)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(0.05)),
}
CONTRIB: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(getattr(optax.contrib, name), 0.05) for name in _CONTRIB_PLAIN},
    **{name: lambda name=name: _scaled(getattr(optax.contrib, name)()) for name in _CONTRIB_SCALED},
    "cocob": optax.contrib.cocob,
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(1.0, estim_lr0=1e-2),
    "differentially_private_aggregate": lambda: _scaled(
        optax.contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0))
    ),
    "dpsgd": lambda: optax.contrib.dpsgd(0.05, 1.0, 0.1, 0),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(0.1), s_init=1e-2),
    "momo": lambda: optax.contrib.momo(0.1),
    "momo_adam": lambda: optax.contrib.momo_adam(0.05),
    "prodigy": lambda: optax.contrib.prodigy(0.5, estim_lr0=1e-2),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "sam": lambda: _sam(opaque=False),
    "scale_by_cocob": lambda: _scaled(optax.contrib.scale_by_cocob(), -1.0),
    "scale_by_muon": lambda: optax.partition(
        {
            "main": _scaled(optax.contrib.scale_by_muon(weight_dimension_numbers=_matrices)),
            "rest": optax.sgd(0.05),
        },
        LABELS,
    ),
    "scale_by_madgrad": lambda: optax.contrib.scale_by_madgrad(0.05),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(0.05),
    "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(0.1),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.05)),
}
COMBINED: dict[str, Callable[[], Any]] = {
    "lookahead, with `LookaheadParams`": OPTAX["lookahead"],
    "sam, `opaque_mode=True`": lambda: _sam(opaque=True),
    "sam in a chain": lambda: optax.chain(optax.clip(1.0), _sam(opaque=True)),
    "lbfgs in a chain with a plateau": lambda: optax.chain(optax.contrib.reduce_on_plateau(), optax.lbfgs()),
    "lbfgs without a line search": lambda: optax.lbfgs(0.1, linesearch=None),
    "lbfgs with a backtracking line search": lambda: optax.lbfgs(
        linesearch=optax.scale_by_backtracking_linesearch(15, store_grad=True)
    ),
    "lbfgs in a partition": lambda: optax.partition(
        {"main": optax.lbfgs(), "rest": optax.sgd(0.05)}, LABELS, mask_compatible_extra_args=True
    ),
    "jinns: scale_by_SSBroyden_family": lambda: _jinns("scale_by_SSBroyden_family"),
    "jinns: scale_by_SSBroyden_family, BFGS, in a chain": lambda: optax.chain(
        optax.identity(), _jinns("scale_by_SSBroyden_family", method="BFGS")
    ),
    "jinns: vanilla_ngd": lambda: _jinns("vanilla_ngd"),
    "Gauss-Newton by `residual_fn`": gauss_newton,
}
CASES = {
    **{f"optax.{name}": make for name, make in OPTAX.items()},
    **{f"optax.contrib.{name}": make for name, make in CONTRIB.items()},
    **COMBINED,
}
LIBRARIES = {"optax": (optax, OPTAX), "optax.contrib": (optax.contrib, CONTRIB)}


def factories(library: ModuleType) -> Iterator[str]:
    """The names of a library's functions that return a transformation."""
    for name in dir(library):
        found = getattr(library, name)
        if name.startswith("_") or not inspect.isfunction(found):
            continue
        if "GradientTransformation" in str(inspect.signature(found).return_annotation):
            yield name


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of an optimizer.

    Attributes:
        trains: whether the loss fell.
        resumes: whether a run that was saved and restored halfway ends in the bits of one that was not.
        refused: why it was refused; empty if it was not.
    """

    trains: bool = False
    resumes: bool = False
    refused: str = ""

    def cells(self) -> str:
        """Its columns in the table."""
        if self.refused:
            return f"refused: {self.refused}"
        return f"{'trains' if self.trains else 'does not train'}, {'resumes' if self.resumes else 'parts'}"


def outcome(name: str) -> Outcome:
    """Trains with this optimizer, and resumes."""
    module = PAIR if name.startswith("lookahead, with") else MODULE
    try:
        optimizer = CASES[name]()
        step = LossTrainStep(module, optimizer)
        state = initialize_train_state(module.init(jax.random.key(0)), optimizer, {}, keys.split_root(0))
        loop = TrainLoop(step, state, Fixed())
    except TypeError as error:
        if not str(error).startswith(("the optimizer", "optax.")):
            raise
        return Outcome(refused=str(error))
    # A quasi-Newton method is at the minimum after a dozen steps, and the one of jinns divides 0 by 0 there.
    stop, half = (10, 5) if "SSBroyden" in name else (24, 11)
    whole, half = (loop.run(loop.place(state), end) for end in (stop, half))
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, asynchronous=False) as checkpoints:
        checkpoints.save(half.state)
        resumed = loop.run(loop.place(checkpoints.restore(state)), stop)
    losses = whole.records["fit"]
    falls = bool(np.isfinite(losses).all() and losses[-4:].mean() < 0.98 * losses[0])
    return Outcome(falls, first_difference(resumed.state, whole.state) is None)


def shown(name: str) -> str:
    """The name in the table."""
    return name if " " in name else f"`{name}`"


def row(name: str, found: Outcome) -> str:
    """A row of the table."""
    return f"| {shown(name)} | {found.cells()} |"


def table(outcomes: dict[str, Outcome]) -> str:
    """The table of the page."""
    return "\n".join(["| optimizer | outcome |", "|---|---|", *itertools.starmap(row, outcomes.items())])


if __name__ == "__main__":
    print(table({name: outcome(name) for name in CASES}))
