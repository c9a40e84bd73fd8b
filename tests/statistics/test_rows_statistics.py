"""Whether weighted and shuffled rows follow their laws, and are independent over steps, epochs and seeds.

Every statistic takes a sampling key and gives one p-value; its test uses a fixed key and fails below
`FALSE_ALARM`, which is therefore the probability that perfect draws would have failed here. How often
they fail over 100 keys is looked at in `tests/campaigns/test_failure_rates.py`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from phijax_rng import NamedBatchSource, ShuffledRowSampler, WeightedRowSampler, keys

pytestmark = pytest.mark.full  # many draws each

FALSE_ALARM = 1e-4
KEY = keys.split_root(31).sampling
NUM_STEPS = 4_000
NUM_ROWS = 40
INDEX = np.arange(NUM_ROWS, dtype=np.int32)
WEIGHTS = np.where(INDEX % 4 == 0, 0, 1 + INDEX / 4)
FEW = np.array([0.0, 1.0, 2.0, 5.0, 0.5])
SAMPLERS = {
    "weighted": (WeightedRowSampler({"index": INDEX}, WEIGHTS), 30),
    "weighted again": (WeightedRowSampler({"index": INDEX}, WEIGHTS), 30),
    "weighted, distinct": (WeightedRowSampler({"index": INDEX[:5]}, FEW, replace=False), 3),
    "shuffled": (ShuffledRowSampler({"index": INDEX}), NUM_ROWS),
    "shuffled again": (ShuffledRowSampler({"index": INDEX}), NUM_ROWS),
    "shuffled few": (ShuffledRowSampler({"index": INDEX[:4]}), 4),
}


@jax.jit
def _batches(key):
    samplers = {name: sampler for name, (sampler, _) in SAMPLERS.items()}
    source = NamedBatchSource(samplers, {name: size for name, (_, size) in SAMPLERS.items()}, key)
    return jax.lax.map(source, jnp.arange(NUM_STEPS))


_drawn = {}


def index(key, name):
    """Row numbers of every step, shape (steps, rows); drawn once for each key."""
    known = keys.fingerprint(key)
    if known not in _drawn:
        _drawn.clear()
        _drawn[known] = jax.tree.map(np.asarray, _batches(key))
    return _drawn[known][name]["index"]


def goodness(observed, probabilities):
    return stats.chisquare(observed, observed.sum() * np.asarray(probabilities)).pvalue


def weighted_frequencies(key):
    counts = np.bincount(index(key, "weighted").ravel(), minlength=NUM_ROWS)
    assert counts[WEIGHTS == 0].sum() == 0
    return goodness(counts[WEIGHTS > 0], WEIGHTS[WEIGHTS > 0] / WEIGHTS.sum())


def successive_law(size):
    """Ordered tuples of distinct rows, and their probability: one after the other by what is left."""
    positive = np.flatnonzero(FEW)
    law = {}
    for rows in itertools.permutations(positive, size):
        left, probability = FEW.sum(), 1.0
        for row in rows:
            probability *= FEW[row] / left
            left -= FEW[row]
        law[rows] = probability
    return law


def weighted_tuples(key):
    law = successive_law(3)
    drawn = list(map(tuple, index(key, "weighted, distinct").tolist()))
    return goodness(np.array([drawn.count(rows) for rows in law]), list(law.values()))


def joint(left, right, count=10):
    """Two labels in range(count) that should be uniform and independent of each other."""
    cells = np.ravel(left) * count + np.ravel(right)
    return stats.chisquare(np.bincount(cells, minlength=count * count)).pvalue


def quantile(rows):
    """Weighted rows as labels 0 to 9 of equal probability are not to be had; ten rows as they come are."""
    cells = np.cumsum(WEIGHTS) / WEIGHTS.sum()
    return np.minimum((cells[rows] * 3 - 1e-9).astype(int), 2)


def independent(left, right):
    table = np.zeros((3, 3))
    np.add.at(table, (quantile(left).ravel(), quantile(right).ravel()), 1)
    return stats.chi2_contingency(table).pvalue


def weighted_steps(key):
    rows = index(key, "weighted")
    return independent(rows[0::2], rows[1::2])


def weighted_neighbors(key):
    rows = index(key, "weighted")
    return independent(rows[:, 0::2], rows[:, 1::2])


def weighted_samplers(key):
    return independent(index(key, "weighted"), index(key, "weighted again"))


def orders_of_four(key):
    """Every epoch of four rows against all 24 orders."""
    code = index(key, "shuffled few") @ np.array([64, 16, 4, 1])
    orders = [np.dot(order, [64, 16, 4, 1]) for order in itertools.permutations(range(4))]
    return stats.chisquare([np.count_nonzero(code == order) for order in orders]).pvalue


def orders_of_successive_epochs(key):
    """The order of three rows of an epoch, against that in the next: 36 pairs."""
    rank = np.argsort(index(key, "shuffled few"), axis=1)[:, :3]
    label = (rank[:, :1] < rank[:, 1:]).sum(axis=1) * 2 + (rank[:, 1] < rank[:, 2])
    names = {value: number for number, value in enumerate(sorted(set(label.tolist())))}
    table = np.zeros((len(names), len(names)))
    np.add.at(table, ([names[v] for v in label[0::2]], [names[v] for v in label[1::2]]), 1)
    return stats.chi2_contingency(table).pvalue


def places_in_an_epoch(key):
    """Where a row stands in an epoch: uniform, over rows and places."""
    rows = index(key, "shuffled")
    counts = np.zeros((NUM_ROWS, NUM_ROWS))
    np.add.at(counts, (rows, np.broadcast_to(np.arange(NUM_ROWS), rows.shape)), 1)
    expected = NUM_STEPS / NUM_ROWS
    # Counts of a uniform permutation matrix: (n - 1)**2 degrees, each cell of variance 1 / (1 - 1/n).
    statistic = ((counts - expected) ** 2 / expected).sum() * (NUM_ROWS - 1) / NUM_ROWS
    return stats.chi2.sf(statistic, (NUM_ROWS - 1) ** 2)


def agreements(one, other):
    """In how many places two orders agree: Poisson(1) but for a correction of order 1/n!."""
    same = np.bincount((one == other).sum(axis=1), minlength=6)
    law = stats.poisson(1)
    return goodness(np.append(same[:5], same[5:].sum()), [*law.pmf(range(5)), law.sf(4)])


def successive_epochs(key):
    rows = index(key, "shuffled")
    return agreements(rows[0::2], rows[1::2])


def two_shuffles(key):
    return agreements(index(key, "shuffled"), index(key, "shuffled again"))


@functools.lru_cache(maxsize=2)
def _of_seed(seed):
    return index(keys.split_root(seed).sampling, "shuffled").copy()


def neighboring_seeds(key):
    """Epochs of seeds s and s + 1, s drawn from the key."""
    seed = int(jax.random.randint(key, (), 0, 2**30))
    return agreements(_of_seed(seed), _of_seed(seed + 1))


STATISTICS = {
    "frequencies of weighted rows": weighted_frequencies,
    "tuples of distinct weighted rows": weighted_tuples,
    "weighted rows of neighboring steps": weighted_steps,
    "neighboring weighted rows": weighted_neighbors,
    "two weighted samplers": weighted_samplers,
    "orders of four rows": orders_of_four,
    "orders of successive epochs": orders_of_successive_epochs,
    "places in an epoch": places_in_an_epoch,
    "agreements of successive epochs": successive_epochs,
    "agreements of two shuffles": two_shuffles,
    "agreements of neighboring seeds": neighboring_seeds,
}


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
def test_rows_follow_their_law(statistic):
    assert statistic(KEY) > FALSE_ALARM


CONTROLS = {
    "weights that are a tenth off": lambda: goodness(
        np.bincount(index(KEY, "weighted").ravel(), minlength=NUM_ROWS)[WEIGHTS > 0],
        (WEIGHTS[WEIGHTS > 0] + 0.1 * (INDEX[WEIGHTS > 0] == 39) * WEIGHTS.max())
        / (1.1 * WEIGHTS.max() + WEIGHTS.sum() - WEIGHTS.max()),
    ),
    "one order for two epochs": lambda: agreements(index(KEY, "shuffled"), index(KEY, "shuffled")),
    "one key for two samplers": lambda: independent(index(KEY, "weighted"), index(KEY, "weighted")),
    "an epoch that swaps only its ends": lambda: agreements(
        index(KEY, "shuffled"), np.roll(index(KEY, "shuffled"), 1, axis=1)
    ),
}


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_rows_that_do_not_are_seen(control):
    assert control() < FALSE_ALARM
