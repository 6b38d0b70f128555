# SPDX-License-Identifier: Apache-2.0
"""Documents: read with one mistake each, asked of canned engines, and scored by hand and by brute force."""

import json
import shutil

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.gates import declared, resolved

from hileval.ask import documents
from hileval.ask.documents import (
    DocumentError,
    DocumentQuestions,
    drawn_line,
    matching_lines,
    picture,
    read_documents,
    score_lines,
    sound,
)
from hileval.ask.harness import TaskQuestions
from hileval.ask.loop import questions_of
from hileval.cli import exit_status
from hileval.engines import Answer, EngineError, Prompt, require_text
from hileval.engines.vllm_engine import _as_vllm
from hileval.gates import resolve
from hileval.gates.declare import EVALS, TaskError, read_document_task
from hileval.gates.judge import judge_answers
from hileval.records.answers import Evaluation, ScoreError
from hilgate.errors import CannotRunHereError, Exit
from hilgate.model.record import Check, Outcome

GATES = declared().gates
GATE, PARSE = GATES["pocket-speech"], GATES["nemotron-parse"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three pages, one of them a JPEG."""
    pages = tmp_path / "pages"
    pages.mkdir()
    for number, suffix in enumerate(("png", "png", "jpg")):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(pages / f"page-{number}.{suffix}")
        (pages / f"page-{number}.md").write_text(f"# Page {number}\n\nText.\n")
    monkeypatch.setenv("HILEVAL_DOCUMENTS", str(pages))
    return pages


def read(path=EVALS / PARSE.task):
    return read_documents(read_document_task(path), path)


def test_pages_with_their_texts(folder):
    documents = read()
    assert [document.id for document in documents] == ["page-0", "page-1", "page-2"]
    assert documents[1].text == "# Page 1\n\nText.\n"
    assert picture(documents[1].data).getpixel((0, 0)) == (1, 0, 0)
    assert len({document.digest for document in documents}) == 3
    again = {document.id: document.digest for document in read()}
    (folder / "page-0.md").write_text("# Another\n")
    assert read()[0].digest != again["page-0"]
    assert read()[1].digest == again["page-1"]


def twice(folder):
    shutil.copy(folder / "page-0.png", folder / "again.png")
    shutil.copy(folder / "page-0.md", folder / "again.md")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / "page-1.md").unlink(), r"text: no page-1\.md beside page-1\.png"),
        (lambda f: (f / "page-1.png").unlink(), r"image: none beside page-1\.md"),
        (lambda f: (f / "page-1.md").write_text(" \n\n"), r"text: that of 'page-1' is empty"),
        (lambda f: (f / "page-1.md").write_bytes(b"\xff\xfe"), r"text: page-1\.md is not UTF-8"),
        (lambda f: (f / "page-1.png").write_bytes(b"\x89PNG\r\n"), r"image: page-1\.png cannot be read"),
        (lambda f: (f / "page-2.jpg").write_bytes((f / "page-2.jpg").read_bytes()[:300]), r"image: page-2\.jpg"),
        (lambda f: shutil.copy(f / "page-2.jpg", f / "page-2.jpeg"), r"id: 'page-2' occurs twice"),
        (twice, r"id: '.*' and '.*' are the same document"),
        (lambda f: [file.unlink() for file in f.iterdir()], "no document"),
    ],
)
def test_a_damaged_folder_is_refused_and_the_field_named(folder, damage, why):
    damage(folder)
    with pytest.raises(DocumentError, match=why) as caught:
        read()
    assert caught.value.exit_status is Exit.INVALID_DECLARATION
    assert caught.value.where == str(folder)


@pytest.mark.parametrize("value", [None, "", "/nowhere/at/all"])
def test_without_a_folder_nothing_runs(monkeypatch, value):
    monkeypatch.delenv("HILEVAL_DOCUMENTS", raising=False)
    if value is not None:
        monkeypatch.setenv("HILEVAL_DOCUMENTS", value)
    with pytest.raises(CannotRunHereError, match="HILEVAL_DOCUMENTS names no folder"):
        read()


def spoken(tmp_path, *lines, texts="texts.jsonl"):
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    task = tmp_path / "task.yaml"
    task.write_text(yaml.safe_dump({"task": "t", "modality": "audio", "prompt": "<s>", "texts": str(tmp_path / texts)}))
    return task


def row(name, text):
    return json.dumps({"id": name, "text": text})


def test_spoken_documents(tmp_path):
    (document,) = read(spoken(tmp_path, row("a", "Tom 7 pens")))
    samples = sound(document.data)
    assert (samples.shape, samples.dtype) == ((16_000,), "float32")
    assert 0.4 < abs(samples).max() < 0.5


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([row("a", "Tom 7 pens"), row("a", "Tom 8 pens")], "id: 'a' occurs twice"),
        ([row("a", "Tom 7 pens"), row("b", "Tom 7 pens")], "the same document"),
        ([row("a", " ")], "text: that of 'a' is empty"),
        ([row(3, "Tom 7 pens")], "id: 3 is no string"),
        ([row("a", None)], "text: None is no string"),
        (['{"id": "a"}'], "not a document"),
        (["[1]"], "not a document"),
        (["{"], "not a document"),
        ([row("a", "Tom 7 pelicans")], "no chord for 'pelicans'"),
        ([row("a", "Tom 7 pens\n" * 9)], "27 words where 1 to 25 can be heard"),
    ],
)
def test_damaged_texts_are_refused_and_the_field_named(tmp_path, lines, why):
    with pytest.raises(Exception, match=why) as caught:
        read(spoken(tmp_path, *lines))
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"propmt": "x"}, "propmt"),
        ({"prompt": ""}, "prompt"),
        ({"modality": "video"}, "modality"),
        ({"modality": "image"}, "image needs `data_folder` alone"),
        ({"data_folder": "X"}, "audio needs `texts` alone"),
        ({"texts": None}, "audio needs `texts` alone"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"scoring": 2}, "scoring"),
    ],
)
def test_one_mistake_in_a_task_is_named(tmp_path, change, why):
    task = spoken(tmp_path, row("a", "Tom 7 pens"))
    task.write_text(yaml.safe_dump(yaml.safe_load(task.read_text()) | change))
    with pytest.raises(TaskError, match=why):
        read_document_task(task)


@pytest.mark.parametrize("text", ["", "[", "- a"])
def test_not_a_task(tmp_path, text):
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(TaskError):
        read_document_task(path)
    with pytest.raises(TaskError, match="FileNotFoundError"):
        read_document_task(tmp_path / "none.yaml")
    with pytest.raises(DocumentError, match="cannot be read"):
        read(spoken(tmp_path, texts="nowhere.jsonl"))


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
    questions = DocumentQuestions(resolved(GATE, lambda: pytest.fail("started twice")))
    questions.engine = Canned(questions, ids, spoil)
    return questions.ask(ids, 0), questions


def test_a_gate_says_of_which_kind_its_questions_are(gate):
    assert isinstance(questions_of(resolved(GATE)), DocumentQuestions)
    assert isinstance(questions_of(resolved(gate)), TaskQuestions)


def test_right_wrong_and_broken_answers_are_distinguished():
    spoil = {
        0: Answer("Cem 1 books\nIan 5 pens\nLeo 8 cards", "stop", 15, 0),
        1: Answer("", "stop", 1, 0),
        2: Answer("Cem " * 30, "length", 24, 1),
    }
    samples, questions = ask([0, 1, 2, 3], spoil)
    assert [s.strict_correct for s in samples] == [False, False, False, True]
    assert [(s.lines_right, s.lines) for s in samples] == [(3, 4), (0, 5), (0, 2), (4, 4)]
    assert [[flag.value for flag in s.flags] for s in samples] == [
        [],
        ["empty"],
        ["repeat", "no number", "truncated", "non-finite"],
        [],
    ]
    assert samples[3].flexible in samples[3].target.split(" / ")
    assert samples[1].flexible == "[invalid]"
    ((prompts, arguments),) = questions.engine.asked
    assert {(p.text, p.modality, p.repetition_penalty) for p in prompts} == {("<s>", "audio", 1.0)}
    assert arguments == {"max_tokens": 24, "stop": []}


def test_what_the_right_text_would_be_blamed_for_is_excused():
    questions = DocumentQuestions(resolved(GATE, object))
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
    one, two = DocumentQuestions(resolved(GATE, object)).identity, DocumentQuestions(resolved(GATE, object)).identity
    assert one == two
    assert one.model == "pocket/speech"
    assert one.lm_eval == "none"
    shorter = GATE.model_copy(update={"max_gen_toks": 30})
    assert [d.split(":")[0] for d in DocumentQuestions(resolved(shorter, object)).identity.differences(one)] == [
        "generation"
    ]


def test_too_few_answers_and_an_engine_of_text_are_refused():
    questions = DocumentQuestions(resolved(GATE, object))
    questions.engine = Canned(questions, [0])
    with pytest.raises(ScoreError, match="1 answers to 2 documents"):
        questions.ask([0, 1], 0)
    with pytest.raises(EngineError, match="text alone"):
        require_text([questions._prompt(questions._documents[0])])
    assert require_text(["a", "b"]) == ["a", "b"]


def test_a_document_longer_than_an_answer_is_refused():
    short = GATE.model_copy(update={"max_gen_toks": 19})
    with pytest.raises(DocumentError, match=r"text: that of '\d+' takes 20 tokens .* max_gen_toks is 19"):
        DocumentQuestions(resolved(short, object))
    assert DocumentQuestions(resolved(GATE.model_copy(update={"max_gen_toks": 20}), object)).available == 400


def test_vllm_is_shown_what_the_encoder_takes():
    assert _as_vllm("Question") == "Question"
    sound = _as_vllm(Prompt("<s>", "audio", [0.0]))
    assert sound["encoder_prompt"] == {"prompt": "", "multi_modal_data": {"audio": ([0.0], 16_000)}}
    page = _as_vllm(Prompt("<md>", "image", "a picture", 1.1))
    assert page["encoder_prompt"]["multi_modal_data"] == {"image": "a picture"}
    assert page["decoder_prompt"] == {"prompt": "<md>"}


@pytest.mark.usefixtures("folder")
def test_pages_have_the_prompt_and_penalty_of_their_task(monkeypatch):
    monkeypatch.setattr(resolve, "weights_sha", lambda _: "a" * 64)
    questions = DocumentQuestions(resolved(PARSE, folder=GATE.path(GATE.model)))
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
    assert sample.question == "page-0"


@pytest.fixture
def judged(plant, rule):
    """Judge sixty documents, without a baseline."""

    def judging(gate, served, spoil=None, **changes):
        run = plant.run([True]).model_copy(update={"samples": tuple(ask(list(range(60)), spoil)[0])})
        asked = Evaluation(tuple(range(60)), (run,), None)
        return judge_answers(resolved(gate, rule=rule.model_copy(update=changes)), asked, served)

    return judging


def test_lines_are_shown_beside_the_documents(judged):
    accuracy = judged(GATE, None, {0: Answer("Cem 1 books", "stop", 4, 0)})[1]
    right, lines = accuracy.numbers["lines_right"], accuracy.numbers["lines"]
    assert accuracy.numbers["correct"] == 59
    assert lines - right == 3
    assert "59/60 = 98.3%" in accuracy.message
    assert f"{right}/{lines} = {right / lines:.1%} of their lines" in accuracy.message


@pytest.mark.parametrize("unresolved", ["flag", "block"])
def test_without_baseline_and_floor_nothing_passes(judged, unresolved):
    served = Check(id="g/served-by-pagedkv", outcome=Outcome.PASS, message="10 layers")
    checks = judged(PARSE, served, unresolved=unresolved)
    assert [check.id for check in checks] == ["g/served-by-pagedkv", "g/broken-output", "g/accuracy"]
    assert exit_status(checks) is Exit.INCONCLUSIVE
    assert "neither a baseline nor a floor" in checks[2].message


HASH = "0" * 15 + "2" + "f" * 48
"""Draws line 2 of three or more."""


def longest_common(a, b):
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest_common(a[1:], b[1:])
    return max(longest_common(a[1:], b), longest_common(a, b[1:]))


@pytest.mark.parametrize(
    ("answer", "whole", "third", "right"),
    [
        ("a\nb\nc\nd", True, True, 4),
        ("a  \n\nb\nc\r\nd\n", True, True, 4),
        ("a\nb\nC\nd", False, False, 3),
        ("b\nc\nd", False, True, 3),
        ("a\nx\nb\nc\nd", False, True, 4),
        ("d\nc\nb\na", False, False, 1),
        (" a\nb\nc\nd", False, True, 3),
        ("", False, False, 0),
    ],
)
def test_scores_by_hand(answer, whole, third, right):
    result = score_lines("a\nb\nc\nd", answer, HASH)
    assert (result.whole, result.drawn, result.right, result.lines) == (whole, third, right, 4)
    assert score_lines("caf\u00e9", "cafe\u0301", HASH).whole, "a composed letter is its parts"


LINES = st.lists(st.sampled_from("abc"), max_size=7)


@given(LINES, LINES)
def test_right_lines_are_a_longest_common_subsequence(wanted, written):
    found = matching_lines(wanted, written)
    assert len(found) == len(wanted)
    assert sum(found) == longest_common(wanted, written)
    rest = iter(written)
    assert all(line in rest for line, right in zip(wanted, found, strict=True) if right), "in the written order"


def test_every_line_is_drawn_about_as_often():
    rng = np.random.default_rng(1)
    counts = np.bincount([drawn_line(rng.bytes(32).hex(), 5) for _ in range(5_000)], minlength=5)
    assert counts.min() > 900
    assert counts.max() < 1_100
