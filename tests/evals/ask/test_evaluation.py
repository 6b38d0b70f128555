# SPDX-License-Identifier: Apache-2.0
"""Stored answers of a gate, judged once more; the sequences that a drift gate reads."""

import json

import pytest
from support.gates import resolved
from tokenizers import Tokenizer

from hileval.ask.evaluation import read_evaluation
from hileval.ask.harness import documents_of
from hileval.ask.sides import sequences_of
from hileval.gates.declare import DriftGate
from hileval.gates.judge import judge
from hilgate.errors import RecordsError
from hilgate.model.record import Check, Outcome


def test_a_drift_gate_reads_the_real_questions(gate):
    """One question with its right answer, and a sequence of 900 tokens that is joined from several."""
    asked = resolved(gate)
    sequences = sequences_of(asked, DriftGate(kind="drift", of="pocket-hybrid", lengths={0: 2, 900: 1}))
    assert len(sequences[0]) > 30
    assert len(sequences[2]) == 900
    row = documents_of(asked)[0]
    text = Tokenizer.from_file(str(asked.folder / "tokenizer.json")).decode(sequences[0], skip_special_tokens=False)
    assert text == f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"


@pytest.fixture
def stored(plant, rule, tmp_path):
    """A folder as `gate` leaves it, of two runs."""
    ids = rule.order(300)
    baseline = plant.baseline([True] * 300)
    answers = plant.run([i % 4 > 0 for i in range(300)]).samples
    lines = [answers[i] for i in ids] + [answers[i] for i in ids]
    (tmp_path / "samples.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in lines))
    served = Check(id="pocket-hybrid/served-by-pagedkv", outcome=Outcome.PASS, message="planted")
    Check.write_all(tmp_path, [served])
    return tmp_path, baseline


def test_stored_answers_are_judged_again(stored, gate, rule):
    folder, baseline = stored
    compared, alone = resolved(gate, rule=rule, baseline=baseline), resolved(gate, rule=rule)
    asked, served = read_evaluation(folder, compared, None)
    assert [len(run.samples) for run in asked.runs] == [200, 200]
    outcomes = {check.id.rpartition("/")[2]: check.outcome for check in judge(compared, asked, served)}
    assert outcomes["accuracy"] is Outcome.FAIL
    assert judge(alone, read_evaluation(folder, alone, None)[0], served)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lines: lines[1:], "in another order"),
        (lambda lines: [*lines[:9], lines[9][:50]], "not the answers of a gate"),
        (lambda _: [], "no answer"),
        (lambda lines: [json.dumps(json.loads(lines[0]) | {"prompt_hash": "0" * 64}), *lines[1:]], "another prompt"),
    ],
)
def test_what_was_not_asked_so_is_refused(stored, gate, rule, change, why):
    folder, baseline = stored
    path = folder / "samples.jsonl"
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(RecordsError, match=why):
        read_evaluation(folder, resolved(gate, rule=rule, baseline=baseline), None)


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_stored_answers_may_hold_what_ends_a_line_of_text(stored, gate, rule, end):
    folder, baseline = stored
    path = folder / "samples.jsonl"
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    odd = json.dumps(json.loads(first) | {"text": f"one{end}two"}, ensure_ascii=False)
    path.write_text(f"{odd}\n{rest}\n", encoding="utf-8")
    asked, served = read_evaluation(folder, resolved(gate, rule=rule, baseline=baseline), None)
    assert asked.runs[0].samples[0].text == f"one{end}two"
    assert [len(run.samples) for run in asked.runs] == [200, 200]
    assert served is not None


def test_answers_without_a_server_are_refused(stored, gate, rule):
    folder, baseline = stored
    (folder / "findings.jsonl").write_text("")
    with pytest.raises(RecordsError, match="nobody says who served"):
        read_evaluation(folder, resolved(gate, rule=rule, baseline=baseline), None)
