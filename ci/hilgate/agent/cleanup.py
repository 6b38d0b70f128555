"""Ends what a job left behind, and nothing else: `python3 -m hilgate.agent.cleanup --job ID`.

A process belongs to a job when its environment names it, when it descends from one that does, or when it is in the
session of one that does. A process whose environment names another job is that job's, whatever it descends from. What
hides from all three is not ended here: if it has a GPU open, `holders` reports it and the node is unfit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.agent import bounded, paths, processes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL; as the runner gives its steps."""

CANCELLED_GRACE_SECONDS = 2.0
"""The agent gives all hooks of a cancelled job 9 s together (buildkite-agent start, --signal-grace-period-seconds)."""

KILLED_SECONDS = 3.0
"""For the kernel to end what got SIGKILL; a process in state D is reported instead."""

ROUNDS = 3
"""A process that starts others while it ends is looked for again."""

DOCKER_SECONDS = 30.0
POLL_SECONDS = 0.05
LABEL = "hilgate.job"
"""Of a job's containers (`hilgate.agent.container`)."""


@dataclass
class Ended:
    """What was ended, one phrase each, and what could not be."""

    ended: list[str]
    problems: list[str]


def grace(env: Mapping[str, str]) -> float:
    """Seconds between SIGTERM and SIGKILL."""
    return CANCELLED_GRACE_SECONDS if env.get("BUILDKITE_JOB_CANCELLED") == "true" else GRACE_SECONDS


def end_job(job: str, *, grace_seconds: float = GRACE_SECONDS, proc: Path = paths.PROC) -> Ended:
    """End the containers and processes of a job. An empty job has none."""
    result = Ended([], [])
    if not job:
        return result
    _end_containers(job, grace_seconds, result)
    for _ in range(ROUNDS):
        found = left_by(job, proc)
        if not found:
            break
        _end(found, grace_seconds, proc)
        result.ended += [str(process) for process in found if not _lives(process, proc)]
    for process in left_by(job, proc):
        result.problems.append(f"process {process} of job {job} does not end")
    return result


def left_by(job: str, proc: Path = paths.PROC) -> list[processes.Process]:
    """The live processes that a job left, oldest first."""
    known = processes.snapshot(proc)
    spared = processes.own_line(known)
    jobs = {pid: processes.job_of(proc, pid) for pid in known if pid not in spared}
    of_job = {pid for pid, mark in jobs.items() if mark == job}
    free = {pid for pid, mark in jobs.items() if not mark}
    grown = -1
    while grown != len(of_job):
        grown = len(of_job)
        of_job |= {pid for pid in free if known[pid].parent in of_job or known[pid].session in of_job}
    found = [known[pid] for pid in of_job if known[pid].state != processes.ZOMBIE]
    return sorted(found, key=lambda process: (process.started, process.pid))


def _end(found: list[processes.Process], grace_seconds: float, proc: Path) -> None:
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, KILLED_SECONDS)):
        alive = [process for process in found if _lives(process, proc)]
        for process in alive:
            _send(process, number, proc)
        until = time.monotonic() + seconds
        while any(_lives(process, proc) for process in alive) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def _send(process: processes.Process, number: signal.Signals, proc: Path) -> None:
    """Signal exactly this process: the descriptor is taken first, so the number cannot pass to another meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if _lives(process, proc):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _lives(process: processes.Process, proc: Path) -> bool:
    now = processes.read(proc, process.pid)
    return now is not None and now.started == process.started and now.state not in {processes.ZOMBIE, "X"}


def _end_containers(job: str, grace_seconds: float, result: Ended) -> None:
    ran = bounded.run(("docker", "ps", "--all", "--quiet", f"--filter=label={LABEL}={job}"), DOCKER_SECONDS)
    if ran.problem.startswith("docker cannot be started"):
        return  # no Docker on this host, so no containers
    if ran.problem or ran.status != 0:
        result.problems.append(f"the containers of job {job} cannot be listed: {ran.problem or ran.said()}")
        return
    for container in ran.out.split():
        # `stop` sends SIGTERM, then SIGKILL; `rm --force` is for one that was only created, or did not stop.
        bounded.run(("docker", "stop", f"--time={max(1, round(grace_seconds))}", container), DOCKER_SECONDS)
        bounded.run(("docker", "rm", "--force", "--volumes", container), DOCKER_SECONDS)
    left = bounded.run(("docker", "ps", "--all", "--quiet", f"--filter=label={LABEL}={job}"), DOCKER_SECONDS)
    still = set(left.out.split())
    result.ended += [f"container {container}" for container in ran.out.split() if container not in still]
    result.problems += [f"container {container} of job {job} does not end" for container in sorted(still)]


def main(words: list[str] | None = None) -> int:
    """End what a job left; 0 also when there was nothing, 75 when something does not end."""
    parser = argparse.ArgumentParser(prog="hilgate.agent.cleanup", description="End what a job left on this host.")
    parser.add_argument("--job", default=os.environ.get("BUILDKITE_JOB_ID", ""), help="id of the job (this one)")
    done = end_job(parser.parse_args(words).job, grace_seconds=grace(os.environ))
    for line in done.ended:
        sys.stdout.write(f"ended {line}\n")
    for line in done.problems:
        sys.stderr.write(f"{line}\n")
    return 75 if done.problems else 0


if __name__ == "__main__":
    sys.exit(main())
