"""What a job left is ended, however it hides or resists, and what belongs to anybody else survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hilgate.agent import cleanup, paths, processes

if TYPE_CHECKING:
    from collections.abc import Iterator

WAITS = "import time; print('ready', flush=True); time.sleep(60)"
RESISTS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS


class Host:
    """Real processes, each started for a job; none outlives the test."""

    def __init__(self) -> None:
        self.job = str(uuid.uuid4())
        self.started: list[subprocess.Popen[str]] = []
        self.others: list[int] = []

    def start(self, code: str, *, job: str | None = None, bare: bool = False) -> subprocess.Popen[str]:
        """Start Python code in a session of its own, and wait until it says that it is ready."""
        env = {"PATH": os.environ["PATH"]} | ({} if bare else {"BUILDKITE_JOB_ID": job or self.job})
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.started.append(process)
        assert process.stdout is not None
        self.others += [int(word) for word in process.stdout.readline().split() if word.isdigit()]
        return process

    def alive(self, pid: int) -> bool:
        process = processes.read(paths.PROC, pid)
        return process is not None and process.state != "Z"

    def end(self) -> cleanup.Ended:
        return cleanup.end_job(self.job, grace_seconds=0.3)

    def stop(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for pid in self.others:
            if self.alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Host]:
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}")  # no Docker
    machine = Host()
    yield machine
    machine.stop()


def test_a_server_in_its_own_session_is_ended(host: Host) -> None:
    server = host.start(WAITS)
    done = host.end()
    assert not host.alive(server.pid)
    assert done.problems == []
    assert [line.split()[0] for line in done.ended] == [str(server.pid)]


def test_a_process_that_ignores_sigterm_is_killed(host: Host) -> None:
    stubborn = host.start(RESISTS)
    began = time.monotonic()
    done = host.end()
    assert not host.alive(stubborn.pid)
    assert time.monotonic() - began >= 0.3
    assert (len(done.ended), done.problems) == (1, [])


def test_a_process_that_ends_on_sigterm_may_finish(host: Host, tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = (
        f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (open({str(note)!r}, 'w').close(), sys.exit()))"
    )
    host.start(f"{code}; {WAITS}")
    host.end()
    assert note.exists()


def test_a_child_without_the_mark_is_ended_with_its_parent(host: Host) -> None:
    child = f"subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}], env={{}}, stdout=subprocess.DEVNULL)"
    host.start(f"import subprocess, sys, time; child = {child}; print(child.pid, flush=True); time.sleep(60)")
    assert len(host.others) == 1
    assert host.alive(host.others[0])
    done = host.end()
    assert not host.alive(host.others[0])
    assert len(done.ended) == 2


def test_an_orphan_of_the_jobs_session_is_ended(host: Host) -> None:
    """Its parent has ended and its environment is gone, as with setproctitle; the session's first process remains."""
    between = (
        "import os, subprocess, sys;"
        f"print(subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}], env={{}}, stdout=-3, stderr=-3).pid)"
    )
    host.start(
        "import subprocess, sys, time;"
        f"print(subprocess.run([sys.executable, '-S', '-c', {between!r}], capture_output=True, text=True).stdout,"
        " flush=True); time.sleep(60)"
    )
    orphan = processes.read(paths.PROC, host.others[0])
    assert orphan is not None
    assert orphan.parent not in {process.pid for process in host.started}
    host.end()
    assert not host.alive(orphan.pid)


def test_another_jobs_process_survives_even_below_ours(host: Host) -> None:
    other = host.start(WAITS, job=str(uuid.uuid4()))
    nobody = host.start(WAITS, bare=True)
    child = f"[sys.executable, '-S', '-c', {WAITS!r}], env={{'HILGATE_JOB_ID': 'another'}}, stdout=subprocess.DEVNULL"
    host.start(f"import subprocess, sys, time; print(subprocess.Popen({child}).pid, flush=True); time.sleep(60)")
    done = host.end()
    assert len(done.ended) == 1
    assert host.alive(other.pid)
    assert host.alive(nobody.pid)
    assert host.alive(host.others[0])


def test_a_zombie_is_neither_signalled_nor_reported(host: Host) -> None:
    ended = host.start("print('ready', flush=True)")
    while (process := processes.read(paths.PROC, ended.pid)) is not None and process.state != "Z":
        time.sleep(0.01)
    assert process is not None
    assert host.end() == cleanup.Ended([], [])


def test_the_caller_and_its_ancestors_are_spared(host: Host) -> None:
    """The hook, the agent above it: all of them carry the job's id."""
    code = (
        "import subprocess, sys, os;"
        f"hook = subprocess.run([sys.executable, '-m', 'hilgate.agent.cleanup', '--job', {host.job!r}],"
        " capture_output=True, text=True);"
        "print('survived', hook.returncode, hook.stdout, hook.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BUILDKITE_JOB_ID": host.job, "PYTHONPATH": "ci"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["survived", "0"]


def test_an_empty_job_has_no_processes(host: Host) -> None:
    server = host.start(WAITS, job="")
    assert cleanup.end_job("") == cleanup.Ended([], [])
    assert host.alive(server.pid)


def test_a_process_of_the_same_number_started_later_is_another(host: Host) -> None:
    server = host.start(WAITS)
    process = processes.read(paths.PROC, server.pid)
    assert process is not None
    earlier = processes.Process(process.pid, process.parent, process.session, "S", process.started - 1, process.name)
    cleanup._send(earlier, signal.SIGKILL, paths.PROC)
    time.sleep(0.05)
    assert host.alive(server.pid)


DOCKER = """#!/bin/sh
echo "$*" >> {folder}/docker.log
case "$1" in
  ps) {ps} ;;
  rm) {rm} ;;
esac
"""


def docker(folder: Path, *, ps: str, rm: str) -> list[str]:
    (folder / "docker").write_text(DOCKER.format(folder=folder, ps=ps, rm=rm))
    (folder / "docker").chmod(0o755)
    return []


def test_the_jobs_containers_are_stopped_and_removed(host: Host, tmp_path: Path) -> None:
    (tmp_path / "left").write_text("c0ffee\n")
    docker(tmp_path, ps=f"while read -r id; do echo $id; done < {tmp_path}/left", rm=f": > {tmp_path}/left")
    done = host.end()
    assert (done.ended, done.problems) == (["container c0ffee"], [])
    told = (tmp_path / "docker.log").read_text().splitlines()
    assert told[0] == f"ps --all --quiet --filter=label=hilgate.job={host.job}"
    assert told[1:3] == ["stop --time=1 c0ffee", "rm --force --volumes c0ffee"]


def test_a_container_that_stays_is_named(host: Host, tmp_path: Path) -> None:
    docker(tmp_path, ps="echo c0ffee", rm="exit 1")
    assert host.end().problems == [f"container c0ffee of job {host.job} does not end"]


def test_a_docker_that_does_not_answer_is_named(host: Host, tmp_path: Path) -> None:
    docker(tmp_path, ps="echo Cannot connect to the Docker daemon >&2; exit 1", rm="exit 1")
    assert host.end().problems == [
        f"the containers of job {host.job} cannot be listed: Cannot connect to the Docker daemon"
    ]


def test_a_cancelled_job_gets_less_time() -> None:
    assert cleanup.grace({}) == cleanup.GRACE_SECONDS
    assert cleanup.grace({"BUILDKITE_JOB_CANCELLED": "true"}) == cleanup.CANCELLED_GRACE_SECONDS
