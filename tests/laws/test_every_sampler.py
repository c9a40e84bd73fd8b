"""What every sampler keeps, whatever it draws: one suite, one row of the table for each sampler.

A new sampler is added to `CASES`; its own tests then need only say what is special to it.
"""

import copy
import dataclasses
import functools
import json
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import (
    Checkpoints,
    DatasetSampler,
    LossModule,
    NamedBatchSource,
    RandomRowSampler,
    ShuffledRowSampler,
    SpaceTimeSampler,
    Trainer,
    UniformDomainSampler,
    WeightedRowSampler,
    initialize_train_state,
    keys,
)
from phijax_rng.resume import contract
from phijax_rng.sampling import HostedRowSampler
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._selection import mostly_full
from tests.laws._points import POINTS

KEY = keys.split_root(7).sampling
STEP = 123_456_789


@dataclasses.dataclass(frozen=True)
class Case:
    """One sampler.

    Attributes:
        make: builds the sampler, the same one at every call.
        size: rows of a batch, so many that two batches do not agree by chance.
        other: builds one that draws otherwise, which the contract must tell apart.
        refused: what the constructor refuses: how to call it, the error, and its whole message.
        fixed: whether every step is meant to get the same rows.
        state: `state(sampler, key)` of a sampler that keeps one, else `None`.
        on_host: whether its rows are fetched on the host, so that it cannot be traced.
        kind: what the contract calls it, if that is not its class.
        arguments: more arguments of `Trainer.fit_state`, by which the state is refreshed.
    """

    make: Callable[[], Any]
    size: Any
    other: Callable[[], Any]
    refused: tuple[tuple[Callable[[], Any], type[Exception], str], ...]
    fixed: bool = False
    state: Callable[[Any, Any], Any] | None = None
    on_host: bool = False
    kind: str | None = None
    arguments: Any = dataclasses.field(default_factory=dict)


def rows_of(n):
    """Rows that hold their own index, in two fields."""
    index = np.arange(n)
    return {"inputs": (index[:, None] / n).astype(np.float32), "index": index.astype(np.int32)}


def places(n):
    line = np.linspace(0, 1, n, dtype=np.float32)
    return {"inputs": np.stack([line, line[::-1]], axis=1)}


NO_ROWS = "fields['inputs'] must have at least one row, got shape (0, 1). Fill the pool."
TOO_MANY = (
    "size must be at most the 1000 rows of the pool when replace=False, got 1001. "
    "Use 'all', a smaller size, or replace=True."
)

WEIGHTS = np.arange(1000) % 7  # every seventh row is never drawn


def elements(n):
    return [{"inputs": np.float32([i / n]), "index": np.int32(i)} for i in range(n)]


CASES = {
    "rows with replacement": Case(
        lambda: RandomRowSampler(rows_of(1000)),
        16,
        lambda: RandomRowSampler(rows_of(1001)),
        ((lambda: RandomRowSampler({"inputs": np.zeros((0, 1))}), ValueError, NO_ROWS),),
    ),
    "rows by permutation": Case(
        lambda: RandomRowSampler(rows_of(1000), replace=False),
        16,
        lambda: RandomRowSampler(rows_of(1000), replace=True),
        ((lambda: RandomRowSampler(rows_of(1000), replace=False).sample(KEY, 1001), ValueError, TOO_MANY),),
    ),
    "rows by sorting": Case(
        lambda: RandomRowSampler(rows_of(1000), replace=False, method="sort"),
        16,
        lambda: RandomRowSampler(rows_of(1000), replace=False),
        (
            (
                lambda: RandomRowSampler(rows_of(9), method="bogus"),
                ValueError,
                "method must be one of 'permutation', 'sort', got 'bogus'. Pick one of them.",
            ),
        ),
    ),
    "sorted rows": Case(
        lambda: RandomRowSampler(rows_of(1000), sort_axis=0),
        16,
        lambda: RandomRowSampler(rows_of(1000)),
        (
            (
                lambda: RandomRowSampler(rows_of(9), sort_axis=1),
                ValueError,
                "sort_axis must be in [0, 1), got 1. Pick a number inside the range.",
            ),
        ),
    ),
    "shuffled rows": Case(
        lambda: ShuffledRowSampler(rows_of(100)),
        16,
        lambda: RandomRowSampler(rows_of(100)),
        ((lambda: ShuffledRowSampler({"inputs": np.zeros((0, 1))}), ValueError, NO_ROWS),),
    ),
    "weighted rows": Case(
        lambda: WeightedRowSampler(rows_of(1000), WEIGHTS),
        16,
        lambda: WeightedRowSampler(rows_of(1000), WEIGHTS + 1),
        (
            (
                lambda: WeightedRowSampler(rows_of(3), [1.0, -0.5, 2.0]),
                ValueError,
                "weights[1] must be finite and not negative. Use 0 for a row that must not be drawn.",
            ),
            (
                lambda: WeightedRowSampler(rows_of(3), [0, 0, 0]),
                ValueError,
                "weights must have a positive entry, got 3 zeros. Nothing could be drawn.",
            ),
        ),
    ),
    "weighted rows without replacement": Case(
        lambda: WeightedRowSampler(rows_of(1000), WEIGHTS, replace=False),
        16,
        lambda: WeightedRowSampler(rows_of(1000), WEIGHTS),
        (
            (
                lambda: WeightedRowSampler(rows_of(4), [1, 0, 2, 0], replace=False).check_size(3, "size"),
                ValueError,
                "size must be at most the 2 rows of positive weight when replace=False, got 3. "
                "Use a smaller size, more positive weights, or replace=True.",
            ),
        ),
    ),
    "shuffled rows on the host": Case(
        lambda: HostedRowSampler(ShuffledRowSampler(rows_of(100))),
        16,
        lambda: HostedRowSampler(RandomRowSampler(rows_of(100))),
        (
            (
                lambda: HostedRowSampler(5),
                TypeError,
                "sampler must be a sampler of rows of a pool, got 5. "
                "Pass a RandomRowSampler, ShuffledRowSampler or WeightedRowSampler.",
            ),
        ),
        kind="ShuffledRowSampler",  # the same draws, so the same contract
        on_host=True,
    ),
    "a dataset": Case(
        lambda: DatasetSampler(elements(100), order="shuffled"),
        16,
        lambda: DatasetSampler(elements(101), order="shuffled"),
        (
            (
                lambda: DatasetSampler([]),
                ValueError,
                "len(dataset) must be in [1, 2**31), got 0. Pick a number inside the range.",
            ),
        ),
        on_host=True,
    ),
    "all rows": Case(
        lambda: RandomRowSampler(rows_of(20)),
        "all",
        lambda: RandomRowSampler({**rows_of(20), "index": np.zeros(20, np.int32)}),
        ((lambda: RandomRowSampler({"inputs": np.zeros((0, 1))}), ValueError, NO_ROWS),),
        fixed=True,
    ),
    "box": Case(
        lambda: UniformDomainSampler([(0.1, 0.7), (-1.7, 1.7)], {"weight": np.float32(2)}),
        16,
        lambda: UniformDomainSampler([(0.1, 0.7), (-1.7, 1.6)], {"weight": np.float32(2)}),
        (
            (
                lambda: UniformDomainSampler([(1.0, 0.0)]),
                ValueError,
                "bounds[0] must be finite with lo < hi in float32, got (1.0, 0.0). Pass (lo, hi).",
            ),
            (
                lambda: UniformDomainSampler([(0.0, 1.0)], dtype=np.float16),
                ValueError,
                "dtype of coordinates must be float32, or float64 with jax_enable_x64 on, "
                "got <class 'numpy.float16'>. Use float32.",
            ),
        ),
    ),
    "space-time": Case(
        lambda: SpaceTimeSampler(places(50), (0.0, 0.6)),
        16,
        lambda: SpaceTimeSampler(places(50), (0.0, 0.5)),
        (
            (
                lambda: SpaceTimeSampler(places(50), (0.6, 0.0)),
                ValueError,
                "time_bounds[0] must be finite with lo < hi in float32, got (0.6, 0.0). Pass (lo, hi).",
            ),
        ),
    ),
}

CASES |= {name: Case(**fields) for name, fields in POINTS.items()}

every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# One of each kind, for tests that compile a program for each.
EVERYDAY = ("weighted rows without replacement", "shuffled rows on the host", "residual refinement")
compiled = pytest.mark.parametrize("case", mostly_full(CASES, everyday=EVERYDAY))


def source_of(case, sampler=None):
    return NamedBatchSource({"rows": sampler or case.make()}, {"rows": case.size}, KEY)


def state_of(case):
    """What `source(step, state)` takes beside the step."""
    return None if case.state is None else {"rows": case.state(case.make(), jax.random.key(3))}


def draw(case, step, source=None, state=None):
    source = source or source_of(case)
    state = state or state_of(case)
    return (source(step) if state is None else source(step, state))["rows"]


def same(actual, expected):
    assert_trees_bitwise_equal(actual, expected, dict_order=False)


@compiled
def test_a_batch_is_a_function_of_key_and_step(case):
    batch, source = draw(case, STEP), source_of(case)
    for step in (STEP, 0, STEP):  # what was asked in between leaves no trace
        rows = draw(case, step, source)
    same(rows, batch)
    other_key = NamedBatchSource({"rows": case.make()}, {"rows": case.size}, keys.split_root(8).sampling)
    assert (first_difference(draw(case, STEP, other_key), batch) is None) == case.fixed


@compiled
def test_the_next_step_has_another_batch_unless_the_rows_are_fixed(case):
    source = source_of(case)
    batches = [draw(case, step, source) for step in (0, 1, 2**31 - 2, 2**31 - 1)]
    for i, one in enumerate(batches):
        for other in batches[:i]:
            assert (first_difference(one, other) is None) == case.fixed


@compiled
def test_eager_jitted_and_scanned_batches_are_the_same_bits(case):
    source, state = source_of(case), state_of(case)
    if case.on_host:  # only its row numbers are drawn in a program, one of which serves many steps
        alone = [draw(case, step, source) for step in range(STEP, STEP + 3)]
        same(
            source.stacked_batches(range(STEP, STEP + 3), 4)["rows"],
            jax.tree.map(lambda *rows: np.stack(rows), *alone),
        )
        with pytest.raises(TypeError, match=r"^the rows of 'rows' are on the host"):
            jax.jit(source)(STEP)
        return

    def at(source, state, step):
        return (source(step) if state is None else source(step, state))["rows"]

    @jax.jit
    def scanned(source, state, steps):
        return jax.lax.scan(lambda _, step: (None, at(source, state, step)), None, steps)[1]

    steps = [STEP, 0]
    eager = [draw(case, step, source) for step in steps]
    same(jax.jit(at)(source, state, steps[0]), eager[0])
    same(
        scanned(source, state, jnp.array(steps, jnp.int32)),
        jax.tree.map(lambda *rows: np.stack(rows), *eager),
    )


@every
def test_a_batch_has_the_rows_it_was_asked_for(case):
    size = case.make().num_rows if case.size == "all" else case.size
    assert {len(leaf) for leaf in jax.tree.leaves(draw(case, STEP))} == {size}


@compiled
def test_x64_moves_no_batch(case):
    # With x64 on, the default dtype of points is another.
    sampler, state = case.make(), state_of(case)
    plain = jax.tree.map(np.asarray, draw(case, STEP, source_of(case, sampler), state))
    with jax.enable_x64(True):
        same(jax.tree.map(np.asarray, draw(case, STEP, source_of(case, sampler), state)), plain)


@every
@pytest.mark.parametrize(
    "carry", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_sampler_and_its_source_survive_copying(case, carry):
    batch, source = draw(case, STEP), source_of(case)
    same(draw(case, STEP, source_of(case, carry(case.make()))), batch)
    same(draw(case, STEP, carry(source)), batch)  # after a first call, which remembers things


@every
def test_the_contract_tells_it_from_another(case):
    described = [
        (contract.describe_part(source), contract.digest_contents(source))
        for source in (source_of(case), source_of(case), source_of(case, case.other()))
    ]
    assert json.loads(json.dumps(described[0])) == list(map(dict, described[0]))
    assert described[0] == described[1]
    assert described[0] != described[2]
    entry = described[0][0]["samplers"][0]
    assert entry["kind"] == (case.kind or type(case.make()).__name__)  # described by itself, not by default


@every
def test_what_it_cannot_be_is_refused_at_construction(case):
    for call, error, message in case.refused:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == message


def _losses(model_state, batches):
    means = [jnp.mean(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(batches["rows"])]
    return {"fit": sum((model_state["w"] - mean) ** 2 for mean in means)}


def _residuals(model_state, batches):
    return {"rows": batches["rows"]["inputs"][:, 0] - model_state["w"]}


MODULE = LossModule(lambda key: {"w": jnp.float32(0.5)}, _losses, batch_keys=("rows",), residuals=_residuals)


@functools.cache
def _state():
    streams = keys.split_root(7)
    return initialize_train_state(MODULE.init(streams.model), optax.sgd(0.1), {}, streams)


def fit(case, stop, directory=None):
    """The state at `stop`, of a run that goes on where the directory has one."""
    checkpoints = None if directory is None else Checkpoints(directory)
    options = {"optimizer": optax.sgd(0.1), "source": source_of(case), **case.arguments}
    if checkpoints is not None:
        options["resume"] = "auto"
    return Trainer(stop, checkpoints=checkpoints, progress=False).fit_state(MODULE, _state(), **options).state


@compiled
def test_a_resumed_run_draws_what_the_whole_run_draws(case, tmp_path):
    fit(case, 3, tmp_path)
    resumed, whole = fit(case, 7, tmp_path), fit(case, 7)
    assert_trees_bitwise_equal(resumed, whole)
    if not case.fixed:  # the control: without the right step, other parameters
        start = _state().replace(step=jnp.int32(1))
        moved = Trainer(8, progress=False).fit_state(
            MODULE, start, optimizer=optax.sgd(0.1), source=source_of(case), **case.arguments
        )
        assert first_difference(moved.state.model_state, whole.model_state) is not None
