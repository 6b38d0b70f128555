# SPDX-License-Identifier: Apache-2.0
"""Fixtures of attacks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.agent import agent  # noqa: F401 - a fixture
from support.flow import BRANCH, FILES, FORK, MAIN, SECRETS, Build, Machine, machine
from support.forks import Project, project
from support.plans import git

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def change(tmp_path: Path) -> Project:
    """A small repository and a clone that attacks it."""
    return project(tmp_path)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A host that serves a repository, and a clone that sends changes."""
    folder = tmp_path_factory.mktemp("host")
    change = project(folder, **FILES)
    return machine(folder, change.ours, change.theirs)


@pytest.fixture(scope="session")
def main(host: Machine) -> Build:
    """The build of main, whose image and history the others find."""
    return host.build(host.ours, git(host.ours, "rev-parse", "main"), **MAIN)


@pytest.fixture(scope="session")
def green(host: Machine, main: Build) -> dict[str, Build]:
    """Builds of a harmless change, of a fork and of a branch. The cluster has secrets, and GitHub takes no comment."""
    assert main.posted == 0, main.log()
    around = replace(host, secrets=SECRETS, refusal="HTTP 502")
    return {
        kind: around.build(host.clone, host.change("1.9 / 2"), **facts)
        for kind, facts in (("fork", FORK), ("branch", BRANCH))
    }
