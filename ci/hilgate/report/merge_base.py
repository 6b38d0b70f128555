# SPDX-License-Identifier: Apache-2.0
"""The same check on the merge base: passed, failed, or not known, and why not.

What is known comes from the newest build of that commit in the history, or from a results folder that somebody names.
It is words beside a decision and never part of it: damage in it is said and stops nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hilgate.errors import HilgateError, NothingSelectedError
from hilgate.history import store
from hilgate.model import JOBS_FOLDER, PLAN_FILE
from hilgate.model.record import Outcome
from hilgate.plan.make import plan_digest, read_plan
from hilgate.run import results
from hilgate.run.outcome import first_line
from hilgate.run.results import Recorded
from hilgate.text import count

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model.plan import Plan
    from hilgate.run.results import Attempt

RECENT_BUILDS = 50
"""How far back a check's own record is counted: about a week of a busy repository."""


@dataclass(frozen=True)
class MergeBase:
    """What is known of the merge base.

    Attributes:
        unknown: Why nothing is; empty when something is.
        commit: The commit that the facts are of.
        is_base: Whether that is the merge base of the plan.
        recorded: What its build recorded.
        failures: (planned key, check id) -> in how many recent builds it failed, flaky ones included.
        runs: Planned key -> in how many recent builds it ran.
    """

    unknown: str = ""
    commit: str = ""
    is_base: bool = True
    recorded: Recorded = field(default_factory=lambda: Recorded((), {}))
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)


NOTHING = MergeBase(unknown="no history and no results of it were given")
NO_BUILD = "the history has no build yet"
NO_BASE = "the plan names no merge base"


def find(plan: Plan, *, history: Path | None = None, against: Path | None = None) -> MergeBase:
    """What is known from a results folder if one is named, else from the history.

    `against` is a results folder of the merge base (`hilgate gate` there), or of agents with `jobs/` in it.
    """
    recent = MergeBase()
    try:
        if against is not None:
            theirs, jobs = read_plan(against / PLAN_FILE), against / JOBS_FOLDER
            recorded = results.read_all(against, jobs if jobs.is_dir() else None, theirs, plan_digest(theirs))
            return MergeBase("", theirs.commit, theirs.commit == plan.merge_base, recorded)
        if history is None:
            return NOTHING
        for build in store.builds(history)[-RECENT_BUILDS:]:
            failed, ran = store.failures(build)
            recent.failures.update(failed)
            recent.runs.update(ran)
        builds = store.builds(history, plan.merge_base) if plan.merge_base else ()
        if builds:
            return replace(recent, recorded=store.read(builds[-1]), commit=plan.merge_base)
        unknown = f"no build of {plan.merge_base[:12]} is in the history" if plan.merge_base else ""
        return replace(recent, unknown=unknown or NO_BASE)
    except NothingSelectedError:
        return MergeBase(unknown=NO_BUILD)
    except HilgateError as error:
        return replace(recent, unknown=f"{error.what} ({error.where})" if error.where else error.what)


def on_merge_base(facts: MergeBase, step: str, check: str = "", *, local: bool = False) -> str:
    """What happened to a check there, in words; without a check, to the whole step.

    In a `local` run nothing is said where nobody asked: without a history, a build in it or a merge base.
    """
    runs, times = facts.runs[step], facts.failures[step, check]
    recently = f"; failed in {times or 'none'} of the last {count(runs, 'build')}" if check and runs else ""
    if local and not recently and facts.unknown in {NOTHING.unknown, NO_BUILD, NO_BASE}:
        return ""
    if facts.unknown:
        return f"not known: {facts.unknown}{recently}"
    place = (facts.commit[:12] or "a folder without a commit") + (
        "" if facts.is_base else ", which is not the merge base"
    )
    attempt = facts.recorded.last(step)
    if attempt is None:
        return f"not known: {step} was not run at {place}{recently}"
    return f"{_words(attempt, check)} at {place}{recently}"


def _words(attempt: Attempt, check: str) -> str:
    if not check:
        passed, outcome = sum(one.outcome is Outcome.PASS for one in attempt.checks), attempt.record.outcome
        return f"passed ({count(passed, 'check')})" if outcome is Outcome.PASS else f"{outcome.value} too"
    found = next((one for one in attempt.checks if one.id == check), None)
    if found is None:
        return "not known: no such check"
    if found.outcome is Outcome.PASS:
        return "passed"
    words = {Outcome.FAIL: "failed too", Outcome.INCONCLUSIVE: "inconclusive too"}.get(found.outcome, "did not run")
    return f"{words} ({first_line(found.message)})"
