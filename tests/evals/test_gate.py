"""The rule on planted outcome vectors."""

import pytest

from hileval.ask.evaluation import IdentityMismatchError, require_same_prompts, stored_outcomes
from hileval.gates.judge import exit_status, judge
from hilgate.errors import Exit, NothingSelectedError
from hilgate.model import Check, Outcome

N = 200
GOOD = [i not in (17, 91) for i in range(N)]
PASSED = Check(id="pocket-hybrid/served-by-pagedkv", outcome=Outcome.PASS, message="2 attention layers")


def without(correct, *lost):
    return [right and i not in lost for i, right in enumerate(correct)]


def outcomes(checks):
    return {check.id.split("/")[1]: check.outcome for check in checks}


def judged(plant, gate, rule, run, baseline=None, served=PASSED):
    baseline = baseline or plant.baseline(GOOD)
    return judge("pocket-hybrid", gate, rule, plant.asked(baseline, run), baseline, served)


def test_a_run_equal_to_its_baseline_passes(plant, gate, rule):
    checks = judged(plant, gate, rule, plant.run(GOOD))
    assert exit_status(checks) is Exit.PASS
    accuracy = next(check for check in checks if check.id == "pocket-hybrid/accuracy")
    assert accuracy.numbers["lost"] == accuracy.numbers["gained"] == 0
    assert accuracy.numbers["exact_match"] == accuracy.numbers["baseline_exact_match"] == 0.99
    assert "198/200 = 99.0%" in accuracy.message


def test_an_improvement_passes(plant, gate, rule):
    assert exit_status(judged(plant, gate, rule, plant.run([True] * N))) is Exit.PASS


def test_a_kv_fault_fails_accuracy_and_floor(plant, gate, rule):
    """7 % exact match, answers well formed: V shifted by one block reads other people's numbers."""
    checks = judged(plant, gate, rule, plant.run([i % 14 == 0 for i in range(N)]))
    assert outcomes(checks) == {
        "served-by-pagedkv": Outcome.PASS,
        "broken-output": Outcome.PASS,
        "accuracy": Outcome.FAIL,
        "floor": Outcome.FAIL,
    }
    assert exit_status(checks) is Exit.FAIL


def test_the_step_from_pass_to_inconclusive_to_fail(plant, gate, rule):
    """One question alone never fails, and a loss that the margin does not exclude never passes."""
    results = [
        outcomes(judged(plant, gate, rule, plant.run(without(GOOD, *range(20, 20 + lost)))))["accuracy"]
        for lost in range(9)
    ]
    assert results[0] is Outcome.PASS
    assert results[1] is Outcome.INCONCLUSIVE  # the 99 % bound of 1 in 200 is 3.3 %
    assert results[2] is Outcome.INCONCLUSIVE
    assert set(results[3:]) == {Outcome.FAIL}  # a question right in all five runs is lost by luck once in six


def test_an_undecided_merge_passes_with_a_flag_and_an_undecided_release_does_not(plant, gate, rule):
    run = plant.run(without(GOOD, 20))
    flagging = rule.model_copy(update={"unresolved": "flag"})
    flagged = judged(plant, gate, flagging, run)[2]
    assert flagged.outcome is Outcome.PASS
    assert "FLAGGED" in flagged.message
    assert judged(plant, gate, rule, run)[2].outcome is Outcome.INCONCLUSIVE


def test_a_baseline_of_too_few_runs_never_passes(plant, gate, rule):
    short = plant.baseline(GOOD, GOOD)
    check = judged(plant, gate, rule, plant.run(GOOD), short)[2]
    assert check.outcome is Outcome.INCONCLUSIVE
    assert "holds 2 runs and the rule wants 5" in check.message


def test_a_drop_fails_whatever_the_baseline_holds(plant, gate, rule):
    short = plant.baseline(GOOD, GOOD)
    assert judged(plant, gate, rule, plant.run(without(GOOD, *range(20, 60))), short)[2].outcome is Outcome.FAIL


def test_without_a_baseline_only_the_floor_holds_and_it_says_so(plant, gate, rule):
    asked = plant.asked(None, plant.run(GOOD))
    blocked = judge("g", gate, rule, asked, None, None)
    assert outcomes(blocked) == {
        "broken-output": Outcome.PASS, "accuracy": Outcome.INCONCLUSIVE, "floor": Outcome.PASS
    }  # fmt: skip
    flagged = judge("g", gate, rule.model_copy(update={"unresolved": "flag"}), asked, None, None)[1]
    assert flagged.outcome is Outcome.PASS
    assert "no baseline yet" in flagged.message


def test_the_paired_test_sees_what_the_floor_does_not(plant, gate, rule):
    checks = judged(plant, gate, rule, plant.run(without(GOOD, *range(20, 28))))
    assert outcomes(checks)["floor"] is Outcome.PASS
    assert outcomes(checks)["accuracy"] is Outcome.FAIL
    lost = next(check for check in checks if check.id.endswith("accuracy")).labels["lost_questions"]
    assert lost == "20 21 22 23 24 25 26 27"


def test_too_few_questions_are_inconclusive(plant, gate, rule):
    checks = judged(plant, gate, rule, plant.run(GOOD[:16]))
    assert outcomes(checks)["accuracy"] is Outcome.INCONCLUSIVE
    assert exit_status(checks) is Exit.INCONCLUSIVE


def test_below_the_floor_with_a_bad_baseline(plant, gate, rule):
    """A baseline that is as bad does not excuse the model."""
    bad = [i % 2 == 0 for i in range(N)]
    checks = judged(plant, gate, rule, plant.run(bad), plant.baseline(bad))
    assert outcomes(checks)["accuracy"] is Outcome.PASS
    assert outcomes(checks)["floor"] is Outcome.FAIL


def test_one_non_finite_log_probability_fails(plant, gate, rule):
    checks = judged(plant, gate, rule, plant.run(GOOD, non_finite=[5]))
    assert outcomes(checks)["broken-output"] is Outcome.FAIL
    assert "NaN or infinite" in checks[1].message


@pytest.mark.parametrize(("count", "outcome"), [(2, Outcome.PASS), (7, Outcome.FAIL), (30, Outcome.FAIL)])
def test_broken_answers_fail_when_there_are_too_many(plant, gate, rule, count, outcome):
    run = plant.run(GOOD, texts=dict.fromkeys(range(20, 20 + count), "!" * 40))
    check = judged(plant, gate, rule, run)[1]
    assert check.outcome is outcome
    assert check.numbers["repeat"] == count


def test_another_backend_turns_every_check_into_did_not_run(plant, gate, rule):
    served = Check(id="pocket-hybrid/served-by-pagedkv", outcome=Outcome.DID_NOT_RUN, message="served by CPU_ATTN")
    checks = judged(plant, gate, rule, plant.run(GOOD), served=served)
    assert set(outcomes(checks).values()) == {Outcome.DID_NOT_RUN}
    assert exit_status(checks) is Exit.NOTHING_RAN


@pytest.mark.parametrize("field", ["weights", "tokenizer", "chat_template", "protocol", "task", "generation"])
def test_a_baseline_of_something_else_is_refused(plant, gate, field):
    other = plant.identity.model_copy(update={field: "chat" if field == "protocol" else "d" * 64})
    with pytest.raises(IdentityMismatchError, match=field) as caught:
        stored_outcomes(gate, plant.baseline(GOOD, identity=other), plant.identity, range(N))
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


def test_another_prompt_or_an_unknown_question_is_refused(plant, gate):
    baseline = plant.baseline(GOOD[:3])
    with pytest.raises(IdentityMismatchError, match="1 of 4 questions are not in it"):
        stored_outcomes(gate, baseline, plant.identity, range(4))
    with pytest.raises(IdentityMismatchError, match="not in the baseline"):
        require_same_prompts(baseline, plant.run(GOOD[:4]).samples)
    sample = plant.run(GOOD[:1]).samples[0].model_copy(update={"prompt_hash": "e" * 64})
    with pytest.raises(IdentityMismatchError, match="another prompt"):
        require_same_prompts(baseline, [sample])


def test_no_checks_is_not_a_pass():
    with pytest.raises(NothingSelectedError):
        exit_status([])
