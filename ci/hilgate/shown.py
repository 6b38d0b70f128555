"""How outcomes, times and counts are worded wherever a person reads them: terminal, annotation, report.

Every outcome has a mark and a word; colour only accompanies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate import rules
from hilgate.judge import totals
from hilgate.model import Outcome, StepVerdict, Verdict

if TYPE_CHECKING:
    from hilgate.results import Recorded

MARKS: dict[Outcome, str] = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✗",
    Outcome.INCONCLUSIVE: "?",
    Outcome.DID_NOT_RUN: "○",
}

STYLES: dict[Outcome, str] = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.DID_NOT_RUN: "magenta",
}
"""Styles of rich; did not run is not dimmed, because it is not green."""


def marked(outcome: Outcome) -> str:
    """`✗ fail`."""
    return f"{MARKS[outcome]} {outcome.value}"


def duration(seconds: float | None) -> str:
    """`0.4 s`, `59 s`, `12 min 03 s`, `1 h 04 min`; a dash when nothing was timed."""
    if seconds is None:
        return "–"  # noqa: RUF001 - a dash, not a minus
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def headline(verdict: Verdict, recorded: Recorded) -> str:
    """`41 passed, 0 failed, 12 not run (no gfx950 here)`: the checks of all steps, with the first reason."""
    text = rules.summary(totals(verdict))
    reason = _first_skip(verdict, recorded)
    return f"{text} ({reason})" if reason else text


def step_counts(verdict: Verdict) -> str:
    """`3 of 4 steps passed, 1 omitted`."""
    passed = sum(step.outcome is Outcome.PASS for step in verdict.steps)
    text = f"{passed} of {len(verdict.steps)} steps passed"
    return f"{text}, {len(verdict.omissions)} omitted" if verdict.omissions else text


def not_green(verdict: Verdict) -> tuple[StepVerdict, ...]:
    """What is not a pass, worst first, otherwise in the order of the plan."""
    steps = [step for step in verdict.steps if step.outcome is not Outcome.PASS]
    return tuple(sorted(steps, key=lambda step: -rules.SEVERITY[step.outcome]))


def _first_skip(verdict: Verdict, recorded: Recorded) -> str:
    for step in verdict.steps:
        attempt = recorded.last(step.key)
        check = rules.first(attempt.checks, Outcome.DID_NOT_RUN) if attempt else None
        if check:
            return rules.first_line(check.message)
    return ""
