# SPDX-License-Identifier: Apache-2.0
"""Say what came before a verdict: lost tries of its jobs, and earlier builds of the same files.

It decides nothing, but where jobs may be tried again by hand: what a try answered must not be lost by that. A machine
that vanished is ordinary, and so is a build that was started again; but a reader who trusts a green build must know
that it took several tries.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.errors import Exit, HilgateError
from hilgate.model import EARLIER_FILE
from hilgate.model.earlier import Earlier
from hilgate.model.record import Outcome
from hilgate.names import approved_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hilgate.model import Key
    from hilgate.model.earlier import EarlierBuild
    from hilgate.model.plan import Plan
    from hilgate.run.results import Recorded

ANSWERS_NOTHING = frozenset({-1, int(Exit.CANNOT_RUN_HERE), int(Exit.SICK_NODE), 255})
"""Exit statuses after which a job may be tried again by hand: nothing was learned about the change. Those of a lost
agent and of a lost executor are -1 and 255."""
UNKNOWN = "not known: whether jobs were tried more than once, and whether these files were built before"
MOST_LINES = 20
UNREMARKABLE = frozenset({"passed", "scheduled", "skipped", "not_run"})
"""States of a build that say nothing against its files."""


@dataclass(frozen=True)
class Before:
    """What `earlier.json` says of a plan's build.

    Attributes:
        said: A sentence for each thing that came before, or that is unknown.
        doubts: Why a pass is none: a retry by hand lost an answer, or it is unknown whether one did.
        waited: Planned key -> minutes, of steps whose job was ended before an agent took it.
    """

    said: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    waited: dict[Key, int] = field(default_factory=dict)


def before(folder: Path, plan: Plan, recorded: Recorded) -> Before:
    """Read `earlier.json` in a results folder."""
    path = folder / EARLIER_FILE
    try:
        earlier = Earlier.load(path, "run `hilgate earlier` again")
    except HilgateError as error:
        why = f"{EARLIER_FILE} is {error.what}" if path.exists() else "Buildkite was not asked, or did not answer"
        unknown = f"{UNKNOWN} ({why})"
        return Before((unknown,), (unknown,) if plan.manual_retry else ())
    minutes = {one.step: one.minutes for one in earlier.waited}
    waited = {step.key: minutes[step.job_key] for step in plan.steps if step.job_key in minutes}
    return Before(_said(earlier, plan, recorded), tuple(_lost_answers(earlier, plan)), waited)


def _lost_answers(earlier: Earlier, plan: Plan) -> Iterator[str]:
    """What a try by hand has replaced although it was an answer."""
    jobs = {step.job_key for step in plan.steps if not step.report_only}
    jobs |= {approved_key(key) for key in jobs}
    for one in earlier.tries if plan.manual_retry else ():
        if one.by_hand and one.started and one.step in jobs and one.exit_status not in ANSWERS_NOTHING:
            ended = f"job {one.job} ended with {_status(one.exit_status)}"
            yield f"{one.step} was tried again by hand after an answer ({ended}): start a new build"


def _said(earlier: Earlier, plan: Plan, recorded: Recorded) -> tuple[str, ...]:
    trees = {build.tree for build in recorded.builds if build.tree}
    same = [one for one in earlier.builds if one.commit == plan.commit or one.tree in trees]
    lines = [*_of_tries(earlier), *(line for one in same for line in _of_build(one, recorded))]
    more = [f"and {len(lines) - MOST_LINES} more, in {EARLIER_FILE}"] if len(lines) > MOST_LINES else []
    return (*lines[:MOST_LINES], *more)


def _of_tries(earlier: Earlier) -> Iterator[str]:
    lost = defaultdict(list)
    for one in earlier.tries:
        lost[one.step].append(one)
    for step, tries in sorted(lost.items()):
        ends = ", ".join(f"job {one.job} ended with {_status(one.exit_status)}" for one in tries)
        yield f"{step}: {len(tries)} lost {'try' if len(tries) == 1 else 'tries'} before the one that counts: {ends}"


def _status(status: int | None) -> str:
    return {None: "no exit status", -1: "-1 (the agent was lost)"}.get(status, str(status))


def _of_build(build: EarlierBuild, recorded: Recorded) -> Iterator[str]:
    if build.state not in UNREMARKABLE or build.failed:
        yield f"build {build.number} of the same files: {build.state}"
    for key, ids in sorted(build.failed.items()):
        last = recorded.last(key)
        passed = {check.id for check in last.checks if check.outcome is Outcome.PASS} if last else set()
        for name in ids:
            if name in passed:
                yield f"{key}: {name} failed in build {build.number} and passed in this one"
