# SPDX-License-Identifier: Apache-2.0
"""Upload the checks of a verdict to Buildkite's Test Engine ("Importing JSON").

Its Python library is a plugin that loads itself into each pytest run of its environment, and waits a minute for each
hundred tests; no step has the token, so what was recorded is uploaded here, in the form that is documented.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import httpx

from hilgate.model.record import Outcome
from hilgate.run.outcome import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hilgate.report.write import Judged

API = "https://analytics-api.buildkite.com/v1"
URL_VARIABLE, TOKEN_VARIABLE = "BUILDKITE_ANALYTICS_API_URL", "BUILDKITE_ANALYTICS_TOKEN"
BATCH = 1000
"""Tests of one upload."""
RESULTS = {
    Outcome.PASS: "passed",
    Outcome.FAIL: "failed",
    Outcome.INCONCLUSIVE: "unknown",
    Outcome.DID_NOT_RUN: "skipped",
}


def upload(judged: Judged, env: Mapping[str, str], *, seconds: float) -> str:
    """Upload all checks; what became of it.

    Raises:
        httpx.HTTPError: Nobody answers, or with something else than a success.
    """
    tests, address = [*_tests(judged)], f"{env.get(URL_VARIABLE) or API}/uploads"
    headers = {"Authorization": f'Token token="{env[TOKEN_VARIABLE]}"'}
    for first in range(0, len(tests), BATCH):
        body = {"format": "json", "run_env": _run(judged, env), "data": tests[first : first + BATCH]}
        answer = httpx.post(address, json=body, headers=headers, timeout=seconds)
        if not answer.is_success:
            return f"not sent: the Test Engine answers {answer.status_code}, and took {first} of {len(tests)} tests"
    return f"{len(tests)} tests uploaded"


def _run(judged: Judged, env: Mapping[str, str]) -> dict[str, str]:
    """Which build it is; a build that is judged again is the same."""
    known = {
        "CI": "buildkite" if env.get("BUILDKITE_BUILD_ID") else None,
        "key": env.get("BUILDKITE_BUILD_ID")
        or f"{judged.verdict.plan_digest[:16]}-{judged.verdict.decided:%Y%m%dT%H%M%S}",
        "url": env.get("BUILDKITE_BUILD_URL"),
        "branch": env.get("BUILDKITE_BRANCH"),
        "commit_sha": judged.verdict.commit,
        "number": env.get("BUILDKITE_BUILD_NUMBER"),
        "job_id": env.get("BUILDKITE_JOB_ID"),
    }
    return {name: value for name, value in known.items() if value}


def _tests(judged: Judged) -> Iterator[dict[str, Any]]:
    began = min((build.started for build in judged.recorded.builds), default=judged.verdict.decided)
    for step in judged.plan.steps:
        attempt = judged.recorded.last(step.key)
        at = (attempt.record.started - began).total_seconds() if attempt else 0.0
        for check in attempt.checks if attempt else ():
            file = check.id.partition("::")[0] if "::" in check.id else None
            yield {
                "id": str(uuid.uuid4()),
                "scope": step.key,
                "name": check.id,
                "file_name": file,
                "location": file,
                "result": RESULTS[check.outcome],
                "failure_reason": first_line(check.message) if check.outcome is not Outcome.PASS else None,
                "history": {"section": "top", "start_at": at, "end_at": at + check.seconds, "duration": check.seconds},
                "tags": {"device": step.device},
            }
            at += check.seconds
