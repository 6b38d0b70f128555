"""Baselines on disk: what is written is read back; anything less is refused."""

import json

import pytest

from hileval.records.baseline import Baseline, BaselineError, UnfitBaselineError, make_baseline
from hileval.records.records import DuplicateQuestionError, Run, Setting
from hilgate.errors import Exit


def test_round_trip_with_one_answer_per_line(plant, tmp_path):
    baseline = plant.baseline([True, False, True])
    path = tmp_path / "b" / "gate.json"
    baseline.write(path)
    assert Baseline.read(path) == baseline
    assert sum("doc_hash" in line for line in path.read_text().splitlines()) == 3


def test_missing(tmp_path):
    with pytest.raises(BaselineError, match="no baseline") as caught:
        Baseline.read(tmp_path / "none.json")
    assert caught.value.exit_status is Exit.INVALID_DECLARATION
    assert "baseline record" in caught.value.remedy


def test_cut_short(plant, tmp_path):
    path = tmp_path / "gate.json"
    plant.baseline([True] * 5).write(path)
    path.write_text(path.read_text()[:-200])
    with pytest.raises(BaselineError, match="not valid"):
        Baseline.read(path)


def test_lost_lines_are_noticed(plant, tmp_path):
    path = tmp_path / "gate.json"
    plant.baseline([True] * 5).write(path)
    content = json.loads(path.read_text())
    content["questions"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(BaselineError, match="n=5 but holds 4"):
        Baseline.read(path)


def test_unknown_key_and_other_schema(plant, tmp_path):
    path = tmp_path / "gate.json"
    plant.baseline([True]).write(path)
    content = json.loads(path.read_text())
    for change in ({"schema_version": 1}, {"note": "x"}):
        path.write_text(json.dumps(content | change))
        with pytest.raises(BaselineError, match="not valid"):
            Baseline.read(path)


def test_a_question_twice_is_refused_in_runs_and_baselines(plant, tmp_path):
    run = plant.run([True, True])
    with pytest.raises(DuplicateQuestionError, match="more than once"):
        Run(identity=run.identity, samples=(run.samples[0], run.samples[0]), seconds=1)
    path = tmp_path / "gate.json"
    plant.baseline([True, True]).write(path)
    content = json.loads(path.read_text())
    content["questions"][1] = content["questions"][0]
    path.write_text(json.dumps(content))
    with pytest.raises(DuplicateQuestionError):
        Baseline.read(path)


def test_a_run_that_is_missing_from_one_question_is_named(plant, tmp_path):
    path = tmp_path / "gate.json"
    plant.baseline([True, True]).write(path)
    content = json.loads(path.read_text())
    content["questions"][1]["strict"] = "111"
    path.write_text(json.dumps(content))
    with pytest.raises(BaselineError, match="question 1: strict is of 3 runs, not 5"):
        Baseline.read(path)


@pytest.fixture
def arguments(plant):
    planted = plant.baseline([True])
    return {
        "floor": 0.95, "setting": Setting(engine="vllm 0.32.0", attention_backend="CPU_ATTN"),
        "environment": planted.environment, "reason": "first", "by": "somebody",
    }  # fmt: skip


def test_outcomes_come_back_run_by_run_in_the_asked_order(plant, arguments):
    vectors = [[True, False, True], [True, True, True]]
    made = make_baseline("g", [plant.run(v) for v in vectors], **(arguments | {"floor": 0.5}))
    hashes = [question.doc_hash for question in made.questions]
    assert made.outcomes("strict", hashes[::-1]).tolist() == [[True, False, True], [True, True, True]]
    assert made.outcomes("strict", hashes).tolist() == vectors
    assert made.d == pytest.approx(1 / 3)


def test_what_may_become_a_baseline(plant, arguments):
    assert make_baseline("g", [plant.run([True] * 20)] * 5, **arguments).runs == 5
    assert make_baseline("g", [plant.run([True] * 20)], **arguments).d is None


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([], "K = 0"),
        ([[True] * 20, [True, False]], "run 2 was asked other questions"),
        ([[True, False]], "run 1: 1/2 right is below the floor"),
    ],
    ids=["no run", "other questions", "below the floor"],
)
def test_what_may_not_become_a_baseline(plant, arguments, runs, why):
    with pytest.raises(UnfitBaselineError, match=why):
        make_baseline("g", [plant.run(run) for run in runs], **arguments)


def test_neither_may_a_run_with_nan_nor_one_of_another_model(plant, arguments):
    with pytest.raises(UnfitBaselineError, match="non-finite"):
        make_baseline("g", [plant.run([True] * 20, non_finite=[3])], **arguments)
    run = plant.run([True] * 20)
    other = run.model_copy(update={"identity": run.identity.model_copy(update={"weights": "9" * 64})})
    with pytest.raises(UnfitBaselineError, match="run 2 is of another model: weights"):
        make_baseline("g", [run, other], **arguments)
