import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, hypergeom
from statsmodels.stats.contingency_tables import mcnemar

from hileval.gates import statistics
from hilgate.errors import RecordsError

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
    before, after = rng.random(n) < 0.7, rng.random(n) < 0.6
    lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
    expected = binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue if lost + gained else 1.0
    assert statistics.drop_p(before, after) == pytest.approx(expected, abs=1e-12)


def test_four_models_of_known_accuracy_pair_by_pair():
    """As many right answers of 1,319 as published for four models, questions sharing difficulty, by another library."""
    rng = np.random.default_rng(8)
    difficulty = rng.standard_normal(1319)
    answers = {}
    for right in (286, 515, 458, 742):
        order = np.argsort(difficulty + rng.standard_normal(1319))
        answers[right] = np.isin(np.arange(1319), order[:right])
    for (many, before), (few, after) in itertools.permutations(answers.items(), 2):
        table = [[(before & after).sum(), (before & ~after).sum()], [(~before & after).sum(), (~before & ~after).sum()]]
        disagree = table[0][1] + table[1][0]
        assert 0.2 < disagree / 1319 < 0.5
        both_sides = mcnemar(table, exact=True).pvalue
        ours = statistics.drop_p(before, after)
        expected = both_sides / 2 if many > few else 1 - both_sides / 2 + binom.pmf(table[0][1], disagree, 0.5)
        assert ours == pytest.approx(expected, rel=1e-9, abs=1e-300)
        assert (ours <= 0.01) == (many > few)


def test_fifteen_lost_and_two_gained():
    lost, gained, same = 15, 2, 183
    before = [1] * lost + [0] * gained + [1] * same
    after = [0] * lost + [1] * gained + [1] * same
    assert statistics.drop_p(before, after) == pytest.approx(0.0011749, rel=1e-4)


@given(two_sides(), st.randoms(use_true_random=False))
def test_order_of_questions_and_of_runs_does_not_matter(sides, random):
    base, new = sides
    order = random.sample(range(base.shape[1]), base.shape[1])
    assert statistics.drop_p(base[::-1, order], new[::-1, order]) == pytest.approx(
        statistics.drop_p(base, new), abs=1e-12
    )


@given(two_sides(), st.data())
def test_one_more_wrong_answer_never_raises_p(sides, data):
    base, new = sides
    right = np.argwhere(new)
    if not len(right):
        return
    worse = new.copy()
    worse[tuple(right[data.draw(st.integers(0, len(right) - 1))])] = False
    assert statistics.drop_p(base, worse) <= statistics.drop_p(base, new) + 1e-12


def test_three_questions_by_enumeration():
    # The reference walks every way to choose which of the K + M runs are the new ones, question by question.
    base = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=bool)
    new = np.array([[0, 1, 0], [0, 0, 1]], dtype=bool)
    together = np.vstack([base, new])
    ways = [[int(together[list(chosen), q].sum()) for chosen in itertools.combinations(range(5), 2)] for q in range(3)]
    totals = [sum(combination) for combination in itertools.product(*ways)]
    expected = np.mean([total <= new.sum() for total in totals])
    assert statistics.drop_p(base, new) == pytest.approx(expected)


def test_null_distribution_is_a_distribution_with_the_right_mean():
    counts = np.array([30, 4, 3, 2, 5, 6, 150])
    pmf = statistics.null_pmf(counts, new_runs=2)
    assert pmf.sum() == pytest.approx(1.0)
    expected = sum(int(counts[g]) * hypergeom.mean(6, g, 2) for g in range(1, 6))
    assert np.arange(len(pmf)) @ pmf == pytest.approx(expected)


def test_the_level_is_held_where_nothing_changed():
    rng = np.random.default_rng(11)
    chance = np.concatenate([np.full(20, 0.5), np.ones(170), np.zeros(10)])
    p_values = [statistics.drop_p(rng.random((5, 200)) < chance, rng.random((1, 200)) < chance) for _ in range(3000)]
    assert np.mean(np.array(p_values) <= 0.05) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 3000)
    assert np.mean(np.array(p_values) <= 0.05) >= 0.02  # and it is not given away


def test_no_disagreement_says_nothing():
    assert statistics.drop_p(np.ones((5, 100)), np.ones((1, 100))) == 1.0


def test_discordance_is_unbiased():
    rng = np.random.default_rng(3)
    chance = rng.choice([0.1, 0.5, 0.9, 1.0], size=4000)
    measured = statistics.discordance(rng.random((5, 4000)) < chance)
    assert measured == pytest.approx(np.mean(2 * chance * (1 - chance)), abs=0.01)


def test_discordance_of_one_run_is_refused():
    with pytest.raises(RecordsError, match="at least two runs"):
        statistics.discordance([1, 0, 1])


@pytest.mark.parametrize(
    ("base", "new", "message"),
    [
        ([], [1], "baseline: no outcomes"),
        ([[1, 0]], [], "new run: no outcomes"),
        ([1, 0], [1, 0, 1], "2 questions before and 3 after"),
        ([1, float("nan")], [1, 0], "nan is no outcome"),
        ([1, 0], [1, 0.5], "0.5 is no outcome"),
    ],
    ids=["no baseline", "no new run", "other questions", "NaN", "half an answer"],
)
def test_refuses_what_is_no_outcome(base, new, message):
    with pytest.raises(RecordsError, match=message):
        statistics.drop_p(base, new)


def test_holm_equals_its_definition():
    # Sorted p-values are compared with alpha / (m - i), and the first that is too large stops it.
    assert statistics.holm([0.004, 0.02, 0.0001], alpha=0.01) == (True, False, True)
    assert statistics.holm([0.0034, 0.0034, 0.0034], alpha=0.01) == (False, False, False)
    assert statistics.holm([], alpha=0.01) == ()


def test_interval_is_wilsons():
    low, high = statistics.interval(190, 200, 0.01)
    z, p, n = 2.5758293, 0.95, 200
    middle, half = (
        (p + z * z / 2 / n) / (1 + z * z / n),
        z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + (z / 2 / n) ** 2),
    )
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=1e-6)


def test_excess_of_broken_answers():
    assert statistics.excess(12, 250, 1 / 250) == pytest.approx(7e-10, rel=0.3)
    assert statistics.excess(3, 250, 1 / 250) == pytest.approx(0.08, rel=0.1)
