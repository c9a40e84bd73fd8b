import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phijax_rng import Checkpoints, HostPool, LossModule, PoolDataModule
from phijax_rng.errors import NonFiniteError
from tests import _fit, _problems
from tests._bitwise import assert_trees_bitwise_equal


def _losses(params, batches):
    # A row of the batch says when the loss is NaN: the batch of step k is row k.
    spoilt = jnp.sum(batches["data"]["inputs"]) > 0
    return {"fit": jnp.sum((params["w"] - 2) ** 2) * jnp.where(spoilt, jnp.nan, 1)}


class Rows:
    """The batch of step k is whether the loss of step k is NaN."""

    def __init__(self, at):
        self.spoilt = jnp.asarray(np.isin(np.arange(64), at), jnp.float32)

    def train_batch_source(self, batch_keys, key):
        return lambda step: {"data": {"inputs": self.spoilt[step], "step": step}}


def problem(at):
    module = LossModule(lambda key: {"w": jnp.ones(2)}, _losses, batch_keys=("data",))
    return _problems.Problem(module, Rows(at), optax.sgd(0.1))


def fit(at, stop=20, folder=None, *, most=4, **options):
    trainer = {
        "on_nonfinite": "skip",
        "max_skipped_in_a_row": most,
        "log_every_n_steps": 5,
        **options.pop("trainer", {}),
    }
    return _fit.fit(problem(at), stop, folder, trainer=trainer, **options)


AT = [3, 9, 10, 17]


def test_skipped_updates_are_counted_in_the_result_and_the_history():
    result = fit(AT)
    assert result.skipped_updates == 4
    assert "skipped_updates=4, " in repr(result)
    assert [(row["step"], row["skipped_updates"]) for row in result.history] == [
        (5, 1),
        (10, 2),
        (15, 3),
        (20, 4),
    ]
    chunked = fit(AT, trainer={"chunk_size": 3})
    assert_trees_bitwise_equal(list(chunked.history), list(result.history))
    assert_trees_bitwise_equal(chunked.state, result.state)
    assert "skipped_updates" not in repr(fit([]))
    assert fit([]).skipped_updates == 0


def test_without_skip_there_is_nothing_to_count():
    result = fit([], trainer={"on_nonfinite": "raise"})
    assert result.skipped_updates == 0
    assert all("skipped_updates" not in row for row in result.history)
    assert fit(AT, trainer={"on_nonfinite": "ignore"}).skipped_updates == 0


@pytest.mark.parametrize("cut", [4, 10, 11])
def test_a_resumed_run_goes_on_counting(tmp_path, cut):
    fit(AT, cut, tmp_path)
    resumed = fit(AT, 20, tmp_path, resume="auto")
    whole = fit(AT)
    assert resumed.skipped_updates == whole.skipped_updates == 4
    assert [row["skipped_updates"] for row in resumed.history] == [1, 2, 3, 4]
    assert_trees_bitwise_equal(resumed.state, whole.state)


def test_too_many_in_a_row_end_the_run_and_what_stands_is_saved(tmp_path):
    at = [2, 6, 7, 8, 9, 10]
    with pytest.raises(NonFiniteError) as caught:
        fit(at, 20, tmp_path)
    error = caught.value
    assert str(error).startswith(
        "training became non-finite at every step from 6 to 9, 4 in a row: 'fit' is nan"
    )
    assert (error.first_step, error.step, int(error.state.step)) == (6, 9, 9)
    assert "to draw the batch of step 9 again" in error.__notes__[0]
    assert Checkpoints(tmp_path).latest_step == 9
    # The row goes on after a resume: one more such update ends the run again.
    with pytest.raises(NonFiniteError, match="at every step from 6 to 9, 4 in a row: "):
        fit(at, 20, tmp_path, resume=True)
    with pytest.raises(NonFiniteError, match="at every step from 6 to 10, 5 in a row: "):
        fit(at, 20, tmp_path, most=5, resume=True)
    result = fit(at, 20, tmp_path, most=6, resume=True)
    assert (result.skipped_updates, int(result.state.step)) == (6, 20)
    assert_trees_bitwise_equal(result.state, fit(at, most=6).state)


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_the_row_is_counted_across_chunks(chunk_size):
    with pytest.raises(NonFiniteError) as caught:
        fit([6, 7, 8, 9, 10], trainer={"chunk_size": chunk_size})
    assert (caught.value.first_step, caught.value.step) == (6, 9)


def test_a_run_in_which_every_loss_is_nan_ends_after_100_updates():
    every = PoolDataModule({"data": HostPool(np.ones((4, 1), np.float32))}, {"data": 2})
    spoilt = _problems.Problem(problem([]).module, every, optax.sgd(0.1))
    with pytest.raises(NonFiniteError) as caught:
        _fit.fit(spoilt, 3000, trainer={"on_nonfinite": "skip"})
    assert (caught.value.first_step, caught.value.step) == (0, 99)
