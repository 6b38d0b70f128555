"""What the first screen shows: for each step that is not green, what broke, by how much, and whether it did before."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import headlines, rules
from hilgate.magnitude import Magnitude, magnitude
from hilgate.merge_base import NOTHING, Facts, on_merge_base
from hilgate.model import Check, Outcome, Plan, StepVerdict, Verdict
from hilgate.pages import shorten
from hilgate.repeat import container_line

if TYPE_CHECKING:
    from hilgate.results import Recorded


@dataclass(frozen=True)
class Finding:
    """One check that is not green."""

    check: Check
    size: Magnitude
    merge_base: str


@dataclass(frozen=True)
class Problem:
    """A step that is not green, with the checks that say so."""

    step: StepVerdict
    findings: tuple[Finding, ...]
    more: int
    """Checks that failed or were inconclusive and are not shown."""
    skips: tuple[tuple[str, int], ...]
    """(reason, how many checks), of the checks that did not run."""
    merge_base: str
    """Of the step itself; said where no check says more."""
    container: str
    """The line that repeats it in its image; empty when it ran in none."""


@dataclass(frozen=True)
class Named:
    """Checks that somebody must look after although they may not have stopped anything."""

    step: str
    kind: str
    what: str
    ids: tuple[str, ...]


def problems(
    plan: Plan, recorded: Recorded, verdict: Verdict, *, limit: int, facts: Facts = NOTHING
) -> tuple[Problem, ...]:
    """Every step that is not green, worst first; a step that passed with skips is green and not here."""
    planned = {step.key: step for step in plan.steps}
    found = []
    for step in headlines.not_green(verdict):
        attempt = recorded.last(step.key)
        checks = attempt.checks if attempt else ()
        wrong = [check for check in checks if check.outcome in {Outcome.FAIL, Outcome.INCONCLUSIVE}]
        wrong.sort(key=lambda check: -rules.SEVERITY[check.outcome])
        skipped = [check for check in checks if check.outcome is Outcome.DID_NOT_RUN]
        reasons = Counter(shorten(rules.first_line(check.message), 300) for check in skipped)
        device = planned[step.key].device
        found.append(
            Problem(
                step,
                tuple(
                    Finding(check, magnitude(check, device), on_merge_base(facts, step.key, check.id))
                    for check in wrong[:limit]
                ),
                max(0, len(wrong) - limit),
                tuple(reasons.most_common(limit)),
                on_merge_base(facts, step.key),
                container_line(step, planned[step.key]),
            )
        )
    return tuple(found)


def named(verdict: Verdict) -> tuple[Named, ...]:
    """Flaky and quarantined checks and unexpected passes of every step, green ones included."""
    kinds = (
        ("flaky", "failed and then passed over the same files: not a pass", "flaky"),
        ("quarantined", "failed in quarantine: an owner has promised to mend it", "quarantined"),
        ("unexpected pass", "in quarantine and passed: remove the entry from ci/quarantine.yaml", "unexpected_passes"),
    )
    return tuple(
        Named(step.key, kind, what, ids)
        for step in verdict.steps
        for kind, what, attribute in kinds
        if (ids := getattr(step, attribute))
    )


def approval(verdict: Verdict) -> str:
    """Who must approve, or has approved, what the change loosens of its own gate; empty when it loosens nothing."""
    looser = sum(one.looser for one in verdict.loosened)
    if not looser:
        return ""
    if verdict.approved_by:
        return f"approved by {verdict.approved_by}"
    return "needs a named approval by somebody of the gate's owners who did not start this build"
