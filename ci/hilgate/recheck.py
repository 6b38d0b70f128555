"""Failing tests once more over the same files: to tell a flake from a regression, never to make anything green."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate.model import Check, Evidence, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hilgate.model import Plan
    from hilgate.records import Recorded

MOST_IDS: Final = 20
"""More failing tests than this are no flake, and running them again would only cost time on scarce nodes."""

WITH_VALUE = frozenset(
    {"-k", "-m", "-p", "-c", "-o", "-W", "-n", "-r", "--ignore", "--ignore-glob", "--deselect", "--rootdir", "--basetemp",
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
        if attempt is None or step.evidence is not Evidence.JUNIT or step.queue is None:
            continue
        if step.key in recorded.damaged or attempt.record.command != step.command:
            continue
        host = attempt.record.environment.host
        again = {r.check for r in recorded.reruns.get(step.key, ()) if r.elsewhere and r.host != host}
        ids = tuple(name for name in failing_ids(attempt.checks) if name not in again)
        if ids:
            found[step.key] = ids
    return found


def outcomes(ids: tuple[str, ...], checks: Mapping[str, Check], problem: str) -> list[tuple[str, Outcome, str]]:
    """(id, outcome, message) of each id after a rerun.

    Args:
        ids: What was run again.
        checks: Id -> what became of it.
        problem: Why the rerun as a whole cannot be believed; empty when it can. A failure stays one.
    """
    told = []
    for name in ids:
        check = checks.get(name)
        if check is None or (problem and check.outcome is not Outcome.FAIL):
            told.append((name, Outcome.DID_NOT_RUN, problem or "the rerun does not name it"))
        else:
            told.append((name, check.outcome, check.message))
    return told
