"""How often the statistical tests fail over 100 keys: as often as chance says.

A p-value below 0.01 comes in one of a hundred draws from perfect samplers. Over 100 keys and every statistic
of a module, their number is compared with the binomial law; the test fails with probability 1e-4.
"""

import jax
import pytest
from scipy import stats

from phijax_rng import keys
from tests.statistics import test_rows_statistics, test_samplers, test_shuffle_statistics

NUM_KEYS = 100
LEVEL = 0.01
FALSE_ALARM = 1e-4

MODULES = {
    "rows": (test_rows_statistics.STATISTICS, lambda i: keys.split_root(1000 + i).sampling),
    "samplers": (test_samplers.STATISTICS, lambda i: keys.split_root(1000 + i).sampling),
    "shuffles": (test_shuffle_statistics.STATISTICS, lambda i: jax.random.key(1000 + i)),
}


@pytest.mark.parametrize(("statistics", "key_of"), MODULES.values(), ids=MODULES)
def test_statistics_fail_as_often_as_chance_says(statistics, key_of):
    below = dict.fromkeys(statistics, 0)
    for number in range(NUM_KEYS):
        key = key_of(number)
        for name, statistic in statistics.items():
            below[name] += statistic(key) < LEVEL
    total = NUM_KEYS * len(statistics)
    print(f"{sum(below.values())} of {total} p-values below {LEVEL}: {below}")
    assert stats.binomtest(sum(below.values()), total, LEVEL, alternative="greater").pvalue > FALSE_ALARM
    # Of one statistic alone, more than 8 of 100 are below 0.01 less than once in a million.
    assert max(below.values()) <= 8
