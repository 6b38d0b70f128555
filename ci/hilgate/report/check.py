# SPDX-License-Identifier: Apache-2.0
"""A verdict for GitHub: a check whose annotations stand at the lines that failed, and the text of a comment. Pure.

Both say what the annotation in Buildkite says and decide nothing: a merge waits for the status of the gate alone. What
is no pass is a failure here too; GitHub counts a neutral check as a passed one. (REST API: Checks.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hilgate.errors import MisuseError
from hilgate.model.record import Outcome
from hilgate.report import annotation
from hilgate.text import shorten, visible

if TYPE_CHECKING:
    from hilgate.report.causes import Cause
    from hilgate.report.view import ReportView

CHECK = "hilgate"
"""Name of the check; not that of the required status, which Buildkite posts."""
MOST_ANNOTATIONS = 50
"""Of one request, as GitHub documents; more would be sent by further ones, and nobody reads them."""
MOST_CHARACTERS = 60_000
"""Of a comment or a summary; GitHub refuses more than 65,535."""

_PLACE = re.compile(r"([\w./-]+\.py):(\d+)")


def check_of(view: ReportView) -> dict[str, Any]:
    """The body of "Create a check run" for a verdict: an annotation for each cause that has a line in the repository.

    Raises:
        MisuseError: The plan is of no commit, or of a quick run or a part of a step.
    """
    plan, verdict = view.plan, view.verdict
    plan.require_whole("the plan")
    if not re.fullmatch(r"[0-9a-f]{40}", plan.commit) or plan.dirty:
        raise MisuseError("the results are of no commit", remedy="publish those of a build of agents")
    return {
        "name": CHECK,
        "head_sha": plan.commit,
        "status": "completed",
        "conclusion": "success" if verdict.outcome is Outcome.PASS else "failure",
        "output": {
            "title": shorten(visible(view.whose or view.headline), 200),
            "summary": annotation.render(view, MOST_CHARACTERS),
            "annotations": [one for cause in view.causes if (one := _annotation(cause))][:MOST_ANNOTATIONS],
        },
    }


def _annotation(cause: Cause) -> dict[str, Any] | None:
    """Of the smallest case, at the first place of it that lies in the repository."""
    first = cause.failures[0]
    place = _PLACE.match(first.signature.place)
    if first.check is None or place is None or place[1].startswith(("/", "../")) or "/../" in place[1]:
        return None
    number = len(cause.failures)
    alike = f"{number} failures look like this{f': {cause.extent}' if cause.extent else ''}\n" if number > 1 else ""
    return {
        "path": place[1],
        "start_line": int(place[2]),
        "end_line": int(place[2]),
        "annotation_level": "failure" if first.check.outcome is Outcome.FAIL else "warning",
        "title": shorten(visible(f"{first.step.key}: {first.check.id}"), 250),
        "message": shorten(visible(f"{alike}{first.check.message}"), 4000),
    }


def comment_of(view: ReportView) -> str:
    """What the annotation in Buildkite says, short enough for a comment."""
    return annotation.render(view, MOST_CHARACTERS)
