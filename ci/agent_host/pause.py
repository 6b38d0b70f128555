# SPDX-License-Identifier: Apache-2.0
"""Take an agent out of service for a while, with the reason, and say so in the build whose job found it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from agent_host import health, host

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PAUSE_MINUTES = "HILGATE_PAUSE_MINUTES"
DEFAULT_PAUSE_MINUTES, MAX_PAUSE_MINUTES = 240, 10080
"""Buildkite resumes a paused agent by itself, after the maximum at the latest (its documentation, "Pause and resume an
agent"). Long enough to be seen, short enough that a forgotten node comes back to be looked at."""

SHARED_MINUTES = 10
"""For what another node may see as well: were each node out for hours because a registry was silent for a minute, there
would be none left."""

AGENT_SECONDS = 60.0
"""For one call of buildkite-agent, which tries five times, a second apart."""


def usual_minutes(env: Mapping[str, str]) -> int:
    """How long an unfit agent stays out.

    Raises:
        DeclarationError: The setting is no whole number.
    """
    return health.whole_number(env, PAUSE_MINUTES, DEFAULT_PAUSE_MINUTES)


def take_out(problems: Sequence[str], env: Mapping[str, str], minutes: int) -> None:
    """Pause the agent that runs this job, and say so in its build: nobody looks at a list of agents."""
    words = _words(problems, env, minutes)
    warning = f"`{env.get('BUILDKITE_AGENT_NAME', '')}` is paused: `{words[2].replace('`', '')}`"
    shown = ("annotate", "--style", "warning", "--context", f"node-{env.get('BUILDKITE_JOB_ID', '')}", warning)
    for problem, call in (("this agent could not be paused", words), ("the build does not report it", shown)):
        if failure := host.run(("buildkite-agent", *call), AGENT_SECONDS).failure:
            sys.stdout.write(f"also: {problem}: {failure}\n")


def _words(problems: Sequence[str], env: Mapping[str, str], minutes: int) -> tuple[str, ...]:
    """Words that pause the agent that runs this job, with the first problems as its note.

    The note stands in one line of a list of agents; all of it is in the job's health file.
    """
    text = host.printable("; ".join(problems))
    end = f" (hilgate, job {env.get('BUILDKITE_JOB_ID', '')})"
    room = 300 - len(end)
    note = (text if len(text) <= room else text[: room - 3] + "...") + end
    return ("pause", "--note", note, "--timeout-in-minutes", str(max(1, min(minutes, MAX_PAUSE_MINUTES))))
