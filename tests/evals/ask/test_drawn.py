# SPDX-License-Identifier: Apache-2.0
"""Drawn weights: a tokenizer that loses nothing, a key that is what the engine answered, answers judged once more."""

import json
import shutil

import pytest
from support.gates import declared, resolved
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from hileval.ask.drawn import write_key, write_tokenizer
from hileval.ask.evaluation import read_evaluation
from hileval.ask.harness import TaskQuestions, documents_of
from hileval.ask.sides import sequences_of
from hileval.engines import Answer
from hileval.gates.declare import EVALS, DriftGate
from hileval.gates.judge import judge
from hilgate.errors import CannotRunHereError, HilgateError, RecordsError
from hilgate.model.record import Check, Outcome

pytestmark = pytest.mark.usefixtures("no_report_of_the_machine")

GATE = declared().gates["drawn-falcon-h1-tiny"]
RULE = declared().rules["drawn"].model_copy(update={"questions": 40, "margin": 0.3, "baseline_runs": 1})


class Engine:
    name = "planted 1"

    def __init__(self, says):
        self.says = says

    def answer(self, prompts, *, max_tokens, stop):
        assert (max_tokens, "Question:" in stop) == (3, True)
        return [Answer(self.says(prompt), "length", 3, 0) for prompt in prompts]

    def attention_layers(self):
        return [{"layer": "0", "impl": "pagedkv.x", "backend": "pagedkv.B", "writes": 1, "attentions": 1}]

    def close(self):
        pass


@pytest.fixture
def folder(tmp_path):
    shutil.copy(EVALS / GATE.model / "config.json", tmp_path)
    return tmp_path


def as_numbers(prompt):
    return f"\n#### 7\n#### {len(prompt)}" if len(prompt) % 5 else "\u00e9"


def test_text_is_bytes_and_every_other_token_is_an_answer(folder):
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Question: Janet\u2019s ducks\n  lay 16\t\u00e9ggs."
    ids = tokenizer.encode(text)
    assert (len(ids), tokenizer.decode(ids)) == (len(text.encode()), text)
    assert min(ids) >= 3
    assert max(ids) < 259
    assert tokenizer.decode([259, 511]) == "\n#### 259\n#### 511"
    assert len(tokenizer) == 512


def test_the_key_holds_what_was_answered_and_the_gate_asks_it(folder):
    gate = resolved(GATE, lambda: Engine(as_numbers), rule=RULE, folder=folder)
    with pytest.raises(HilgateError, match=r"no data file key\.jsonl"):
        TaskQuestions(gate)
    kept = write_key(gate)
    again = TaskQuestions(gate)
    assert 20 < kept == again.available < 40, "what holds no number is no key"
    assert all(sample.flexible_correct for sample in again.ask(range(kept), 0))
    gate.key.unlink()
    with pytest.raises(CannotRunHereError, match="no answer holds a number"):
        write_key(resolved(GATE, lambda: Engine(lambda _: "\u00e9"), rule=RULE, folder=folder))


def test_a_drift_gate_asks_the_real_questions_and_needs_no_key(folder):
    gate = resolved(GATE, lambda: Engine(as_numbers), rule=RULE, folder=folder)
    sequences = sequences_of(gate, DriftGate(kind="drift", of=gate.name, lengths={0: 2, 900: 1}))
    assert [len(tokens) > 100 for tokens in sequences] == [True, True, True]
    assert not gate.key.exists()
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(sequences[0])
    assert text == f"Question: {(row := documents_of(gate)[0])['question']}\nAnswer: {row['answer']}\n\n"


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


def test_answers_of_which_nobody_says_who_served_them_are_refused(stored, gate, rule):
    folder, baseline = stored
    (folder / "findings.jsonl").write_text("")
    with pytest.raises(RecordsError, match="nobody says who served"):
        read_evaluation(folder, resolved(gate, rule=rule, baseline=baseline), None)
