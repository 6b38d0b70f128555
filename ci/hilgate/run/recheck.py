# SPDX-License-Identifier: Apache-2.0
"""Run failing tests again over the same files, to tell a flake from a regression. That never makes a step green."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hilgate.errors import Exit
from hilgate.evidence import kind_of
from hilgate.model.record import Check, Outcome, RerunRecord
from hilgate.run import process
from hilgate.run.outcome import other_packages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.run.process import Child
    from hilgate.run.results import Recorded

BASE_FOLDER: Final = "on-base"
"""Folder of the log and evidence of failing tests over the files of the merge base."""
MOST_BASE_SECONDS: Final = 120.0
"""Longest step whose failing tests run over the merge base's files too; of a longer one the answer costs too much."""
NO_SUCH_TEST: Final = "there is no such test"
"""Message of a failing test that the merge base does not have."""

FOLDER: Final = "again"
"""Folder of the rerun's log and evidence, below its step's folder."""


def pending(plan: Plan, recorded: Recorded) -> dict[str, tuple[str, ...]]:
    """Planned key -> ids of its failing tests that have not been run again on another node.

    Steps whose results cannot be believed are left out: they are not judged by their tests.
    """
    found = {}
    for step in plan.steps:
        attempt = recorded.last(step.key)
        if attempt is None or step.queue is None:
            continue
        if step.key in recorded.damaged or attempt.record.command != step.step.command:
            continue
        if other_packages(plan, attempt.record.imported):
            continue
        host = attempt.record.environment.host
        again = {r.check for r in recorded.reruns.get(step.key, ()) if r.elsewhere and r.host != host}
        ids = tuple(name for name in kind_of(step).failing_ids(attempt.checks) if name not in again)
        if ids:
            found[step.key] = ids
    return found


@dataclass(frozen=True)
class Rerun:
    """Failing tests of a step that are running once more; `on_base` over the files of the merge base, in `root`."""

    step: PlannedStep
    ids: tuple[str, ...]
    child: Child
    folder: Path
    root: Path
    on_base: bool = False

    def poll(self, host: str, *, elsewhere: bool) -> list[RerunRecord] | None:
        """A record of each test once all have ended; None while they run.

        A failure stays one whatever else went wrong; a pass needs a rerun that went well as a whole.
        """
        end = self.child.poll()
        if end is None:
            return None
        found = kind_of(self.step).collect(self.folder, self.root)
        problem = end.reason or found.problem
        if end.exit_status not in {None, Exit.PASS, Exit.FAIL}:
            problem = kind_of(self.step).exit_meaning(end.exit_status)
        lacking = NO_SUCH_TEST if self.on_base else "the rerun does not name it"
        missing = Check(id="(none)", outcome=Outcome.DID_NOT_RUN, message=problem or lacking)
        checks = {check.id: check for check in found.checks}
        records = []
        for name in self.ids:
            check = checks.get(name, missing)
            believed = check if not problem or check.outcome is Outcome.FAIL else missing
            records.append(
                RerunRecord(
                    step=self.step.key,
                    check=name,
                    host=host,
                    elsewhere=elsewhere,
                    on_base=self.on_base,
                    outcome=believed.outcome,
                    seconds=check.seconds,
                    message=believed.message,
                )
            )
        return records


def start_on_base(
    step: PlannedStep, checks: Sequence[Check], folder: Path, context: process.RunContext, seconds: float
) -> Rerun | None:
    """Start the files of a step's failing tests in a tree of the merge base, whose `context` this is; None as `start`.

    They run whole, so every failing test of them is asked for, however many there are.
    """
    kind = kind_of(step)
    failing = [check for check in checks if check.outcome is Outcome.FAIL]
    of_each_file = list({check.id.partition("::")[0]: check for check in failing}.values())
    some = kind.failing_ids(of_each_file)
    ids = tuple(name for name in some if (context.root / name.partition("::")[0]).is_file())
    command = kind.narrow(step.step.command, ids, context.root)
    if not ids or not command or seconds <= 0 or other_packages(context.plan, context.imported(step)):
        return None
    files = {name.partition("::")[0] for name in ids}
    asked = tuple(check.id for check in failing if check.id.partition("::")[0] in files)
    child = process.start(step, command, folder, context, seconds)
    return Rerun(step, asked, child, folder, context.root, on_base=True)


def start(
    step: PlannedStep, ids: tuple[str, ...], folder: Path, context: process.RunContext, seconds: float
) -> Rerun | None:
    """Start failing tests once more; None where there is nothing to run, no way to run it alone, or no time left.

    `ids` are of checks that failed; what still runs after `seconds` is ended.
    """
    command = kind_of(step).narrow(step.step.command, ids, context.root)
    if not command or seconds <= 0:
        return None
    return Rerun(step, ids, process.start(step, command, folder, context, seconds), folder, context.root)
