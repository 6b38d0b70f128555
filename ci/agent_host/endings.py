# SPDX-License-Identifier: Apache-2.0
"""How the last jobs of this agent ended: three fast endings in a row without a verdict take the agent out of service.

An agent that fails fast is always the idle one, so it takes job after job and uses up their retries. What it cannot
see of itself it sees in how its jobs end. `begin` notes a job before anything of it runs; a job that no later hook has
seen ended before its hooks could run (a full disk), or was killed.

What counts is said by this host alone. A fork's code chooses the status of its container, so nothing that a container
says counts, and of a fork's job only what says nothing about the fork.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from agent_host import facts, health, host, pause
from hilgate.errors import Exit
from hilgate.names import of_build

if TYPE_CHECKING:
    from collections.abc import Mapping

FAST_SECONDS = 120.0
"""A job that ends sooner has hardly begun; a step that hangs or is killed later says nothing about its node's start."""

IN_A_ROW = 3

PAUSE_MINUTES = 60
"""How long such an agent stays out. After it one more such ending takes it out again."""

BUILDS = Path("/var/lib/buildkite-agent/builds")
"""`build-path` of ci/agent/buildkite-agent.cfg."""

ANSWERS = frozenset({Exit.PASS, Exit.FAIL, Exit.MISUSE, Exit.INVALID_DECLARATION, Exit.NOTHING_RAN, Exit.INCONCLUSIVE})
"""Statuses that speak of the change; every other one speaks of the machine."""


@dataclass
class Endings:
    """What an agent remembers of its jobs.

    Attributes:
        job: The last job that began here; empty once its end was noted.
        began: When, in seconds since the epoch.
        reported: Whether the agent was taken out during that job already, for another reason.
        row: Fast endings without a verdict since the last job with one.
        why: What each of them ended with, the newest last.
        jobs: How many jobs ended, by `answered`, `without a verdict`, `cancelled`, `of a fork`.
        retries: How many of them were retries of another attempt.
        unfit: What the last look at the node found; empty for a fit one.
    """

    job: str = ""
    began: float = 0.0
    reported: bool = False
    row: int = 0
    why: list[str] = field(default_factory=list)
    jobs: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    unfit: list[str] = field(default_factory=list)

    @property
    def black_hole(self) -> str:
        """Why the agent must not take a further job; empty when it may."""
        if self.row < IN_A_ROW:
            return ""
        listed = "; ".join(self.why[-IN_A_ROW:])
        return f"{self.row} jobs in a row ended within {FAST_SECONDS:.0f} s without a verdict: {listed}"

    def begin(self, job: str, now: float) -> None:
        """A job begins. The one before it, if no hook has seen its end, ended without a verdict."""
        if self.job and self.job != job:
            self._count("without a verdict", now, "was killed, or ended before any hook could run")
        self.job, self.began, self.reported = job, now, False

    def end(self, env: Mapping[str, str], now: float, *, inside: bool = False) -> None:
        """The last hook of a job runs; the variables are Buildkite's of that job.

        `inside`: its container, or its command on the host, came to an end of its own.
        """
        if not self.job or self.job != env.get("BUILDKITE_JOB_ID", ""):
            return
        self.retries += env.get("BUILDKITE_RETRY_COUNT", "0") not in {"", "0"}
        status, where = status_of(env)
        if env.get("BUILDKITE_JOB_CANCELLED") == "true":
            self._count("cancelled", now)
        elif inside or (where == "command" and status in ANSWERS):
            self._count("answered", now)
            self.row, self.why = 0, []
        elif of_build(env).fork and status != Exit.SICK_NODE:
            self._count("of a fork", now)  # its checkout, a refusal of the guard: what the fork brings decides
        else:
            self._count("without a verdict", now, f"{where} ended with {status}")

    def _count(self, kind: str, now: float, why: str = "") -> None:
        self.jobs[kind] = self.jobs.get(kind, 0) + 1
        if why and not self.reported and now - self.began <= FAST_SECONDS:
            self.row += 1
            self.why = [*self.why, f"job {self.job}: {why}"][-IN_A_ROW:]
        self.job = ""

    def forgive_one(self) -> None:
        """After the agent was taken out: when it comes back, one more such ending takes it out again."""
        self.row = min(self.row, IN_A_ROW - 1)


def status_of(env: Mapping[str, str]) -> tuple[int, str]:
    """The status that a job ends with as the last hook sees it, and what ended with it: the command, or a hook."""
    for variable, where in (("BUILDKITE_COMMAND_EXIT_STATUS", "command"), ("BUILDKITE_LAST_HOOK_EXIT_STATUS", "hook")):
        with contextlib.suppress(ValueError):
            status = int(env.get(variable, ""))
            if where == "command" or status:
                return status, where
    return -1, "checkout"


def path(env: Mapping[str, str]) -> Path:
    """Where an agent's endings are kept."""
    return host.state_file(env, "endings")


def load(env: Mapping[str, str]) -> Endings:
    """What is known; nothing where the note is missing or damaged."""
    try:
        known = json.loads(path(env).read_text(encoding="utf-8"))
        found = Endings(**{one.name: known[one.name] for one in fields(Endings)})
    except (OSError, ValueError, KeyError, TypeError):
        return Endings()
    return found if _is_whole(found) else Endings()


def _is_whole(found: Endings) -> bool:
    """Whether every value of a note is of its type; JSON may hold any."""
    if not (isinstance(found.why, list) and isinstance(found.unfit, list) and isinstance(found.jobs, dict)):
        return False
    texts, numbers = (found.job, *found.why, *found.unfit), (found.began, found.row, found.retries)
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int | float) for number in (*numbers, *found.jobs.values())
    )


def save(env: Mapping[str, str], known: Endings) -> None:
    """Keep it, whole or not at all.

    Raises:
        OSError: It cannot be written, so the next job would not know of this one.
    """
    host.write_whole(path(env), json.dumps(asdict(known)))


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


def admit(env: Mapping[str, str], temporary: Path) -> int:
    """Let a job in, or refuse it before anything of it runs: 0, or 75 after the agent was paused.

    The agent gives this hook few variables, and the job's in a file.
    """
    env = {**_variables_of_job(env), **env}
    known = load(env)
    known.begin(env.get("BUILDKITE_JOB_ID", ""), time.time())
    # With the folder of the checkout, of which pre-bootstrap knows no more than where all of them lie.
    builds = Path(env.get("BUILDKITE_BUILD_PATH") or BUILDS)
    state = path(env).parent
    least = health.whole_number(env, health.MIN_ROOM, health.MIN_ROOM_MIB)
    folders = {"the job's own files": temporary, "checkouts": builds, "what outlives jobs": state}
    with contextlib.suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
    problems = health.room_problems({what: where for what, where in folders.items() if where.is_dir()}, least)
    minutes = pause.usual_minutes(env)
    if not problems and known.black_hole:
        problems, minutes = [known.black_hole], PAUSE_MINUTES
    if problems:
        known.forgive_one()
        known.job, known.unfit = "", problems
    try:
        save(env, known)
    except OSError as error:
        problems = problems or [f"what this agent remembers cannot be written: {error.strerror} ({path(env)})"]
    write_agent(env, known, env.get(health.QUEUE, ""))
    if not problems:
        return int(Exit.PASS)
    sys.stdout.write("".join(f"refused: {problem}\n" for problem in problems))
    pause.take_out(problems, env, minutes)
    return int(Exit.SICK_NODE)


def _variables_of_job(env: Mapping[str, str]) -> dict[str, str]:
    """Buildkite's variables of the job, as the agent wrote them for this hook; none where the file cannot be read."""
    try:
        known = json.loads(Path(env.get("BUILDKITE_ENV_JSON_FILE", "")).read_bytes())
        return {
            name: value for name, value in known.items() if name.startswith("BUILDKITE_") and isinstance(value, str)
        }
    except (OSError, ValueError, AttributeError):
        return {}


def ended(env: Mapping[str, str]) -> int:
    """Note how a job ended; the third fast ending without a verdict in a row pauses the agent."""
    known = load(env)
    known.end(env, time.time(), inside=_was_inside(env))
    why = known.black_hole
    if why:
        known.forgive_one()
        known.unfit = [why]
    try:
        save(env, known)
    except OSError as error:
        sys.stdout.write(f"how this job ended cannot be noted: {error.strerror} ({path(env)})\n")
    write_agent(env, known, env.get(health.QUEUE, ""))
    if why:
        pause.take_out([why], env, PAUSE_MINUTES)
    return int(Exit.PASS)


def write_agent(env: Mapping[str, str], known: Endings, queue: str) -> None:
    """Write what an agent knows of itself as metrics of the node exporter."""
    agent = env.get("BUILDKITE_AGENT_NAME", "")
    of = {"agent": agent, "queue": queue}
    samples: list[facts.Sample] = [("hilgate_node_fit", of, float(not known.unfit))]
    samples += [("hilgate_node_unfit_info", {**of, "why": problem}, 1.0) for problem in dict.fromkeys(known.unfit)]
    samples += [
        ("hilgate_jobs_total", {**of, "ending": kind}, float(count)) for kind, count in sorted(known.jobs.items())
    ]
    samples.append(("hilgate_job_retries_total", of, float(known.retries)))
    samples.append(("hilgate_fast_endings", of, float(known.row)))
    samples.append(("hilgate_last_job_timestamp_seconds", of, time.time()))
    facts.write(env, agent, samples)
