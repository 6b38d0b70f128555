# SPDX-License-Identifier: Apache-2.0
"""The rule on outcome vectors."""

import numpy as np
import pytest
from pydantic import ValidationError
from support.gates import PRE_MERGE

from hileval.gates.rule import GateRule, RuleState

RELEASE = GateRule(
    alpha=0.01, margin=0.02, beta=0.01, baseline_runs=5, extensions=2, noisy_d=0.05, noisy_runs=3, unresolved="block"
)


def toss(rng, chance):
    return rng.random(len(chance)) < chance


def sure(n, wrong=0):
    run = np.ones(n, dtype=bool)
    run[:wrong] = False
    return run


def test_plan_looks_every_25_from_50_and_never_beyond_the_task():
    assert PRE_MERGE.plan(1319) == (50, 75, 100, 125, 150, 175, 200, 225, 250)
    assert PRE_MERGE.plan(60) == (50, 60)
    assert PRE_MERGE.plan(30) == (30,)
    assert RELEASE.plan(1319) == (1319,)


def test_order_is_a_seeded_draw_without_repetition():
    drawn = PRE_MERGE.order(1319)
    assert len(set(drawn)) == 250
    assert drawn == PRE_MERGE.order(1319)
    assert drawn != PRE_MERGE.model_copy(update={"seed": 4}).order(1319)
    assert np.mean(drawn) > 500  # not the first 250


def test_an_unchanged_exact_model_passes_after_75_questions():
    base = np.ones((5, 250), dtype=bool)
    standings = [PRE_MERGE.stand(base, [sure(n)]) for n in (25, 50, 75)]
    assert [s.state for s in standings] == [RuleState.ASK_MORE, RuleState.ASK_MORE, RuleState.PASS]
    assert standings[-1].high < 0.05
    late = sure(250)
    late[100:] = False
    assert PRE_MERGE.stand(base, [late]) == standings[-1], "answers beyond the deciding look do not change it"


def test_undecided_asks_for_another_run_then_is_unresolved():
    rng = np.random.default_rng(2)
    chance = np.concatenate([np.full(60, 0.5), np.ones(190)])
    base = np.array([toss(rng, chance) for _ in range(5)])
    lossy = base[0].copy()
    lossy[np.flatnonzero(lossy)[-7:]] = False
    first = PRE_MERGE.stand(base, [lossy])
    assert first.state is RuleState.RUN_AGAIN
    assert PRE_MERGE.stand(base, [lossy, lossy[:100]]).state is RuleState.ASK_MORE
    again = PRE_MERGE.stand(base, [lossy, lossy])
    assert again.new_runs == 2
    assert again.state in {RuleState.FAIL, RuleState.UNRESOLVED}
    assert again.p_value < first.p_value


def test_a_noisy_baseline_starts_with_three_runs():
    rng = np.random.default_rng(5)
    noisy = np.array([toss(rng, np.full(400, 0.8)) for _ in range(5)])
    quiet = np.ones((5, 400), dtype=bool)
    assert (RELEASE.first_runs(noisy), RELEASE.first_runs(quiet)) == (3, 1)
    assert RELEASE.stand(noisy, [noisy[0]]).state is RuleState.ASK_MORE
    assert RELEASE.stand(noisy, [noisy[0], noisy[1], noisy[2]]).state is not RuleState.ASK_MORE
    wreck = toss(rng, np.full(400, 0.4))
    assert RELEASE.stand(noisy, [wreck]).state is RuleState.FAIL, "a wreck costs one run"


def test_gates_that_decide_together_share_alpha():
    lost = sure(250)
    lost[::60] = False
    base = np.ones((5, 250), dtype=bool)
    alone, one_of_ten = (rule.stand(base, [lost]) for rule in (RELEASE, RELEASE.shared(10)))
    assert one_of_ten.level == pytest.approx(alone.level / 10)
    assert alone.p_value == one_of_ten.p_value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": None}, "look_every needs a number of questions"),
        ({"first_look": 300}, "comes after the last"),
        ({"alpha": 0.0}, "greater than 0"),
        ({"extensions": 3}, "less than or equal to 2"),
        ({"unresolved": "pass"}, "block"),
        ({"lookevery": 3}, "Extra inputs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_a_rule_that_makes_no_sense(changes, message):
    with pytest.raises(ValidationError, match=message):
        GateRule(**(PRE_MERGE.model_dump() | changes))
