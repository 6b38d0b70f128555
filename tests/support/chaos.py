# SPDX-License-Identifier: Apache-2.0
"""A host with an agent that takes jobs from a Buildkite on the loopback: for what goes wrong in a night.

The agent is the real one that `HILGATE_REAL_AGENT` names, else `support/fake_agent.py`, which does what the tests need
of it in the same order. Docker is a program whose containers outlive their client, as dockerd's do.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.agent import planned
from support.executor import REAL_AGENT
from support.loopback import Asked, served
from support.nodes import ROOT
from support.plans import git

from agent_host import host
from hilgate.names import AGENTS_FILE, PROJECT_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTENT, DIGEST = "c" * 64, "sha256:" + "ab" * 32
KEY = "units-cpu"
RUN = (
    "mkdir -p results && cp {plan} results/plan.json && "
    f"hilgate job {KEY} --plan results/plan.json --results results/jobs/{KEY}"
)

DOCKER = """#!{python}
import json, os, pathlib, signal, subprocess, sys, time
here = pathlib.Path({folder!r})
words = sys.argv[1:]
with (here / "docker-calls").open("a") as file:
    file.write(" ".join(words[:3]) + "\\n")
if (here / "docker-dead").exists():
    sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
known = {{path.name: json.loads(path.read_text()) for path in (here / "containers").iterdir()}}
def end(name):
    try:
        os.killpg(known[name]["pid"], signal.SIGKILL)
    except ProcessLookupError:
        pass
if words[0] == "run":
    value = {{word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--")}}
    job = next(word.rpartition("=")[2] for word in words if word.startswith("--label=hilgate.job="))
    (mount,) = [word for word in words if word.startswith("--mount=") and word.endswith("target=/hilgate/results")]
    results = mount.partition("source=")[2].partition(",")[0]
    command = "echo records > results.jsonl; " + (here / "inside").read_text()
    child = subprocess.Popen(["/bin/sh", "-c", command], cwd=results, start_new_session=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (here / "containers" / value["--name"]).write_text(json.dumps({{"pid": child.pid, "job": job}}))
    status = child.wait()
    sys.exit(status if status >= 0 else 128 - status)
if words[0] == "ps":
    for name, facts in known.items():
        if any(word in ("--filter=label=hilgate.job", "--filter=label=hilgate.job=" + facts["job"]) for word in words):
            print(facts["job"] if any(word.startswith("--format") for word in words) else name)
if words[0] in ("stop", "rm"):
    for name in words[1:]:
        if name in known:
            end(name)
            if words[0] == "rm":
                (here / "containers" / name).unlink(missing_ok=True)
"""


class Buildkite:
    """Offers jobs to one agent, and keeps what it hears of them."""

    def __init__(self) -> None:
        self.offered: list[dict[str, Any]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.started: set[str] = set()
        self.cancelled: set[str] = set()
        self.ended: dict[str, dict[str, Any]] = {}
        self.log: dict[str, bytes] = {}
        self.uploaded: dict[str, list[str]] = {}
        self.pauses: list[str] = []
        self.refused = ""
        """Calls whose path holds it are answered with 422."""
        self.server = contextlib.ExitStack()
        self.address = f"{self.server.enter_context(served(self.answer))}/"

    def answer(self, asked: Asked) -> tuple[int, object, dict[str, str]]:  # noqa: C901 - a call after the other
        method, path, _, body, _ = asked
        if self.refused and self.refused in path:
            return 422, {"message": "refused"}, {}
        times = dict.fromkeys(("ping_interval", "heartbeat_interval", "job_status_interval"), 1)
        answer: dict[str, Any] = {"id": "a", "uuid": "a", "exists": True, "access_token": "of-the-agent"} | times
        found = re.search(r"/jobs/([^/?]+)", path)
        job = found[1] if found else ""
        if path.endswith("/ping"):
            answer = {}
            if self.pauses:
                answer = {"action": "pause"}
            elif self.offered:
                answer = {"job": self.offered[0]}
        elif path.endswith("/pause"):
            self.pauses.append(json.loads(body)["note"])
        elif path.endswith("/register"):
            answer["name"] = json.loads(body).get("name", "agent")
        elif path.endswith("/accept"):
            self.offered = [one for one in self.offered if one["id"] != job]
            answer = self.jobs[job] | {"state": "accepted"}
        elif path.endswith("/start"):
            self.started.add(job)
        elif path.endswith("/finish"):
            self.ended[job] = json.loads(body)
        elif "/chunks" in path:
            self.log[job] = self.log.get(job, b"") + (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        elif path.endswith("/artifacts") and method == "POST":
            sent = json.loads(body)["artifacts"]
            self.uploaded.setdefault(job, []).extend(one["path"] for one in sent)
            form = {"url": self.address, "method": "POST", "path": "up", "file_input": "file"}
            upload = {"data": {"k": "v"}, "action": form}
            ids = [f"a{number}" for number in range(len(sent))]
            answer = {
                "id": "b",
                "artifact_ids": ids,
                "upload_instructions": upload,
                "per_artifact_upload_instructions": {},
            }
        elif job and method == "GET":
            answer = {"id": job, "state": "canceled" if job in self.cancelled else "running"}
        return 200, answer, {}


class Night:
    """One host, its agent, and a repository whose jobs it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.buildkite = folder, Buildkite()
        self.bin, self.tmp, self.builds = folder / "bin", folder / "tmp", folder / "builds"
        self.containers, self.textfile = folder / "containers", folder / "textfile"
        self.home = tempfile.mkdtemp()  # a short path: the agent puts a socket below it
        for place in (self.bin, self.tmp, self.builds, self.containers, self.textfile):
            place.mkdir()
        self.inside("true")
        self._program("docker", DOCKER.format(python=sys.executable, folder=str(folder)))
        if REAL_AGENT:
            shutil.copy(REAL_AGENT, self.bin / "buildkite-agent")  # by this name processes of an agent are known
        else:
            fake = Path(__file__).with_name("fake_agent.py").read_text()
            self._program("buildkite-agent", f"#!{sys.executable}\n{fake}")
        self.repository = folder / "repository"
        (self.repository / "ci").mkdir(parents=True)
        (self.repository / "file").write_text("content\n")
        for name in (AGENTS_FILE, PROJECT_FILE):
            shutil.copy(ROOT / name, self.repository / name)
        for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "all"]):
            git(self.repository, *words)
        served = folder / "served"  # the agent's own clone: it says from when on a change of this repository may begin
        git(folder, "clone", "-q", str(self.repository), str(served))
        self.plan()
        settings = (ROOT / "ci/agent/buildkite-agent.cfg").read_text()
        settings = settings.replace("/opt/hilgate", str(ROOT)).replace("/var/lib/buildkite-agent", str(folder))
        (folder / "agent.cfg").write_text(re.sub(r'(cancel-\w+-timeout)="\d+s"', r'\1="10s"', settings))
        self.env = {
            "PATH": f"{self.bin}:{ROOT / 'ci/bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": self.home,
            "TMPDIR": str(self.tmp),
            "HILGATE_REPOSITORY": str(served),
            "HILGATE_STATE": str(folder / "state"),
            "HILGATE_MIN_DISK_GIB": "0",
            "HILGATE_MIN_ROOM_MIB": "0",
            "HILGATE_KEEP_FREE_GIB": "0",
            "HILGATE_UPLOAD_SECONDS": "1",
            "HILGATE_PATIENCE_SECONDS": "0",
            "HILGATE_TEXTFILE": str(self.textfile),
        }
        self.agent: subprocess.Popen[bytes] | None = None

    def _program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def inside(self, script: str) -> None:
        """What a container does, in the folder of its results."""
        (self.folder / "inside").write_text(script)

    def plan(self) -> None:
        commit = git(self.repository, "rev-parse", "HEAD")
        steps = [planned(key=KEY, image="cpu", timeout_minutes=1, gpus=0)]
        text = {"commit": commit, "images": {"cpu": CONTENT}, "digests": {"cpu": DIGEST}, "steps": steps}
        (self.folder / "plan.json").write_text(json.dumps(text))

    def offer(self, command: str = "", **variables: str) -> str:
        """A job for the agent; returns its id."""
        job = str(uuid.uuid4())
        env = {
            "CI": "true",
            "BUILDKITE": "true",
            "BUILDKITE_JOB_ID": job,
            "BUILDKITE_BUILD_ID": str(uuid.uuid4()),
            "BUILDKITE_COMMAND": command or RUN.format(plan=self.folder / "plan.json"),
            "BUILDKITE_REPO": str(self.repository),
            "BUILDKITE_COMMIT": git(self.repository, "rev-parse", "HEAD"),
            "BUILDKITE_BRANCH": "main",
            "BUILDKITE_PIPELINE_DEFAULT_BRANCH": "main",
            "BUILDKITE_PULL_REQUEST": "false",
            "BUILDKITE_ORGANIZATION_SLUG": "org",
            "BUILDKITE_PIPELINE_SLUG": "pipeline",
            "BUILDKITE_STEP_KEY": KEY,
            "BUILDKITE_PIPELINE_PROVIDER": "github",
            "BUILDKITE_BUILD_NUMBER": "1",
            "BUILDKITE_TIMEOUT": "10",
            "BUILDKITE_AGENT_NAME": "host-1",
            "BUILDKITE_AGENT_META_DATA_QUEUE": "amd-cpu",
            "BUILDKITE_RETRY_COUNT": "0",
            "BUILDKITE_ARTIFACT_PATHS": f"results/jobs/{KEY}/**/*",
        } | variables
        described = {"id": job, "state": "assigned", "env": env, "token": "of-this-job", "chunks_max_size_bytes": 10**5}
        self.buildkite.jobs[job] = described
        self.buildkite.offered.append(described)
        return job

    def start(self) -> None:
        """Start the agent, as its service does."""
        words = [str(self.bin / "buildkite-agent"), "start", "--config", str(self.folder / "agent.cfg")]
        words += ["--name", "host-1", "--queue", "amd-cpu", "--token", "x", "--endpoint", self.buildkite.address]
        words += ["--job-context-dir", self.home]
        log = (self.folder / "agent.log").open("ab")
        self.agent = subprocess.Popen(words, env=self.env, stdout=log, stderr=log, start_new_session=True)
        log.close()

    def ends(self, job: str, seconds: float = 60.0) -> dict[str, Any]:
        """Wait for the end of a job; what the agent says of it."""
        self.until(lambda: job in self.buildkite.ended, seconds, job)
        return self.buildkite.ended[job]

    def runs(self, command: str = "", **variables: str) -> str:
        """Run one job; its exit status as Buildkite sees it."""
        return str(self.ends(self.offer(command, **variables))["exit_status"])

    def until(self, true: Callable[[], object], seconds: float = 60.0, job: str = "") -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                log = (self.folder / "agent.log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"not within {seconds} s; agent:\n{log}\njob:\n{self.log(job)}")
            time.sleep(0.05)

    def log(self, job: str) -> str:
        """A job's log."""
        text = self.buildkite.log.get(job, b"").decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*[a-zA-Z]|\x1b_[^\x07]*\x07", "", text)

    def kill(self) -> None:
        """Kill -9 the agent and, as systemd does with what is left in its control group, all that descends from it."""
        assert self.agent is not None
        for pid in [self.agent.pid, *self._descendants(self.agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()

    def _descendants(self, pid: int) -> list[int]:
        """Processes below one, but not those of containers: dockerd is their parent, not the agent."""
        known = host.processes(host.PROC)
        containers = {json.loads(path.read_text())["pid"] for path in self.containers.iterdir()}
        found, size = {pid}, 0
        while size != len(found):
            size = len(found)
            found |= {one.pid for one in known.values() if one.parent in found and one.pid not in containers}
        return sorted(found - {pid})

    def pid_of_container(self) -> int:
        """The first process of the one container that runs."""
        (path,) = self.containers.iterdir()
        return int(json.loads(path.read_text())["pid"])

    def processes_of(self, job: str) -> dict[int, str]:
        """The command lines of a job's processes, by number."""
        lines = {}
        for pid in host.processes(host.PROC):
            if host.job_of(host.PROC, pid) == job:
                with contextlib.suppress(OSError):
                    lines[pid] = (host.PROC / str(pid) / "cmdline").read_text().replace("\0", " ")
        return lines

    def kill_executor(self) -> None:
        """Kill -9 the process that runs the job, and what descends from it, and leave the agent alone."""
        assert self.agent is not None
        for pid in self._descendants(self.agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def commit(self) -> None:
        """The default branch moves on."""
        git(self.repository, "commit", "-q", "--allow-empty", "-m", "more")
        self.plan()

    def link(self) -> str:
        """The commit of pull request 7, which adds a link."""
        git(self.repository, "checkout", "-q", "-b", "pull-7")
        (self.repository / "link").symlink_to("/etc/passwd")
        git(self.repository, "add", "-A")
        git(self.repository, "commit", "-q", "-m", "a link")
        commit = git(self.repository, "rev-parse", "HEAD")
        git(self.repository, "update-ref", "refs/pull/7/head", commit)  # as GitHub offers it
        git(self.repository, "checkout", "-q", "main")
        return commit

    def reap(self) -> subprocess.CompletedProcess[str]:
        """The reaper, as the service starts it before the agent and a timer does."""
        words = [sys.executable, "-I", str(ROOT / "ci/agent_host/__main__.py"), "reap", "--builds", str(self.builds)]
        return subprocess.run(words, env=self.env, capture_output=True, text=True, check=False)

    def left(self) -> list[str]:
        """What jobs left on this host: containers that run, and their folders."""
        folders = [path.name for pattern in ("hilgate-*", "job-env*") for path in self.tmp.glob(pattern)]
        return sorted([*(path.name for path in self.containers.iterdir()), *folders])

    def stop(self) -> None:
        if self.agent is not None and self.agent.poll() is None:
            self.kill()
        for path in self.containers.iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)
        self.buildkite.server.close()
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def night(folder: Path) -> Iterator[Night]:
    """A host for one test; nothing of it runs on afterwards."""
    made = Night(folder)
    try:
        yield made
    finally:
        made.stop()
