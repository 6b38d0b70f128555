"""Jobs that are stopped, that hang, and that run on the host itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.agent import CPU, KEY, SECRET

from hilgate.agent import job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_stops_the_container_and_keeps_its_results(agent, number):
    agent.docker(seconds=60)
    (agent.checkout / "ci").symlink_to(Path(job.__file__).parents[2])
    words = [
        sys.executable,
        "-m",
        "hilgate.agent.job",
        KEY,
        "--plan",
        "results/plan.json",
        "--results",
        f"results/jobs/{KEY}",
    ]
    env = {**agent.env, "PYTHONPATH": "ci", "TMPDIR": str(agent.bin.parent)}
    with subprocess.Popen(words, cwd=agent.checkout, env=env, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 20
        while not (agent.bin / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(number)
        assert child.wait(20) == 130
        assert f"ended: {number.name}" in child.stderr.read()
    assert [call[0] for call in agent.calls()][-2:] == ["stop", "rm"]
    assert (agent.results / "results.jsonl").exists()


SEEN = """#!/bin/sh
printf '%s\\n' "$*" > "$(dirname "$0")/seen"
env >> "$(dirname "$0")/seen"
exit 6
"""


def test_a_step_without_an_image_runs_on_the_host_with_named_variables_only(agent, monkeypatch):
    agent.program("hilgate", SEEN)
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    assert seen.startswith(
        f"run {CPU} --plan {agent.checkout}/results/plan.json --results {agent.checkout}/results/jobs/{CPU}\n"
    )
    assert f"HF_TOKEN={SECRET}" in seen
    assert "ACCESS_TOKEN" not in seen
    assert agent.calls() == []


def test_a_fork_runs_on_a_host_only_where_the_machine_is_thrown_away(agent, monkeypatch, capsys):
    agent.program("hilgate", SEEN)
    agent.plan(fork=True)
    assert agent.run(monkeypatch, CPU) == 5
    assert "does not run on this host itself" in capsys.readouterr().err
    agent.env["HILGATE_DISPOSABLE"] = "1"
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    assert SECRET not in seen
    assert f"\nHOME={agent.bin.parent}\n" not in seen


def test_a_host_without_hilgate_cannot_run_it(agent, monkeypatch):
    assert agent.run(monkeypatch, CPU) == 5
