"""The rule on planted outcome vectors."""

import pytest

from hileval.gate import IdentityMismatchError, exit_status, judge, pair_answers
from hilgate.errors import Exit, NothingSelectedError
from hilgate.model import Check, Outcome

N = 200
GOOD = [i not in (17, 91) for i in range(N)]
PASSED = Check(id="pocket-hybrid/served-by-pagedkv", outcome=Outcome.PASS, message="2 attention layers")


def without(correct, *lost):
    return [right and i not in lost for i, right in enumerate(correct)]


def outcomes(checks):
    return {check.id.split("/")[1]: check.outcome for check in checks}


def judged(plant, gate, run, baseline=None, served=PASSED):
    return judge("pocket-hybrid", gate, run, baseline or plant.baseline(GOOD), served)


def test_a_run_equal_to_its_baseline_passes(plant, gate):
    checks = judged(plant, gate, plant.run(GOOD))
    assert exit_status(checks) is Exit.PASS
    accuracy = next(check for check in checks if check.id == "pocket-hybrid/accuracy")
    assert accuracy.numbers["lost"] == accuracy.numbers["gained"] == 0
    assert accuracy.numbers["exact_match"] == accuracy.numbers["baseline_exact_match"] == 0.99
    assert "198/200 = 99.0%" in accuracy.message


def test_an_improvement_passes(plant, gate):
    assert exit_status(judged(plant, gate, plant.run([True] * N))) is Exit.PASS


def test_a_kv_fault_fails_accuracy_and_floor(plant, gate):
    """7 % exact match, answers well formed: V shifted by one block reads other people's numbers."""
    checks = judged(plant, gate, plant.run([i % 14 == 0 for i in range(N)]))
    assert outcomes(checks) == {
        "served-by-pagedkv": Outcome.PASS,
        "broken-output": Outcome.PASS,
        "accuracy": Outcome.FAIL,
        "floor": Outcome.FAIL,
    }
    assert exit_status(checks) is Exit.FAIL


def test_the_step_from_pass_to_inconclusive_to_fail(plant, gate):
    """One question alone never fails, and a loss that the margin does not exclude never passes."""
    results = [
        outcomes(judged(plant, gate, plant.run(without(GOOD, *range(20, 20 + lost)))))["accuracy"] for lost in range(9)
    ]
    assert results[0] is Outcome.PASS
    assert results[1] is Outcome.PASS
    assert set(results[3:7]) == {Outcome.INCONCLUSIVE}
    assert results[7] is results[8] is Outcome.FAIL


def test_the_paired_test_sees_what_the_floor_does_not(plant, gate):
    checks = judged(plant, gate, plant.run(without(GOOD, *range(20, 28))))
    assert outcomes(checks)["floor"] is Outcome.PASS
    assert outcomes(checks)["accuracy"] is Outcome.FAIL
    lost = next(check for check in checks if check.id.endswith("accuracy")).labels["lost_questions"]
    assert lost == "20 21 22 23 24 25 26 27"


def test_too_few_questions_are_inconclusive(plant, gate):
    checks = judged(plant, gate, plant.run(GOOD[:16]))
    assert outcomes(checks)["accuracy"] is Outcome.INCONCLUSIVE
    assert exit_status(checks) is Exit.INCONCLUSIVE


def test_below_the_floor_with_a_bad_baseline(plant, gate):
    """A baseline that is as bad does not excuse the model."""
    bad = [i % 2 == 0 for i in range(N)]
    checks = judged(plant, gate, plant.run(bad), plant.baseline(bad))
    assert outcomes(checks)["accuracy"] is Outcome.PASS
    assert outcomes(checks)["floor"] is Outcome.FAIL


def test_one_non_finite_log_probability_fails(plant, gate):
    checks = judged(plant, gate, plant.run(GOOD, non_finite=[5]))
    assert outcomes(checks)["broken-output"] is Outcome.FAIL
    assert "NaN or infinite" in checks[1].message


@pytest.mark.parametrize(("count", "outcome"), [(2, Outcome.PASS), (7, Outcome.FAIL), (30, Outcome.FAIL)])
def test_broken_answers_fail_when_there_are_too_many(plant, gate, count, outcome):
    run = plant.run(GOOD, texts=dict.fromkeys(range(20, 20 + count), "!" * 40))
    check = judged(plant, gate, run)[1]
    assert check.outcome is outcome
    assert check.numbers["repeat"] == count


def test_another_backend_turns_every_check_into_did_not_run(plant, gate):
    served = Check(id="pocket-hybrid/served-by-pagedkv", outcome=Outcome.DID_NOT_RUN, message="served by CPU_ATTN")
    checks = judged(plant, gate, plant.run(GOOD), served=served)
    assert set(outcomes(checks).values()) == {Outcome.DID_NOT_RUN}
    assert exit_status(checks) is Exit.NOTHING_RAN


@pytest.mark.parametrize("field", ["weights", "tokenizer", "task", "generation"])
def test_a_baseline_of_something_else_is_refused(plant, gate, field):
    other = plant.identity.model_copy(update={field: "d" * 64})
    with pytest.raises(IdentityMismatchError, match=field) as caught:
        judged(plant, gate, plant.run(GOOD), plant.baseline(GOOD, identity=other))
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


def test_another_prompt_or_an_unknown_question_is_refused(plant):
    baseline = plant.baseline(GOOD[:3])
    with pytest.raises(IdentityMismatchError, match="not in the baseline"):
        pair_answers(plant.run(GOOD[:4]), baseline)
    sample = plant.run(GOOD[:1]).samples[0].model_copy(update={"prompt_hash": "e" * 64})
    run = plant.run(GOOD[:1]).model_copy(update={"samples": (sample,)})
    with pytest.raises(IdentityMismatchError, match="another prompt"):
        pair_answers(run, baseline)


def test_no_checks_is_not_a_pass():
    with pytest.raises(NothingSelectedError):
        exit_status([])
