"""Results of the compiled loop, joined and cut."""

import itertools

import numpy as np
import pytest

from phijax_rng.training.chunks import Chunk, joined, part
from tests._bitwise import assert_trees_bitwise_equal


def chunk(start, step):
    steps = np.arange(start, step)
    records = {"total": steps.astype(np.float32), "pde": -steps.astype(np.float32)}
    return Chunk(None, step, start, records, steps % 3 == 0, steps % 5 == 0)


def test_the_repr_has_steps_names_and_dtypes_and_no_number_of_an_array():
    assert repr(chunk(200, 204)) == (
        "Chunk(start=200, step=204, records={'total': float32[4], 'pde': float32[4]})"
    )


@pytest.mark.parametrize("cuts", [(3, 9), (3, 4, 9), (3, 4, 7, 9)])
def test_joined_chunks_are_the_chunk_of_all_their_updates(cuts):
    pieces = [chunk(*ends) for ends in itertools.pairwise(cuts)]
    assert_same(joined(pieces), chunk(3, 9))


def test_a_part_has_the_updates_of_its_slice():
    assert_same(part(chunk(3, 9), slice(0, 4), None), chunk(3, 7))
    assert_same(part(chunk(3, 9), slice(4, 6), None), chunk(7, 9))


def assert_same(found, expected):
    assert_trees_bitwise_equal(vars(found), vars(expected))
