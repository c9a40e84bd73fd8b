"""Draws docs/images/shuffle-evidence.svg: how the quality of the shuffle depends on its number of rounds.

Run it from the root of the repository: `python docs/_plots/shuffle_evidence.py`. It also prints the numbers of the
page. The numbers come from fixed keys, so a second run draws the same figure.
"""

import functools
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from scipy import stats

from phijax_rng import shuffle

OUT = Path(__file__).parents[1] / "images" / "shuffle-evidence.svg"
ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14)
SMALL = (2, 3, 4, 5)
NUM_KEYS = 200_000
BITS = 20  # of an index, for the avalanche
NUM_INDICES = 512


@functools.partial(jax.jit, static_argnums=(2, 3))
def images(keys, index, n, rounds):
    """Row t: where the permutation of key t takes each index, after this many rounds."""
    grid = shuffle._grid(n)

    def one(key):
        words = jax.random.bits(key, (rounds, 2, 2), jnp.uint32)
        turn = functools.partial(shuffle._round, grid)
        return jax.lax.scan(turn, index, words)[0]

    return jax.vmap(one)(keys)


def excess(n, rounds):
    """The chi-square statistic over all n! permutations, in standard deviations from its mean."""
    keys = jax.random.split(jax.random.key(n), NUM_KEYS)
    drawn = np.asarray(images(keys, jnp.arange(n, dtype=jnp.uint32), n, rounds)).astype(int)
    code = drawn @ n ** np.arange(n)
    cells = np.array(list(itertools.permutations(range(n)))) @ n ** np.arange(n)
    counts = np.bincount(code, minlength=n**n)[cells]
    expected = NUM_KEYS / math.factorial(n)
    freedom = math.factorial(n) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return (statistic - freedom) / math.sqrt(2 * freedom), stats.chi2.sf(statistic, freedom)


def flipped(rounds, changed):
    """The share of the bits of an image that flip, for each of the changed single bits."""
    n = 2**BITS
    index = jax.random.randint(jax.random.key(1), (NUM_INDICES,), 0, n, jnp.int32).astype(jnp.uint32)
    words = np.asarray(jax.random.key_data(jax.random.key(7)))
    if changed == "key":
        flips = [
            words ^ np.uint32([1 << b if w == 0 else 0, 1 << b if w == 1 else 0])
            for w in (0, 1)
            for b in range(32)
        ]
        before = images(jax.random.wrap_key_data(words)[None], index, n, rounds)
        after = images(jax.random.wrap_key_data(np.stack(flips)), index, n, rounds)
    else:
        keys = jax.random.split(jax.random.key(7), 16)
        before = images(keys, index, n, rounds)[None]
        after = jnp.stack([images(keys, index ^ np.uint32(1 << b), n, rounds) for b in range(BITS)])
    differ = np.asarray(before ^ after)
    share = np.bitwise_count(differ).astype(float) / BITS
    return share.reshape(len(after), -1).mean(axis=1)


def main():
    mpl.rcParams.update({"svg.hashsalt": "shuffle", "svg.fonttype": "path", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for n in SMALL:
        values = [excess(n, rounds) for rounds in ROUNDS]
        chosen = shuffle._num_rounds(int(shuffle._grid(n).rows))
        print(
            f"n={n}, chosen {chosen}:",
            ", ".join(f"{r}: {v:.1f}" for r, (v, _) in zip(ROUNDS, values, strict=True)),
        )
        left.plot(ROUNDS, [max(v, 0.3) for v, _ in values], marker="o", markersize=3, label=f"n = {n}")
        left.plot(
            chosen, max(excess(n, chosen)[0], 0.3), marker="s", markersize=7, color=left.lines[-1].get_color()
        )
    left.axhspan(0.25, 3.7, color="0.9", label="perfect: below 3.7 but once in 10 000")
    left.set(
        yscale="log",
        xlabel="rounds",
        ylabel="excess chi-square, standard deviations",
        title=f"all n! permutations, {NUM_KEYS} keys",
    )
    left.legend(fontsize=7)
    for changed, label in (
        ("key", "one bit of the key, each of 64"),
        ("index", "one bit of the index, each of 20"),
    ):
        shares = [flipped(rounds, changed) for rounds in ROUNDS[:6]]
        print(
            changed,
            ", ".join(f"{r}: {s.min():.3f} to {s.max():.3f}" for r, s in zip(ROUNDS, shares, strict=False)),
        )
        middle = np.array([s.mean() for s in shares])
        right.errorbar(
            ROUNDS[:6],
            middle,
            [middle - [s.min() for s in shares], [s.max() for s in shares] - middle],
            marker="o",
            markersize=3,
            capsize=3,
            label=label,
        )
    right.axhline(0.5, color="0.6", linewidth=0.8)
    right.axvline(5, color="0.6", linewidth=0.8, linestyle=":")
    right.set(
        xlabel="rounds", ylabel="share of the image's bits that flip", title=f"avalanche, n = 2**{BITS}"
    )
    right.legend(fontsize=7)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
