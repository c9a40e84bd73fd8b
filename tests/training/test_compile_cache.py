"""Programs are compiled in one thread, one after the other, and nobody waits for one that was left."""

import threading

import jax
import jax.numpy as jnp
import pytest

from phijax_rng.devices.placement import on_device
from phijax_rng.training.compile_cache import compiled

NAME = "phijax_rng-compile"


def compile_one(number, while_compiling=lambda: None):
    lowered = jax.jit(lambda x: x * number + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
    return compiled(lowered, lowered.as_text(), on_device().replicated, while_compiling)


def threads():
    return {thread for thread in threading.enumerate() if thread.name == NAME}


def test_programs_that_follow_one_another_are_compiled_in_one_thread():
    compile_one(-1)
    before = threads()
    assert before
    for number in range(5):
        assert float(compile_one(number)(jnp.ones(3))[0]) == number + 1
    assert threads() == before


def test_a_compilation_that_was_left_holds_nobody_up(monkeypatch):
    ready, plain = threading.Event(), jax.stages.Lowered.compile

    def slow(self, *arguments, **options):
        ready.wait(60)
        return plain(self, *arguments, **options)

    def leave():
        raise KeyboardInterrupt

    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    with pytest.raises(KeyboardInterrupt):
        compile_one(100, leave)
    monkeypatch.setattr(jax.stages.Lowered, "compile", plain)
    assert float(compile_one(101)(jnp.ones(3))[0]) == 102
    ready.set()


def test_an_error_of_the_compiler_is_raised(monkeypatch):
    def fails(self, *arguments, **options):
        raise ValueError("no such target")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
    with pytest.raises(ValueError, match=r"^no such target$"):
        compile_one(200)
    monkeypatch.undo()
    assert float(compile_one(200)(jnp.ones(3))[0]) == 201
