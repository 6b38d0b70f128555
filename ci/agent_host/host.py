# SPDX-License-Identifier: Apache-2.0
"""Run commands with a timeout that also kills grandchildren, and end the processes and containers that a job left.

    python3 -m agent_host.host cleanup [--job ID]

A process belongs to a job when its environment names it, when it descends from one that does, or when it is in the
session of one that does. A process whose environment names another job is that job's, whatever it descends from. What
hides from all three is not ended here: if it has a GPU open, `gpus.find_holders` reports it and the node is unfit.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.errors import CannotRunHereError, Exit, HilgateError, Parser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

PROC = Path("/proc")
KFD = Path("/sys/class/kfd/kfd")
"""Folder of the amdkfd driver: `topology/nodes/<n>` describes the GPUs, `proc/<pid>` is there for as long as the driver
keeps anything of a process (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c)."""

DEV = Path("/dev")

REAP_SECONDS = 3.0
"""Time that a process has to end after SIGKILL. A process in state D (a driver that does not answer) may never die, and
is reported."""

MAX_OUTPUT_BYTES = 8 * 2**20
"""Most bytes of one stream; amd-smi prints about 3 KiB for a GPU, and a whole kernel log is at most a few MiB."""

FULL_SHA = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
"""A whole commit id, in a repository of SHA-1 or of SHA-256."""

GIT_SECONDS = 600.0
DOCKER_SECONDS = 30.0

JOB_VARIABLES = ("HILGATE_JOB_ID", "BUILDKITE_JOB_ID")
"""Environment variables that name a process's job; the first that it has counts."""

JOB_LABEL = "hilgate.job"
"""Docker label of a job's containers (`agent_host.container`)."""

STATE = "HILGATE_STATE"
"""Variable of the agent: a folder that outlives jobs."""

ZOMBIE = "Z"
GRACE_SECONDS, CANCELLED_GRACE_SECONDS = 5.0, 2.0
"""Between SIGTERM and SIGKILL; as the runner gives its steps. All hooks and uploads of a cancelled job share the
agent's `cancel-cleanup-timeout`: 5 s by default, 30 in ci/agent/buildkite-agent.cfg."""

ROUNDS = 3
"""A process that starts others while it ends is looked for again."""

POLL_SECONDS = 0.05


class SickNodeError(HilgateError):
    """This node cannot do, or cannot say, what it should: another one may."""

    exit_status = Exit.SICK_NODE


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    program: str
    status: int | None
    """Exit status, negative for a signal; None when it was ended here or could not start."""
    out: str = ""
    err: str = ""
    problem: str = ""
    """Why there is no exit status."""
    started: bool = True

    @property
    def last_line(self) -> str:
        """The last line with text of what it wrote; empty when it wrote nothing."""
        lines = [line.strip() for line in (self.out + "\n" + self.err).splitlines() if line.strip()]
        return printable(lines[-1]) if lines else ""

    @property
    def failure(self) -> str:
        """Why it did not end with status 0, in one printable line; empty when it did."""
        if self.status == 0:
            return ""
        return self.problem or f"{self.program} ended with status {self.status}: {self.last_line or 'no message'}"


def printable(text: str) -> str:
    """Escape every character that could move a cursor, hide or colour anything."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def run(
    words: Sequence[str], seconds: float, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> CommandResult:
    """Run a command in its own process group for at most `seconds`, then kill the group.

    Its output goes to files: a pipe could be held open by a grandchild.
    """
    program = words[0]
    with _sink() as out, _sink() as err:
        try:
            process = subprocess.Popen(
                list(words), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
            )
        except OSError as error:
            return CommandResult(program, None, problem=f"{program} cannot be started: {error.strerror}", started=False)
        status: int | None = None
        problem = ""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            problem = f"{program} did not answer within {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if problem:
            try:
                process.wait(REAP_SECONDS)
            except subprocess.TimeoutExpired:
                problem += f" and cannot be killed (process {process.pid})"
        elif out.seek(0, os.SEEK_END) > MAX_OUTPUT_BYTES:
            # Half an answer could be the half without the bad news.
            status, problem = None, f"{program} printed more than {MAX_OUTPUT_BYTES} bytes"
        return CommandResult(program, status, _text(out), _text(err), problem)


def _sink() -> IO[bytes]:
    """A file for what a program prints; in memory where TMPDIR is full: that must still be said."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(temporary(os.environ)).free > 4 * MAX_OUTPUT_BYTES:
            return tempfile.TemporaryFile()
    return os.fdopen(os.memfd_create("output"), "w+b")


def temporary(env: Mapping[str, str]) -> Path:
    """Where jobs have their folders. Not `tempfile`'s answer, which is another folder where this one is full."""
    return Path(env.get("TMPDIR") or tempfile.gettempdir())


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(MAX_OUTPUT_BYTES).decode(errors="replace")


def git(folder: str | Path, *arguments: str) -> str:
    """Standard output of a git command that runs no hook of the repository and asks nobody for a password.

    Raises:
        CannotRunHereError: It failed.
    """
    safe = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "protocol.ext.allow=never")
    words = ("git", *(word for setting in safe for word in ("-c", setting)), *arguments)
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    ran = run(words, GIT_SECONDS, cwd=Path(folder), env=env)
    if ran.failure:
        raise CannotRunHereError(
            f"git {arguments[0]} failed: {ran.failure}", where=str(folder), remedy="see git on this agent"
        )
    return ran.out


def state_file(env: Mapping[str, str], what: str) -> Path:
    """Where an agent keeps something from one job to the next; each agent of a machine has a file of its own."""
    folder = Path(env.get(STATE) or Path(env.get("XDG_STATE_HOME") or Path.home() / ".local/state", "hilgate"))
    agent = re.sub(r"[^A-Za-z0-9-]", "-", env.get("BUILDKITE_AGENT_NAME", "") or "local")
    return folder / f"{what}-{agent}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step, so that no reader and no crash sees half of it; its folder is made.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def remove(folder: Path) -> str:
    """Remove a folder whatever a container made of it; why that failed, empty when it did not.

    `rm` walks by descriptors, so no depth is too deep for it, and it follows no link.
    """
    run(("chmod", "-R", "u+rwX", "--", str(folder)), 600.0)
    return run(("rm", "-rf", "--one-file-system", "--", str(folder)), 3600.0).failure


def expect_text(value: object, what: str, pattern: re.Pattern[str]) -> str:
    """A value of a JSON document that must be a text of this pattern; else ValueError says what it is."""
    if isinstance(value, str) and pattern.fullmatch(value):
        return value
    raise ValueError(f"{what} is {value!r}")


def expect_number(value: object, what: str, least: int = 0, most: int = sys.maxsize) -> int:
    """A value of a JSON document that must be a whole number in a range; else ValueError says what it is."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ValueError(f"{what} is {value!r}")


@dataclass(frozen=True)
class Process:
    """One process at one moment, in the words of proc(5); pid and start together name no later process."""

    pid: int
    parent: int
    session: int
    state: str
    started: int
    """Clock ticks after boot."""
    name: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.name}, state {self.state})"


def read_process(proc: Path, pid: int) -> Process | None:
    """One process; None once it has ended."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may hold any character, so the other fields are counted from the last ')'.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[3]), fields[0], int(fields[19]), printable(name))


def processes(proc: Path) -> dict[int, Process]:
    """Every process, by pid."""
    pids = [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]
    read = {pid: read_process(proc, pid) for pid in pids}
    return {pid: process for pid, process in read.items() if process is not None}


def job_of(proc: Path, pid: int) -> str:
    """The job that a process was started for; empty when its environment names none or is another user's."""
    try:
        found = _environment(proc, pid)
    except OSError:
        return ""
    return next((found[name] for name in JOB_VARIABLES if found.get(name)), "")


EXECUTOR = "buildkite-agent"
"""Name of the process of an agent, and of its child that runs one job."""


def live_jobs(proc: Path) -> dict[str, str]:
    """The jobs that agents of this machine run now, and the name of the agent of each.

    A job lives while its executor does, under an agent that lives. What a job has started does not count: it may
    outlive both. Processes of containers do not either, whatever they call themselves.

    Raises:
        SickNodeError: An executor belongs to another user, so its job is not known.
    """
    running, found = processes(proc), {}
    for process in running.values():
        parent = running.get(process.parent)
        if process.name != EXECUTOR or parent is None or parent.name != EXECUTOR or process.state == ZOMBIE:
            continue
        try:
            if (proc / str(process.pid) / "ns/pid").readlink() != (proc / "self/ns/pid").readlink():
                continue
            values = _environment(proc, process.pid)
        except FileNotFoundError:
            continue  # it has just ended
        except OSError as error:
            raise SickNodeError(
                f"process {process} runs a job that cannot be read: {error.strerror}",
                where=str(proc / str(process.pid)),
                remedy="run this as the user of the agents",
            ) from error
        if job := values.get("BUILDKITE_JOB_ID", ""):
            found[job] = values.get("BUILDKITE_AGENT_NAME", "")
    return found


def of_other_agents(variable: str, own: str, proc: Path) -> dict[Process, str]:
    """What a variable says in the other agents of this machine that run as this user, and in what runs their jobs.

    `own` is this agent's name. Processes of containers do not count, whatever they call themselves.
    """
    running, others = processes(proc), {}
    mine = untouchable(running)
    for process in running.values():
        if process.name != EXECUTOR or process.pid in mine or process.state == ZOMBIE:
            continue
        with contextlib.suppress(OSError):
            if (proc / str(process.pid) / "ns/pid").readlink() != (proc / "self/ns/pid").readlink():
                continue
            values = _environment(proc, process.pid)
            if values.get("BUILDKITE_AGENT_NAME", "") != own and values.get(variable):
                others[process] = values[variable]
    return others


def _environment(proc: Path, pid: int) -> dict[str, str]:
    data = (proc / str(pid) / "environ").read_bytes()
    pairs = [pair.decode(errors="replace").partition("=") for pair in data.split(b"\0") if b"=" in pair]
    return {name: value for name, _, value in pairs}


def untouchable(running: Mapping[int, Process]) -> set[int]:
    """What a hook must never signal: itself, all it descends from (these are the agent's), and the first process."""
    line: set[int] = set()
    pid = os.getpid()
    while pid in running and pid not in line:
        line.add(pid)
        pid = running[pid].parent
    return {0, 1, pid, *line}


@dataclass
class Cleanup:
    """What was ended, a phrase each, and a sentence for what could not be."""

    ended: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def grace(env: Mapping[str, str]) -> float:
    """Seconds between SIGTERM and SIGKILL."""
    return CANCELLED_GRACE_SECONDS if env.get("BUILDKITE_JOB_CANCELLED") == "true" else GRACE_SECONDS


def end_job(job: str, *, grace_seconds: float = GRACE_SECONDS) -> Cleanup:
    """End the containers and processes of a job. An empty job has none."""
    result = Cleanup()
    if not job:
        return result
    _end_containers(job, grace_seconds, result)
    for _ in range(ROUNDS):
        left = left_by(job)
        if not left:
            break
        _end(left, grace_seconds)
        result.ended += [str(process) for process in left if not _lives(process)]
    result.problems += [f"process {process} of job {job} does not end" for process in left_by(job)]
    return result


def left_by(job: str) -> list[Process]:
    """The live processes that a job left, oldest first."""
    running = processes(PROC)
    spared = untouchable(running)
    jobs = {pid: job_of(PROC, pid) for pid in running if pid not in spared}
    of_job = {pid for pid, name in jobs.items() if name == job}
    unnamed = {pid for pid, name in jobs.items() if not name}
    size = -1
    while size != len(of_job):
        size = len(of_job)
        of_job |= {pid for pid in unnamed if running[pid].parent in of_job or running[pid].session in of_job}
    found = [running[pid] for pid in of_job if running[pid].state != ZOMBIE]
    return sorted(found, key=operator.attrgetter("started", "pid"))


def left_folders(temporary: Path, job: str) -> list[Path]:
    """What a job has below TMPDIR."""
    return sorted(path for path in temporary.glob("*") if job_of_folder(path.name) == job)


_MADE = re.compile(
    r"hilgate-(?:job|home|trusted)-(?P<job>.+)-[a-z0-9_]{8}|"
    r"job-env(?:-json)?-(?P<uuid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}).*"
)
"""Names below TMPDIR that say whose they are: what the container of a job works in, the home of a step on the host, the
copy of the code that decides, as `tempfile.mkdtemp` names them; and the job's variables, a file of buildkite-agent."""


def job_of_folder(name: str) -> str:
    """The job that something below TMPDIR was made for; empty when its name says none."""
    match = _MADE.fullmatch(name)
    return (match["job"] or match["uuid"]) if match else ""


def _end(ending: list[Process], grace_seconds: float) -> None:
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, REAP_SECONDS)):
        alive = [process for process in ending if _lives(process)]
        for process in alive:
            _send(process, number)
        until = time.monotonic() + seconds
        while any(_lives(process) for process in alive) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def _send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process: the descriptor is taken first, so the number cannot pass to another meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if _lives(process):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _lives(process: Process) -> bool:
    now = read_process(PROC, process.pid)
    return now is not None and now.started == process.started and now.state not in {ZOMBIE, "X"}


def _end_containers(job: str, grace_seconds: float, result: Cleanup) -> None:
    listing = ("docker", "ps", "--all", "--quiet", f"--filter=label={JOB_LABEL}={job}")
    before = run(listing, DOCKER_SECONDS)
    if not before.started:
        return  # no Docker on this host, so no containers
    if before.failure:
        result.problems.append(f"the containers of job {job} cannot be listed: {before.failure}")
        return
    containers = before.out.split()
    for container in containers:
        # `stop` sends SIGTERM, then SIGKILL; `rm --force` is for one that was only created, or did not stop.
        run(("docker", "stop", f"--time={max(1, round(grace_seconds))}", container), DOCKER_SECONDS)
        run(("docker", "rm", "--force", "--volumes", container), DOCKER_SECONDS)
    after = run(listing, DOCKER_SECONDS)
    if after.failure:
        result.problems.append(f"whether the containers of job {job} ended is not known: {after.failure}")
        return
    still = set(after.out.split())
    result.ended += [f"container {container}" for container in containers if container not in still]
    result.problems += [f"container {container} of job {job} does not end" for container in sorted(still)]


def main(words: list[str] | None = None) -> int:
    """End what a job left; 0 also when there was nothing, 75 when something does not end."""
    parser = Parser(prog="agent_host.host", description="End what a job left on this host.")
    parser.add_argument("command", choices=["cleanup"])
    parser.add_argument(
        "--job", default=os.environ.get("BUILDKITE_JOB_ID", ""), help="id of the job (default: the current job)"
    )
    job = parser.parse_args(words).job
    done = end_job(job, grace_seconds=grace(os.environ))
    for folder in left_folders(temporary(os.environ), job) if job else ():
        if folder.name.startswith("job-env"):  # the agent still needs it, and removes it itself
            continue
        if failure := remove(folder):
            done.problems.append(f"{folder} cannot be removed: {failure}")
    sys.stdout.write("".join(f"ended {line}\n" for line in done.ended))
    sys.stderr.write("".join(f"{line}\n" for line in done.problems))
    return int(Exit.SICK_NODE) if done.problems else 0


if __name__ == "__main__":
    sys.exit(main())
