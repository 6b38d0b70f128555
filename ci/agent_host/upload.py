# SPDX-License-Identifier: Apache-2.0
"""Upload what a job found, with more retries than the agent itself makes: results cost hours of a GPU."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from agent_host import health, host, pause
from hilgate.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECONDS = "HILGATE_UPLOAD_SECONDS"
MOST_SECONDS = 600
"""Where the job has that much time left."""

LEAST_SECONDS = 45.0
BETWEEN_SECONDS = 10.0


def upload(env: Mapping[str, str], checkout: Path, *, between: float = BETWEEN_SECONDS) -> int:
    """Upload what the job left: 0 when it arrived, 75 when a job that passed must run again, 1 when one that did not.

    The agent is taken out for a few minutes where it cannot upload.
    """
    paths, status = env.get("BUILDKITE_ARTIFACT_PATHS", ""), env.get("BUILDKITE_COMMAND_EXIT_STATUS", "")
    until, failure = time.monotonic() + _patience(env), ""
    while True:
        left = until - time.monotonic()
        failure = host.run(("buildkite-agent", "artifact", "upload", paths), max(left, 1.0), cwd=checkout).failure
        if not failure or left <= between:
            break
        sys.stdout.write(f"the results did not arrive yet: {failure}\n")
        time.sleep(between)
    if not failure:
        return int(Exit.PASS)
    sys.stdout.write(f"+++ the results of this job did not arrive: {failure}\n")
    pause.take_out([f"results cannot be uploaded: {failure}"], env, pause.SHARED_MINUTES)
    if status != "0":
        return int(Exit.FAIL)
    sys.stdout.write("The job passed and nobody can see it: it runs again elsewhere.\n")
    return int(Exit.SICK_NODE)


def _patience(env: Mapping[str, str]) -> float:
    """Patience: what Buildkite's timeout leaves, less the time that the last hooks need."""
    most = float(health.whole_number(env, SECONDS, MOST_SECONDS))
    with contextlib.suppress(ValueError):
        end = float(env.get("HILGATE_JOB_STARTED", "")) + 60 * float(env.get("BUILDKITE_TIMEOUT", ""))
        return min(most, max(LEAST_SECONDS, end - time.time() - 60))
    return most
