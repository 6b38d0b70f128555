# SPDX-License-Identifier: Apache-2.0
"""Say what came before a verdict: lost tries of its jobs, and earlier builds of the same files. It decides nothing.

A machine that vanished is ordinary, and so is a build that was started again; but a reader who trusts a green build
must know that it took several tries.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hilgate.errors import HilgateError
from hilgate.model import EARLIER_FILE
from hilgate.model.earlier import Earlier
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hilgate.model.earlier import EarlierBuild
    from hilgate.model.plan import Plan
    from hilgate.run.results import Recorded

UNKNOWN = "not known: whether jobs were tried more than once, and whether these files were built before"
MOST_LINES = 20
UNREMARKABLE = frozenset({"passed", "scheduled", "skipped", "not_run"})
"""States of a build that say nothing against its files."""


def before(folder: Path, plan: Plan, recorded: Recorded) -> tuple[str, ...]:
    """What `earlier.json` in a results folder says of a plan's build, a sentence each; or that nobody knows."""
    path = folder / EARLIER_FILE
    try:
        earlier = Earlier.load(path, "run `hilgate earlier` again")
    except HilgateError as error:
        why = f"{EARLIER_FILE} is {error.what}" if path.exists() else "Buildkite was not asked, or did not answer"
        return (f"{UNKNOWN} ({why})",)
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
