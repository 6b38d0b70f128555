# SPDX-License-Identifier: Apache-2.0
"""Where the code that decides comes from; honest builds of every kind are in tests/attacks/test_honest_builds.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from support.forks import BASE, project
from support.nodes import ROOT
from support.plans import git

from hilgate.agent import host, trusted

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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
