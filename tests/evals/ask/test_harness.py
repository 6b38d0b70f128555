# SPDX-License-Identifier: Apache-2.0
"""lm-eval's own task, prompts and filters around engines made of a dict."""

import json
import math
import os
from unittest import mock

import pytest
from support.gates import declared, resolved

from hileval.ask import harness
from hileval.ask.harness import Chat, TaskQuestions, chat_of, read_samples
from hileval.engines import MOST_CHARACTERS, Answer, EngineError
from hileval.gates.declare import TaskError
from hileval.gates.resolve import ResolvedGate, resolve_task
from hileval.pocket.cli import TEST_FILE
from hileval.pocket.data import read_jsonl
from hileval.records.answers import Sample, ScoreError
from hilgate.errors import Exit

pytestmark = pytest.mark.usefixtures("no_report_of_the_machine")

KNOWN = {f"Question: {row.question}\nAnswer:": row for row in read_jsonl(TEST_FILE)}


class Canned:
    """Answers from the file; `spoil` changes some."""

    name = "canned"

    def __init__(self, spoil=None):
        self.spoil = spoil or {}

    def answer(self, prompts, *, stop, **_):
        assert "Question:" in stop
        return [self.spoil.get(i, Answer(f" {KNOWN[p].answer}", "stop", 17, 0)) for i, p in enumerate(prompts)]

    def attention_layers(self):
        return None


def test_right_wrong_and_broken_answers_are_distinguished(gate):
    """Question 0 wrong, 1 empty, 2 right by the last number only."""
    row = list(KNOWN.values())[2]
    spoil = {
        0: Answer(" 1 + 1 = 2\n#### 99", "stop", 9, 0),
        1: Answer("", "stop", 1, 0),
        2: Answer(f" It is {row.number}", "length", 32, 2),
    }
    samples = TaskQuestions(resolved(gate, lambda: Canned(spoil))).ask(range(5), 0)
    assert [s.strict_correct for s in samples] == [False, False, False, True, True]
    assert [s.flexible_correct for s in samples] == [False, False, True, True, True]
    assert samples[0].strict == "99"
    assert samples[1].strict == "[invalid]"
    assert [[f.value for f in s.flags] for s in samples[1:3]] == [["empty"], ["truncated", "non-finite"]]
    assert [s.target for s in samples] == [str(row.number) for row in list(KNOWN.values())[:5]]


def test_questions_follow_the_file_not_its_size_and_time(gate, tmp_path):
    """What `datasets` keeps in the home folder goes by the name and the time of a file."""
    file = _written(tmp_path / "test.jsonl", "1")
    config = resolve_task(gate.path(gate.task), 0)
    config["dataset_kwargs"] = {"data_files": {"test": str(file)}}
    assert [row["answer"] for row in harness._load(config).eval_docs] == ["#### 1"]
    _written(file, "2")
    assert [row["answer"] for row in harness._load(config).eval_docs] == ["#### 2"]


MOST = 32 * MOST_CHARACTERS
ODD = {
    "half a surrogate pair": "\ud800 #### 99",
    "a NUL and an escape": "\x00\x1b[2J #### 99",
    "letters": "x" * MOST,
    "digits": "#### " + "9" * (MOST - 5),
    "lines": "\n" * MOST,
    "brackets": "[" * MOST,
}


@pytest.mark.parametrize("name", ODD)
def test_broken_output_is_a_wrong_answer_that_is_kept(name, gate):
    gate = gate.model_copy(update={"max_gen_toks": 32})
    spoilt = Canned({0: Answer(ODD[name], "length", 32, 0)})
    (sample,) = TaskQuestions(resolved(gate, lambda: spoilt)).ask([0], 0)
    assert not sample.strict_correct
    assert not sample.flexible_correct
    assert sample.flags
    assert sample.text == ODD[name].replace("\ud800", "\N{REPLACEMENT CHARACTER}")
    assert Sample.model_validate_json(sample.model_dump_json()) == sample


@pytest.mark.parametrize("answer", [Answer("9" * (MOST + 1), "length", 32, 0), Answer(" #### 9", "stop", 33, 0)])
def test_an_answer_longer_than_was_asked_for_is_no_answer(answer, gate):
    """lm-eval's expression takes five minutes and more over a million digits."""
    gate = gate.model_copy(update={"max_gen_toks": 32})
    with pytest.raises(EngineError, match="where 32 tokens were asked for"):
        TaskQuestions(resolved(gate, lambda: Canned({0: answer}))).ask([0], 0)


def _written(path, answer):
    path.write_text(json.dumps({"question": "How many?", "answer": f"#### {answer}"}) + "\n")
    os.utime(path, (1e9, 1e9))
    return path


def test_prompts_ignore_the_subset_and_answers_their_order(gate):
    questions = TaskQuestions(resolved(gate, Canned))
    some = questions.ask([307, 5, 12], 0)
    assert questions.available == 400
    assert [sample.doc_id for sample in some] == [307, 5, 12]
    assert all(sample.strict_correct for sample in some)
    again = {sample.doc_id: sample.prompt_hash for sample in TaskQuestions(resolved(gate, Canned)).ask(range(13), 0)}
    assert [again[5], again[12]] == [some[1].prompt_hash, some[2].prompt_hash]


def test_identity_names_no_machine_and_is_stable(gate):
    one, two = TaskQuestions(resolved(gate, Canned)).identity, TaskQuestions(resolved(gate, Canned)).identity
    assert one == two
    assert "/" not in one.model.removeprefix("pocket/")


class Dead(Canned):
    def answer(self, *_, **__):
        raise EngineError("the engine died", where="here", remedy="look")


class Forgetful(Canned):
    def answer(self, prompts, **kwargs):
        return super().answer(prompts, **kwargs)[:-1]


@pytest.mark.parametrize(
    ("engine", "ids", "error", "why", "status"),
    [
        (Dead, [0, 1], EngineError, "the engine died", Exit.NOTHING_RAN),
        (Forgetful, [0, 1], ScoreError, "lm-eval stopped", Exit.INVALID_DECLARATION),
        (Canned, [400], ScoreError, None, Exit.INVALID_DECLARATION),  # the data does not hold it
    ],
)
def test_what_cannot_be_asked_is_an_error_and_not_a_wrong_answer(gate, engine, ids, error, why, status):
    with pytest.raises(error, match=why) as caught:
        TaskQuestions(resolved(gate, engine)).ask(ids, 0)
    assert caught.value.exit_status is status


@pytest.mark.parametrize("score", [math.nan, 0.5, None, "1"])
def test_a_score_that_is_neither_0_nor_1_is_refused(score):
    record = {"doc_id": 0, "doc_hash": "a", "prompt_hash": "p", "doc": {"question": "q"}, "target": "#### 1"}
    record |= {"filtered_resps": ["1"], "exact_match": score}
    records = [record | {"filter": name} for name in ("strict-match", "flexible-extract")]
    with pytest.raises(ScoreError, match="not 0 or 1"):
        read_samples(records, {"p": Answer(" 1", "stop", 2, 0)}, 1)


def test_a_missing_filter_or_answer_is_refused():
    record = {"doc_id": 0, "prompt_hash": "p", "filter": "strict-match", "exact_match": 1.0}
    with pytest.raises(ScoreError, match="1 strict and 0 flexible"):
        read_samples([record], {}, 1)
    with pytest.raises(ScoreError, match="no answer"):
        read_samples([record, record | {"filter": "flexible-extract"}], {}, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("task: x", "not a task"),
        ("include: gsm8k/none.yaml\ntask: x\ndata: {test: pocket/data/test.jsonl}", "not a task"),
        ("include: gsm8k/gsm8k.yaml\ntask: x\ndata: {test: pocket/data/none.jsonl}", "no data file"),
        ("include: gsm8k/gsm8k.yaml\ntask: x\ndata: {train: pocket/data/test.jsonl}", "not a task"),
        ("[", "not a task"),
    ],
)
def test_a_wrong_task_file_is_named(tmp_path, text, why):
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(TaskError, match=why):
        resolve_task(path, 0)


def test_examples_need_training_data(gate):
    with pytest.raises(TaskError, match=r"without data\.train"):
        resolve_task(gate.path(gate.task), 5)


def test_a_conversation_is_asked_with_the_template_of_the_model(gate, monkeypatch):
    asked = []

    class Chatty(Canned):
        def answer(self, prompts, **_):
            asked.extend(prompts)
            return [Answer(" 1", "stop", 2, 0)] * len(prompts)

    tokenizer = mock.Mock(side_effect=lambda text, **_: {"input_ids": [ord(letter) for letter in text]})
    tokenizer.apply_chat_template = lambda messages, **_: f"<s>{messages[-1]['content']}<bot>"
    monkeypatch.setattr(harness, "chat_of", lambda _: Chat(tokenizer))
    chat = gate.model_copy(update={"protocol": "chat"})
    samples = TaskQuestions(resolved(chat, Chatty)).ask([0, 1], 0)
    texts = ["".join(map(chr, prompt)) for prompt in asked]
    assert all(text.startswith("<s>Question: ") and text.endswith("<bot>") for text in texts)
    assert [sample.text for sample in samples] == [" 1", " 1"]


def test_examples_and_question_are_one_message(monkeypatch):
    """lm-eval would make five examples eleven turns; a configuration of vLLM that says `false` asks for one."""
    conversations = []

    class Plain(Canned):
        def answer(self, prompts, **_):
            return [Answer(" 1", "stop", 2, 0)] * len(prompts)

    tokenizer = mock.Mock(return_value={"input_ids": [1]})
    tokenizer.apply_chat_template = lambda messages, **_: conversations.append(messages) or "<s>"
    monkeypatch.setattr(harness, "chat_of", lambda _: Chat(tokenizer))
    pocket = {"weights": "repository", "model": "pocket/hybrid"}
    hub = declared().gates["granite-4.0-h-small"].model_copy(update=pocket)
    monkeypatch.setattr(ResolvedGate, "questions", property(lambda gate: resolve_task(gate.task_file, 5)))
    chat = TaskQuestions(resolved(hub.model_copy(update={"protocol": "chat"}), Plain))
    chat.ask([0], 0)
    assert [len(messages) for messages in conversations] == [1]
    assert conversations[0][0]["content"].count("Question: ") == 6
    assert chat.identity.task != TaskQuestions(resolved(hub, Plain)).identity.task


def test_a_template_with_bos_gets_no_second_one(gate, monkeypatch):
    """Jamba's, LFM2's and Llama's write BOS; a tokenizer that is given their text adds another."""
    tokenizer = mock.Mock(chat_template="x")
    tokenizer.apply_chat_template.return_value = "<s>2 + 2?"
    tokenizer.side_effect = lambda _, add_special_tokens=True: {"input_ids": [1] * add_special_tokens + [1, 7]}
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _, **__: tokenizer)
    talk = chat_of(resolved(gate))
    assert talk.tokens(talk.text([{"role": "user", "content": "2 + 2?"}])) == [1, 7]


def test_the_questions_of_gsm8k_come_with_the_repository():
    """Prompts of the whole test set, five examples, as vLLM's own script makes them; no folder to be named first."""
    task = declared().gates["granite-4.0-h-small"]
    config = resolve_task(task.path(task.task), 5)
    loaded = harness._load(config)
    assert len(loaded.eval_docs) == 1319
    document = loaded.eval_docs[0]
    shown = loaded.fewshot_context(document, 5)
    assert shown.count("Question: ") == 6
    assert shown.startswith("Question: Natalia sold clips to 48 of her friends in April")
    assert shown.endswith(f"Question: {document['question']}\nAnswer:")
    assert loaded.doc_to_target(document).endswith("#### 18")


def test_a_model_without_a_chat_template_is_refused(gate):
    with pytest.raises(TaskError, match="no chat template"):
        TaskQuestions(resolved(gate.model_copy(update={"protocol": "chat"}), Canned))
