# SPDX-License-Identifier: Apache-2.0
"""Where the code that decides comes from; honest builds of every kind are in tests/attacks/test_honest_builds.py."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from support.forks import BASE, project
from support.nodes import ROOT
from support.plans import git

from agent_host import base as comparisons
from agent_host import host, trusted
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def test_the_last_hook_removes_the_copies_of_its_own_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("rm", "chmod"):
        (programs / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(programs))
    for job in ("one", "two"):
        (tmp_path / f"{trusted.PREFIX}{job}-abcd_123" / "ci").mkdir(parents=True)
    assert host.main(["cleanup", "--job", "one"]) == 0
    assert [path.name for path in tmp_path.glob("hilgate-*")] == [f"{trusted.PREFIX}two-abcd_123"]


def test_a_base_without_hilgate_is_served_by_the_agents_clone(tmp_path: Path) -> None:
    change = project(tmp_path)
    assert "python_path" not in BASE["ci/project.yaml"]
    base = git(change.ours, "rev-parse", "main")
    assert trusted.copy_code(change.theirs, base, tmp_path) == ROOT / "ci"


def test_a_shallow_clone_without_history_is_refused_in_words(tmp_path: Path) -> None:
    change = project(tmp_path)
    git(change.theirs, "checkout", "-q", "--orphan", "alone")
    git(change.theirs, "commit", "-qm", "alone")
    done = change.hilgate("plan")
    assert (done.returncode, "git merge-base failed" in done.stderr) == (5, True)


def release_branch(tmp_path: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """`hilgate plan --profile release` of a build of release/0.1, which has a commit more than main had."""
    change = project(tmp_path)
    change.write("src/limits.toml", "floor = 0.96\n")
    change.write(".gitignore", "plan.json\n")
    change.commit()
    git(change.theirs, "push", "-q", "origin", "HEAD:release/0.1")
    git(change.ours, "commit", "-q", "--allow-empty", "-m", "main goes on")
    build = {"BUILDKITE_PULL_REQUEST": "false", "BUILDKITE_PULL_REQUEST_REPO": "", "BUILDKITE_BRANCH": "release/0.1"}
    done = change.hilgate("plan", "--profile", "release", "--write", "plan.json", **build | env)
    return done, change.theirs / "plan.json"


def test_a_release_of_a_release_branch_is_planned_whole(tmp_path: Path) -> None:
    done, plan = release_branch(tmp_path, HILGATE_FLOW="release")
    assert done.returncode == 0, done.stderr
    read = json.loads(plan.read_text())
    assert (read["base"], read["profile"], read["dirty"]) == (None, "release", False)
    assert [step["step"]["key"] for step in read["steps"]] == ["one"]


@pytest.mark.parametrize(
    "build", [{}, {"HILGATE_FLOW": "release", "BUILDKITE_BRANCH": "releases"}], ids=["no release", "another branch"]
)
def test_other_builds_of_it_are_compared_with_the_default_branch(tmp_path: Path, build: dict[str, str]) -> None:
    done, plan = release_branch(tmp_path, **build)
    assert done.returncode == 0, done.stderr
    assert json.loads(plan.read_text())["base"]


def test_a_release_of_a_commit_off_its_branch_is_refused(tmp_path: Path) -> None:
    change = project(tmp_path)
    git(change.ours, "branch", "release/0.1", "main")
    change.write("src/limits.toml", "floor = 0.01\n")
    change.commit()
    build = {"BUILDKITE_PULL_REQUEST": "false", "BUILDKITE_BRANCH": "release/0.1", "HILGATE_FLOW": "release"}
    with pytest.raises(CannotRunHereError, match=r"this commit is not on release/0\.1"):
        comparisons.merge_base(comparisons.own_repository(change.theirs, tmp_path), change.env(**build))


@pytest.mark.parametrize("lock", ["index.lock", "HEAD.lock", "config.lock", "refs/hilgate/base.lock"])
def test_a_stale_lock_of_git_in_a_checkout_stops_nothing(tmp_path: Path, lock: str) -> None:
    """The agent makes a checkout anew where git fails in it; what decides asks a repository of its own."""
    change = project(tmp_path)
    change.write("src/limits.toml", "floor = 0.96\n")
    change.commit()
    left = change.theirs / ".git" / lock
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()
    done = change.hilgate("plan", "--profile", "pr")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
