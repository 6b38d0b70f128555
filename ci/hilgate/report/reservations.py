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
    from collections.abc import Iterator

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


SLOW = 2.0
"""Times its declared minutes after which a step is called slow."""

OF_STEPS = {
    "a part": "only a part of these steps ran",
    "cannot run here": "skipped because this machine lacks what they need; other machines run them",
    "ran again": "an earlier attempt was stopped by the machine, and a later one passed",
    "slow": "took over twice their declared minutes",
    "restored": "measured with the merge base's own values, because new ones were not approved",
}
"""Kind of a reservation about whole steps -> what it means, in the order in which they are listed."""


def reservations(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Reservation, ...]:
    """All of them, those of checks first."""
    planned = {step.key: step for step in plan.steps}
    found: list[Reservation] = []
    of_steps: dict[str, list[str]] = {kind: [] for kind in OF_STEPS}
    for step in verdict.steps:
        attempt = recorded.last(step.key)
        for kind, what, ids in (
            ("flaky", "failed and then passed over the same files: not a pass", step.flaky),
            ("quarantined", "failed in quarantine: an owner has promised to mend it", step.quarantined),
            (
                "unexpected pass",
                "in quarantine and passed: remove the entry from ci/quarantine.yaml",
                step.unexpected_passes,
            ),
            ("not all proved", "a pass that does not prove all it is for", _notes(attempt)),
        ):
            if ids:
                found.append(Reservation(kind, what, step.key, ids))
        if step.outcome is Outcome.PASS:
            for kind, words in _of_step(planned[step.key], step, recorded):
                of_steps[kind].append(f"{step.key}: {words}")
    return (*found, *(Reservation(kind, OF_STEPS[kind], "", tuple(ids)) for kind, ids in of_steps.items() if ids))


def _notes(attempt: Attempt | None) -> tuple[str, ...]:
    return tuple(
        f"{check.id}: {check.labels[PASSED_BUT]}"
        for check in (attempt.checks if attempt else ())
        if check.outcome is Outcome.PASS and check.labels.get(PASSED_BUT)
    )


def _of_step(planned: PlannedStep, step: StepVerdict, recorded: Recorded) -> Iterator[tuple[str, str]]:
    """(kind, what is to be said) of each reservation about the pass of a whole step."""
    if planned.arguments:
        yield "a part", f"{count(step.counts.passed, 'check')} of {planned.arguments}"
    *earlier, last = recorded.attempts.get(step.key, (None,))
    skipped = [check for check in (last.checks if last else ()) if check.outcome is Outcome.DID_NOT_RUN]
    needs = dict.fromkeys(need for check in skipped for need in needs_of(check) if need in planned.step.may_lack)
    if needs:
        reasons = "; ".join(planned.step.may_lack[need].why for need in needs)
        yield "cannot run here", f"{count(len(skipped), 'check')} ({reasons})"
    if earlier and earlier[-1]:
        yield "ran again", earlier[-1].record.message
    seconds, minutes = step.seconds or 0.0, planned.step.minutes
    if seconds > SLOW * 60 * minutes:
        yield "slow", f"{duration(seconds)}, declared {minutes:g} min"
    files = recorded.restored.get(step.key, ())
    if files:
        yield "restored", ", ".join(files)
