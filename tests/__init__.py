"""Tests of phijax_rng; helpers are imported as `from tests._bitwise import ...`."""
