"""Scores of documents: by hand, by brute force, and what goes wrong where lines are tested as if independent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hileval.ask.documents import drawn, lines_of, matched, score
from hileval.gates import statistics

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
    result = score("a\nb\nc\nd", answer, HASH)
    assert (result.whole, result.drawn, result.right, result.lines) == (whole, third, right, 4)


def test_a_composed_letter_is_its_parts():
    assert score("caf\u00e9", "cafe\u0301", HASH).whole


LINES = st.lists(st.sampled_from("abc"), max_size=7)


@given(LINES, LINES)
def test_as_many_lines_are_right_as_a_longest_common_subsequence_has(wanted, written):
    found = matched(wanted, written)
    assert len(found) == len(wanted)
    assert sum(found) == longest_common(wanted, written)
    rest = iter(written)
    assert all(line in rest for line, right in zip(wanted, found, strict=True) if right), "in the written order"


@given(LINES.filter(bool), LINES, st.integers(0, 2**64 - 1))
def test_a_document_that_is_right_has_right_lines_only(wanted, written, number):
    result = score("\n".join(wanted), "\n".join(written), f"{number:064x}"[::-1])
    assert result.whole == (wanted == written)
    if result.whole:
        assert result.drawn
        assert result.right == result.lines


@given(st.integers(0, 2**256 - 1), st.integers(1, 50))
def test_the_drawn_line_follows_from_the_document_alone(number, lines):
    assert 0 <= drawn(f"{number:064x}", lines) < lines


def test_every_line_is_drawn_about_as_often():
    rng = np.random.default_rng(1)
    counts = np.bincount([drawn(rng.bytes(32).hex(), 5) for _ in range(5_000)], minlength=5)
    assert counts.min() > 900
    assert counts.max() < 1_100


def test_lines_of_ignores_what_nobody_sees():
    assert lines_of("a \n\n \t\n b\t") == ["a", " b"]


def test_lines_tested_as_if_independent_raise_false_alarms():
    """Documents that flip whole between equal runs: the reason why a question is a document."""
    rng = np.random.default_rng(5)
    alarms = np.zeros(2)
    for _ in range(400):
        right = np.where(rng.random(100) < 0.2, 0.8, 1.0)
        documents = rng.random((6, 100)) < right
        lines = np.repeat(documents, 20, axis=1)
        alarms += [statistics.drop_p(runs[:5], runs[5:]) <= 0.01 for runs in (documents, lines)]
    assert alarms[0] / 400 <= 0.025
    assert alarms[1] / 400 >= 0.2
