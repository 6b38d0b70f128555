# SPDX-License-Identifier: Apache-2.0
"""The loop between rule, engine and journal, with an engine of planted answers."""

import contextlib
from dataclasses import replace

import pytest
from support.gates import PRE_MERGE, resolved

from hileval.ask import loop
from hileval.ask.loop import Journal, ask_until_decided, code_fingerprint, heading_of, journal_of
from hileval.records.baseline import IdentityMismatchError
from hilgate.errors import NothingSelectedError

N = 200
RULE = PRE_MERGE.model_copy(update={"questions": N, "seed": 1})


def asked_until_decided(plant, gate, questions, baseline=..., limit=None):
    stored = plant.baseline([True] * N) if baseline is ... else baseline
    return ask_until_decided(replace(resolved(gate, rule=RULE, baseline=stored), limit=limit), questions)


@pytest.mark.parametrize(
    ("correct", "text", "margin", "asked"),
    [
        ([True] * N, None, 0.05, [75]),
        ([i % 3 == 0 for i in range(N)], None, 0.05, [50]),
        ([True] * N, "!" * 40, 0.05, [50]),
        ([True] * N, None, 0.01, [N, N]),  # all right answers of 200 cannot exclude a drop of one point
    ],
    ids=["unchanged", "wreck", "broken output", "undecided"],
)
def test_no_more_is_asked_than_decides(plant, planted_questions, gate, correct, text, margin, asked):
    questions = planted_questions(plant.run(correct, texts=dict.fromkeys(range(N), text) if text else None))
    rule = RULE.model_copy(update={"margin": margin})
    asked_for = resolved(gate, rule=rule, baseline=plant.baseline([True] * N))
    assert [len(run.samples) for run in ask_until_decided(asked_for, questions)] == asked
    assert [run for run, _ in questions.asked] == [run for run, count in enumerate(asked) for _ in range(count)]
    assert len(set(questions.batches)) == len(questions.batches), "the same batch again gives the same bits"


def test_without_a_baseline_every_question_is_asked_once(plant, planted_questions, gate):
    questions = planted_questions(plant.run([True] * N))
    assert [len(run.samples) for run in asked_until_decided(plant, gate, questions, None)] == [N]


def test_a_limit_of_zero_is_refused(plant, planted_questions, gate):
    with pytest.raises(NothingSelectedError):
        asked_until_decided(plant, gate, planted_questions(plant.run([True] * N)), limit=0)


def test_unknown_questions_are_refused_before_the_engine(plant, planted_questions, gate):
    questions = planted_questions(plant.run([True] * N))
    with pytest.raises(IdentityMismatchError, match="are not in it"):
        asked_until_decided(plant, gate, questions, plant.baseline([True] * 150))
    assert questions.asked == []


@pytest.fixture
def journal(plant, planted_questions, gate, tmp_path):
    """What a crash after 50 answers left, opened again."""
    path = tmp_path / "journal.jsonl"
    heading = heading_of(resolved(gate), plant.identity)
    first = planted_questions(plant.run([True] * N), dies_after=50)
    with pytest.raises(KeyboardInterrupt):
        asked_until_decided(plant, gate, Journal(first, path, heading))

    def reopened(**changes):
        again = planted_questions(plant.run([True] * N))
        return Journal(again, path, heading.model_copy(update=changes)), again

    reopened.path, reopened.asked = path, first.asked
    return reopened


def test_what_was_answered_before_a_crash_is_not_asked_again(plant, gate, journal):
    reopened, second = journal()
    assert reopened.resumed == 50
    assert len(asked_until_decided(plant, gate, reopened)[0].samples) == 75
    assert set(journal.asked).isdisjoint(second.asked)
    assert len(second.asked) == 25


def test_an_engine_is_started_though_every_answer_is_kept(journal):
    """Nobody else can say who served them."""
    reopened, second = journal()
    assert second.engine is None
    assert reopened.engine is second.engine
    assert len(second.asked) == 1
    assert second.asked[0] in journal.asked


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_journal_goes_once_its_answers_are_written(monkeypatch, plant, planted_questions, gate, tmp_path, error):
    questions = planted_questions(plant.run([True] * N))
    monkeypatch.setattr(loop, "questions_of", lambda _: questions)
    monkeypatch.setattr(loop, "JOURNALS", tmp_path)
    with contextlib.suppress(KeyboardInterrupt), journal_of(resolved(gate)) as journal:
        journal.ask([3, 4], 0)
        if error:
            raise error
    assert (tmp_path / "g.jsonl").exists() is bool(error)
    assert questions.engine.close.called


def test_a_line_cut_short_is_asked_again(journal):
    journal.path.write_bytes(journal.path.read_bytes()[:-40])
    assert journal()[0].resumed == 49
    assert journal()[0].resumed == 49  # and the file is whole again


@pytest.mark.parametrize(
    "change",
    [
        {"code": "d"},
        {"engine": "transformers"},
        {"gate": "h"},
        {"arguments": {"kv_cache_dtype": "fp8"}},
        {"environment": {"PAGEDKV_PACKING": "shuffle"}},
        {"versions": {"vllm": "0.33"}},
        {"attention_backend": "vllm"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_answers_of_something_else_are_set_aside(journal, change):
    assert journal(**change)[0].resumed == 0
    assert len(journal.path.with_name("journal.jsonl.before").read_text().splitlines()) == 51


def test_fingerprint_sees_code_and_tables_only(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = code_fingerprint(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    assert code_fingerprint(tmp_path) == before
    (tmp_path / "t.toml").write_text("x")
    assert code_fingerprint(tmp_path) != before
