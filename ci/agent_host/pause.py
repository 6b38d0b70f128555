# SPDX-License-Identifier: Apache-2.0
"""Take an agent out of service for a while, with the reason: unfit, or three fast endings in a row.

An agent that fails fast is always the idle one, so it takes job after job and uses up their retries. What it cannot
see of itself it sees in how its jobs end: `begins` notes a job before anything of it runs, `ends` how it ended.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

from agent_host import health, host
from hilgate.errors import Exit
from hilgate.names import of_build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PAUSE_MINUTES = "HILGATE_PAUSE_MINUTES"
DEFAULT_PAUSE_MINUTES, MAX_PAUSE_MINUTES = 240, 10080
"""Buildkite resumes a paused agent by itself, after the maximum at the latest (its documentation, "Pause and resume an
agent"). Long enough to be seen, short enough that a forgotten node comes back to be looked at."""

FAST_ENDINGS_MINUTES = 60
"""How long an agent stays out after fast endings. What it cannot see of itself may have been the network's."""

FAST_SECONDS = 120.0
"""A job that ends sooner has hardly begun; a step that hangs or is killed later says nothing about its node's start."""

IN_A_ROW = 3

ANSWERS = frozenset({Exit.PASS, Exit.FAIL, Exit.MISUSE, Exit.INVALID_DECLARATION, Exit.NOTHING_RAN, Exit.INCONCLUSIVE})
"""Statuses of a command that speak of the change; every other one speaks of the machine."""

AGENT_SECONDS = 60.0
"""Limit of one call of buildkite-agent, which tries five times, a second apart."""


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


def begins(env: Mapping[str, str], now: float) -> str:
    """Note that a job begins; why this agent must not take it, empty when it may.

    The job before it, if no later hook has seen its end, was killed, or ended before a hook could run (a full disk).

    Raises:
        OSError: The note cannot be written, so the next job would not know of this one.
    """
    job, began, row = _load(env)
    if job and job != env.get("BUILDKITE_JOB_ID") and now - began <= FAST_SECONDS:
        row.append(f"job {job}: was killed, or ended before any hook could run")
    return _save(env, env.get("BUILDKITE_JOB_ID", ""), now, row)


def ends(env: Mapping[str, str], now: float) -> str:
    """Note how a job ended, in its last hook; why this agent must go out, empty when it may stay.

    A fork chooses the status of its container, what its checkout does and what the guard refuses. So of a fork's job
    nothing counts but a 75 that this host says itself.

    Raises:
        OSError: The note cannot be written.
    """
    job, began, row = _load(env)
    if not job or job != env.get("BUILDKITE_JOB_ID"):
        return ""
    status, where = _ended_with(env)
    if env.get("BUILDKITE_JOB_CANCELLED") == "true":
        pass
    elif _was_inside(env) or (where == "command" and status in ANSWERS):
        row = []
    elif now - began <= FAST_SECONDS and (status == Exit.SICK_NODE or not of_build(env).fork):
        row.append(f"job {job}: {where} ended with {status}")
    return _save(env, "", now, row)


def forget_job(env: Mapping[str, str]) -> None:
    """The agent was taken out during this job for another reason, so how the job ends does not count."""
    with contextlib.suppress(OSError):
        _save(env, "", 0.0, _load(env)[2])


def note_inside(env: Mapping[str, str]) -> None:
    """What runs inside has come to an end of its own: whatever it says, this host has done its part.

    A file of its own, because jobs run the code of their merge base, which may be older or newer than the hooks.
    """
    with contextlib.suppress(OSError):
        host.write_whole(host.state_file(env, "inside"), json.dumps(env.get("BUILDKITE_JOB_ID", "")))


def _was_inside(env: Mapping[str, str]) -> bool:
    with contextlib.suppress(OSError, ValueError):
        job = json.loads(host.state_file(env, "inside").read_text(encoding="utf-8"))
        return bool(job) and job == env.get("BUILDKITE_JOB_ID", "")
    return False


def _ended_with(env: Mapping[str, str]) -> tuple[int, str]:
    """The status that a job ends with as the last hook sees it, and what ended with it: the command, or a hook."""
    for variable, where in (("BUILDKITE_COMMAND_EXIT_STATUS", "command"), ("BUILDKITE_LAST_HOOK_EXIT_STATUS", "hook")):
        with contextlib.suppress(ValueError):
            status = int(env.get(variable, ""))
            if where == "command" or status:
                return status, where
    return -1, "checkout"


def _load(env: Mapping[str, str]) -> tuple[str, float, list[str]]:
    """The job that runs, when it began, and the fast endings in a row; nothing where the note is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        job, began, row = json.loads(host.state_file(env, "endings").read_text(encoding="utf-8"))
        if isinstance(job, str) and isinstance(began, int | float) and isinstance(row, list):
            return job, began, [str(why) for why in row]
    return "", 0.0, []


def _save(env: Mapping[str, str], job: str, began: float, row: Sequence[str]) -> str:
    """Keep the note, whole or not at all; why the agent goes out, empty where it stays."""
    why = ""
    if len(row) >= IN_A_ROW:
        listed = "; ".join(row)
        why = f"{len(row)} jobs in a row ended within {FAST_SECONDS:.0f} s without a verdict: {listed}"
        job, row = "", row[-(IN_A_ROW - 1) :]  # when it comes back, one more such ending takes it out again
    host.write_whole(host.state_file(env, "endings"), json.dumps([job, began, row]))
    return why
