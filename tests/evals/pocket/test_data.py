# SPDX-License-Identifier: Apache-2.0
"""Properties of the word problems and the spoken documents, of their files and of the tokenizers."""

import hashlib
import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hileval.engines import SAMPLING_RATE
from hileval.pocket import data
from hileval.pocket.cli import SPEECH_FILE, TEST_FILE, TEST_QUESTIONS, TEST_SEED, reserved_documents
from hileval.pocket.data import documents, make_document, make_problem, problems, read_jsonl, speak
from hileval.pocket.models import build_tokenizer
from hilgate.errors import RecordsError

PROBLEMS, DOCUMENTS = build_tokenizer(), build_tokenizer("speech")
OWNS = re.compile(r"(\w+) has (\d+) \w+\.")
LISTEN = np.exp(-2j * np.pi * np.outer(data.TONES, np.arange(data.SLOT) / SAMPLING_RATE))


@given(st.integers(0, 2**32))
def test_the_answer_follows_from_the_question(seed):
    """Recomputed from the question's text alone."""
    problem = make_problem(random.Random(seed))
    owns = {name: int(count) for name, count in OWNS.findall(problem.question)}
    ask = problem.question.rsplit(". ", 1)[1]
    asked = [name for name in re.findall(r"\w+", ask) if name in owns]
    counts = [owns[name] for name in asked]
    expected = counts[0] - counts[1] if " more " in ask else sum(counts)
    assert len(asked) == len(set(asked)) in (2, 3)
    assert problem.number == expected
    assert 0 <= expected <= 3 * data.MAX_COUNT
    assert data.PEOPLE[0] <= len(owns) <= data.PEOPLE[1]
    for name in asked:
        assert f"{name} has {owns[name]}." in problem.answer


@given(st.integers(0, 2**32))
def test_the_tokenizers_lose_nothing(seed):
    problem, document = make_problem(random.Random(seed)), make_document(random.Random(seed))
    question = f"Question: {problem.question}\nAnswer: {problem.answer}"
    for tokenizer, text in ((PROBLEMS, question), (DOCUMENTS, document)):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert len(ids) == 4 * len(document.split("\n")) - 1


def test_the_committed_questions_and_documents_are_the_seeds():
    assert read_jsonl(TEST_FILE) == list(itertools.islice(problems(TEST_SEED), TEST_QUESTIONS))
    assert reserved_documents() == frozenset(itertools.islice(documents(TEST_SEED), TEST_QUESTIONS))
    assert len(SPEECH_FILE.read_text().splitlines()) == TEST_QUESTIONS


def test_excluded_problems_do_not_come():
    some = [row.digest for row in itertools.islice(problems(8), 50)]
    left = list(itertools.islice(problems(8, exclude=frozenset(some[::2])), 25))
    assert [row.digest for row in left] == some[1::2]


@pytest.mark.parametrize("text", ["", '{"question": "a"}\n', "[1]\n", "{\n"])
def test_damaged_question_files_are_named(tmp_path, text):
    path = tmp_path / "test.jsonl"
    path.write_text(text)
    with pytest.raises(RecordsError, match=r"GSM8K|without questions"):
        read_jsonl(path)
    with pytest.raises(RecordsError, match="no question file"):
        read_jsonl(tmp_path / "none.jsonl")


def words_in(sound):
    """The words of a sound, by Fourier transform of each slot: nothing of what made it."""
    words = {chord: word for word, chord in data.CHORDS.items()}
    slots = [slot for slot in sound.reshape(-1, data.SLOT).astype(float) if slot.any()]
    return [words[tuple(sorted(np.argsort(abs(LISTEN @ slot))[-2:].tolist()))] for slot in slots]


@settings(deadline=None)  # the first one takes as long as a busy machine lets it
@given(st.integers(0, 2**32))
def test_a_document_can_be_heard_in_its_sound(seed):
    text = make_document(random.Random(seed))
    sound = speak(text)
    assert sound.dtype == np.int16
    assert words_in(sound) == text.split()
    lines = [line.split() for line in text.split("\n")]
    assert 2 <= len(lines) <= 5
    assert len({name for name, _, _ in lines}) == len(lines)


def test_documents_begin_at_various_times():
    sounds = [speak(text).reshape(-1, data.SLOT) for text in itertools.islice(documents(TEST_SEED), 40)]
    assert len({int(np.flatnonzero(sound.any(1))[0]) for sound in sounds}) >= 10


def test_the_same_samples_everywhere():
    """No sample of the table is near a half, so that no machine's sine rounds it otherwise."""
    exact = data.LOUDNESS * np.sin(2 * np.pi * np.arange(SAMPLING_RATE) / SAMPLING_RATE)
    assert np.abs(exact % 1 - 0.5)[np.abs(exact) > 0].min() > 1e-6
    digest = hashlib.sha256(speak("Tom 7 pens").astype("<i2").tobytes()).hexdigest()
    assert digest == "a726f3411e8047a80dd8b3ad994f6f6fffdb6a3f423e52b982633784a255d68f"
