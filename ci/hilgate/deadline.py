"""When a step must end so that its results are uploaded before Buildkite ends the job. Pure.

Buildkite counts a job's timeout from its start, checkout and image pull included, and what it ends leaves no artifacts.
So a step ends at its own timeout or a minute before the job's, whichever comes first. At a desk there is no job.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Mapping

UPLOAD_SECONDS = 60.0
"""Kept for the records, the hooks after the command and the upload of what the step left."""

STARTED = "HILGATE_JOB_STARTED"
"""Epoch seconds at which the job began; set by the agent's `environment` hook, before the checkout."""

TIMEOUT = "BUILDKITE_TIMEOUT"
"""The job's timeout in minutes, or `false` where it has none; set by Buildkite."""

NO_TIMEOUT = ("", "false")
SECONDS_PER_MINUTE = 60.0


def inner_timeout(step_seconds: float, environment: Mapping[str, str], now: float) -> float:
    """Seconds that a step may take from now on; 0 when the job has no time left for it.

    Args:
        step_seconds: The step's own timeout.
        environment: The job's environment variables.
        now: Epoch seconds.

    Raises:
        CannotRunHereError: The job has a timeout, and when it started is not known or not a number.
    """
    minutes = environment.get(TIMEOUT, "")
    if minutes in NO_TIMEOUT:
        return step_seconds
    started = min(_number(STARTED, environment.get(STARTED, "")), now)  # a clock that is ahead gives no extra time
    deadline = started + _number(TIMEOUT, minutes) * SECONDS_PER_MINUTE - UPLOAD_SECONDS
    return max(0.0, min(step_seconds, deadline - now))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise CannotRunHereError(
            f"{name} is {text!r}, and a job with a timeout must know when it began",
            where="the job's environment",
            remedy="install the agent's environment hook (.buildkite/hooks); pass both variables to the container",
        )
    return value
