"""Properties of the word problems, of their files and of the tokenizer."""

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hileval.pocket.cli import FRESH_SEED, TEST_FILE, TEST_QUESTIONS, TEST_SEED
from hileval.pocket.data import MAX_COUNT, PEOPLE, make_problem, problems, read_jsonl
from hileval.pocket.models import build_tokenizer
from hilgate.errors import RecordsError

TOKENIZER = build_tokenizer()
OWNS = re.compile(r"(\w+) has (\d+) \w+\.")


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
    assert 0 <= expected <= 3 * MAX_COUNT
    assert PEOPLE[0] <= len(owns) <= PEOPLE[1]
    for name in asked:
        assert f"{name} has {owns[name]}." in problem.answer


@given(st.integers(0, 2**32))
def test_the_tokenizer_loses_nothing(seed):
    problem = make_problem(random.Random(seed))
    text = f"Question: {problem.question}\nAnswer: {problem.answer}"
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.decode(ids) == text


def test_the_same_seed_gives_the_same_problems_and_none_twice():
    first, again = (list(itertools.islice(problems(3), 300)) for _ in range(2))
    assert first == again
    assert len({row.digest for row in first}) == 300
    assert not {row.digest for row in itertools.islice(problems(4), 300)} & {row.digest for row in first}


def test_the_committed_test_questions_are_the_seeds():
    rows = read_jsonl(TEST_FILE)
    assert rows == list(itertools.islice(problems(TEST_SEED), TEST_QUESTIONS))
    assert len({row.digest for row in rows}) == TEST_QUESTIONS


def test_excluded_problems_do_not_come():
    some = [row.digest for row in itertools.islice(problems(FRESH_SEED), 50)]
    left = list(itertools.islice(problems(FRESH_SEED, exclude=frozenset(some[::2])), 25))
    assert [row.digest for row in left] == some[1::2]


@pytest.mark.parametrize("text", ["", '{"question": "a"}\n', "[1]\n", "{\n"])
def test_damaged_question_files_are_named(tmp_path, text):
    path = tmp_path / "test.jsonl"
    path.write_text(text)
    with pytest.raises(RecordsError, match=r"GSM8K|without questions"):
        read_jsonl(path)
    with pytest.raises(RecordsError, match="no question file"):
        read_jsonl(tmp_path / "none.jsonl")
