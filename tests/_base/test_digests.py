import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phijax_rng._base import digests as module
from phijax_rng._base.digests import digest, digest_fields

BASE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.zeros(2, np.float32),
    "flags": np.array([True, False]),
    "key": jax.random.key(3),
    "none": np.zeros((0, 3), np.float32),
    "small": np.int8(3),
    "wide": jnp.ones(3, jnp.bfloat16),
}


def nan(payload):
    return np.array([0x7FC00000 | payload], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"b": -BASE["b"]},
        {"a": BASE["b"], "b": BASE["a"]},
        {"a": np.nextafter(BASE["a"], np.float32(9))},
        {"a": BASE["a"].T.copy()},
        {"a": BASE["a"].astype(np.float64)},
        {"a": BASE["a"].view(np.int32)},
        {"flags": np.array([False, True])},
        {"flags": np.array([1, 0], np.int8)},
        {"small": np.int8(-3)},
        {"wide": jnp.ones(3, jnp.float16)},
        {"key": jax.random.key(4)},
        {"key": jax.random.key_data(BASE["key"])},
        {"none": np.zeros((0, 4), np.float32)},
        {"none": np.zeros((0, 3), np.int32)},
    ],
    ids=[
        *("a sign bit of zero", "two swapped leaves", "the last bit", "a shape", "a dtype", "the same bytes"),
        *("bool", "bool as int8", "int8", "bfloat16", "a key", "a key's words", "an empty shape"),
        "an empty dtype",
    ],
)
def test_a_digest_sees(change):
    assert digest({**BASE, **change}) != digest(BASE)


def test_two_nans_with_other_bits_have_other_digests():
    assert digest({"x": nan(1)}) != digest({"x": nan(2)})
    assert digest({"x": nan(1)}) == digest({"x": nan(1)})


def test_other_names_and_other_implementations_have_other_digests():
    assert digest({"x": 1}) != digest({"y": 1})
    words = np.array([1, 2], np.uint32)
    threefry, philox = (jax.random.wrap_key_data(words, impl=i) for i in ("threefry2x32", "philox4x32"))
    assert digest({"k": threefry}) != digest({"k": philox})


def test_a_digest_does_not_depend_on_layout_or_placement():
    fortran = {**BASE, "a": np.asfortranarray(BASE["a"])}
    strided = {**BASE, "a": np.repeat(BASE["a"], 2, axis=1)[:, ::2]}
    placed = jax.tree.map(jnp.asarray, BASE)
    assert {digest(fortran), digest(strided), digest(placed)} == {digest(BASE)}


def test_a_digest_is_pinned():
    # Checkpoints hold these digests: another value here makes older checkpoints unreadable.
    plain = {"w": np.arange(3, dtype=np.float32), "n": np.int32(7)}
    assert digest(plain) == PINNED


PINNED = "a70552f72afcf8886f1160ad172823bfbf44c247195ee1a88ae4dbe4d2a469cb"


def test_blocks_do_not_hide_a_change(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    rows = np.arange(64, dtype=np.float32)
    changed = rows.copy()
    changed[37] = -1
    assert digest(rows) != digest(changed)


def test_no_more_threads_hash_than_the_process_has_cores(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {3, 5})
    monkeypatch.setattr(module, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(module, "_AHEAD_BYTES", 2**18)
    hashing, sha256 = set(), module._sha256

    def watched(block):
        hashing.add(threading.current_thread().name)
        return sha256(block)

    tree = {f"{i:02d}": np.full(2**15 + i, i, np.float32) for i in range(20)}
    alone = digest(tree)
    monkeypatch.setattr(module, "_sha256", watched)
    assert digest(tree) == alone
    assert 1 <= len(hashing - {threading.current_thread().name}) <= 2
    monkeypatch.delattr(module.os, "sched_getaffinity")  # as on macOS
    assert module.num_cores() == module.os.cpu_count()
    assert digest(tree) == alone


def test_a_large_pool_is_sampled_and_its_digest_has_the_prefix(monkeypatch):
    rows = {"inputs": np.arange(20_000, dtype=np.float32).reshape(-1, 2)}
    assert digest_fields(rows).startswith("sha256:")
    monkeypatch.setattr(module, "SAMPLED_ABOVE_BYTES", 1000)
    sampled = digest_fields(rows)
    assert sampled.startswith("sha256-sampled:")
    last = {"inputs": rows["inputs"].copy()}
    last["inputs"][-1, 0] = 0
    assert digest_fields(last) != sampled
    assert digest_fields({"inputs": rows["inputs"][:-1]}) != sampled
