# SPDX-License-Identifier: Apache-2.0
"""Commands end in time, and what a job left is ended while what belongs to anybody else survives."""

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

from agent_host import host

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
        process = host.read_process(host.PROC, pid)
        return process is not None and process.state != "Z"

    def end(self) -> host.Cleanup:
        return host.end_job(self.job, grace_seconds=0.3)

    def stop(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for pid in self.others:
            if self.alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise SystemExit(3)", "ended with status 3: no message"),
        ("import sys; sys.exit('\\033[2Jno')", r"ended with status 1: \x1b[2Jno"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "ended with status -6"),
        ("import time; time.sleep(60)", "did not answer within 0.5 s"),
        ("import os, time\nif os.fork(): time.sleep(60)\ntime.sleep(60)", "did not answer within 0.5 s"),
        (f"print('x' * {host.MAX_OUTPUT_BYTES})", f"printed more than {host.MAX_OUTPUT_BYTES} bytes"),
    ],
    ids=["status", "message", "signal", "hangs", "grandchild", "too much"],
)
def test_a_command_says_why_it_failed(code: str, failure: str) -> None:
    ran = host.run((sys.executable, "-S", "-c", code), 0.5 if "sleep" in code else 20.0)
    assert failure in ran.failure
    assert ran.failure.isprintable()


def test_a_command_that_is_not_there_was_not_started() -> None:
    ran = host.run(("/not/there",), 1.0)
    assert (ran.started, ran.failure) == (False, "/not/there cannot be started: No such file or directory")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Host]:
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}")  # no Docker
    started = Host()
    yield started
    started.stop()


def test_what_a_job_left_is_asked_to_end_and_then_killed(machine: Host, tmp_path: Path) -> None:
    note = tmp_path / "note"
    writes = (
        f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (open({str(note)!r}, 'w').close(), sys.exit()))"
    )
    left = [machine.start(code) for code in (WAITS, RESISTS, f"{writes}; {WAITS}")]
    # A child of a process of the job, in whose environment the job is not.
    child = f"subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}], env={{}}, stdout=subprocess.DEVNULL)"
    left.append(machine.start(f"import subprocess, sys, time; print({child}.pid, flush=True); time.sleep(60)"))
    began = time.monotonic()
    done = machine.end()
    assert time.monotonic() - began >= 0.3
    assert note.exists()
    pids = [*(process.pid for process in left), *machine.others]
    assert [machine.alive(pid) for pid in pids] == [False] * 5
    assert (sorted(int(line.split()[0]) for line in done.ended), done.problems) == (sorted(pids), [])


def test_an_orphan_of_the_jobs_session_is_ended(machine: Host) -> None:
    """Its parent has ended and its environment is gone, as with setproctitle; the session's first process remains."""
    between = (
        "import os, subprocess, sys;"
        f"print(subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}], env={{}}, stdout=-3, stderr=-3).pid)"
    )
    machine.start(
        "import subprocess, sys, time;"
        f"print(subprocess.run([sys.executable, '-S', '-c', {between!r}], capture_output=True, text=True).stdout,"
        " flush=True); time.sleep(60)"
    )
    orphan = host.read_process(host.PROC, machine.others[0])
    assert orphan is not None
    assert orphan.parent not in {process.pid for process in machine.started}
    machine.end()
    assert not machine.alive(orphan.pid)


def test_another_jobs_process_survives_even_below_ours(machine: Host) -> None:
    other = machine.start(WAITS, job=str(uuid.uuid4()))
    nobody = machine.start(WAITS, bare=True)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"  # only then is its environment its own
    child = f"[sys.executable, '-S', '-c', {code!r}], env={{'HILGATE_JOB_ID': 'another'}}"
    machine.start(f"import subprocess, sys, time; subprocess.Popen({child}); time.sleep(60)")
    assert host.end_job("") == host.Cleanup()
    assert len(machine.end().ended) == 1
    assert [machine.alive(pid) for pid in (other.pid, nobody.pid, *machine.others)] == [True] * 3


def test_a_zombie_is_neither_signalled_nor_reported(machine: Host) -> None:
    ended = machine.start("print('ready', flush=True)")
    while (process := host.read_process(host.PROC, ended.pid)) is not None and process.state != "Z":
        time.sleep(0.01)
    assert process is not None
    assert machine.end() == host.Cleanup()


def test_the_caller_and_its_ancestors_are_spared(machine: Host) -> None:
    """The hook, the agent above it: all of them carry the job's id."""
    code = (
        "import subprocess, sys, os;"
        f"hook = subprocess.run([sys.executable, '-m', 'agent_host.host', 'cleanup', '--job', {machine.job!r}],"
        " capture_output=True, text=True);"
        "print('survived', hook.returncode, hook.stdout, hook.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BUILDKITE_JOB_ID": machine.job, "PYTHONPATH": "ci"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["survived", "0"]


def test_a_process_of_the_same_number_started_later_is_another(machine: Host) -> None:
    server = machine.start(WAITS)
    process = host.read_process(host.PROC, server.pid)
    assert process is not None
    earlier = host.Process(process.pid, process.parent, process.session, "S", process.started - 1, process.name)
    host._send(earlier, signal.SIGKILL)
    time.sleep(0.05)
    assert machine.alive(server.pid)


DOCKER = """#!/bin/sh
echo "$*" >> {folder}/docker.log
case "$1" in
  ps) {ps} ;;
  rm) {rm} ;;
esac
"""


@pytest.mark.parametrize(
    ("ps", "rm", "ended", "problem"),
    [
        ("while read -r id; do echo $id; done < {folder}/left", ": > {folder}/left", ["container c0ffee"], ""),
        ("echo c0ffee", "exit 1", [], "container c0ffee of job {job} does not end"),
        (
            "echo no daemon >&2; exit 1",
            "exit 1",
            [],
            "the containers of job {job} cannot be listed: docker ended with status 1: no daemon",
        ),
    ],
    ids=["end", "stay", "are not known"],
)
def test_the_jobs_containers_are_removed_or_named(
    machine: Host, tmp_path: Path, ps: str, rm: str, ended: list[str], problem: str
) -> None:
    (tmp_path / "left").write_text("c0ffee\n")
    script = DOCKER.format(folder=tmp_path, ps=ps.format(folder=tmp_path), rm=rm.format(folder=tmp_path))
    (tmp_path / "docker").write_text(script)
    (tmp_path / "docker").chmod(0o755)
    done = machine.end()
    assert (done.ended, done.problems) == (ended, [problem.format(job=machine.job)] if problem else [])
    calls = (tmp_path / "docker.log").read_text().splitlines()
    assert calls[0] == f"ps --all --quiet --filter=label=hilgate.job={machine.job}"
    assert calls[1:3] in ([], ["stop --time=1 c0ffee", "rm --force --volumes c0ffee"])


def test_a_cancelled_job_gets_less_time() -> None:
    assert host.grace({}) == host.GRACE_SECONDS
    assert host.grace({"BUILDKITE_JOB_CANCELLED": "true"}) == host.CANCELLED_GRACE_SECONDS


def test_a_program_can_be_asked_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk an agent must still be able to say that it is full."""
    for folder in (tmp_path / "missing", Path("/proc")):
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        done = host.run(("sh", "-c", "echo out; echo err >&2; exit 3"), 20.0)
        assert (done.status, done.out, done.err) == (3, "out\n", "err\n")
