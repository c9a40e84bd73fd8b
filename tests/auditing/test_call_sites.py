"""Whose a line is."""

import jax
import numpy as np
import optax
import pytest

from phijax_rng import keys
from phijax_rng.auditing.call_sites import Line, Place, library_of, owner_of


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (__file__, "user"),
        (keys.__file__, "own"),
        (optax.__file__, "installed"),
        (jax.__file__, "jax"),
        (jax.random.normal.__code__.co_filename, "random"),
        ("<ipython-input-1>", "user"),
    ],
)
def test_a_file_lies_in_one_room(file: str, owner: str) -> None:
    assert owner_of(file) == owner


def test_a_place_in_a_package_names_the_package() -> None:
    own = Line(__file__, 1, "test")
    assert library_of(Place(own)) is None
    assert library_of(Place(own, Line(keys.__file__, 1, "stream"))) is None
    assert library_of(Place(own, Line(optax.__file__, 1, "update"))) == "optax"
    assert library_of(Place(own, Line(np.__file__, 1, "sum"))) == "numpy"
