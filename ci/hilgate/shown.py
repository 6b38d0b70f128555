"""How outcomes, times and counts are worded wherever a person reads them: terminal, annotation, report.

Every outcome has a mark and a word; colour only accompanies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate import rules
from hilgate.judge import totals
from hilgate.model import Outcome, Ruling, StepVerdict, Verdict

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


RULINGS: dict[Ruling, str] = {
    Ruling.PASS: "it did its work and found nothing wrong",
    Ruling.REGRESSION: "it did its work and what it checks is wrong",
    Ruling.INFRA: "the node, the agent, the network or the image; nothing was learned about the change",
    Ruling.FLAKY: "a check failed and then passed over the same files, which is not a pass",
    Ruling.QUARANTINED: "nothing but failures that the merge base has in quarantine",
    Ruling.INCONCLUSIVE: "the evidence is too thin to tell",
    Ruling.NOT_SELECTED: "not in the plan",
}
"""What each ruling tells the author of a change."""


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
    """`2 of 4 steps passed, 1 regression, 1 infra, 3 not selected`."""
    passed = sum(step.outcome is Outcome.PASS for step in verdict.steps)
    words = [f"{passed} of {len(verdict.steps)} steps passed"]
    rulings = [step.ruling for step in not_green(verdict)]
    words += [f"{rulings.count(ruling)} {ruling.value}" for ruling in dict.fromkeys(rulings)]
    words += [f"{len(verdict.omissions)} {Ruling.NOT_SELECTED.value}"] if verdict.omissions else []
    return ", ".join(words)


def ruled(step: StepVerdict) -> str:
    """`✗ fail: regression`; the ruling is left out where it says the same as the outcome."""
    return marked(step.outcome) + ("" if step.ruling.value == step.outcome.value else f": {step.ruling.value}")


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
