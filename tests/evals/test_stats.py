"""Statistics against brute force and against other implementations."""

import itertools
import math

import numpy as np
import pytest
from statsmodels.stats.contingency_tables import mcnemar as two_sided

from hileval import stats
from hileval.stats import Paired
from hilgate.errors import RecordsError


def enumerated(lost: int, gained: int) -> float:
    """P(losses >= lost) over all equally likely directions of the discordant questions."""
    outcomes = list(itertools.product((0, 1), repeat=lost + gained))
    return sum(sum(o) >= lost for o in outcomes) / len(outcomes)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 1), (7, 0), (6, 1), (5, 5), (3, 8), (10, 2)])
def test_mcnemar_counts_the_ways(lost, gained):
    assert stats.mcnemar(Paired(200, lost, gained)) == pytest.approx(enumerated(lost, gained), rel=1e-12)


def test_mcnemar_doubles_to_the_two_sided_test():
    one = stats.mcnemar(Paired(1319, 34, 12))
    assert one == pytest.approx(two_sided([[1200, 34], [12, 73]], exact=True).pvalue / 2, rel=1e-12)


def test_pair_counts_only_what_changed():
    before = [True, True, False, False, True]
    after = [True, False, True, False, False]
    assert stats.pair(before, after) == Paired(n=5, lost=2, gained=1)


@pytest.mark.parametrize(("before", "after"), [([], []), ([True], [True, False])])
def test_pair_refuses_vectors_that_do_not_match(before, after):
    with pytest.raises(RecordsError, match="cannot be paired"):
        stats.pair(before, after)


def test_drop_upper_covers_the_true_drop():
    """In 400 simulated runs with a true drop of 3 points the 99 % bound is above it in at least 97 %."""
    rng = np.random.default_rng(0)
    n, covered = 200, 0
    for _ in range(400):
        lost, gained = rng.binomial(n, 0.04), rng.binomial(n, 0.01)
        covered += stats.drop_upper(Paired(n, int(lost), int(gained)), 0.01) >= 0.03
    assert covered / 400 >= 0.97


def test_drop_upper_without_flips_is_not_zero_and_shrinks_with_n():
    few, many = (stats.drop_upper(Paired(n, 0, 0), 0.01) for n in (20, 200))
    assert 0.05 < few < 0.15
    assert 0.005 < many < 0.01
    assert stats.drop_upper(Paired(1, 0, 0), 0.01) == 1.0


def test_interval_is_wilsons():
    n, k, z = 200, 196, 2.5758293035489004
    p = k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert stats.interval(k, n, 0.01) == pytest.approx((centre - half, centre + half), rel=1e-9)


def test_power_without_noise_is_a_binomial_tail():
    fewest = stats.losses_to_fail(0.01)
    assert fewest == 7
    expected = 1 - sum(math.comb(200, k) * 0.05**k * 0.95 ** (200 - k) for k in range(fewest))
    assert stats.power(200, 0.05, 0.0, 0.01) == pytest.approx(expected, rel=1e-9)


def test_power_of_no_drop_stays_below_alpha():
    assert stats.power(200, 0.0, 0.04, 0.01) <= 0.01
    assert stats.power(200, 0.10, 0.02, 0.01) > stats.power(200, 0.05, 0.02, 0.01) > stats.power(200, 0.02, 0.02, 0.01)
