"""The same check on the merge base: passed, failed, or not known, and why not.

Facts come from the history, or from a results folder that somebody names. They are words beside a decision and never
part of it: damage in them is said and stops nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.errors import HilgateError, NothingSelectedError
from hilgate.history import store
from hilgate.model import Outcome
from hilgate.plan.make import plan_digest, read_plan
from hilgate.run import outcome as rules
from hilgate.run import results

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Plan

RECENT_BUILDS = 50
"""How far back a check's own record is counted: about a week of a busy repository."""


@dataclass(frozen=True)
class StepFacts:
    """One planned step on the merge base.

    Attributes:
        passed: How many of its checks passed.
        checks: Check id -> (outcome, first line of its message).
        whole: Whether `checks` holds every check; the history keeps only those with numbers or not green.
    """

    outcome: Outcome
    passed: int
    checks: dict[str, tuple[Outcome, str]]
    whole: bool


@dataclass(frozen=True)
class Facts:
    """What is known of the merge base.

    Attributes:
        unknown: Why nothing is; empty when something is.
        commit: The commit that the facts are of.
        is_base: Whether that is the merge base of the plan.
        steps: Planned key -> what it did there.
        failures: (planned key, check id) -> in how many recent builds it failed or was flaky.
        runs: Planned key -> in how many recent builds it ran.
    """

    unknown: str = ""
    commit: str = ""
    is_base: bool = True
    steps: dict[str, StepFacts] = field(default_factory=dict)
    failures: dict[tuple[str, str], int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)


NOTHING = Facts(unknown="no history and no results of it were given")


def find(plan: Plan, *, history: Path | None = None, against: Path | None = None) -> Facts:
    """Facts from a results folder if one is named, else from the history.

    Args:
        plan: Of the build that is reported.
        history: Folder of the history.
        against: Results folder of the merge base (`hilgate gate` there), or of agents with `jobs/` in it.
    """
    try:
        if against is not None:
            return from_results(plan, against)
        return from_history(plan, history) if history is not None else NOTHING
    except NothingSelectedError:
        return Facts(unknown="the history has no build yet")
    except HilgateError as error:
        return Facts(unknown=f"{error.what} ({error.where})" if error.where else error.what)


def from_results(plan: Plan, folder: Path) -> Facts:
    """Facts of one results folder, every check of it.

    Raises:
        RecordsError: It has no plan or its results are not sound.
    """
    theirs = read_plan(folder / "plan.json")
    jobs = folder / "jobs"
    recorded = results.read_all(folder, jobs if jobs.is_dir() else None, theirs, plan_digest(theirs))
    steps = {}
    for step in theirs.steps:
        if attempt := recorded.last(step.key):
            checks = {check.id: (check.outcome, rules.first_line(check.message)) for check in attempt.checks}
            passed = rules.count(attempt.checks).passed
            steps[step.key] = StepFacts(attempt.record.outcome, passed, checks, whole=True)
    return Facts(commit=theirs.commit, is_base=theirs.commit == plan.merge_base, steps=steps)


def from_history(plan: Plan, folder: Path) -> Facts:
    """Facts of the newest build of the merge base, step by step, and how often checks failed lately.

    Raises:
        NothingSelectedError: The history is empty.
        RecordsError: It is damaged.
    """
    with store.opened(folder) as history:
        recent = {build.build for build in sorted(history.builds, key=lambda build: build.time)[-RECENT_BUILDS:]}
        bad = {(line.build, line.key, line.id) for line in history.checks if line.outcome is Outcome.FAIL}
        bad |= {(line.build, line.key, name) for line in history.steps for name in line.flaky}
        failures = Counter((key, name) for build, key, name in bad if build in recent)
        runs = Counter(line.key for line in history.steps if line.build in recent and line.attempts)
        lines = [line for line in history.steps if line.commit == plan.merge_base and line.attempts]
        steps = {}
        for line in sorted(lines, key=lambda line: line.time):  # the newest stays
            found = [check for check in history.checks if (check.build, check.key) == (line.build, line.key)]
            checks = {check.id: (check.outcome, check.message) for check in found}
            steps[line.key] = StepFacts(line.outcome, line.passed, checks, whole=False)
    unknown = "the plan names no merge base" if not plan.merge_base else ""
    if not unknown and not steps:
        unknown = f"no build of {plan.merge_base[:12]} is in the history"
    return Facts(unknown=unknown, commit=plan.merge_base, steps=steps, failures=dict(failures), runs=dict(runs))


def on_merge_base(facts: Facts, step: str, check: str = "") -> str:
    """What happened to a check there, in words; without a check, to the whole step.

    Args:
        facts: From `find`.
        step: A planned key.
        check: Id of a check; empty for the step itself.
    """
    lately = _lately(facts, step, check)
    if facts.unknown:
        return f"not known: {facts.unknown}{lately}"
    place = facts.commit[:12] or "a folder without a commit"
    place += "" if facts.is_base else ", which is not the merge base"
    known = facts.steps.get(step)
    if known is None:
        return f"not known: {step} was not run at {place}{lately}"
    return f"{_words(known, check)} at {place}{lately}"


def _words(known: StepFacts, check: str) -> str:
    if check in known.checks:
        outcome, message = known.checks[check]
        if outcome is Outcome.PASS:
            return "passed"
        words = {Outcome.FAIL: "failed too", Outcome.INCONCLUSIVE: "inconclusive too"}.get(outcome, "did not run")
        return f"{words} ({message})"
    if check and known.whole:
        return "not known: no such check"
    if known.outcome is Outcome.PASS:
        # Without numbers a passed check has no line in the history; its step vouches for all that were there.
        return f"nothing failed in its step ({known.passed} passed)" if check else f"passed ({known.passed} checks)"
    return f"not known: its step was not green ({known.outcome.value})" if check else f"{known.outcome.value} too"


def _lately(facts: Facts, step: str, check: str) -> str:
    runs = facts.runs.get(step, 0)
    if not check or not runs:
        return ""
    times = facts.failures.get((step, check), 0)
    return f"; failed in {times or 'none'} of the last {runs} builds"
