"""The judgement: from runs and a baseline to checks. Pure; no clock, no file, no engine.

Order matters. First who served the runs (accuracy of something else proves nothing), then broken output (it names the
cause), then the paired test against the baseline, then the absolute floor.

Broken output, told apart from wrong answers: it needs no statistics in gross cases, and it names the cause.

A wrong stride, a NaN or a stale block seldom makes a model reason worse; it makes it repeat, stop or babble. Real cases
that looked like accuracy loss: vllm#51011 (74 % instead of 97 %, with 285 of 1319 answers degenerate), vllm#39192
(0.4 %), vllm#14848 (0 %).

Which questions flipped, with both answers side by side: what a person reads after a gate has failed. Pure.
"""

from __future__ import annotations

import enum
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hileval.gates import statistics
from hileval.gates.rule import State, stand
from hilgate.errors import Exit, NothingSelectedError
from hilgate.model import Check, Number, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.ask.evaluation import Evaluation
    from hileval.gates.declare import Gate
    from hileval.gates.rule import Rule, Standing
    from hileval.records.baseline import Baseline
    from hileval.records.records import Sample


SHOWN_FLIPS = 3
"""Flipped questions that a message quotes; all of them are in flips.md."""


def broken_beyond_doubt(gate: Gate, baseline: Baseline | None, samples: Sequence[Sample]) -> bool:
    """Whether asking more can no longer help: the output is broken."""
    return bool(samples) and _broken("so far", gate, baseline, samples).outcome is Outcome.FAIL


def judge(
    name: str, gate: Gate, rule: Rule, asked: Evaluation, baseline: Baseline | None, served: Check | None
) -> list[Check]:
    """Every check of a gate.

    Args:
        name: The gate's key; check ids start with it.
        gate: Its declaration.
        rule: What applies to it now.
        asked: What was measured.
        baseline: What it is compared with; None judges the floor alone.
        served: The check of who served attention (`hileval.ask.evaluation`), None where the engine has no choice.
    """
    accuracy_id = f"{name}/accuracy"
    checks = [
        _broken(f"{name}/broken-output", gate, baseline, asked.samples),
        _accuracy(accuracy_id, gate, rule, asked, baseline)
        if baseline is not None
        else _without_baseline(accuracy_id, gate, rule, asked),
    ]
    if gate.floor is not None:
        checks.append(_floor(f"{name}/floor", gate.floor, gate, rule, asked))
    if served is None:
        return checks
    if served.outcome is not Outcome.PASS:
        checks = [_not_measured(check) for check in checks]
    return [served, *checks]


def exit_status(checks: Sequence[Check]) -> Exit:
    """One status for all checks: a failure outranks a missing result, which outranks an inconclusive one.

    Raises:
        NothingSelectedError: there is no check at all.
    """
    if not checks:
        raise NothingSelectedError("a gate without checks", remedy="this is a bug in hileval")
    outcomes = {check.outcome for check in checks}
    for outcome, status in (
        (Outcome.FAIL, Exit.FAIL),
        (Outcome.DID_NOT_RUN, Exit.NOTHING_RAN),
        (Outcome.INCONCLUSIVE, Exit.INCONCLUSIVE),
    ):
        if outcome in outcomes:
            return status
    return Exit.PASS


def _not_measured(check: Check) -> Check:
    return check.model_copy(
        update={
            "outcome": Outcome.DID_NOT_RUN,
            "message": f"not measured on the required attention; what answered instead: {check.message}",
        }
    )


def _broken(check_id: str, gate: Gate, baseline: Baseline | None, samples: Sequence[Sample]) -> Check:
    n = len(samples)
    kinds = Counter(flag for sample in samples for flag in sample.flags)
    count = sum(bool(sample.flags) for sample in samples)
    before = 0.0
    if baseline is not None:
        known = {question.doc_hash for question in baseline.questions}
        asked = [sample.doc_hash for sample in samples if sample.doc_hash in known]
        before = float(baseline.outcomes("broken", asked).mean()) if asked else 0.0
    p_value = statistics.excess(count, n, before + 1 / n)
    allowed = max(gate.broken.max_rate, 2 * before)
    numbers: dict[str, Number] = {
        "n": n,
        "broken": count,
        "baseline_broken_rate": before,
        "p_value": p_value,
        "limit": allowed,
    }
    numbers |= {flag.value.replace(" ", "_").replace("-", "_"): kinds[flag] for flag in Flag if kinds[flag]}
    listed = ", ".join(f"{kinds[flag]} {flag.value}" for flag in Flag if kinds[flag]) or "none"
    first = next((sample for sample in samples if sample.flags), None)
    shown = f"; first: question {first.doc_id}: {first.text[:60]!r}" if first else ""
    reasons = []
    if kinds[Flag.NON_FINITE]:
        reasons.append("a log-probability was NaN or infinite")
    if count / n > allowed:
        reasons.append(f"more than {allowed:.1%} broken")
    if count >= gate.broken.min_count and p_value <= gate.broken.alpha:
        reasons.append(f"p={p_value:.1e} against the baseline's {before:.1%}")
    message = f"{count}/{n} answers broken ({listed})" + (f": {', '.join(reasons)}{shown}" if reasons else shown)
    outcome = Outcome.FAIL if reasons else Outcome.PASS
    return Check(id=check_id, outcome=outcome, message=message, numbers=numbers)


def _accuracy(check_id: str, gate: Gate, rule: Rule, asked: Evaluation, baseline: Baseline) -> Check:
    assert asked.base is not None
    new = asked.outcomes(gate)
    standing = stand(rule, asked.base, new)
    outcome, verdict = _verdict(rule, baseline, standing)
    base = asked.base[:, : standing.n]
    counted = np.array([run[: standing.n] for run in new[: standing.new_runs]])
    correct, n = int(counted.sum()), counted.size
    low, high = statistics.interval(correct, n, rule.alpha)
    found = flips(asked, baseline, gate.filter)
    lost, gained = [flip for flip in found if flip.lost], [flip for flip in found if not flip.lost]
    message = f"baseline {base.mean():.1%} in {baseline.runs} runs, lost {len(lost)}, gained {len(gained)}: {verdict}"
    labels = {"filter": gate.filter, "state": standing.state.value}
    if lost:
        labels["lost_questions"] = " ".join(str(flip.doc_id) for flip in lost[:20])
    if outcome is not Outcome.PASS and lost:
        message += "\n" + side_by_side(lost, SHOWN_FLIPS)
    numbers: dict[str, Number] = {
        "n": standing.n,
        "runs": standing.new_runs,
        "correct": correct,
        "exact_match": correct / n,
        "ci_low": low,
        "ci_high": high,
        "baseline_exact_match": float(base.mean()),
        "baseline_runs": baseline.runs,
        "lost": len(lost),
        "gained": len(gained),
        "p_value": standing.p_value,
        "level": standing.level,
        "drop": standing.drop,
        "drop_low": standing.low,
        "drop_upper": standing.high,
        "margin": rule.margin,
        "seconds": round(asked.seconds, 1),
    }
    numbers |= {} if baseline.d is None else {"d": baseline.d}
    message = f"{correct}/{n} = {correct / n:.1%} [{low:.1%}, {high:.1%}]{_by_line(asked.samples, numbers)}, {message}"
    return Check(id=check_id, outcome=outcome, message=message, labels=labels, numbers=numbers, seconds=asked.seconds)


def _by_line(samples: Sequence[Sample], numbers: dict[str, Number]) -> str:
    """The share of right lines of documents, also put into `numbers`: shown, never tested (`hileval.ask.documents`)."""
    lines, right = sum(sample.lines for sample in samples), sum(sample.lines_right for sample in samples)
    if not lines:
        return ""
    numbers |= {"lines": lines, "lines_right": right, "line_match": right / lines}
    return f" of documents, {right}/{lines} = {right / lines:.1%} of their lines"


def _verdict(rule: Rule, baseline: Baseline, standing: Standing) -> tuple[Outcome, str]:
    """What a standing means for a merge or a release, in words."""
    if standing.state is State.FAIL:
        return Outcome.FAIL, f"dropped by {standing.drop:.1%} (p={standing.p_value:.1e})"
    if baseline.runs < rule.baseline_runs:
        return Outcome.INCONCLUSIVE, (
            f"not failed (p={standing.p_value:.2g}), but the baseline holds {baseline.runs} runs and the rule wants "
            f"{rule.baseline_runs}: one run's luck would be shared by every merge"
        )
    excluded = f"a drop of {rule.margin:.1%} is excluded (bound {standing.high:.1%})"
    undecided = f"a drop of {rule.margin:.1%} is not excluded (bound {standing.high:.1%}, p={standing.p_value:.2g})"
    if standing.state is State.PASS:
        return Outcome.PASS, excluded
    if standing.state is State.UNRESOLVED and rule.unresolved == "flag":
        return Outcome.PASS, f"FLAGGED, {undecided} after {standing.new_runs} runs of {standing.n} questions"
    missing = "; more questions would tell" if standing.state in {State.ASK_MORE, State.RUN_AGAIN} else ""
    return Outcome.INCONCLUSIVE, undecided + missing


def _without_baseline(check_id: str, gate: Gate, rule: Rule, asked: Evaluation) -> Check:
    correct = sum(int(run.sum()) for run in asked.outcomes(gate))
    n = len(asked.samples)
    low, high = statistics.interval(correct, n, rule.alpha)
    source = f"; published: {gate.published[0].value:.1%} ({gate.published[0].metric})" if gate.published else ""
    if gate.floor is None:
        outcome, why = Outcome.INCONCLUSIVE, "neither a baseline nor a floor, so nothing is judged"
    else:
        outcome = Outcome.PASS if rule.unresolved == "flag" else Outcome.INCONCLUSIVE
        why = f"FLAGGED: no baseline yet, so only the floor holds{source}"
    numbers: dict[str, Number] = {
        "n": n,
        "correct": correct,
        "exact_match": correct / n,
        "ci_low": low,
        "ci_high": high,
    }
    return Check(
        id=check_id,
        outcome=outcome,
        message=(
            f"{correct}/{n} = {correct / n:.1%} [{low:.1%}, {high:.1%}]{_by_line(asked.samples, numbers)}, {why}; "
            "record one: python -m hileval baseline record"
        ),
        labels={"filter": gate.filter, "state": "no baseline"},
        numbers=numbers,
        seconds=asked.seconds,
    )


def _floor(check_id: str, floor: float, gate: Gate, rule: Rule, asked: Evaluation) -> Check:
    n, correct = len(asked.samples), sum(int(run.sum()) for run in asked.outcomes(gate))
    low, high = statistics.interval(correct, n, rule.alpha)
    share = correct / n
    if share >= floor:
        outcome, verdict = Outcome.PASS, "not below"
    elif high < floor:
        outcome, verdict = Outcome.FAIL, "below"
    else:
        outcome, verdict = Outcome.INCONCLUSIVE, "below, but the interval reaches"
    message = f"{correct}/{n} = {share:.1%} [{low:.1%}, {high:.1%}] is {verdict} the floor of {floor:.0%}"
    numbers: dict[str, Number] = {"n": n, "exact_match": share, "ci_low": low, "ci_high": high, "floor": floor}
    return Check(id=check_id, outcome=outcome, message=message, numbers=numbers)


class Flag(enum.StrEnum):
    """What can be wrong with one answer before its number is looked at."""

    EMPTY = "empty"
    REPEAT = "repeat"
    """At most 3 distinct characters in 12 or more (`!!!!` is the argmax over NaN logits where token 0 is `!`), or fewer
    than half of the 4-grams distinct in 24 or more words."""
    GARBAGE = "garbage"
    """U+FFFD, or under 80 % printable ASCII (English tasks only)."""
    NO_NUMBER = "no number"
    TRUNCATED = "truncated"
    """The engine stopped at the token limit, not at the end of the answer."""
    NON_FINITE = "non-finite"
    """A log-probability of a generated token was NaN or infinite."""


def flags_of(text: str, *, finish_reason: str | None, non_finite: int = 0) -> tuple[Flag, ...]:
    """Every flag that applies to one answer, in the order of `Flag`.

    Args:
        text: What the model wrote.
        finish_reason: `stop` or `length` as the engine reports it; None where an engine does not say.
        non_finite: How many generated tokens had a non-finite log-probability.
    """
    stripped = text.strip()
    found = {
        Flag.EMPTY: not stripped,
        Flag.REPEAT: bool(stripped) and _repeats(stripped),
        Flag.GARBAGE: bool(stripped) and _garbage(stripped),
        Flag.NO_NUMBER: bool(stripped) and not re.search(r"\d", stripped),
        Flag.TRUNCATED: finish_reason == "length",
        Flag.NON_FINITE: non_finite > 0,
    }
    return tuple(flag for flag in Flag if found[flag])


def _repeats(text: str) -> bool:
    if len(text) >= 12 and len(set(text)) <= 3:
        return True
    words = text.split()
    if len(words) < 24:
        return False
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(grams)) / len(grams) < 0.5


def _garbage(text: str) -> bool:
    if "\N{REPLACEMENT CHARACTER}" in text:
        return True
    printable = sum(" " <= character <= "~" or character in "\n\t" for character in text)
    return printable / len(text) < 0.8


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
