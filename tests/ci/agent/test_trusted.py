# SPDX-License-Identifier: Apache-2.0
"""Honest builds of every kind, from plan to verdict, with `hilgate` as agents have it; where its code comes from."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.forks import BASE, project
from support.nodes import ROOT
from support.plans import git

from hilgate.agent import host, trusted

if TYPE_CHECKING:
    from pathlib import Path

OURS = "https://github.com/acme/acme"
BUILDS = {
    "pull request": {},
    "pull request of a fork": {"HILGATE_DISPOSABLE": "1"},
    "branch": {"BUILDKITE_PULL_REQUEST": "false"},
    "merge queue": {"BUILDKITE_PULL_REQUEST": "false", "BUILDKITE_MERGE_QUEUE_BASE_BRANCH": "main"},
    "default branch": {"BUILDKITE_PULL_REQUEST": "false", "BUILDKITE_BRANCH": "main"},
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("build", BUILDS)
def test_an_honest_build_passes_from_plan_to_verdict(tmp_path: Path, build: str) -> None:
    change = project(tmp_path)
    change.write("tests/test_b.py", "def test_b():\n    assert True\n")
    change.commit()
    fork = build.endswith("fork")
    env = {
        **{name: os.environ[name] for name in ("PATH", "HOME")},
        **change.env(fork=fork, BUILDKITE_JOB_ID="0193-job", TMPDIR=str(tmp_path)),
        **BUILDS[build],
        "BUILDKITE_MERGE_QUEUE_BASE_COMMIT": git(change.ours, "rev-parse", "main"),
        "BUILDKITE_REPO": OURS,
        "BUILDKITE_PULL_REQUEST_REPO": "https://github.com/somebody/acme" if fork else OURS,
        # What the forge serves at that address.
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{change.ours}.insteadOf",
        "GIT_CONFIG_VALUE_0": OURS,
    }
    if build == "default branch":
        git(change.ours, "config", "receive.denyCurrentBranch", "ignore")
        git(change.theirs, "push", "-q", "origin", "HEAD:main")

    def hilgate(*words: str) -> subprocess.CompletedProcess[str]:
        command = [ROOT / "ci/bin/hilgate", *words]
        return subprocess.run(command, cwd=change.theirs, env=env, capture_output=True, text=True, check=False)

    made = hilgate("plan", "--profile", "pr", "--write", "results/plan.json")
    assert made.returncode == 0, made.stderr
    plan = json.loads((change.theirs / "results/plan.json").read_text())
    assert plan["fork"] is fork
    assert plan["changed_files"] == ([] if build == "default branch" else ["tests/test_b.py"])
    assert bool(plan["loosened"]) is False
    assert hilgate("pipeline", "--plan", "results/plan.json").stdout.startswith("steps:\n")
    # The agent downloads the plan into the checkout of the job, whose results it uploads; here they are one folder.
    ran = hilgate("job", "one-cpu", "--plan", "results/plan.json", "--results", "results/jobs/one-cpu")
    assert ran.returncode == 0, ran.stderr
    judged = hilgate("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
    assert judged.returncode == 0, judged.stdout + judged.stderr
    verdict = json.loads((change.theirs / "results/verdict.json").read_text())
    assert (verdict["outcome"], verdict["commit"]) == ("pass", git(change.theirs, "rev-parse", "HEAD"))
    assert len(list(tmp_path.glob("hilgate-trusted-0193-job-*"))) == 4


def test_the_last_hook_removes_the_copies_of_its_own_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    for job in ("one", "two"):
        (tmp_path / f"{trusted.PREFIX}{job}-x" / "ci").mkdir(parents=True)
    assert host.main(["cleanup", "--job", "one"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{trusted.PREFIX}two-x"]


def test_a_merge_base_without_hilgate_is_served_by_the_agents_clone(tmp_path: Path) -> None:
    change = project(tmp_path)
    assert "python_path" not in BASE["ci/project.yaml"]
    base = git(change.ours, "rev-parse", "main")
    assert trusted.copy_code(change.theirs, base, tmp_path) == ROOT / "ci/hilgate"


def test_a_shallow_clone_that_has_no_common_history_is_refused_in_words(tmp_path: Path) -> None:
    change = project(tmp_path)
    git(change.theirs, "checkout", "-q", "--orphan", "alone")
    git(change.theirs, "commit", "-qm", "alone")
    env = {**os.environ, **change.env(fork=False)}
    done = subprocess.run(
        [ROOT / "ci/bin/hilgate", "plan"], cwd=change.theirs, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "git merge-base failed" in done.stderr) == (5, True)
