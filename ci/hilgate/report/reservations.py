# SPDX-License-Identifier: Apache-2.0
"""Passes with caveats: all that is neither red nor simply passed, as one list. Pure.

A pass that does not prove what it is for, answers that churned, a part of a step, a second attempt, checks that cannot
run here, a slow step, a quarantine: each is said once, with the steps or checks that it is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.model.record import Outcome
from hilgate.run.outcome import needs_of
from hilgate.text import count, duration

if TYPE_CHECKING:
    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.verdict import StepVerdict, Verdict
    from hilgate.run.results import Attempt, Recorded

PASSED_BUT = "passed_but"
"""The label of a check that passes and does not prove all it is for."""
TITLE = "Passed, but"


@dataclass(frozen=True)
class Reservation:
    """One kind of it.

    Attributes:
        kind: In a word or two.
        what: What that means for the reader.
        step: The step that the ids are checks of; empty where they are steps.
        ids: Which checks or steps, with what is to be said of each.
    """

    kind: str
    what: str
    step: str
    ids: tuple[str, ...]

    @property
    def title(self) -> str:
        """`flaky in units-cpu`."""
        return f"{self.kind} in {self.step}" if self.step else self.kind


def reservations(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Reservation, ...]:
    """All of them, those of checks first."""
    of_checks = (
        ("flaky", "failed and then passed over the same files: not a pass", "flaky"),
        ("quarantined", "failed in quarantine: an owner has promised to mend it", "quarantined"),
        ("unexpected pass", "in quarantine and passed: remove the entry from ci/quarantine.yaml", "unexpected_passes"),
    )
    found = [
        Reservation(kind, what, step.key, getattr(step, attribute))
        for step in verdict.steps
        for kind, what, attribute in of_checks
        if getattr(step, attribute)
    ]
    for step in verdict.steps:
        notes = _notes(recorded.last(step.key))
        if notes:
            found.append(Reservation("not all proved", "a pass that does not prove all it is for", step.key, notes))
    planned = {step.key: step for step in plan.steps}
    passed = [(planned[step.key], step) for step in verdict.steps if step.outcome is Outcome.PASS]
    of_steps = (
        ("a part", "only a part of these steps ran", _part),
        ("cannot run here", "skipped because this machine lacks what they need; other machines run them", _lacking),
        ("ran again", "an earlier attempt was stopped by the machine, and a later one passed", _again),
        ("slow", "took over twice their declared minutes", _slow),
        ("restored", "measured with the merge base's own values, because new ones were not approved", _restored),
    )
    for kind, what, words_of in of_steps:
        words = {step.key: words_of(one, step, recorded) for one, step in passed}
        ids = tuple(key + each for key, each in words.items() if each)
        if ids:
            found.append(Reservation(kind, what, "", ids))
    return tuple(found)


def _notes(attempt: Attempt | None) -> tuple[str, ...]:
    return tuple(
        f"{check.id}: {check.labels[PASSED_BUT]}"
        for check in (attempt.checks if attempt else ())
        if check.outcome is Outcome.PASS and check.labels.get(PASSED_BUT)
    )


def _part(planned: PlannedStep, step: StepVerdict, recorded: Recorded) -> str:  # noqa: ARG001 - as the others
    return f": {count(step.counts.passed, 'check')} of {planned.arguments}" if planned.arguments else ""


def _lacking(planned: PlannedStep, step: StepVerdict, recorded: Recorded) -> str:
    attempt = recorded.last(step.key)
    skipped = [one for one in attempt.checks if one.outcome is Outcome.DID_NOT_RUN] if attempt else []
    needs = dict.fromkeys(need for one in skipped for need in needs_of(one) if need in planned.step.may_lack)
    return (
        f": {count(len(skipped), 'check')} ({'; '.join(planned.step.may_lack[need].why for need in needs)})"
        if needs
        else ""
    )


def _again(planned: PlannedStep, step: StepVerdict, recorded: Recorded) -> str:  # noqa: ARG001
    earlier = recorded.attempts.get(step.key, ())[:-1]
    return f": {earlier[-1].record.message}" if earlier else ""


SLOW = 2.0
"""Times its declared minutes after which a step is called slow."""


def _slow(planned: PlannedStep, step: StepVerdict, recorded: Recorded) -> str:  # noqa: ARG001
    seconds, minutes = step.seconds or 0.0, planned.step.minutes
    return f": {duration(seconds)}, declared {minutes:g} min" if seconds > SLOW * 60 * minutes else ""


def _restored(planned: PlannedStep, step: StepVerdict, recorded: Recorded) -> str:  # noqa: ARG001
    files = recorded.restored.get(step.key, ())
    return f": {', '.join(files)}" if files else ""
