# SPDX-License-Identifier: Apache-2.0
"""Stored answers of a gate, judged once more; the sequences that a drift gate reads."""

import json

import pytest
from support.gates import resolved
from tokenizers import Tokenizer

from hileval.ask.harness import documents_of
from hileval.ask.sides import sequences_of
from hileval.gates.declare import DriftGate
from hileval.gates.judge import judge_answers, read_evaluation
from hileval.records.answers import Asked
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
    """A folder as `ask` leaves it, of two runs."""
    ids = rule.order(300)
    baseline = plant.baseline([True] * 300)
    answers = plant.run([i % 4 > 0 for i in range(300)]).samples
    served = Check(id="pocket-hybrid/served-by-pagedkv", outcome=Outcome.PASS, message="planted")
    asked = Asked(
        gate="g",
        identity=plant.identity,
        available=300,
        limit=None,
        answers=(200, 200),
        seconds=(1.0, 2.0),
        engine="vllm",
        served=served,
        environment=baseline.environment,
    )
    asked.write(tmp_path, [answers[i] for i in ids] * 2)
    return tmp_path, baseline


def test_stored_answers_are_judged_again(stored, gate, rule):
    folder, baseline = stored
    compared, alone = resolved(gate, rule=rule, baseline=baseline), resolved(gate, rule=rule)
    _, asked, evaluation = read_evaluation(compared, folder)
    assert [(len(run.samples), run.seconds) for run in evaluation.runs] == [(200, 1.0), (200, 2.0)]
    outcomes = {check.id.split("/")[1]: check.outcome for check in judge_answers(compared, evaluation, asked.served)}
    assert outcomes["accuracy"] is Outcome.FAIL
    assert judge_answers(alone, read_evaluation(alone, folder)[2], asked.served)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lines: [lines[1], lines[0], *lines[2:]], "in another order"),
        (lambda lines: lines[:-1], "399 answers, where 400 were given"),
        (lambda lines: [*lines[:9], lines[9][:50]], "not the answers of a gate"),
        (lambda _: [], "0 answers, where 400"),
        (lambda lines: [json.dumps(json.loads(lines[0]) | {"prompt_hash": "0" * 64}), *lines[1:]], "another prompt"),
    ],
)
def test_what_was_not_asked_so_is_refused(stored, gate, rule, change, why):
    folder, baseline = stored
    path = folder / "samples.jsonl"
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(RecordsError, match=why):
        read_evaluation(resolved(gate, rule=rule, baseline=baseline), folder)


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_stored_answers_may_hold_what_ends_a_line_of_text(stored, gate, rule, end):
    folder, baseline = stored
    path = folder / "samples.jsonl"
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    odd = json.dumps(json.loads(first) | {"text": f"one{end}two"}, ensure_ascii=False)
    path.write_text(f"{odd}\n{rest}\n", encoding="utf-8")
    _, _, evaluation = read_evaluation(resolved(gate, rule=rule, baseline=baseline), folder)
    assert evaluation.runs[0].samples[0].text == f"one{end}two"
    assert [len(run.samples) for run in evaluation.runs] == [200, 200]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gate": "h"}, "the answers of h, not of g"),
        ({"limit": 20}, "in another order"),
        ({"available": 299}, "in another order"),
        ({"answers": (400, 0)}, "400 were given"),
        ({"answers": (300, 100)}, "occurs more than once"),
        ({"served": "ours"}, "not the answers of a gate"),
    ],
)
def test_answers_that_were_got_otherwise_are_refused(stored, gate, rule, change, why):
    folder, baseline = stored
    path = folder / "asked.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordsError, match=why):
        read_evaluation(resolved(gate, rule=rule, baseline=baseline), folder)
    path.unlink()
    with pytest.raises(RecordsError, match="not the answers of a gate"):
        read_evaluation(resolved(gate, rule=rule, baseline=baseline), folder)
