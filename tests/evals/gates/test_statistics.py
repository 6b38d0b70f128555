# SPDX-License-Identifier: Apache-2.0
"""Exact test, sequential looks and bounds of a drop: by enumeration, by other libraries, and by their levels."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binomtest, norm, ttest_1samp

from hileval import statistics
from hileval.statistics import churn, difference_levels, difference_p, drop_interval, dropped_at_a_look, excludes

RUNS = st.integers(1, 5)


@st.composite
def two_sides(draw):
    n, base_runs, new_runs = draw(st.integers(1, 40)), draw(RUNS), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chance = rng.random(n)
    return rng.random((base_runs, n)) < chance, rng.random((new_runs, n)) < chance


@given(st.integers(0, 2**32 - 1), st.integers(1, 120))
def test_one_run_each_is_scipys_exact_mcnemar(seed, n):
    rng = np.random.default_rng(seed)
    before, after = rng.random((1, n)) < 0.7, rng.random((1, n)) < 0.6
    lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
    expected = binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue if lost + gained else 1.0
    assert statistics.drop_p(before, after) == pytest.approx(expected, abs=1e-12)


def test_three_questions_by_enumeration():
    # The reference walks every way to choose which of the K + M runs are the new ones, question by question.
    base = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=bool)
    new = np.array([[0, 1, 0], [0, 0, 1]], dtype=bool)
    together = np.vstack([base, new])
    ways = [[int(together[list(chosen), q].sum()) for chosen in itertools.combinations(range(5), 2)] for q in range(3)]
    totals = [sum(combination) for combination in itertools.product(*ways)]
    expected = np.mean([total <= new.sum() for total in totals])
    assert statistics.drop_p(base, new) == pytest.approx(expected)


def test_discordance_is_unbiased():
    rng = np.random.default_rng(3)
    chance = rng.choice([0.1, 0.5, 0.9, 1.0], size=4000)
    measured = statistics.discordance(rng.random((5, 4000)) < chance)
    assert measured == pytest.approx(np.mean(2 * chance * (1 - chance)), abs=0.01)


def test_interval_is_wilsons():
    z, p, n = 2.5758293, 0.95, 200
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + (z / 2 / n) ** 2)
    middle = (p + z * z / 2 / n) / (1 + z * z / n)
    assert statistics.interval(190, n, 0.01) == pytest.approx((middle - half, middle + half), abs=1e-6)


def test_excess_of_broken_answers():
    assert statistics.excess(12, 250, 1 / 250) == pytest.approx(7e-10, rel=0.3)
    assert statistics.excess(3, 250, 1 / 250) == pytest.approx(0.08, rel=0.1)


PLAN = (50, 75, 100, 125, 150, 175, 200, 225, 250)


def toss(rng, runs, chance):
    return rng.random((runs, len(chance))) < chance


def test_chance_to_cross_a_boundary_is_below_alpha():
    # Every way in which the three runs of six disputed questions could be dealt is played through the real looks.
    right = [2, 1, 2, 1, 2, 1]
    deals = [[(a, b, g - a - b) for a in (0, 1) for b in (0, 1) if 0 <= g - a - b <= 1] for g in right]
    called = []
    for deal in itertools.product(*deals):
        columns = np.array(deal, dtype=bool).T
        called.append(dropped_at_a_look(columns[:2], columns[2:], (2, 4, 6), 0.3))
    assert 0.05 < np.mean(called) <= 0.3


def test_what_is_spent_is_what_happens():
    rng = np.random.default_rng(5)
    chance = rng.permutation(np.concatenate([np.full(30, 0.5), np.ones(200), np.zeros(20)]))
    called = np.mean([dropped_at_a_look(toss(rng, 5, chance), toss(rng, 1, chance), PLAN, 0.05) for _ in range(2000)])
    assert called <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)
    assert called >= 0.025  # one fifth of alpha a look would leave half of this


def test_one_look_is_the_plain_test():
    rng = np.random.default_rng(6)
    chance = np.concatenate([np.full(20, 0.5), np.ones(80)])
    for drop in (0.0, 0.05, 0.1, 0.2):
        base, new = toss(rng, 5, chance), toss(rng, 1, chance * (rng.random(100) >= drop))
        assert dropped_at_a_look(base, new, (100,), 0.01) == (statistics.drop_p(base, new) <= 0.01)


@pytest.mark.parametrize(
    ("lost", "at_once", "by_looks"), [(2, False, False), (3, True, False), (4, True, True)], ids=str
)
def test_an_early_look_spends_its_share_alone(lost, at_once, by_looks):
    """Each lost answer has a chance of one in six: three are called at 1 %, four at a fifth of it, after 50 of 250."""
    base, new = np.ones((5, 250), dtype=bool), np.ones((1, 60), dtype=bool)
    new[0, :lost] = False
    assert dropped_at_a_look(base, new, (50,), 0.01) is at_once
    assert dropped_at_a_look(base, new, PLAN, 0.01) is by_looks


@pytest.mark.parametrize("lost", [0, 1, 3, 10])
def test_upper_bound_of_an_exact_engine_is_clopper_pearson(lost):
    new = np.ones((1, 200), dtype=bool)
    new[0, :lost] = False
    upper = drop_interval(np.ones((5, 200), dtype=bool), new, 0.01)[1]
    assert upper == pytest.approx(beta.ppf(0.99, lost + 1, 200 - lost), abs=1e-6)


def test_a_gain_is_claimed_less_readily_than_a_drop():
    base, new = np.zeros((3, 100), dtype=bool), np.zeros((1, 100), dtype=bool)
    new[0, :8] = True
    low, high = drop_interval(base, new, 0.01)
    mirrored = drop_interval(~base, ~new, 0.01)
    assert low < -mirrored[1] < -0.08 < -mirrored[0] < 0 < high < 0.03


@pytest.mark.parametrize(("base_runs", "new_runs", "d"), [(5, 1, 0.02), (5, 1, 0.13), (1, 1, 0.04), (5, 3, 0.04)])
def test_upper_bound_holds_its_level(base_runs, new_runs, d):
    rng = np.random.default_rng([base_runs, new_runs, int(d * 100)])
    n, drop = 150, 0.05
    tossed = round(2 * d * n)
    chance = np.concatenate([np.full(tossed, 0.5), np.ones(n - tossed - 5), np.zeros(5)])
    lost = drop / chance.mean()
    below = 0
    for _ in range(600):
        new = toss(rng, new_runs, chance * (rng.random(n) >= lost))
        below += excludes(toss(rng, base_runs, chance), new, drop, 0.05)  # the upper bound lies below the drop
    assert below / 600 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 600)


def test_excludes_agrees_with_the_bound():
    rng = np.random.default_rng(4)
    chance = np.concatenate([np.full(10, 0.5), np.ones(190)])
    for drop in (0.0, 0.02, 0.05, *[0.08] * 20):
        base, new = toss(rng, 5, chance), toss(rng, 1, chance * (rng.random(200) >= drop))
        assert excludes(base, new, 0.05, 0.01) == (drop_interval(base, new, 0.01)[1] <= 0.05)


def test_more_noise_in_the_baseline_excludes_less():
    """Ten questions that one stored run of five gets wrong: the new run, all right, shows none of that noise."""
    quiet, new = np.ones((5, 250), dtype=bool), np.ones((1, 250), dtype=bool)
    noisy = quiet.copy()
    noisy[np.arange(10) % 5, np.arange(10)] = False
    above = [drop_interval(base, new, 0.01)[1] - statistics.drop(base, new) for base in (noisy, quiet)]
    assert above[0] > above[1]


def test_the_difference_test_is_scipys_with_a_variance_floor():
    x = np.random.default_rng(1).choice([-1.0, 0.0, 0.2, 1.0], size=(3, 90), p=[0.05, 0.7, 0.1, 0.15])
    assert difference_p(x) == pytest.approx(ttest_1samp(x, 0, axis=-1, alternative="greater").pvalue)
    assert difference_p(np.zeros(90)) == pytest.approx(0.5)
    assert difference_p(np.eye(1, 90)[0]) > 0.05, "one lost answer proves nothing"
    assert difference_p(np.ones(50)) < 1e-40


def test_levels_of_looks_sum_to_alpha_mostly_at_the_last():
    levels = difference_levels(PLAN, 0.01)
    assert levels[0] < 1e-6
    assert 0.007 < levels[-1] < 0.01
    assert difference_levels((1319,), 0.008) == (0.008,)
    steps = np.random.default_rng(2).standard_normal((200_000, len(PLAN))) * np.sqrt(np.diff(PLAN, prepend=0))
    p_values = norm.sf(steps.cumsum(axis=1) / np.sqrt(PLAN))
    assert (p_values <= levels).any(axis=1).mean() == pytest.approx(0.01, abs=0.0007)


def test_churn_of_exchangeable_runs_is_exact_by_enumeration():
    rng = np.random.default_rng(12)
    base, new = rng.random((3, 4)) < 0.5, rng.random((2, 4)) < 0.5
    together = np.vstack([base, new])
    each = []
    for question in together.T:
        values = []
        for chosen in itertools.combinations(range(5), 2):
            ours, theirs = question[list(chosen)], np.delete(question, chosen)
            values.append(int((ours[:, None] != theirs).sum()))
        each.append(values)
    seen = (new[:, None] != base).sum()
    expected = np.mean([sum(values) >= seen for values in itertools.product(*each)])
    differ, among, p_value = churn(base, new)
    assert p_value == pytest.approx(expected)
    assert (differ, among) == pytest.approx((seen / 24, statistics.discordance(base)))


def test_gains_of_a_new_run_widen_the_bound_of_copies():
    base, new = np.ones((5, 250), dtype=bool), np.ones((1, 250), dtype=bool)
    base[:, :10] = new[:, 10:20] = False
    flipped = drop_interval(base, new, 0.03)
    assert flipped == pytest.approx(drop_interval(base[:1], new, 0.03)), "five copies know what one run knows"
    assert flipped[1] > 0.03
