"""Takes this agent out of service for a while: the job goes to another one, and a person sees why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.agent import bounded, health

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MINUTES = "HILGATE_PAUSE_MINUTES"
DEFAULT_MINUTES = 240
"""Buildkite resumes a paused agent by itself; without this after 5 minutes, at most after 10080 (its documentation,
"Pause and resume an agent"). Long enough to be seen, short enough that a forgotten node comes back to be looked at."""

MAX_MINUTES = 10080
SECONDS = 60.0
"""The agent tries five times, a second apart."""

NOTE_CHARACTERS = 300
"""The note stands in one line of a list of agents; all of it is in the job's health file."""


def note(problems: Sequence[str], job: str) -> str:
    """One printable line: the first problems, then where the rest is."""
    said = bounded.plain("; ".join(problems))
    end = f" (hilgate preflight, job {job})"
    room = NOTE_CHARACTERS - len(end)
    return (said if len(said) <= room else said[: room - 3] + "...") + end


def pause(problems: Sequence[str], env: Mapping[str, str]) -> str:
    """Pause the agent that runs this job; returns why that did not work, or nothing.

    Raises:
        DeclarationError: The agent sets a number of minutes that is none.
    """
    minutes = str(max(1, min(health.number(env, MINUTES, DEFAULT_MINUTES), MAX_MINUTES)))
    words = ("buildkite-agent", "pause", "--note", note(problems, env.get("BUILDKITE_JOB_ID", "")))
    ran = bounded.run((*words, "--timeout-in-minutes", minutes), SECONDS)
    if ran.problem or ran.status != 0:
        return f"this agent could not be paused: {ran.problem or ran.said() or f'status {ran.status}'}"
    return ""


def upload(path: Path, checkout: Path) -> str:
    """Upload one file of the job; returns why that did not work, or nothing."""
    name = str(path.relative_to(checkout))
    ran = bounded.run(("buildkite-agent", "artifact", "upload", name), SECONDS, cwd=checkout)
    if ran.problem or ran.status != 0:
        return f"{name} could not be uploaded: {ran.problem or ran.said() or f'status {ran.status}'}"
    return ""
