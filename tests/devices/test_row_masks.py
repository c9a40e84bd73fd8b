"""Means over the rows that count."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import masked_mean
from phijax_rng.devices.row_masks import every_row


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2, 3), (5, 5)])
def test_the_mean_is_that_of_the_rows_that_count(shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mask = np.array([True, False, True, True, False])
    np.testing.assert_allclose(masked_mean(values, mask), values[mask].mean(), rtol=1e-6)
    assert float(masked_mean(values, np.ones(5, bool))) == pytest.approx(float(values.mean()), rel=1e-6)


def test_no_gradient_comes_from_a_row_that_does_not_count():
    def loss(values):
        return masked_mean(values**3, jnp.array([True, False, True]))

    gradient = jax.grad(loss)(jnp.array([1.0, jnp.inf, 2.0]))
    np.testing.assert_allclose(gradient[np.array([0, 2])], [1.5, 6.0])
    assert (
        np.isnan(gradient[1]) or gradient[1] == 0
    )  # 0 * inf: why rows are filled up by rows that were drawn


@pytest.mark.parametrize(("values", "mask"), [((3, 2), (2,)), ((3,), (3, 1)), ((), ())])
def test_a_mask_that_does_not_fit_is_rejected(values, mask):
    message = (
        f"mask must have shape (rows,) for values of shape (rows, ...), got {mask} for {values}. "
        "Pass the mask of the same batch."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        masked_mean(np.zeros(values), np.ones(mask, bool))


def test_every_row_counts_by_default():
    found = every_row({"b": {"inputs": np.zeros((2, 3))}, "a": {"inputs": np.zeros((4, 1)), "scale": 1.0}})
    assert {name: mask.tolist() for name, mask in found.items()} == {"b": [True] * 2, "a": [True] * 4}
