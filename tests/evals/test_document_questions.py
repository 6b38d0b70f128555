"""Documents as questions: canned engines, and gates that end as they must."""

import json
import sys

import pytest
from PIL import Image

from hileval import cli
from hileval.ask import documents
from hileval.ask.documents import DocumentError, DocumentQuestions, questions_of
from hileval.ask.evaluation import Evaluation
from hileval.ask.harness import ScoreError, TaskQuestions
from hileval.engines import Answer, EngineError, Prompt
from hileval.engines.engine import require_text
from hileval.engines.vllm_engine import _as_vllm
from hileval.gates.declare import load_gates
from hileval.gates.judge import exit_status, judge
from hilgate.errors import Exit
from hilgate.model import Check, Outcome

GATES = load_gates().gates
GATE, PARSE = GATES["pocket-speech"], GATES["nemotron-parse"]


class Canned:
    """Writes the right text; `spoil` changes some."""

    name = "canned"

    def __init__(self, questions, ids, spoil=None):
        self.texts = [questions._documents[one].text for one in ids]
        self.spoil, self.asked = spoil or {}, []

    def answer(self, prompts, **arguments):
        self.asked.append((prompts, arguments))
        return [self.spoil.get(i, Answer(text, "stop", 20, 0)) for i, text in enumerate(self.texts)]

    def attention_layers(self):
        return None


def ask(ids, spoil=None):
    questions = DocumentQuestions(GATE, lambda: pytest.fail("started twice"))
    questions.engine = Canned(questions, ids, spoil)
    return questions.ask(ids, 0), questions


def test_a_gate_says_of_which_kind_its_questions_are(gate):
    assert isinstance(questions_of(GATE, object), DocumentQuestions)
    assert isinstance(questions_of(gate, object), TaskQuestions)


def test_right_wrong_and_broken_answers_are_told_apart():
    spoil = {
        0: Answer("Cem 1 books\nIan 5 pens\nLeo 8 cards", "stop", 15, 0),
        1: Answer("", "stop", 1, 0),
        2: Answer("Cem " * 30, "length", 24, 1),
    }
    samples, questions = ask([0, 1, 2, 3], spoil)
    assert [s.strict_correct for s in samples] == [False, False, False, True]
    assert [(s.lines_right, s.lines) for s in samples] == [(3, 4), (0, 5), (0, 2), (4, 4)]
    assert [[flag.value for flag in s.flags] for s in samples] == [
        [], ["empty"], ["repeat", "no number", "truncated", "non-finite"], []
    ]  # fmt: skip
    assert samples[3].flexible in samples[3].target.split(" / ")
    assert samples[1].flexible == "[invalid]"
    ((prompts, arguments),) = questions.engine.asked
    assert {(p.text, p.modality, p.repetition_penalty) for p in prompts} == {("<s>", "audio", 1.0)}
    assert arguments == {"max_tokens": 24, "stop": []}


def test_what_the_right_text_would_be_blamed_for_is_excused():
    questions = DocumentQuestions(GATE, object)
    page = documents.read_documents(questions._task, GATE.path(GATE.task))[0]
    table = type(page)("page", "| - |\n" * 20, b"")
    sample = documents._sample(0, table, questions._task, Answer(table.text, "stop", 90, 0))
    assert sample.strict_correct
    assert sample.flags == ()
    cut = documents._sample(0, table, questions._task, Answer("| - |", "length", 90, 0))
    assert [flag.value for flag in cut.flags] == ["truncated"]


def test_samples_do_not_depend_on_what_else_is_asked():
    one, two = ask([307, 5])[0], ask([5])[0]
    assert [sample.doc_id for sample in one] == [307, 5]
    assert one[1] == two[0]
    assert len({sample.prompt_hash for sample in one}) == 2


def test_identity_names_the_task_and_no_machine():
    one, two = DocumentQuestions(GATE, object).identity, DocumentQuestions(GATE, object).identity
    assert one == two
    assert one.model == "pocket/speech"
    assert one.lm_eval == "none"
    shorter = GATE.model_copy(update={"max_gen_toks": 30})
    assert [d.split(":")[0] for d in DocumentQuestions(shorter, object).identity.differences(one)] == ["generation"]


def test_a_document_longer_than_an_answer_is_refused():
    short = GATE.model_copy(update={"max_gen_toks": 19})
    with pytest.raises(DocumentError, match=r"text: that of '\d+' takes 20 tokens .* max_gen_toks is 19"):
        DocumentQuestions(short, object)
    assert DocumentQuestions(GATE.model_copy(update={"max_gen_toks": 20}), object).available == 400


def test_too_few_answers_are_an_error():
    questions = DocumentQuestions(GATE, object)
    questions.engine = Canned(questions, [0])
    with pytest.raises(ScoreError, match="1 answers to 2 documents"):
        questions.ask([0, 1], 0)


def test_an_engine_of_text_refuses_sounds():
    questions = DocumentQuestions(GATE, object)
    with pytest.raises(EngineError, match="text alone"):
        require_text([questions._prompt(questions._documents[0])])
    assert require_text(["a", "b"]) == ["a", "b"]


def test_vllm_is_shown_what_the_encoder_takes():
    assert _as_vllm("Question") == "Question"
    sound = _as_vllm(Prompt("<s>", "audio", [0.0]))
    assert sound["encoder_prompt"] == {"prompt": "", "multi_modal_data": {"audio": ([0.0], 16_000)}}
    page = _as_vllm(Prompt("<md>", "image", "a picture", 1.1))
    assert page["encoder_prompt"]["multi_modal_data"] == {"image": "a picture"}
    assert page["decoder_prompt"] == {"prompt": "<md>"}


def test_pages_are_asked_with_the_prompt_and_penalty_of_their_task(tmp_path, monkeypatch):
    Image.new("RGB", (8, 6)).save(tmp_path / "page.png")
    (tmp_path / "page.md").write_text("# One page\n")
    monkeypatch.setenv("HILEVAL_DOCUMENTS", str(tmp_path))
    monkeypatch.setattr(documents, "_folder", lambda _: GATE.path(GATE.model))
    monkeypatch.setattr(documents, "weights_sha", lambda _: "a" * 64)
    questions = DocumentQuestions(PARSE, object)
    questions.engine = Canned(questions, [0])
    (sample,) = questions.ask([0], 0)
    (((prompt,), arguments),) = questions.engine.asked
    assert (prompt.text, prompt.modality, prompt.repetition_penalty) == (
        "</s><s><predict_bbox><predict_classes><output_markdown>",
        "image",
        1.1,
    )
    assert prompt.media.size == (8, 6)
    assert arguments["max_tokens"] == PARSE.max_gen_toks
    assert sample.correct(PARSE.filter)
    assert sample.question == "page"


def run_of(samples, plant):
    return plant.run([True]).model_copy(update={"samples": tuple(samples)})


def test_lines_are_shown_beside_the_documents(plant, rule):
    samples, _ = ask(list(range(60)), {0: Answer("Cem 1 books", "stop", 4, 0)})
    asked = Evaluation(tuple(range(60)), (run_of(samples, plant),), None)
    checks = {check.id: check for check in judge("pocket-speech", GATE, rule, asked, None, None)}
    accuracy = checks["pocket-speech/accuracy"]
    right, lines = accuracy.numbers["lines_right"], accuracy.numbers["lines"]
    assert accuracy.numbers["correct"] == 59
    assert lines - right == 3
    assert "59/60 = 98.3%" in accuracy.message
    assert f"{right}/{lines} = {right / lines:.1%} of their lines" in accuracy.message


@pytest.mark.parametrize("unresolved", ["flag", "block"])
def test_without_baseline_and_floor_nothing_passes(plant, rule, unresolved):
    samples, _ = ask(list(range(60)))
    asked = Evaluation(tuple(range(60)), (run_of(samples, plant),), None)
    served = Check(id="nemotron-parse/served-by-pagedkv", outcome=Outcome.PASS, message="10 layers")
    told = rule.model_copy(update={"unresolved": unresolved})
    checks = judge("nemotron-parse", PARSE, told, asked, None, served)
    assert [check.id.split("/")[1] for check in checks] == ["served-by-pagedkv", "broken-output", "accuracy"]
    assert exit_status(checks) is Exit.INCONCLUSIVE
    assert "neither a baseline nor a floor" in checks[2].message


def test_without_documents_the_gate_did_not_run(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("HILEVAL_DOCUMENTS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hileval", "gate", "nemotron-parse", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as exited:
        cli.run(cli.app)
    assert exited.value.code == Exit.CANNOT_RUN_HERE
    (finding,) = map(json.loads, (tmp_path / "findings.jsonl").read_text().splitlines())
    assert finding["outcome"] == Outcome.DID_NOT_RUN.value
    assert "HILEVAL_DOCUMENTS names no folder" in finding["message"]
    assert "Traceback" not in capsys.readouterr().err
