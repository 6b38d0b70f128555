# SPDX-License-Identifier: Apache-2.0
"""The judge on planted outcome vectors."""

import numpy as np
import pytest
from support.gates import resolved

from hileval.cli import exit_status
from hileval.gates.judge import diff_answers, judge_answers, side_by_side
from hileval.records.answers import Flag
from hilgate.errors import Exit, NothingSelectedError
from hilgate.model.record import Check, Outcome

PASS, FAIL, INCONCLUSIVE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE
N = 200
GOOD = [i not in (17, 91) for i in range(N)]
SERVED = Check(id="pocket-hybrid/served-by-pagedkv", outcome=PASS, message="2 attention layers")


def without(correct, *lost):
    return [right and i not in lost for i, right in enumerate(correct)]


@pytest.fixture
def judged(plant, gate, rule):
    """Judge a run; gives the checks by name, and the exit status."""

    def judging(run, baseline=..., served=SERVED, deterministic=True, which="strict", floor=0.95, **changes):
        stored = plant.baseline(GOOD) if baseline is ... else baseline
        changed = rule.model_copy(update=changes)
        declared = gate.model_copy(update={"deterministic": deterministic, "filter": which, "floor": floor})
        checks = judge_answers(resolved(declared, rule=changed, baseline=stored), plant.asked(stored, run), served)
        return {check.id.split("/")[1]: check for check in checks}, exit_status(checks)

    return judging


def test_a_run_equal_to_its_baseline_and_an_improvement_pass(plant, judged):
    checks, status = judged(plant.run(GOOD))
    assert status is Exit.PASS
    accuracy = checks["accuracy"]
    assert accuracy.numbers["lost"] == accuracy.numbers["gained"] == 0
    assert accuracy.numbers["exact_match"] == accuracy.numbers["baseline_exact_match"] == 0.99
    assert "198/200 = 99.0%" in accuracy.message
    assert judged(plant.run([True] * N))[1] is Exit.PASS


def test_a_kv_fault_fails_accuracy_and_floor(plant, judged):
    """7 % exact match, answers well formed: V shifted by one block reads other people's numbers."""
    checks, status = judged(plant.run([i % 14 == 0 for i in range(N)]))
    assert {name: check.outcome for name, check in checks.items()} == {
        "served-by-pagedkv": PASS,
        "broken-output": PASS,
        "accuracy": FAIL,
        "floor": FAIL,
    }
    assert status is Exit.FAIL


def test_the_step_from_pass_to_inconclusive_to_fail(plant, judged):
    """One question alone never fails, and a loss that the margin does not exclude never passes."""
    runs = [plant.run(without(GOOD, *range(20, 20 + lost))) for lost in range(9)]
    results = [judged(run)[0]["accuracy"].outcome for run in runs]
    assert results[0] is PASS
    assert set(results[1:6]) == {INCONCLUSIVE}  # the 99 % bound of 1 in 200 is 3.3 %
    assert set(results[6:]) == {FAIL}  # six lost and none gained are 2.5 standard errors of their own scatter


def test_undecided_flags_a_merge_and_stops_a_release(plant, judged):
    run = plant.run(without(GOOD, 20))
    flagged = judged(run, unresolved="flag")[0]["accuracy"]
    assert flagged.outcome is PASS
    assert flagged.labels["passed_but"] == "undecided after the last question and run"
    assert "FLAGGED" in flagged.message
    assert judged(run)[0]["accuracy"].outcome is INCONCLUSIVE


def test_too_few_baseline_runs_never_pass_and_a_drop_fails(plant, judged):
    short = plant.baseline(GOOD, without(GOOD, 5))
    check = judged(plant.run(GOOD), short, deterministic=False)[0]["accuracy"]
    assert check.outcome is INCONCLUSIVE
    assert "holds 2 distinct runs and the rule wants 5" in check.message
    assert judged(plant.run(without(GOOD, *range(20, 60))), short)[0]["accuracy"].outcome is FAIL


def test_copies_of_a_run_are_one_unless_deterministic(plant, judged):
    copies = plant.baseline(GOOD)
    assert judged(plant.run(GOOD), copies)[0]["accuracy"].outcome is PASS
    check = judged(plant.run(GOOD), copies, deterministic=False)[0]["accuracy"]
    assert (check.outcome, check.numbers["baseline_distinct"]) == (INCONCLUSIVE, 1)
    differ = plant.baseline(GOOD, *(without(GOOD, i) for i in range(4)))
    assert judged(plant.run(GOOD), differ, deterministic=False)[0]["accuracy"].outcome is PASS
    assert "declared deterministic" in judged(plant.run(GOOD), differ)[0]["accuracy"].message


def test_churn_without_a_drop_is_said_and_passes(plant, judged):
    """Thirteen lost and thirteen gained of 100: five copies called it a pass with a bound of 3.4 points."""
    before = [i >= 20 for i in range(100)]
    after = [i in range(13) or (right and i not in range(20, 33)) for i, right in enumerate(before)]
    check = judged(plant.run(after), plant.baseline(before), margin=0.05, beta=0.03)[0]["accuracy"]
    assert (check.outcome, check.labels["churn"]) == (INCONCLUSIVE, "yes")
    assert "ANSWERS CHURN: 26.0% of them differ from the stored runs, which differ by 0.0%" in check.message
    assert 0.09 < check.numbers["drop_upper"] < 0.13  # Wald's is 9.6 points, that of one stored run 11.7
    assert judged(plant.run(before), plant.baseline(before))[0]["accuracy"].labels["churn"] == "no"


@pytest.mark.parametrize(("churn", "way"), [(30, "further runs of them cannot help"), (3, "another run may decide")])
def test_a_release_left_open_by_churn_says_what_decides(plant, judged, churn, way):
    before = [i >= churn for i in range(N)]
    after = [i < churn or i >= 2 * churn for i in range(N)]
    check = judged(plant.run(after), plant.baseline(before), margin=0.03, beta=0.01)[0]["accuracy"]
    assert check.outcome is INCONCLUSIVE
    smallest = 2.326 * (2 * churn / N / N) ** 0.5
    assert f"can exclude a drop from about {smallest:.1%} on" in check.message
    assert way in check.message


def test_intervals_and_bounds_show_their_level(plant, judged):
    check = judged(plant.run(GOOD))[0]["accuracy"]
    assert "] at 99%" in check.message
    assert "at one look" not in check.message
    looks = {"look_every": 25, "first_look": 50, "beta": 0.03, "margin": 0.05}
    assert "(97% bound 4.6% at one look of 7)" in judged(plant.run(GOOD), **looks)[0]["accuracy"].message


def test_without_a_baseline_only_the_floor_holds_and_it_says_so(plant, judged):
    blocked, _ = judged(plant.run(GOOD), None, None)
    assert {name: check.outcome for name, check in blocked.items()} == {
        "broken-output": PASS,
        "accuracy": INCONCLUSIVE,
        "floor": PASS,
    }
    flagged = judged(plant.run(GOOD), None, None, unresolved="flag")[0]["accuracy"]
    assert flagged.outcome is PASS
    assert "no baseline yet" in flagged.message
    assert flagged.labels["passed_but"] == "no baseline yet, so only the floor holds"
    assert "passed_but" not in judged(plant.run(GOOD))[0]["accuracy"].labels
    assert "passed_but" not in blocked["accuracy"].labels


def test_a_model_that_is_not_pinned_is_said_to_be(plant, gate, rule):
    hub = gate.model_copy(update={"weights": "hub"})
    for stored in (None, plant.baseline(GOOD)):
        for revision, said in (("", True), ("c0ffee00" * 5, False)):
            declared = hub.model_copy(update={"revision": revision})
            checks = judge_answers(
                resolved(declared, rule=rule, baseline=stored), plant.asked(stored, plant.run(GOOD)), None
            )
            assert ("revision not pinned" in checks[1].message) is said


def test_the_paired_test_sees_what_the_floor_does_not(plant, judged):
    checks, _ = judged(plant.run(without(GOOD, *range(20, 28))))
    assert (checks["floor"].outcome, checks["accuracy"].outcome) == (PASS, FAIL)
    assert checks["accuracy"].labels["lost_questions"] == "20 21 22 23 24 25 26 27"


def test_the_floor_sees_what_the_paired_test_does_not(plant, judged):
    """A baseline that is as bad does not excuse the model."""
    bad = [i % 2 == 0 for i in range(N)]
    checks, _ = judged(plant.run(bad), plant.baseline(bad))
    assert (checks["floor"].outcome, checks["accuracy"].outcome) == (FAIL, PASS)


def test_the_floor_counts_only_without_a_baseline(plant, judged):
    """Its own answers, 69 of 200 right, its floor 34.8 %: the draw is always the same, so it would never pass."""
    own = [i % 29 < 10 for i in range(N)]
    assert sum(own) == 70
    assert judged(plant.run(own), plant.baseline(own), floor=0.352)[1] is Exit.PASS
    alone = judged(plant.run(own), None, floor=0.352)[0]["floor"]
    assert alone.outcome is INCONCLUSIVE
    assert "the floor of 35.2%" in alone.message
    assert judged(plant.run(own), plant.baseline(own), floor=0.5)[0]["floor"].outcome is FAIL


def test_too_few_questions_are_inconclusive(plant, judged):
    checks, status = judged(plant.run(GOOD[:16]))
    assert (checks["accuracy"].outcome, status) == (INCONCLUSIVE, Exit.INCONCLUSIVE)


def test_one_non_finite_log_probability_fails(plant, judged):
    check = judged(plant.run(GOOD, non_finite=[5]))[0]["broken-output"]
    assert check.outcome is FAIL
    assert "NaN or infinite" in check.message


@pytest.mark.parametrize(
    ("n", "count", "outcome"),
    [(N, 2, PASS), (N, 7, FAIL), (N, 30, FAIL), (16, 3, PASS), (16, 4, FAIL)],
)
def test_broken_answers_fail_when_there_are_too_many(plant, judged, n, count, outcome):
    """Of 16 answers 4 are more than a fifth, though chance may break as many."""
    check = judged(plant.run(GOOD[:n], texts=dict.fromkeys(range(count), "!" * 40)))[0]["broken-output"]
    assert check.outcome is outcome
    assert check.numbers["repeat"] == count


@pytest.mark.parametrize("share", [0.02, 0.04, 0.06])
@pytest.mark.parametrize("text", ["!" * 40, None], ids=["babble", "cut off"])
def test_usual_broken_answers_fail_at_none_of_nine_looks(plant, gate, share, text):
    """Flags independent from run to run; 8 to 16 % of such models failed when each look had all of alpha."""
    rng, failed, questions = np.random.default_rng(7), 0, 250
    looks = range(50, 251, 25)
    cut = [Flag.TRUNCATED] if text is None else [Flag.REPEAT]
    healthy = plant.run([True] * questions).samples
    flagged = [sample.model_copy(update={"flags": tuple(cut)}) for sample in healthy]
    whole = plant.baseline([True] * questions)
    for _ in range(60):
        drawn = rng.random((6, questions)) < share
        digits = ["".join(str(int(bit)) for bit in column) for column in drawn[:5].T]
        stored = whole.model_copy(
            update={
                "questions": tuple(
                    question.model_copy(update={"broken": digit, "flags": tuple(cut) if "1" in digit else ()})
                    for question, digit in zip(whole.questions, digits, strict=True)
                )
            }
        )
        now = [flagged[i] if broken else healthy[i] for i, broken in enumerate(drawn[5])]
        checks = [gate.broken.check("so far", stored.flagged(now[:look]), now[:look], len(looks)) for look in looks]
        failed += any(check.outcome is FAIL for check in checks)
    assert failed <= 2


def test_another_backend_turns_every_check_into_did_not_run(plant, judged):
    served = SERVED.model_copy(update={"outcome": Outcome.DID_NOT_RUN, "message": "served by CPU_ATTN"})
    checks, status = judged(plant.run(GOOD), served=served)
    assert {check.outcome for check in checks.values()} == {Outcome.DID_NOT_RUN}
    assert status is Exit.NOTHING_RAN


def test_no_checks_is_not_a_pass():
    with pytest.raises(NothingSelectedError):
        exit_status([])


@pytest.fixture
def flips(plant):
    """What flipped in runs of 12 questions, of which the stored ones lack `before`."""

    def of(*lost, before=(), texts=None):
        stored = plant.baseline(without([True] * 12, *before))
        runs = [plant.run(without([True] * 12, *some), texts=texts) for some in lost]
        return diff_answers(plant.asked(stored, *runs), stored, "strict")

    return of


def test_losses_come_before_gains_and_both_answers_are_kept(flips):
    found = flips([7], before=[3], texts={7: " I do not know\n#### 0"})
    assert [(flip.doc_id, flip.lost) for flip in found] == [(7, True), (3, False)]
    assert found[0].stored_text.endswith("#### 16")
    assert found[0].new_text.endswith("#### 0")


def test_a_question_lost_in_one_of_three_runs_is_no_flip(flips):
    assert flips([], [], [5]) == ()
    assert [flip.doc_id for flip in flips([5], [], [5])] == [5]


def test_two_columns_that_fit_and_a_count_of_what_is_left_out(flips):
    text = " word" * 60 + "\n#### 1"
    shown = side_by_side(flips(range(12), texts=dict.fromkeys(range(12), text)), 2)
    assert shown.count("question ") == 2
    assert "and 10 more flipped questions in flips.md" in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert "right in 100% of stored runs, 0% now" in shown
    assert "(nothing)" in side_by_side(flips([0], texts={0: ""}), 5), "an empty answer"
