"""Failing tests once more over the same files: to tell a flake from a regression, never to make anything green."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate.errors import Exit
from hilgate.model import Evidence, Outcome, RerunRecord
from hilgate.run import outcome, process
from hilgate.run.evidence import collect

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hilgate.model import Check, Plan, PlannedStep
    from hilgate.run.process import Child, Ended
    from hilgate.run.results import Recorded

FOLDER: Final = "again"
"""Of the rerun's log and evidence, below its step's folder."""

MOST_IDS: Final = 20
"""More failing tests than this are no flake, and running them again would only cost time on scarce nodes."""

WITH_VALUE = frozenset(
    {"-k", "-m", "-p", "-c", "-o", "-W", "-n", "--ignore", "--ignore-glob", "--deselect", "--rootdir", "--basetemp",
     "--confcutdir", "--timeout", "--maxfail", "--durations", "--tb", "--junitxml", "--junit-prefix", "--dist",
     "--import-mode", "--color", "--capture", "--log-level", "--override-ini", "--config-file", "--pyargs"}
)  # fmt: skip
"""Options of pytest and the plugins used here whose value may be the next word, which is then no test path."""

_ID = re.compile(r"[\w./-]+\.py::\S.*", re.DOTALL)


def failing_ids(checks: Iterable[Check]) -> tuple[str, ...]:
    """Ids of failing checks that pytest can be given back; empty when there are too many for flakes."""
    failed = [check.id for check in checks if check.outcome is Outcome.FAIL]
    if len(failed) > MOST_IDS:
        return ()
    return tuple(name for name in failed if _ID.fullmatch(name) and not name.startswith(("-", "/")))


def narrowed(command: str, ids: tuple[str, ...], root: Path) -> str:
    """A pytest command with its test paths replaced by these ids and its options kept.

    Returns:
        The command, or empty when it is not pytest's or names no test path, so that the ids would only add to it.
    """
    words = shlex.split(command)
    begin = next((n for n, word in enumerate(words) if Path(word).name in {"pytest", "py.test"}), None)
    if begin is None or not ids:
        return ""
    kept, replaced, value = words[: begin + 1], 0, False
    for word in words[begin + 1 :]:
        if not value and not word.startswith("-") and (root / word.split("::", 1)[0]).exists():
            replaced += 1
        else:
            kept.append(word)
        value = word in WITH_VALUE
    return shlex.join([*kept, *ids]) if replaced else ""


def pending(plan: Plan, recorded: Recorded) -> dict[str, tuple[str, ...]]:
    """Planned key -> ids of its failing tests that have not been run again on another node.

    Results that cannot be believed name nothing here: their step is not judged by its tests.
    """
    found = {}
    for step in plan.steps:
        attempt = recorded.last(step.key)
        if attempt is None or step.step.evidence is not Evidence.JUNIT or step.queue is None:
            continue
        if step.key in recorded.damaged or attempt.record.command != step.step.command:
            continue
        host = attempt.record.environment.host
        again = {r.check for r in recorded.reruns.get(step.key, ()) if r.elsewhere and r.host != host}
        ids = tuple(name for name in failing_ids(attempt.checks) if name not in again)
        if ids:
            found[step.key] = ids
    return found


@dataclass(frozen=True)
class Rerun:
    """Failing tests of a step that are running once more."""

    step: PlannedStep
    ids: tuple[str, ...]
    child: Child
    folder: Path
    root: Path

    def poll(self, host: str, *, elsewhere: bool) -> list[RerunRecord] | None:
        """A record of each test once all have ended; None while they run."""
        end = self.child.poll()
        if end is None:
            return None
        found = collect(self.step.step.evidence, self.folder, self.root)
        problem = _problem(end) or found.problem
        checks = {check.id: check for check in found.checks}
        return [self._record(name, checks.get(name), problem, host, elsewhere=elsewhere) for name in self.ids]

    def _record(self, name: str, check: Check | None, problem: str, host: str, *, elsewhere: bool) -> RerunRecord:
        """A failure stays one whatever else went wrong; a pass needs a rerun that went well as a whole."""
        believed = check is not None and (not problem or check.outcome is Outcome.FAIL)
        return RerunRecord(
            step=self.step.key,
            check=name,
            host=host,
            elsewhere=elsewhere,
            outcome=check.outcome if check and believed else Outcome.DID_NOT_RUN,
            seconds=check.seconds if check else 0.0,
            message=check.message if check and believed else problem or "the rerun does not name it",
        )


def start(step: PlannedStep, ids: tuple[str, ...], folder: Path, site: process.Site, seconds: float) -> Rerun | None:
    """Start failing tests once more; None where there is nothing to run, no way to run it alone, or no time left.

    Args:
        step: Whose tests they are.
        ids: Node ids of pytest.
        folder: For the log and the evidence.
        site: Where they run.
        seconds: After which they are ended.
    """
    command = narrowed(step.step.command, ids, site.root) if step.step.evidence is Evidence.JUNIT else ""
    if not command or seconds <= 0:
        return None
    return Rerun(step, ids, process.start(step, command, folder, site, seconds), folder, site.root)


def _problem(end: Ended) -> str:
    """Why a rerun cannot be believed: it was ended, crashed, or pytest could not do its work."""
    if end.exit_status is None:
        return end.reason
    if end.exit_status in {Exit.PASS, Exit.FAIL}:
        return ""
    return outcome.exit_meaning(end.exit_status, Evidence.JUNIT)
