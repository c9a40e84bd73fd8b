"""The hash of the compiled loop: the bits of JAX, from programs without its loop of five iterations."""

import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng import keys
from phijax_rng.training import cpu_threefry
from tests._selection import mostly_full
from tests._subprocess import run_python

# Known answers of the authors' Random123 distribution, tests/kat_vectors: threefry 2x32, 20 rounds.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def words(*values):
    return tuple(jnp.uint32(value) for value in values)


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_the_known_answers(key, counter, expected):
    assert tuple(map(int, cpu_threefry.threefry2x32(words(*key), words(*counter)))) == expected


def draws(key, step):
    """A chain of seven derivations, with draws of every kind at its end, and keys under vmap."""
    for link in range(5):
        key = jax.random.split(jax.random.fold_in(key, step + link), 3)[link % 3]
    rows = jax.random.split(key, 7)
    return {
        "bits": jax.random.bits(key, (5, 3)),
        "bits of 8": jax.random.bits(key, (33,), jnp.uint8),
        "rows": jax.random.randint(key, (9,), 0, 1_000_003),
        "uniform": jax.random.uniform(key, (1000,)),
        "none": jax.random.uniform(key, (0, 2)),
        "under vmap": jax.vmap(lambda own: jax.random.uniform(jax.random.fold_in(own, step), (3,)))(rows),
        "one key": jax.vmap(lambda data: jax.random.bits(jax.random.fold_in(key, data)))(jnp.arange(6)),
        "keys": jax.random.key_data(rows),
    }


def draws_in_a_loop(key, step):
    """Draws that loop inside."""
    key = jax.random.fold_in(key, step)
    return {"order": jax.random.permutation(key, 100), "gamma": jax.random.gamma(key, 2.5, (4,))}


DRAWS = {
    "most draws": (draws, True),
    "most draws, not partitionable": (draws, False),
    "draws that loop inside": (draws_in_a_loop, True),
    "draws that loop inside, not partitionable": (draws_in_a_loop, False),
}


@pytest.mark.parametrize(("draws", "partitionable"), mostly_full(DRAWS, everyday=[]))
def test_every_kind_of_draw_has_jaxs_bits(draws, partitionable):
    with jax.threefry_partitionable(partitionable):
        arguments = (keys.root_key(42), jnp.int32(11))
        ours = cpu_threefry.lower(jax.jit(draws), arguments, "cpu").compile()(*arguments)
        theirs = jax.jit(draws)(*arguments)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_loop_is_unrolled_on_cpus_only():
    arguments = (keys.root_key(42),)
    program = jax.jit(lambda key: jax.random.bits(jax.random.fold_in(key, 1), (8,)))
    assert "stablehlo.while" not in cpu_threefry.lower(program, arguments, "cpu").as_text()
    assert "stablehlo.while" in cpu_threefry.lower(program, arguments, "gpu").as_text()


@pytest.mark.parametrize("name", cpu_threefry.PRIVATE_NAMES)
def test_every_private_name_is_checked_before_use(name, monkeypatch):
    owner, _, attribute = name.replace(":", ":.").rpartition(".")
    assert cpu_threefry.is_available()
    monkeypatch.delattr(pkgutil.resolve_name(owner.replace(":.", ":")), attribute)
    assert not cpu_threefry.is_available()


@pytest.mark.parametrize("name", ["jax.interpreters.mlir:Absent", "jax.extend.absent:threefry2x32_p"])
def test_a_jax_without_a_private_name_compiles_its_own_hash(name, monkeypatch):
    monkeypatch.setattr(cpu_threefry, "PRIVATE_NAMES", (*cpu_threefry.PRIVATE_NAMES, name))
    program = jax.jit(jax.random.bits)
    assert "stablehlo.while" in cpu_threefry.lower(program, (keys.root_key(42),), "cpu").as_text()


def test_a_jax_without_private_parameters_compiles_its_own_hash(monkeypatch):
    monkeypatch.setattr(jax.stages.Traced, "lower", lambda traced: "as JAX does")
    program = jax.jit(jax.random.bits)
    assert cpu_threefry.lower(program, (keys.root_key(42),), "cpu") == "as JAX does"


def test_the_package_needs_no_private_name_to_be_imported():
    run_python("""
        import sys

        sys.modules["jax.extend.mlir.dialects.stablehlo"] = None
        import phijax_rng
        from phijax_rng.training import cpu_threefry

        assert not cpu_threefry.is_available()
    """)
