# SPDX-License-Identifier: Apache-2.0
"""The same check on the merge base: passed, failed, or not known, and why not; and whose a failure is by that.

What is known comes from the newest build of that commit in the history, from a results folder that somebody names, or
from the failing tests themselves, which ran over the merge base's files on the same node. It is words beside a decision
and never part of it: damage in it is said and stops nothing, and what is red there too is red here.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hilgate.errors import HilgateError, NothingSelectedError
from hilgate.history import store
from hilgate.model import JOBS_FOLDER, PLAN_FILE
from hilgate.model.record import Outcome
from hilgate.model.verdict import Ruling
from hilgate.plan.make import plan_digest, read_plan
from hilgate.report.causes import shape_of
from hilgate.run import results
from hilgate.run.outcome import summary
from hilgate.run.recheck import NO_SUCH_TEST
from hilgate.run.results import Recorded
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hilgate.model.plan import Plan
    from hilgate.model.record import Check, RerunRecord, StepRecord
    from hilgate.report.causes import Cause, Failure

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
        flaky: The same of those that failed and then passed over the same files.
        runs: Planned key -> in how many recent builds it ran.
    """

    unknown: str = ""
    commit: str = ""
    is_base: bool = True
    recorded: Recorded = field(default_factory=lambda: Recorded((), {}))
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    flaky: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)


NOTHING = MergeBase(unknown="no history and no results of it were given")
NO_BUILD = "the history has no build yet"
NO_BASE = "the plan names no merge base"
NOT_ASKED = frozenset({NOTHING.unknown, NO_BUILD, NO_BASE})
"""Why nothing is known where nobody keeps a history."""


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
            failed, flaky, ran = store.failures(build)
            recent.failures.update(failed)
            recent.flaky.update(flaky)
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


def known_on_base(plan: Plan, root: Path) -> frozenset[str]:
    """Keys of the steps of a plan that ran in a build of its merge base in the history; none of a damaged one."""
    history = store.folder_of(root)
    facts = find(plan, history=history) if history.is_dir() else NOTHING
    return frozenset() if facts.unknown else frozenset(facts.recorded.attempts)


class Ownership(enum.Enum):
    """Whose a failure is."""

    NEW = "new here"
    RED = "red on the merge base too"
    FLAKY = "flaky"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Origin:
    """Whose a failure is, and by what that is known, or why not."""

    standing: Ownership
    why: str

    def __str__(self) -> str:
        """`new here: it passed at bbbbbbbbbbbb`."""
        return f"{self.standing.value}: {self.why}"


def origin(facts: MergeBase, failure: Failure, on_base: Sequence[RerunRecord] = ()) -> Origin:
    """Whose a failure is; `on_base` are the runs of its step's failing tests over the merge base's files.

    What failed there in another way is not called the same failure, and a build of another commit proves nothing.
    """
    check = failure.check
    if check is None:
        return _recorded(facts, failure)
    again = next((one for one in on_base if one.check == check.id), None)
    times = facts.flaky[failure.step.key, check.id]
    if check.id in failure.step.flaky:
        found = Origin(Ownership.FLAKY, "it passed when it ran again over the same files")
    elif times:
        builds = count(facts.runs[failure.step.key], "build")
        found = Origin(Ownership.FLAKY, f"so it was in {times} of the last {builds}")
    elif again and again.message == NO_SUCH_TEST:
        found = Origin(Ownership.NEW, "the merge base has no such test")
    else:
        there = (
            _origin(again.outcome, again.message, failure, "over the merge base's files on the same node")
            if again
            else None
        )
        found = there or _recorded(facts, failure)
    return found


def _recorded(facts: MergeBase, failure: Failure) -> Origin:
    """By the build of the merge base that is known."""
    key, check = failure.step.key, failure.check
    place = f"at {facts.commit[:12] or 'a folder without a commit'}"
    attempt = facts.recorded.last(key)
    there: StepRecord | Check | None = attempt.record if attempt and not check else None
    if attempt and check:
        there = next((one for one in attempt.checks if one.id == check.id), None)
    if facts.unknown:
        why = facts.unknown
    elif not facts.is_base:
        why = f"the results {place} are not the merge base's"
    elif attempt is None:
        why = f"{key} was not run {place}"
    elif there is None:
        why = f"there is no such check {place}"
    elif found := _origin(there.outcome, there.message, failure, place):
        return found
    else:
        same = there.outcome is failure.signature.outcome
        why = f"it {'failed in another way' if same else there.outcome.value} {place}"
    return Origin(Ownership.UNKNOWN, why)


def _origin(there: Outcome, message: str, failure: Failure, place: str) -> Origin | None:
    """By an outcome of the same check there; None where that settles nothing."""
    if there is Outcome.PASS:
        return Origin(Ownership.NEW, f"it passed {place}")
    same = shape_of(summary(message), failure.id) == failure.signature.shape
    if there is failure.signature.outcome and same:
        return Origin(Ownership.RED, f"it failed alike {place}")
    return None


NOT_OF_A_CHANGE = frozenset({Ruling.INFRA, Ruling.NOT_STARTED})
"""Rulings of steps that say nothing about the change: such a step is nobody's failure."""


def origins(found: Iterable[Cause], facts: MergeBase, recorded: Recorded) -> list[Origin]:
    """Whose each failure of these causes is, where the change could have broken what failed."""
    return [
        origin(facts, one, recorded.on_base.get(one.step.key, ()))
        for cause in found
        for one in cause.failures
        if one.signature.outcome is Outcome.FAIL and one.step.ruling not in NOT_OF_A_CHANGE
    ]


def whose(found: Iterable[Cause], facts: MergeBase, recorded: Recorded, *, local: bool = False) -> str:
    """`1 of these 14 failures is yours; 13 are red on the merge base too, and red here all the same`.

    Empty where nothing failed that the change could have broken, and in a `local` run where nothing was asked.
    """
    known = origins(found, facts, recorded)
    number, total = Counter(one.standing for one in known), len(known)
    new, red, flaky, unknown = (
        number[one] for one in (Ownership.NEW, Ownership.RED, Ownership.FLAKY, Ownership.UNKNOWN)
    )
    why = Counter(one.why for one in known if one.standing is Ownership.UNKNOWN).most_common(1)
    if not total or (local and unknown == total and why[0][0] in NOT_ASKED):
        return ""
    if total == 1:
        return {
            Ownership.NEW: "this failure is yours",
            Ownership.RED: "this failure is not yours, and red here all the same",
            Ownership.FLAKY: "this failure may be nobody's",
            Ownership.UNKNOWN: "whether this failure is yours is not known",
        }[known[0].standing] + f": {known[0].why}"
    rest = [f"{red} {_are(red)} red on the merge base too, and red here all the same"] if red else []
    rest += [f"{flaky} {_are(flaky)} flaky"] if flaky else []
    rest += [f"of {unknown} it is not known ({why[0][0]})"] if unknown else []
    if new == total:
        return f"these {total} failures are yours: all pass on the merge base, or are not in it"
    if unknown == total:
        return f"whether these {total} failures are yours is not known: {why[0][0]}"
    begin = f"{new} of these {total} failures {_are(new)}" if new else f"none of these {total} failures is"
    return f"{begin} {'known to be ' if unknown and not new else ''}yours; {'; '.join(rest)}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def of_cause(cause: Cause, facts: MergeBase, recorded: Recorded, *, local: bool = False) -> str:
    """Whose the failures of one entry are, and how often its smallest case failed lately; empty as `whose` is."""
    key, check = cause.failures[0].step.key, cause.failures[0].check
    known = [origin(facts, one, recorded.on_base.get(one.step.key, ())) for one in cause.failures]
    lately = _lately(facts, key, check.id) if check else ""
    if local and not lately and {one.why for one in known} <= NOT_ASKED:
        return ""
    number = Counter(one.standing for one in known)
    if len(number) == 1:
        return f"{known[0]}{lately}"
    each = ", ".join(f"{times} {standing.value}" for standing, times in number.items())
    return f"{each}; the smallest: {known[0]}{lately}"


def _lately(facts: MergeBase, step: str, check: str) -> str:
    runs, times = facts.runs[step], facts.failures[step, check]
    return f"; failed in {times or 'none'} of the last {count(runs, 'build')}" if runs else ""
