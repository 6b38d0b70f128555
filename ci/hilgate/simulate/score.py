"""The verdict of a simulated build held against what really happened in it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.simulate.faults import Kind
from hilgate.simulate.truth import PASSED

if TYPE_CHECKING:
    from hilgate.model import PlannedStep, StepVerdict, Verdict
    from hilgate.simulate.build import Finished
    from hilgate.simulate.truth import Deed, Ledger

_REACH_OTHERS = frozenset({Kind.OTHER_TREE, Kind.OTHER_STEP, Kind.PLAN_ALTERED})
"""Kinds that spoil the evidence of steps beside the one they strike."""


class Wrong(enum.StrEnum):
    """How a verdict can be wrong."""

    FALSE_PASS = "false pass"  # noqa: S105 - not a password
    LOST_RESULT = "lost result"
    FALSE_BLAME = "false blame"
    NEEDLESS_BLOCK = "needless block"


@dataclass(frozen=True)
class Problem:
    """One way in which a verdict is wrong, and why."""

    kind: Wrong
    why: str


def problems(finished: Finished) -> tuple[Problem, ...]:
    """Everything that is wrong with the verdict of a build."""
    found = []
    truth = finished.truth
    if finished.passed and truth.forbidden:
        found.append(Problem(Wrong.FALSE_PASS, truth.forbidden[0]))
    if not finished.passed and not truth.forbidden and not truth.doubtful:
        why = finished.verdict.why if finished.verdict else finished.broke_down or "no verdict was posted"
        found.append(Problem(Wrong.NEEDLESS_BLOCK, why))
    if finished.broke_down:
        found.append(Problem(Wrong.LOST_RESULT, f"the judge broke down: {finished.broke_down}"))
    if finished.verdict is not None:
        found += [Problem(Wrong.LOST_RESULT, why) for why in _lost(finished, finished.verdict)]
        found += [Problem(Wrong.FALSE_BLAME, why) for why in _blamed(finished, finished.verdict)]
    return tuple(found)


def unseen_failures(finished: Finished) -> int:
    """Failures of attempts that Buildkite retried, in a build that passed: their artifacts are out of reach."""
    deeds = finished.site.ledger.deeds.values()
    return sum(bool(deed.failures()) for tries in deeds for deed in tries[:-1]) if finished.passed else 0


def _lost(finished: Finished, verdict: Verdict) -> list[str]:
    """Findings that arrived sound and in time, and that the verdict does not tell.

    What ran in an image that nobody knows of is no finding.
    """
    ledger, steps = finished.site.ledger, finished.site.steps
    if any(fault.kind in _REACH_OTHERS for fault in finished.faults):
        return []
    told = {step.key: step for step in verdict.steps}
    found = []
    unproven = {step.provides for key, step in steps.items() if step.provides and not _arrived(ledger, key)}
    for key, step in steps.items():
        deed = ledger.last(key)
        if deed is None or not _arrived(ledger, key) or not deed.tests or step.image in unproven:
            continue
        if key not in told:
            found.append(f"{key} is not in the verdict")
        elif why := _untold(step, deed, told[key], ledger):
            found.append(f"{key}: {why}")
    return found


def _arrived(ledger: Ledger, key: str) -> bool:
    """Whether the records of a step are there whole and in time, and nothing is wrong with how they came about."""
    deed = ledger.last(key)
    return deed is not None and not deed.wrong and not deed.doubtful and deed.arrives <= ledger.verdict_at


def _untold(step: PlannedStep, deed: Deed, said: StepVerdict, ledger: Ledger) -> str:
    excused = {test for test in deed.tests if any(excuse.covers(step, test) for excuse in ledger.excuses)}
    if said.counts.failed != len(deed.failures()):
        return f"{len(deed.failures())} tests failed and the verdict counts {said.counts.failed}"
    passed = {test for test, end in deed.tests.items() if end == PASSED}
    if said.counts.passed != len(passed):
        return f"the verdict counts {said.counts.passed} passed tests"
    if missing := (deed.failures() & excused) - set(said.quarantined):
        return f"{min(missing)} failed in quarantine and is not listed"
    if missing := (excused & passed) - set(said.unexpected_passes):
        return f"{min(missing)} passed in quarantine and is not listed"
    return ""


def _blamed(finished: Finished, verdict: Verdict) -> list[str]:
    """Steps ruled a regression of the change although only infrastructure went wrong.

    No injustice where nobody could know better: its hooks saw a sick node as sound, and no run elsewhere passed.
    """
    site = finished.site
    found = []
    for said in verdict.steps:
        deed = site.ledger.last(said.key)
        if said.ruling.value != "regression":
            continue
        if deed is None:
            found.append(f"{said.key} never ran: {said.why}")
            continue
        unknowable = deed.host in site.sick and not deed.seen_sick and said.key not in site.cleared
        own = site.failing_by_nature(said.key)
        if deed.innocent and not own and not unknowable and not said.unexpected_passes:
            found.append(f"{said.key}: {'; '.join(deed.wrong) or 'nothing went wrong'}, ruled: {said.why}")
    return found
