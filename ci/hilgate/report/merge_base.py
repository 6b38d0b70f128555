# SPDX-License-Identifier: Apache-2.0
"""The same check on the merge base: passed, failed, or not known, and why not; and whose a failure is by that.

What is known comes from the newest build of that commit in the history, or from the failing tests themselves, which ran
over the merge base's files on the same node. It is words beside a decision and never part of it: damage in it is said
and stops nothing, and what is red there too is red here.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hilgate.errors import HilgateError, NothingSelectedError
from hilgate.model.record import Outcome
from hilgate.model.verdict import Ruling
from hilgate.names import whole_key
from hilgate.report import history as store
from hilgate.report.causes import shape_of
from hilgate.report.history import Lately, StepThen
from hilgate.run.outcome import summary
from hilgate.run.recheck import NO_SUCH_TEST
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from hilgate.model.plan import Plan
    from hilgate.model.record import RerunRecord
    from hilgate.report.causes import Cause, Failure
    from hilgate.run.results import Recorded

RECENT_BUILDS = 50
"""How far back a check's own record is counted: about a week of a busy repository."""


@dataclass(frozen=True)
class MergeBase:
    """What is known of the merge base.

    Attributes:
        unknown: Why nothing is; empty when something is.
        commit: The commit that the facts are of.
        steps: Planned key -> what it did there.
        lately: What the newest builds say of each check.
    """

    unknown: str = ""
    commit: str = ""
    steps: Mapping[str, StepThen] = field(default_factory=dict)
    lately: Lately = field(default_factory=Lately)


NOTHING = MergeBase(unknown="there is no history")
NO_BUILD = "the history has no build yet"
NO_BASE = "the plan names no merge base"
NOT_ASKED = frozenset({NOTHING.unknown, NO_BUILD, NO_BASE})
"""Why nothing is known where no history is kept."""


def find(plan: Plan, history: Path) -> MergeBase:
    """What the history knows of a plan's merge base."""
    recent, merge_base = MergeBase(), plan.merge_base
    try:
        recent = replace(recent, lately=store.lately(history, RECENT_BUILDS))
        steps = store.newest_build_of(history, merge_base) if merge_base else None
    except NothingSelectedError:
        return MergeBase(unknown=NO_BUILD)
    except HilgateError as error:
        return replace(recent, unknown=f"{error.what} ({error.where})" if error.where else error.what)
    if steps is None:
        unknown = f"no build of {merge_base[:12]} is in the history" if merge_base else NO_BASE
        return replace(recent, unknown=unknown)
    return replace(recent, steps=steps, commit=merge_base)


def known_on_base(plan: Plan, root: Path) -> frozenset[str]:
    """Keys of the steps of a plan that ran in a build of its merge base in the history; none of a damaged one."""
    facts = find(plan, store.path_of(root))
    return frozenset() if facts.unknown else frozenset(facts.steps)


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


def origin(facts: MergeBase, failure: Failure, on_base: Mapping[tuple[str, str], RerunRecord]) -> Origin:
    """Whose a failure is; `on_base` are the runs of failing tests over the merge base's files, by step and check.

    What failed there in another way is not called the same failure, and a build of another commit proves nothing.
    """
    check = failure.check
    if check is None:
        return _recorded(facts, failure)
    again = on_base.get((failure.step.key, check.id))
    times = facts.lately.flaky[whole_key(failure.step.key), check.id]
    if check.id in failure.step.flaky:
        found = Origin(Ownership.FLAKY, "it passed when it ran again over the same files")
    elif times:
        builds = count(facts.lately.runs[whole_key(failure.step.key)], "build")
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
    key, check = whole_key(failure.step.key), failure.check
    place = f"at {facts.commit[:12]}"
    step = facts.steps.get(key)
    there = (step.outcome, step.message) if step and not check else None
    if step and check:
        there = step.checks.get(check.id)
    if facts.unknown:
        why = facts.unknown
    elif step is None:
        why = f"{key} was not run {place}"
    elif there is None:
        why = f"there is no such check {place}"
    elif found := _origin(*there, failure, place):
        return found
    else:
        same = there[0] is failure.signature.outcome
        why = f"it {'failed in another way' if same else there[0].value} {place}"
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
"""Rulings of steps that say nothing about the change: such a step counts as no failure of the change."""


def origins(found: Iterable[Cause], facts: MergeBase, recorded: Recorded) -> list[Origin]:
    """Whose each failure of these causes is, where the change could have broken what failed."""
    return [
        origin(facts, one, recorded.first_on_base)
        for cause in found
        for one in cause.failures
        if one.signature.outcome is Outcome.FAIL and one.step.ruling not in NOT_OF_A_CHANGE
    ]


def whose(found: Iterable[Cause], facts: MergeBase, recorded: Recorded, *, local: bool = False) -> str:
    """`1 of these 14 failures is yours; 13 are red on the merge base too, and red here all the same`.

    Empty where nothing failed that the change could have broken, and in a `local` run where nothing was asked.
    """
    all_origins = origins(found, facts, recorded)
    number, total = Counter(one.standing for one in all_origins), len(all_origins)
    new, red, flaky, unknown = (
        number[one] for one in (Ownership.NEW, Ownership.RED, Ownership.FLAKY, Ownership.UNKNOWN)
    )
    why = Counter(one.why for one in all_origins if one.standing is Ownership.UNKNOWN).most_common(1)
    if not total or (local and unknown == total and why[0][0] in NOT_ASKED):
        return ""
    if total == 1:
        return {
            Ownership.NEW: "this failure is yours",
            Ownership.RED: "this failure is not yours, and red here all the same",
            Ownership.FLAKY: "this failure may be a flake",
            Ownership.UNKNOWN: "whether this failure is yours is not known",
        }[all_origins[0].standing] + f": {all_origins[0].why}"
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
    all_origins = [origin(facts, one, recorded.first_on_base) for one in cause.failures]
    lately = _lately(facts, key, check.id) if check else ""
    if local and not lately and {one.why for one in all_origins} <= NOT_ASKED:
        return ""
    number = Counter(one.standing for one in all_origins)
    if len(number) == 1:
        return f"{all_origins[0]}{lately}"
    each = ", ".join(f"{times} {standing.value}" for standing, times in number.items())
    return f"{each}; the smallest: {all_origins[0]}{lately}"


def _lately(facts: MergeBase, step: str, check: str) -> str:
    step = whole_key(step)
    runs, times = facts.lately.runs[step], facts.lately.failures[step, check]
    return f"; failed in {times or 'none'} of the last {count(runs, 'build')}" if runs else ""
