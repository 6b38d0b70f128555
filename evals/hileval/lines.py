"""Scores of a parsed document: whole, by one drawn line, and line by line. Pure.

Which of them may be gated follows from the paired test: it treats questions as independent. Lines of one document are
not: one wrong token changes what is written after it, and a damaged cache spoils a document, not a line. So a question
is a document. It has two binary scores that depend on nothing else: whether all of it is right (`strict`), and whether
one line is right that was drawn before anything was answered (`flexible`), for pages too long to be ever right as a
whole. The share of all right lines is reported beside them and never tested.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Score:
    """What an answer is worth.

    Attributes:
        whole: Every line right, none missing, none too many.
        drawn: Whether the drawn line is right.
        right: How many lines are right.
        lines: How many there are.
    """

    whole: bool
    drawn: bool
    right: int
    lines: int


def lines_of(text: str) -> list[str]:
    """Lines as they are compared: Unicode in its composed form, without blanks at the end, none empty."""
    lines = (line.rstrip() for line in unicodedata.normalize("NFC", text).splitlines())
    return [line for line in lines if line]


def drawn(doc_hash: str, lines: int) -> int:
    """Number of the line drawn of a document: a function of the document alone, so every run is judged by the same."""
    return int(doc_hash[:16], 16) % lines


def score(target: str, answer: str, doc_hash: str) -> Score:
    """Compare an answer with the expected text, which has at least one line."""
    wanted, written = lines_of(target), lines_of(answer)
    right = matched(wanted, written)
    return Score(wanted == written, right[drawn(doc_hash, len(wanted))], sum(right), len(wanted))


def matched(wanted: Sequence[str], written: Sequence[str]) -> list[bool]:
    """For each wanted line, whether it stands in a longest common subsequence: a line left out costs itself alone.

    Of several longest ones, the one that takes lines as early as it can.
    """
    rows, columns = len(wanted), len(written)
    longest = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            longest[i][j] = (
                longest[i + 1][j + 1] + 1 if wanted[i] == written[j] else max(longest[i + 1][j], longest[i][j + 1])
            )
    found = [False] * rows
    i = j = 0
    while i < rows and j < columns:
        if wanted[i] == written[j]:
            found[i] = True
            i, j = i + 1, j + 1
        elif longest[i + 1][j] > longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return found
