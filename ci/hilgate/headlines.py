"""The first lines of a verdict: counts of checks and steps, and what each ruling tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate import rules
from hilgate.judge import totals
from hilgate.model import Outcome, Ruling, StepVerdict, Verdict
from hilgate.shown import marked

if TYPE_CHECKING:
    from hilgate.results import Recorded

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
