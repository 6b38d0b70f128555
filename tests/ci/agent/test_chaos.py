# SPDX-License-Identifier: Apache-2.0
"""A bad night, one event a test: what the job reports, what is left, and whether the host heals by itself.

With `HILGATE_REAL_AGENT` a real buildkite-agent runs the jobs, from `start` to the last hook.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest
from support.chaos import KEY, Night, night

from agent_host import host
from hilgate.buildkite.steps import RETRY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RETRIED = {str(rule.exit_status) for rule in RETRY.automatic or () if rule.exit_status is not None}
REASONS = {rule.signal_reason for rule in RETRY.automatic or ()} - {None}
RUNS_ON = "sleep 600"
RESULTS = f"results/jobs/{KEY}/results.jsonl"


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Night]:
    """A host whose agent has started."""
    with night(tmp_path) as made:
        made.start()
        yield made


def inside(chaos: Night, command: str = "", **variables: str) -> str:
    """A job whose container runs and does not end; its id."""
    chaos.inside(RUNS_ON)
    job = chaos.offer(command, **variables)
    chaos.until(lambda: list(chaos.containers.iterdir()), job=job)
    return job


def test_an_honest_job_leaves_its_results_and_nothing_else(chaos: Night) -> None:
    job = chaos.offer()
    assert chaos.ends(job)["exit_status"] == "0"
    names = {"health-before.json", "health-after.json", "results.jsonl"}
    assert set(chaos.buildkite.uploaded[job]) == {f"results/jobs/{KEY}/{name}" for name in names}
    assert (chaos.left(), chaos.buildkite.pauses) == ([], [])
    text = (chaos.textfile / "hilgate-host-1.prom").read_text()
    assert 'hilgate_node_fit{agent="host-1",queue="amd-cpu"} 1\n' in text
    assert 'hilgate_jobs_total{agent="host-1",queue="amd-cpu",ending="answered"} 1\n' in text


def test_a_cancelled_job_leaves_nothing(chaos: Night) -> None:
    job = inside(chaos)
    chaos.buildkite.cancelled.add(job)
    assert chaos.ends(job)["signal_reason"] == "cancel"
    assert (chaos.left(), chaos.buildkite.pauses) == ([], [])


def test_a_restart_as_documented_ends_the_job_with_its_hooks_and_uploads(chaos: Night) -> None:
    """The signal is that of the unit."""
    job = inside(chaos)
    assert chaos.agent is not None
    unit = (host.Path(__file__).parents[3] / "ci/agent/buildkite-agent@.service").read_text()
    (name,) = re.findall(r"^KillSignal=(\w+)$", unit, re.MULTILINE) or ["SIGTERM"]
    began = time.monotonic()
    chaos.agent.send_signal(signal.Signals[name])
    ended = chaos.ends(job)
    assert ended["signal_reason"] == "agent_stop"
    assert ended["signal_reason"] in REASONS, "another agent takes the job"
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert chaos.agent.wait(60) is not None
    assert time.monotonic() - began < int(patience), "systemd would have killed both"
    assert RESULTS in chaos.buildkite.uploaded[job]
    assert chaos.left() == []


def test_what_a_killed_agent_leaves_is_ended_before_it_starts_again(chaos: Night) -> None:
    """`kill -9`, a crash, the machine's own end: no hook ran."""
    job = inside(chaos)
    container = host.read_process(host.PROC, chaos.pid_of_container())
    chaos.kill()
    kinds = {name.split(job)[0] for name in chaos.left() if job in name}
    assert kinds == {"hilgate-", "hilgate-job-", "hilgate-trusted-"}
    done = chaos.reap()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"ended container hilgate-{job} of job {job}\n" in done.stdout
    assert chaos.left() == []
    assert container is not None
    assert not host._lives(container)
    chaos.inside("true")
    chaos.start()
    assert chaos.runs() == "0"


def test_the_next_job_ends_what_a_killed_one_left(chaos: Night) -> None:
    """The executor alone dies (the kernel ran out of memory), so no unit is started again and no timer has run."""
    job = inside(chaos)
    chaos.kill_executor()
    assert chaos.ends(job)["exit_status"] in RETRIED
    assert job in " ".join(chaos.left())
    chaos.inside("true")
    again = chaos.offer()
    assert chaos.ends(again)["exit_status"] == "0"
    assert f"ended container hilgate-{job} of job {job}" in chaos.log(again)
    assert chaos.left() == []


def test_the_reaper_leaves_a_job_that_runs_alone(chaos: Night) -> None:
    job = inside(chaos)
    before = chaos.left()
    assert chaos.reap().stdout == ""
    assert chaos.left() == before
    chaos.buildkite.cancelled.add(job)
    chaos.ends(job)


def test_a_killed_job_is_run_elsewhere(chaos: Night) -> None:
    """Python of `hilgate job` is killed: 137, 255 as another agent says it. Nothing of it stays."""
    job = inside(chaos)
    for pid, line in chaos.processes_of(job).items():
        if f"__main__.py job {KEY}" in line:
            os.kill(pid, signal.SIGKILL)
    assert chaos.ends(job)["exit_status"] in {"137", "255"}
    assert {"137", "255"} <= RETRIED
    assert chaos.left() == []


def test_a_dead_docker_takes_the_agent_out_at_its_first_job(chaos: Night) -> None:
    (chaos.folder / "docker-dead").touch()
    assert chaos.runs() == "75"
    (note,) = chaos.buildkite.pauses
    assert note.startswith("the Docker daemon does not answer: docker ended with status 1: Cannot connect")


@pytest.mark.parametrize(
    "lock", ["index.lock", "refs/remotes/origin/main.lock", "refs/hilgate/base.lock", "config.lock"]
)
def test_a_lock_that_a_killed_git_left_in_a_checkout_stops_no_job(chaos: Night, lock: str) -> None:
    """The agent makes a checkout anew where git fails in it; what decides asks a repository of its own."""
    assert chaos.runs() == "0"
    left = chaos.builds / "host-1/org/pipeline/.git" / lock
    left.parent.mkdir(exist_ok=True)
    left.touch()
    chaos.commit()
    assert chaos.runs() == "0"
    assert chaos.buildkite.pauses == []


def test_three_fast_endings_without_a_verdict_take_the_agent_out_and_say_why(chaos: Night) -> None:
    for _ in range(2):
        assert chaos.runs("exit 5") == "5"
    assert chaos.runs() == "0", "a verdict between them starts the count again"
    for number in range(3):
        assert chaos.buildkite.pauses == [], number
        assert chaos.runs("exit 5") == "5"
    (note,) = chaos.buildkite.pauses
    assert note.startswith("3 jobs in a row ended within 120 s without a verdict: job ")
    assert ": command ended with 5" in note
    text = (chaos.textfile / "hilgate-host-1.prom").read_text()
    assert 'hilgate_node_fit{agent="host-1",queue="amd-cpu"} 0\n' in text
    assert 'ending="without a verdict"} 5\n' in text
    chaos.buildkite.pauses.clear()  # somebody resumes it, or Buildkite after an hour
    assert chaos.runs("exit 5") == "5"
    assert len(chaos.buildkite.pauses) == 1, "one more is enough"


def test_failures_of_changes_and_what_a_fork_brings_pause_nothing(chaos: Night) -> None:
    fork = {"BUILDKITE_PULL_REQUEST": "7", "BUILDKITE_PULL_REQUEST_REPO": "https://example.invalid/fork/hilgate"}
    for status in ("1", "6", "3", "4"):
        assert chaos.runs(f"exit {status}") == status
    commit = chaos.link()
    for _ in range(3):  # refused by the guard
        job = chaos.offer("true", BUILDKITE_COMMIT=commit, **fork)
        assert chaos.ends(job)["exit_status"] == "5"
        assert "changes what runs on the agents' hosts: 'link'" in chaos.log(job)
    chaos.inside("exit 75")
    for _ in range(3):  # what a container says is the change's
        assert chaos.runs() == "75"
    assert chaos.buildkite.pauses == []


def test_jobs_that_end_before_any_hook_take_the_agent_out(chaos: Night) -> None:
    """As on a full disk, where the agent cannot write the script of a hook and the job is a 1 in no time."""
    state = chaos.folder / "state/endings-host-1.json"
    for _ in range(3):
        job = chaos.offer("sleep 600", BUILDKITE_ARTIFACT_PATHS="")
        chaos.until(lambda job=job: "sleep 600" in str(chaos.processes_of(job)), job=job)
        chaos.kill_executor()
        chaos.ends(job)
        assert job in state.read_text()
    refused = chaos.offer()
    ended = chaos.ends(refused)
    assert ended["signal_reason"] == "agent_refused"
    assert "agent_refused" in REASONS
    (note,) = chaos.buildkite.pauses
    assert "was killed, or ended before any hook could run" in note


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"HILGATE_MIN_ROOM_MIB": "999999999"}, r"\d+ MiB free for the job's own files in .*; at least 999999999"),
        ({"TMPDIR": "/proc"}, "the job's own files cannot be written in /proc: "),
    ],
    ids=["too little room", "nothing can be written"],
)
def test_without_room_for_its_own_files_no_job_is_taken(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    """Nor is one lost: the agent writes a job's variables elsewhere, or it would end before its first hook."""
    with night(tmp_path) as chaos:
        chaos.env |= settings
        chaos.start()
        assert chaos.ends(chaos.offer())["signal_reason"] == "agent_refused"
        (note,) = chaos.buildkite.pauses
        assert re.match(words, note)


@pytest.mark.parametrize(("command", "status"), [("true", "75"), ("exit 1", "1"), ("exit 6", "6")])
def test_a_job_that_passed_is_no_red_because_its_upload_failed(chaos: Night, command: str, status: str) -> None:
    """The agent alone would make it a 1, which nothing retries. A failure stays one: what is missing is red."""
    chaos.buildkite.refused = "/artifacts"
    job = chaos.offer(f"mkdir -p results/jobs/{KEY} && echo x > {RESULTS} && {command}")
    assert chaos.ends(job)["exit_status"] == status
    assert "75" in RETRIED
    assert "1" not in RETRIED
    assert "results of this job did not arrive" in chaos.log(job)
    assert any(note.startswith("results cannot be uploaded") for note in chaos.buildkite.pauses)
