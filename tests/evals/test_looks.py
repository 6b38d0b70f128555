import itertools

import numpy as np
import pytest

from hileval.gates import statistics
from hileval.gates.statistics import looks
from hilgate.errors import MisuseError

PLAN = (50, 75, 100, 125, 150, 175, 200, 225, 250)


def toss(rng, runs, chance):
    return rng.random((runs, len(chance))) < chance


def test_chance_to_cross_any_boundary_is_below_alpha_by_enumeration():
    # Every way in which the three runs of six disputed questions could be dealt is played through the real looks.
    right = [2, 1, 2, 1, 2, 1]
    deals = [[(a, b, g - a - b) for a in (0, 1) for b in (0, 1) if 0 <= g - a - b <= 1] for g in right]
    called = []
    for deal in itertools.product(*deals):
        columns = np.array(deal, dtype=bool).T
        called.append(looks(columns[:2], columns[2:], (2, 4, 6), 0.3)[-1].dropped)
    assert 0.05 < np.mean(called) <= 0.3


def test_what_is_spent_is_what_happens():
    rng = np.random.default_rng(5)
    chance = rng.permutation(np.concatenate([np.full(30, 0.5), np.ones(200), np.zeros(20)]))
    ends = [looks(toss(rng, 5, chance), toss(rng, 1, chance), PLAN, 0.05)[-1] for _ in range(2000)]
    called = np.mean([look.dropped for look in ends])
    assert called <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)
    assert called >= 0.025  # one fifth of alpha a look would leave half of this


def test_one_look_is_the_plain_test():
    rng = np.random.default_rng(6)
    chance = np.concatenate([np.full(20, 0.5), np.ones(80)])
    for drop in (0.0, 0.05, 0.1, 0.2):
        base, new = toss(rng, 5, chance), toss(rng, 1, chance * (rng.random(100) >= drop))
        look = looks(base, new, (100,), 0.01)[-1]
        assert look.p_value == pytest.approx(statistics.drop_p(base, new))
        assert look.dropped == (look.p_value <= 0.01)


def test_a_wreck_is_seen_at_the_first_look():
    rng = np.random.default_rng(7)
    base, new = toss(rng, 5, np.full(250, 0.95)), toss(rng, 1, np.full(250, 0.4))
    found = looks(base, new, PLAN, 0.01)
    assert [look.n for look in found] == [50]
    assert found[0].dropped


def test_never_spends_more_than_allowed_and_stops_where_the_answers_end():
    rng = np.random.default_rng(8)
    chance = rng.permutation(np.concatenate([np.full(40, 0.5), np.ones(210)]))
    found = looks(toss(rng, 5, chance), toss(rng, 1, chance)[:, :130], PLAN, 0.01)
    assert [look.n for look in found] == [50, 75, 100, 125]
    assert all(look.spent <= look.allowed for look in found)
    assert all(a.spent <= b.spent for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("plan", [(), (0, 5), (50, 50), (100, 50)], ids=["none", "zero", "twice", "descending"])
def test_refuses_a_plan_that_does_not_ascend(plan):
    with pytest.raises(MisuseError, match="looks at"):
        looks(np.ones((2, 100), dtype=bool), np.ones((1, 100), dtype=bool), plan, 0.01)
