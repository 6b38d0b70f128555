"""Baselines on disk: what is written is read back; anything less is refused."""

import json

import pytest

from hileval.baseline import UnfitBaselineError, make_baseline
from hileval.records import Baseline, BaselineError, DuplicateQuestionError, Run
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
    content["answers"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(BaselineError, match="n=5 but holds 4"):
        Baseline.read(path)


def test_unknown_key_and_other_schema(plant, tmp_path):
    path = tmp_path / "gate.json"
    plant.baseline([True]).write(path)
    content = json.loads(path.read_text())
    for change in ({"schema_version": 2}, {"note": "x"}):
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
    content["answers"][1] = content["answers"][0]
    path.write_text(json.dumps(content))
    with pytest.raises(DuplicateQuestionError):
        Baseline.read(path)


def test_what_may_become_a_baseline(plant):
    arguments = {"floor": 0.95, "engine": "vllm 0.32.0", "attention_backend": "CPU_ATTN", "reason": "first"}
    made = make_baseline("g", plant.run([True] * 20), **arguments)
    assert made.n == 20
    assert made.environment.host == ""
    with pytest.raises(UnfitBaselineError, match="below the floor"):
        make_baseline("g", plant.run([True, False]), **arguments)
    with pytest.raises(UnfitBaselineError, match="non-finite"):
        make_baseline("g", plant.run([True] * 20, non_finite=[3]), **arguments)
