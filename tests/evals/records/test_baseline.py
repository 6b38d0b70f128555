# SPDX-License-Identifier: Apache-2.0
"""Baselines: what is written is read back, anything less is refused, and so are answers to something else."""

import json

import pytest

from hileval.records.answers import DuplicateQuestionError, Setting
from hileval.records.baseline import (
    Baseline,
    BaselineError,
    IdentityMismatchError,
    UnfitBaselineError,
    make_baseline,
    require_same_prompts,
    stored_outcomes,
)
from hilgate.errors import Exit


def test_round_trip_with_one_answer_per_line(plant, tmp_path):
    baseline = plant.baseline([True, False, True])
    path = tmp_path / "b" / "gate.json"
    baseline.write(path)
    assert Baseline.read(path) == baseline
    assert sum("doc_hash" in line for line in path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("damage", "error", "why"),
    [
        (lambda c: c["questions"].pop(), BaselineError, "n=5 but holds 4"),
        (lambda c: c["questions"].__setitem__(1, c["questions"][0]), DuplicateQuestionError, "more than once"),
        (lambda c: c["questions"][1].update(strict="111"), BaselineError, "question 1: strict is of 3 runs, not 5"),
        (lambda c: c.update(schema_version=1), BaselineError, "not valid: schema 1, this reads 2"),
        (lambda c: c.update(note="x"), BaselineError, "not valid: note"),
        (lambda c: c["questions"][1].update(doc_id=0), DuplicateQuestionError, "doc_id 0 occurs more than once"),
        (lambda c: c["questions"][1].update(doc_hash="x"), BaselineError, "questions.1.doc_hash: String should match"),
    ],
    ids=["lost line", "question twice", "other runs", "other schema", "unknown key", "number twice", "no hash"],
)
def test_a_damaged_file_is_refused(plant, tmp_path, damage, error, why):
    path = tmp_path / "gate.json"
    plant.baseline([True] * 5).write(path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(error, match=why):
        Baseline.read(path)
    path.write_text(path.read_text()[:-200])
    with pytest.raises(BaselineError, match="not valid: Invalid JSON"):
        Baseline.read(path)


@pytest.fixture
def arguments(plant):
    planted = plant.baseline([True])
    return {
        "floor": 0.95,
        "setting": Setting(engine="vllm 0.32.0", attention_backend="CPU_ATTN"),
        "environment": planted.environment,
        "reason": "first",
        "by": "somebody",
    }


def test_outcomes_come_back_run_by_run_in_the_asked_order(plant, arguments):
    vectors = [[True, False, True], [True, True, True]]
    made = make_baseline("g", [plant.run(v) for v in vectors], **(arguments | {"floor": 0.5}))
    hashes = [question.doc_hash for question in made.questions]
    assert made.outcomes("strict", hashes[::-1]).tolist() == [[True, False, True], [True, True, True]]
    assert made.outcomes("strict", hashes).tolist() == vectors
    assert made.d("strict") == pytest.approx(1 / 3)


def test_a_gate_of_the_last_number_is_recorded_by_it(plant, arguments):
    """Strict 20 %, flexible 93 %: what a model that never writes #### scores."""
    run = plant.run([i % 14 > 0 for i in range(28)])
    samples = tuple(sample.model_copy(update={"strict_correct": sample.doc_id % 5 == 0}) for sample in run.samples)
    run = run.model_copy(update={"samples": samples})
    lucky = run.model_copy(update={"samples": (samples[0].model_copy(update={"flexible_correct": True}), *samples[1:])})
    made = make_baseline("g", [run, lucky], which="flexible", **(arguments | {"floor": 0.91}))
    assert made.distinct("flexible") == 2 > made.distinct("strict")
    assert made.d("flexible") > 0 == made.d("strict")
    with pytest.raises(UnfitBaselineError, match=r"6/28 right is below the floor of 91\.0%"):
        make_baseline("g", [run], **(arguments | {"floor": 0.91}))


def test_what_may_become_a_baseline(plant, arguments):
    assert make_baseline("g", [plant.run([True] * 20)] * 5, **arguments).runs == 5
    assert make_baseline("g", [plant.run([True] * 20)], **arguments).d("strict") is None


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([], "K = 0"),
        ([{"correct": [True] * 20}, {"correct": [True, False]}], "run 2 was asked other questions"),
        ([{"correct": [True, False]}], "run 1: 1/2 right is below the floor"),
        ([{"correct": [True] * 20, "non_finite": [3]}], "non-finite"),
        ([{"correct": [True] * 20}, {"correct": [True] * 20, "weights": "9" * 64}], "run 2 is of another model: weigh"),
    ],
    ids=["no run", "other questions", "below the floor", "NaN", "another model"],
)
def test_what_may_not_become_a_baseline(plant, arguments, runs, why):
    with pytest.raises(UnfitBaselineError, match=why):
        make_baseline("g", [plant.run(**run) for run in runs], **arguments)


@pytest.mark.parametrize("field", ["weights", "tokenizer", "chat_template", "protocol", "task", "generation"])
def test_a_baseline_of_something_else_is_refused(plant, field):
    other = plant.identity.model_copy(update={field: "chat" if field == "protocol" else "d" * 64})
    with pytest.raises(IdentityMismatchError, match=field) as caught:
        stored_outcomes(plant.baseline([True] * 9, identity=other), "strict", plant.identity, range(9))
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


def test_another_prompt_or_an_unknown_question_is_refused(plant):
    baseline = plant.baseline([True] * 3)
    with pytest.raises(IdentityMismatchError, match="1 of 4 questions are not in it"):
        stored_outcomes(baseline, "strict", plant.identity, range(4))
    with pytest.raises(IdentityMismatchError, match="not in the baseline"):
        require_same_prompts(baseline, plant.run([True] * 4).samples)
    sample = plant.run([True]).samples[0].model_copy(update={"prompt_hash": "e" * 64})
    with pytest.raises(IdentityMismatchError, match="another prompt"):
        require_same_prompts(baseline, [sample])
