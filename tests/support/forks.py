# SPDX-License-Identifier: Apache-2.0
"""A repository with a clone that wants to change it, for attacks: a small project that hilgate plans for agents."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.plans import git

from agent_host import base

ROOT = Path(__file__).parents[2]

AREA = """\
area: a
title: A
why: It is an example.
paths: [src/, tests/, ci/]
steps:
  - {key: one, label: one, tests: [tests], devices: [cpu], minutes: 5}
"""
BASE = {
    "ci/agents.yaml": "devices:\n  cpu: {}\nqueues:\n  cpus: {device: cpu, gpus: 0, memory_gib: 8}\n",
    "ci/areas/a.yaml": AREA,
    "ci/project.yaml": "forks_may_change: [src/, tests/]\n",
    "ci/protected.yaml": 'rules:\n  - {paths: ["tests/test_*.py"], flag: deletion}\n',
    "src/limits.toml": "floor = 0.95\n",
    "tests/test_a.py": "def test_a():\n    assert True\n",
}


@dataclass
class Project:
    """The repository, and a clone of it on a branch of its own."""

    ours: Path
    theirs: Path

    def write(self, name: str, text: str) -> Path:
        """A file of the clone; its folder is made."""
        path = self.theirs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(self) -> str:
        """Commit everything in the clone; returns the sha."""
        git(self.theirs, "add", "-Af")
        git(self.theirs, "commit", "-qm", "theirs")
        return git(self.theirs, "rev-parse", "HEAD")

    def env(self, *, fork: bool = True, **more: str) -> dict[str, str]:
        """Buildkite's variables of a pull request of the clone into `main`."""
        theirs = str(self.theirs) if fork else str(self.ours)
        return {
            "BUILDKITE": "true",
            "BUILDKITE_REPO": str(self.ours),
            "BUILDKITE_PULL_REQUEST": "7",
            "BUILDKITE_PULL_REQUEST_REPO": theirs,
            "BUILDKITE_PULL_REQUEST_BASE_BRANCH": "main",
            "BUILDKITE_PIPELINE_DEFAULT_BRANCH": "main",
            "BUILDKITE_BRANCH": "theirs",
            "HILGATE_REPOSITORY": str(self.ours),
            **more,
        }

    def hilgate(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `hilgate` in the clone as a job of an agent does; by default of a branch of this repository."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.run(
            [ROOT / "ci/bin/hilgate", *words],
            cwd=self.theirs,
            env={**kept, "TMPDIR": str(self.ours.parent), **self.env(fork=False), **env},
            capture_output=True,
            text=True,
            check=False,
        )


def merge_base(checkout: Path, env: dict[str, str]) -> str:
    """What a host compares a build of a checkout with, as the start of `hilgate` on agents asks for it."""
    with tempfile.TemporaryDirectory() as folder:
        return base.merge_base(base.own_repository(checkout, Path(folder)), env)


def project(folder: Path, **files: str) -> Project:
    """Make one; `files` are added to `BASE`, with `__` for `/` in their names."""
    ours = folder / "ours"
    for name, text in {**BASE, **files}.items():
        (ours / name).parent.mkdir(parents=True, exist_ok=True)
        (ours / name).write_text(text)
    git(ours, "init", "-q", "-b", "main")
    git(ours, "add", "-A")
    git(ours, "commit", "-qm", "ours")
    subprocess.run(["git", "clone", "-q", str(ours), str(folder / "theirs")], check=True)
    git(folder / "theirs", "checkout", "-qb", "theirs")
    return Project(ours, folder / "theirs")
