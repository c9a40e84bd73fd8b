"""Iterables as sources: in order, from where the run goes on, never begun anew without a word."""

import re

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import Checkpoints, IterableSource, Trainer
from phijax_rng._base import validation
from phijax_rng.errors import RunChangedError
from tests import _problems
from tests._bitwise import assert_trees_bitwise_equal, first_difference
from tests._fit import resumed

PROBLEM = _problems.dropout()


def batch(step):
    rows = PROBLEM.source()(step)["data"]
    return {"data": {name: np.asarray(value) for name, value in rows.items()}}


BATCHES = [batch(step) for step in range(90)]


def generator(count=90, start=0):
    yield from BATCHES[start:count]


class Loader:
    """Begins anew at every `iter`, and fills one buffer again and again."""

    def __init__(self, batches=BATCHES):
        self.batches, self.begun = batches, 0

    def __iter__(self):
        self.begun += 1
        held = {name: np.empty_like(value) for name, value in self.batches[0]["data"].items()}
        for entry in self.batches:
            for name, value in entry["data"].items():
                held[name][...] = value
            yield {"data": held}


def grain_dataset():
    return grain.MapDataset.range(90).map(lambda i: BATCHES[i]).to_iter_dataset()


ITERABLES = {"a list": lambda: BATCHES, "a loader": Loader, "a generator": generator, "Grain": grain_dataset}


def fit(source, stop, folder=None):
    return resumed(PROBLEM, stop, folder, source=source).state


@pytest.mark.parametrize("make", ITERABLES.values(), ids=ITERABLES)
def test_a_run_on_an_iterable_is_the_run_on_its_batches_and_resumes(tmp_path, make):
    whole = PROBLEM.run(90)
    assert_trees_bitwise_equal(fit(make(), 70, tmp_path), PROBLEM.run(70))
    assert_trees_bitwise_equal(fit(make(), 90, tmp_path), whole)


def test_a_resume_does_not_restart_the_iterable(tmp_path):
    fit(BATCHES, 20, tmp_path)
    restarted = [*BATCHES[:20], *BATCHES]  # what a loader that starts again would give
    with pytest.raises(RunChangedError, match="canary"):
        fit(restarted, 40, tmp_path)


def test_a_resume_can_be_rejected_instead(tmp_path):
    fit(IterableSource(Loader(), on_resume="refuse"), 20, tmp_path)
    message = (
        "the source is an iterable that would have to skip 20 batches, and on_resume='refuse'. "
        "Start at step 0, or pass on_resume='skip'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(IterableSource(Loader(), on_resume="refuse"), 40, tmp_path)


def test_recent_batches_can_be_drawn_again():
    loader = Loader()
    source = IterableSource(loader)
    for step in (0, 0, 1, 2, 3, 0, 64, 1):
        assert_trees_bitwise_equal(source(step), BATCHES[step])
    assert loader.begun == 1


def test_an_early_batch_is_read_again_from_the_first(monkeypatch):
    monkeypatch.setattr("phijax_rng.sampling.iterables._RETAINED", 8)
    loader = Loader()
    source = IterableSource(loader)
    assert_trees_bitwise_equal(
        [source(step) for step in (40, 3, 41)], [BATCHES[step] for step in (40, 3, 41)]
    )
    assert loader.begun == 2
    once = IterableSource(generator())
    once(40)
    message = (
        "the source is an iterator at step 41, which cannot return to step 3. "
        "Pass an iterable that can be iterated over again, such as a list or a data loader."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        once(3)


def test_of_large_batches_only_a_few_are_retained():
    source = IterableSource([{"data": np.zeros(2**20, np.float32)}] * 100)
    for step in range(100):
        source(step)
    assert len(source._retained) == 64


@pytest.mark.parametrize("known", [True, False], ids=["a list", "a generator"])
def test_the_end_of_an_iterable_is_named_and_saved_steps_stay(tmp_path, known):
    message = (
        "the source is an iterable that ended after 70 batches, before the batch of step 70. "
        "Train to max_steps=70, or pass a longer one."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(BATCHES[:70] if known else generator(70), 90, tmp_path)
    assert Checkpoints(tmp_path).latest_step == 64  # the stack before
    assert_trees_bitwise_equal(fit(BATCHES[:70], 70, tmp_path), PROBLEM.run(70))


def test_another_order_is_not_taken_for_the_same():
    turned = fit([*BATCHES[1::-1], *BATCHES[2:]], 40)
    assert first_difference(turned.model_state, PROBLEM.run(40).model_state) is not None


def test_unnamed_batches_are_fed_too():
    def train_step(state, rows, key):
        return state.replace(step=state.step + 1), {"fit": jnp.sum(rows)}

    trainer = Trainer(5, progress=False, log_every_n_steps=1)
    source = [np.float32([step]) for step in range(5)]
    fitted = trainer.fit_state(None, PROBLEM.state(), train_step=train_step, source=source)
    assert [entry["fit"] for entry in fitted.history] == [0, 1, 2, 3, 4]


def test_what_gives_no_batches_is_rejected():
    for value in (5, "text", np.float32(2), np.array(2)):
        message = (
            f"iterable must return batches one by one, got {validation.formatted(value)}. Pass an iterable."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            IterableSource(value)
    message = "on_resume must be one of 'skip', 'refuse', got 'restart'. Pick one of them."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        IterableSource(BATCHES, on_resume="restart")


@pytest.mark.parametrize("empty", [[], (), {}, np.zeros((0, 3))], ids=["list", "tuple", "dict", "array"])
def test_an_iterable_without_a_batch_is_rejected_before_it_is_read(empty):
    with pytest.raises(ValueError) as caught:
        IterableSource(empty)
    assert (
        str(caught.value)
        == f"iterable must return at least one batch, got {validation.formatted(empty)}. Fill it."
    )


def test_an_empty_list_is_no_source_of_a_run():
    with pytest.raises(ValueError, match=r"^iterable must return at least one batch, got \[\]\. Fill it\.$"):
        fit([], 3)


def test_an_iterator_that_was_read_before_raises():
    spent = iter([BATCHES[0]])
    next(spent)
    with pytest.raises(ValueError) as caught:
        IterableSource(spent)(0)
    assert str(caught.value) == (
        f"the source is an iterable that returned no batch, got {spent!r}. "
        "Fill it; if it has been read before, pass one that can be iterated over again."
    )


class WithoutLength:
    """A loader whose data has no length, as PyTorch's `DataLoader` of an `IterableDataset`."""

    def __len__(self):
        raise TypeError("object of type 'IterableDataset' has no len()")

    def __iter__(self):
        return iter(BATCHES)


def test_a_loader_without_a_length_is_read():
    assert_trees_bitwise_equal(IterableSource(WithoutLength())(2), BATCHES[2])
