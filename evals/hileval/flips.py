"""Which questions flipped, with both answers side by side: what a person reads after a gate has failed. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.baseline import Baseline
    from hileval.evaluation import Evaluation

SHARE = 0.5
"""A question has flipped when the share of its right answers moved by at least this much."""
WIDTH = 56


@dataclass(frozen=True, slots=True)
class Flip:
    """One question that is answered differently now.

    Attributes:
        before: Share of the stored runs that were right.
        now: Share of the new runs that are right.
        stored_text: What the first stored run wrote.
        new_text: What the first new run wrote.
    """

    doc_id: int
    question: str
    target: str
    before: float
    now: float
    stored_text: str
    new_text: str

    @property
    def lost(self) -> bool:
        """Whether it was right before and is wrong now."""
        return self.now < self.before


def flips(asked: Evaluation, baseline: Baseline, which: str) -> tuple[Flip, ...]:
    """Every flipped question, losses first, in the order of asking."""
    stored = {question.doc_id: question for question in baseline.questions}
    found = []
    for sample in asked.runs[0].samples:
        question = stored[sample.doc_id]
        digits = question.strict if which == "strict" else question.flexible
        before = digits.count("1") / len(digits)
        answers = [s for run in asked.runs for s in run.samples if s.doc_id == sample.doc_id]
        now = sum(s.strict_correct if which == "strict" else s.flexible_correct for s in answers) / len(answers)
        if abs(now - before) >= SHARE:
            found.append(Flip(sample.doc_id, sample.question, sample.target, before, now, question.text, sample.text))
    return tuple(sorted(found, key=lambda flip: not flip.lost))


def side_by_side(found: Sequence[Flip], most: int) -> str:
    """Questions with the stored and the new answer in two columns; says how many are left out."""
    parts = []
    for flip in found[:most]:
        shares = f"right in {flip.before:.0%} of stored runs, {flip.now:.0%} now"
        head = f"question {flip.doc_id}, answer {textwrap.shorten(flip.target, 2 * WIDTH)}: {shares}"
        left, right = _wrapped(flip.stored_text), _wrapped(flip.new_text)
        longest = max(len(left), len(right))
        left += [""] * (longest - len(left))
        right += [""] * (longest - len(right))
        rows = [f"  {a:<{WIDTH}} | {b}" for a, b in zip(["stored", *left], ["now", *right], strict=True)]
        parts.append("\n".join([head, *(row.rstrip() for row in rows)]))
    if len(found) > most:
        parts.append(f"and {len(found) - most} more flipped questions in flips.md")
    return "\n".join(parts)


def _wrapped(text: str) -> list[str]:
    lines = [line for part in text.strip().splitlines() for line in textwrap.wrap(part, WIDTH) or [""]]
    return lines or ["(nothing)"]
