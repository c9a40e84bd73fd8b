"""What a new user sees after a mistake: at most three lines that say what to do, and no frame of ours."""

import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest

import phijax_rng
from phijax_rng import (
    Checkpoints,
    CSVHistory,
    EarlyStopping,
    Evaluate,
    IterableSource,
    LossModule,
    NamedBatchSource,
    PoolDataModule,
    ResidualDistributionSampler,
    Trainer,
    initialize_train_state,
    keys,
)
from phijax_rng.errors import ImpureSourceError, RunChangedError, RunExistsError
from phijax_rng.sampling.geometry import Box
from tests import _fit, _problems

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2)
Y = X[:, :1]
BATCH = {"data": {"inputs": X, "targets": Y}}
SGD = optax.sgd(0.1)
PACKAGE = Path(phijax_rng.__file__).parent


def init(key):
    return {"w": jax.random.normal(key, (2, 1))}


def losses(params, batches):
    rows = batches["data"]
    return {"fit": jnp.mean((rows["inputs"] @ params["w"] - rows["targets"]) ** 2)}


def fit(losses=losses, *, init=init, data=None, pools=BATCH, sizes=None, optimizer=SGD, seed=0, **given):
    given = {"module": LossModule(init, losses, batch_keys=("data",)), **given}
    data = PoolDataModule(pools, {"data": 4} if sizes is None else sizes) if data is None else data
    return Trainer(3, progress=False).fit(
        given.pop("module"), datamodule=data, optimizer=optimizer, seed=seed, **given
    )


def fit_source(source, losses=losses):
    state = initialize_train_state({"w": jnp.zeros((2, 1))}, SGD, {}, keys.split_root(0))
    module = LossModule(init, losses, batch_keys=("data",))
    return Trainer(3, progress=False).fit_state(module, state, optimizer=SGD, source=source)


class Data:
    """A data module that returns what a test gives it."""

    def __init__(self, source):
        self.source = source

    def train_batch_source(self, batch_keys, key):
        return self.source


def mean_of(params, batches):
    return jnp.mean(batches["data"]["inputs"] @ params["w"])


def misspelled_batch(params, batches):
    return {"fit": jnp.mean(batches["dat"]["inputs"] @ params["w"])}


def misspelled_field(params, batches):
    return {"fit": jnp.mean(batches["data"]["input"] @ params["w"])}


def misspelled_parameter(params, batches):
    return {"fit": jnp.mean(batches["data"]["inputs"] @ params["W"])}


def swapped(batches, params):
    return losses(params, batches)


def transposed(params, batches):
    return {"fit": jnp.mean(batches["data"]["inputs"].T @ params["w"])}


def on_the_dict(params, batches):
    return {"fit": jnp.mean(batches["data"])}


def forgot_return(params, batches):
    {"fit": mean_of(params, batches)}


def branches(params, batches):
    value = mean_of(params, batches)
    return {"fit": value if value > 0 else -value}


def converts(params, batches):
    return {"fit": float(mean_of(params, batches))}


def numpy_function(params, batches):
    return {"fit": np.linalg.norm(params["w"])}


def picks_rows(params, batches):
    return {"fit": jnp.mean(params["w"][params["w"] > 0])}


def counts(params, batches):
    return {"fit": sum(params["w"][0, 0] for _ in range(jnp.sum(params["w"] > 0)))}


def writes(params, batches):
    batches["data"]["inputs"][0] = 0
    return {"fit": mean_of(params, batches)}


def generator(step):
    yield BATCH


RNG = np.random.default_rng(0)


def shuffling(step):
    rows = RNG.permutation(6)
    return {"data": {"inputs": X[rows], "targets": Y[rows]}}


def from_scratch(key):
    {"w": jax.random.normal(key, (2, 1))}


CALLED = "losses was called with batches = "
MODEL = "model_state = {'w': float32[2, 1]}"
GIVEN = f"{CALLED}{{'data': {{'inputs': float32[4, 2], 'targets': float32[4, 1]}}}}, {MODEL}"
WHILE_COMPILING = "arrays have no values while a program is compiled."
SIZES = "Use 'all' to take every row of the pool."
INTEGERS = "Pick a non-negative integer, or pass a key made by jax.random.key."

MISTAKES = {
    # Batches of another form
    "tuples as batches": (
        lambda: fit_source([(X, Y)] * 5),
        "source(0) must return a dict of batches by name, got (float32[6, 2], float32[6, 1]). "
        "Return {'data': rows}: batch_keys are 'data'.",
    ),
    "arrays as batches": (
        lambda: fit_source(lambda step: X),
        "source(0) must return a dict of batches by name",
    ),
    "a pair as a named batch": (
        lambda: fit_source([{"data": (X + i, Y)} for i in range(5)]),
        f"tuple indices must be integers or slices, not str\n{CALLED}"
        "{'data': (float32[6, 2], float32[6, 1])}",
    ),
    "another name of the batch": (
        lambda: fit_source([{"dat": BATCH["data"]}] * 5),
        "the source has no batch 'data'; it has 'dat', and the module's batch_keys are 'data'.",
    ),
    "three-tuples as a dataset": (
        lambda: fit(pools={"data": [(x, y, 1.0) for x, y in zip(X, Y, strict=True)]}),
        "dataset[0] must be an array, a pair (inputs, targets) or a dict of fields, got the tuple "
        "(float32[2], float32[1], 1.0). Return a dict that names each.",
    ),
    "a pair as a pool": (
        lambda: fit(pools={"data": (X, Y)}),
        "pools['data'] must be a dict of fields or a dataset, got the tuple (float32[6, 2], float32[6, 1]). "
        "Pass {'inputs': ..., 'targets': ...}, or the elements of a dataset in a list.",
    ),
    "an array as pools": (lambda: fit(pools=X), "pools must be a mapping, got float32[6, 2]"),
    "pools without a name": (
        lambda: fit(pools=BATCH["data"]),
        "pools must be pools by name, got {'inputs': float32[6, 2], 'targets': float32[6, 1]}, and "
        "batch_sizes names 'data'. Pass {'data': {'inputs': ..., ...}}.",
    ),
    "a DataFrame with text": (
        lambda: fit(pools={"data": pandas.DataFrame({"x": X[:, 0], "name": ["a"] * 6})}),
        "fields['name'] must hold numbers, got dtype ",
    ),
    "a DataFrame without names": (
        lambda: fit(pools={"data": pandas.DataFrame(X)}),
        "columns[0] must be a non-empty string, got 0. Name it.",
    ),
    "a DataFrame as pools": (
        lambda: fit(pools=pandas.DataFrame({"x": X[:, 0]})),
        "pools must be a mapping, got DataFrame(...). Pass a dict keyed by name.",
    ),
    "lists of numbers in a batch": (
        lambda: fit_source(lambda step: {"data": {"inputs": (X + step).tolist(), "targets": Y}}),
        "source(0)['data']['inputs'] must be an array of numbers, got a list of numbers. "
        "Convert it with np.asarray, or leave it out.",
    ),
    "text in a batch": (
        lambda: fit_source(lambda step: {"data": {**BATCH["data"], "name": "a"}}),
        "source(0)['data']['name'] must be an array of numbers, got 'a'. Convert it with np.asarray, or",
    ),
    "a generator function": (
        lambda: fit_source(generator),
        "source must return the batches of a step, got the generator function generator. "
        "Call it: generator(...) is an iterable of batches.",
    ),
    "the batch as the source": (
        lambda: fit(data=Data(BATCH)),
        "the source that train_batch_source returns must be a function of the step or an iterable of "
        "batches, got {'data': {'inputs': float32[6, 2], 'targets': float32[6, 1]}}. "
        "Pass lambda step: batches for the same at every step.",
    ),
    "no source": (lambda: fit(data=Data(None)), "train_batch_source returns must be a function of the step"),
    "a list as the source": (
        lambda: fit(data=Data([X, Y])),
        "source(0) must return a dict of batches by name",
    ),
    "too few batches": (
        lambda: fit_source([BATCH] * 2),
        "the source is an iterable that ended after 2 batches, before the batch of step 2. "
        "Train to max_steps=2, or pass a longer one.",
    ),
    "a source that shuffles": (
        lambda: fit_source(shuffling),
        "source(0) returned another 'data' when it was called again. Draw from the key and the step alone: "
        "neither from a global generator, nor from a counter, nor from a loader that shuffles by a state of "
        "its own.",
    ),
    # Names and axes in the losses
    "a misspelled batch": (lambda: fit(misspelled_batch), f"'dat'\n{GIVEN}"),
    "a misspelled field": (lambda: fit(misspelled_field), f"'input'\n{GIVEN}"),
    "a misspelled parameter": (lambda: fit(misspelled_parameter), f"'W'\n{GIVEN}"),
    "arguments in the other order": (lambda: fit(swapped), f"'data'\n{GIVEN}"),
    "the wrong axis": (
        lambda: fit(transposed),
        f"dot_general requires contracting dimensions to have the same shape, got (4,) and (2,).\n{GIVEN}",
    ),
    "a function on the dict": (lambda: fit(on_the_dict), f"got <class 'dict'> at position 0.\n{GIVEN}"),
    "an array that is written to": (lambda: fit(writes), "JAX arrays are immutable"),
    # What the losses return
    "no return": (
        lambda: fit(forgot_return),
        "losses must return scalars by name, got None. Add the return statement.",
    ),
    "an array in place of the dict": (
        lambda: fit(mean_of),
        "losses must return scalars by name, got float32[]. Return {'name': loss}.",
    ),
    "a tuple in place of the dict": (
        lambda: fit(lambda params, batches: (mean_of(params, batches), {})),
        "losses must return scalars by name, got (float32[], {}). Return {'name': loss}.",
    ),
    "one loss per row": (
        lambda: fit(lambda params, batches: {"fit": (batches["data"]["inputs"] @ params["w"])[:, 0]}),
        "losses['fit'] must be a scalar, got shape (4,). Reduce it, for example with jnp.mean.",
    ),
    "text": (
        lambda: fit(lambda params, batches: {"fit": "0.5"}),
        "losses['fit'] must be a real scalar, got '0.5'. Return a number.",
    ),
    # Values of traced arrays
    "a branch": (
        lambda: fit(branches),
        "losses turns an array into a Python bool, as `if`, `while`, `and` and `not` do; "
        f"{WHILE_COMPILING} Use jnp.where, jnp.logical_and or jax.lax.cond.",
    ),
    "float": (
        lambda: fit(converts),
        "losses turns an array into a Python number, as `float`, `int` and `.item()` do; "
        f"{WHILE_COMPILING} Use the array itself; jax.debug.print shows its value.",
    ),
    "a function of NumPy": (
        lambda: fit(numpy_function),
        f"losses turns an array into one of NumPy; {WHILE_COMPILING} Use jax.numpy in place of numpy.",
    ),
    "rows by a condition": (
        lambda: fit(picks_rows),
        f"losses picks the rows where a condition holds; {WHILE_COMPILING} "
        "Use jnp.where(condition, values, 0) and divide by the sum of the condition.",
    ),
    "range": (
        lambda: fit(counts),
        f"losses turns an array into a Python int, as `range` and list indices do; {WHILE_COMPILING} "
        "Use jax.lax.fori_loop or jnp.take, or a number that is known before.",
    ),
    # Functions and classes, called and not
    "an optimizer that is not called": (
        lambda: fit(optimizer=optax.adam),
        "optimizer must offer init and update, got a function. Call it with its learning rate.",
    ),
    "a learning rate as the optimizer": (
        lambda: fit(optimizer=1e-3),
        "optimizer must offer init and update, got 0.001. Pass an Optax optimizer.",
    ),
    "the class of modules": (
        lambda: fit(module=LossModule),
        "module must be a LossModule, got the class LossModule. "
        "Build one: LossModule(init, losses, batch_keys=...).",
    ),
    "a model as the module": (
        lambda: fit(module={"w": np.zeros(3)}),
        "module must be a LossModule, got {'w': float64[3]}.",
    ),
    "the class of data modules": (
        lambda: fit(data=PoolDataModule),
        "datamodule must be an object, got the class PoolDataModule. Call it: PoolDataModule(...).",
    ),
    "arrays as the data module": (
        lambda: fit(data=(X, Y)),
        "datamodule must offer train_batch_source(batch_keys, key), got (float32[6, 2], float32[6, 1]). "
        "Use PoolDataModule.",
    ),
    "init that is called": (
        lambda: fit(init=init(jax.random.key(0))),
        "init must be callable, got {'w': float32[2, 1]}. Pass a function.",
    ),
    "init without a key": (lambda: fit(init=lambda: 0), "init must take (key), got (). Fix its parameters."),
    "init without a return": (
        lambda: fit(init=from_scratch),
        "init must return a model state with floating or complex arrays to train, got None. "
        "Add the return statement.",
    ),
    "parameters that are integers": (
        lambda: fit(init=lambda key: {"w": jnp.ones((2, 1), int)}),
        "init must return a model state with floating or complex arrays to train, got {'w': int32[2, 1]}. "
        "Give its parameters a floating dtype.",
    ),
    "a class of callbacks": (
        lambda: Trainer(3, callbacks=(EarlyStopping,)),
        "callbacks[0] must be an object, got the class EarlyStopping. Call it: EarlyStopping(...).",
    ),
    "one callback": (lambda: Trainer(3, callbacks=EarlyStopping("fit")), "Pass a tuple of them."),
    "a path as checkpoints": (
        lambda: Trainer(3, checkpoints="runs/a"),
        "checkpoints must be a Checkpoints or None, got 'runs/a'. Pass Checkpoints(directory).",
    ),
    # Numbers
    "rows that do not match": (
        lambda: fit(pools={"data": {"inputs": X, "targets": Y[:4]}}),
        "all fields must have equally many rows; inputs has 6, targets has 4. Give each one entry per row.",
    ),
    "inputs on the wrong axis": (
        lambda: fit(pools={"data": {"inputs": X.T, "targets": Y}}),
        "all fields must have equally many rows; inputs has 2, targets has 6.",
    ),
    "a batch of nothing": (
        lambda: fit(sizes={"data": 0}),
        f"batch_sizes['data'] must be a positive int or 'all', got 0. {SIZES}",
    ),
    "a batch size with a point": (
        lambda: fit(sizes={"data": 4.0}),
        f"batch_sizes['data'] must be a positive int or 'all', got 4.0. {SIZES}",
    ),
    "a batch size in words": (
        lambda: fit(sizes={"data": "four"}),
        f"batch_sizes['data'] must be a positive int or 'all', got 'four'. {SIZES}",
    ),
    "one batch size": (
        lambda: fit(sizes=4),
        "batch_sizes must be a mapping, got 4. Pass a dict keyed by name.",
    ),
    "no batch size": (
        lambda: fit(sizes={"bc": 4}),
        "no batch size for sampler 'data'; batch_sizes has 'bc'. Add batch_sizes['data'] or drop",
    ),
    "a batch size without a pool": (
        lambda: fit(sizes={"data": 4, "bc": 4}),
        "batch_sizes names 'bc', but there is only 'data'. Drop it, or add what it names.",
    ),
    "a batch larger than the pool": (
        lambda: fit(data=PoolDataModule(BATCH, {"data": 7}, replace=False)),
        "batch_sizes['data'] must be at most the 6 rows of the pool when replace=False, got 7.",
    ),
    "a seed in quotes": (lambda: fit(seed="42"), f"seed must be a whole number, got '42'. {INTEGERS}"),
    "a seed with a point": (lambda: fit(seed=42.0), f"seed must be a whole number, got 42.0. {INTEGERS}"),
    "steps with a point": (lambda: Trainer(1e4), "max_steps must be a whole number, got 10000.0."),
    "steps below zero": (lambda: Trainer(-1), "max_steps must be in [0, 2**31), got -1."),
    # Calls
    "no number of steps": (
        lambda: Trainer(progress=False),
        "pass max_steps or max_epochs, got neither.",
    ),
    "arguments without their names": (
        lambda: Trainer(3, progress=False).fit(None, None, None, 0),
        "takes 2 positional arguments but 5 were given\n"
        "It is called as Trainer.fit(module, *, datamodule, optimizer, seed, ",
    ),
    "a misspelled argument": (
        lambda: Trainer(3).fit(None, datamodul=None, optimizer=None, seed=0),
        "got an unexpected keyword argument 'datamodul'",
    ),
    "no batch keys": (lambda: LossModule(init, losses), "argument: 'batch_keys'"),
    "one batch key": (
        lambda: LossModule(init, losses, batch_keys="data"),
        "batch_keys must be a sequence of names, got 'data'. Pass a tuple of strings.",
    ),
    "a box upside down": (lambda: Box([(1, 0)]), "bounds[0] must be finite with lo < hi in float32"),
    "a number as the directory": (
        lambda: Checkpoints(3),
        "directory must be a path, got 3. Pass the directory of the run.",
    ),
    "a history without a path": (
        CSVHistory,
        "missing 1 required positional argument: 'path'\nIt is called as CSVHistory(path, *, ",
    ),
    "an evaluation of nothing": (
        lambda: Evaluate(lambda: {}),
        "function must take (model_state), and may take key by that name, got (). Fix its parameters.",
    ),
    "numbers as a balancer": (lambda: fit(balancer={"fit": 1.0}), "balancer must be a LossBalancer"),
    "residuals that are missing": (
        lambda: fit(
            data=Data(
                NamedBatchSource(
                    {"data": ResidualDistributionSampler(Box([(0, 1)] * 2), refresh_every_n_steps=2)},
                    {"data": 4},
                    jax.random.key(0),
                )
            )
        ),
        "residuals",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_three_lines_without_a_frame_of_this_package(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(Exception) as caught:
        make()
    told = lines_of(caught.value)
    assert words in told
    assert len(told.splitlines()) <= 3, told
    assert not re.search(r"array\(|\d\.\d{3,}\D.*\d\.\d{3,}", told), "numbers of an array"
    assert not frames_of_ours(caught.value), told
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def lines_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def frames_of_ours(error):
    files = (Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    return [file for file in files if PACKAGE in file.parents]


def test_the_last_line_is_the_line_of_the_mistake():
    with pytest.raises(KeyError) as caught:
        fit(misspelled_batch)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == (
        'return {"fit": jnp.mean(batches["dat"]["inputs"] @ params["w"])}'
    )


def test_every_frame_is_there_on_request_and_where_the_package_is_at_fault(monkeypatch):
    filtering = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(KeyError) as caught:
            fit(misspelled_batch)
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    assert len(frames_of_ours(caught.value)) > 5
    monkeypatch.setattr(phijax_rng.trainer.trainer, "locked_plan", None)
    with pytest.raises(TypeError) as caught:
        fit()
    assert len(frames_of_ours(caught.value)) >= 2


# Loaders and directories, which need a run


class ShufflingLoader:
    """A loader that gives the batches of an epoch in the order of its own generator."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        order = self.rng.permutation(6)
        rows = [np.roll(order, index) for index in range(6)]
        return iter([{"data": {"inputs": X[each], "targets": Y[each]}} for each in rows])


def test_a_loader_that_gives_other_batches_on_a_resume_is_told_as_one(tmp_path):
    def run(stop, seed, **options):
        trainer = Trainer(stop, checkpoints=Checkpoints(tmp_path), progress=False)
        state = initialize_train_state({"w": jnp.zeros((2, 1))}, SGD, {}, keys.split_root(0))
        module = LossModule(init, losses, batch_keys=("data",))
        source = IterableSource(ShufflingLoader(seed))
        return trainer.fit_state(module, state, optimizer=SGD, source=source, **options)

    run(2, 1)
    with pytest.raises(RunChangedError) as caught:
        run(4, 2, resume=True)
    assert "(the source returned another batch for this step, as a loader that shuffles by" in str(
        caught.value
    )
    assert not frames_of_ours(caught.value)
    assert int(run(4, 1, resume=True).state.step) == 4


def test_a_directory_with_a_run_is_told_apart_from_the_run_to_start_from(tmp_path):
    heat = _problems.heat()
    for name in "ab":
        _fit.fit(heat, 0, tmp_path / name)
    with pytest.raises(RunExistsError) as caught:
        _fit.fit(heat, 2, tmp_path / "a")
    assert str(caught.value) == (
        f"{tmp_path / 'a'} has a run at step 0, and this call would start a fresh one. "
        "Pass resume='auto' to continue it, another directory to keep both, or delete it."
    )
    with pytest.raises(RunExistsError) as caught:
        _fit.fit(heat, 2, tmp_path / "a", ckpt_path=tmp_path / "b")
    assert f"this call would start another one from {tmp_path / 'b'}. Pass resume='auto'" in str(caught.value)


def test_a_data_frame_is_a_pool_with_a_field_for_each_column():
    frame = pandas.DataFrame({"x": X[:, 0], "count": range(6)}, index=list("abcdef"))
    source = PoolDataModule({"data": frame}, {"data": "all"}).train_batch_source(("data",), jax.random.key(0))
    rows = source(0)["data"]
    assert {name: (rows[name].dtype, rows[name].tolist()) for name in rows} == {
        "x": (np.float32, X[:, 0].tolist()),
        "count": (np.int32, list(range(6))),
    }


def test_an_impure_source_stays_an_error_of_its_own():
    with pytest.raises(ImpureSourceError):
        fit_source(shuffling)
