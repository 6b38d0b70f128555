# SPDX-License-Identifier: Apache-2.0
"""Who: whatever has once got a file into `.git` of a checkout on a host. What: settings of git that are commands.

What must happen: neither the guard nor what plans, judges and fetches asks git in a checkout: none of the commands
runs, and the answers are those of a clean one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.plans import git

from agent_host import trust

if TYPE_CHECKING:
    from pathlib import Path

    from support.forks import Project

CONFIG = """
[protocol "ext"]
    allow = always
[url "ext::{run}"]
    insteadOf = {ours}
[remote "{ours}"]
    uploadpack = {run}; git-upload-pack
[core]
    fsmonitor = {run}
    sshCommand = {run}
    pager = {run}
    alternateRefsCommand = {run}
    hooksPath = {hooks}
[diff]
    external = {run}
[filter "evil"]
    clean = {run}; cat
    smudge = {run}; cat
    required = true
[diff "evil"]
    textconv = {run}
    command = {run}
[alias]
    fetch = !{run}
"""


@pytest.fixture
def mark(change: Project) -> Path:
    """The file that any of the commands makes; the change has been committed before they got there."""
    change.write("src/limits.toml", "floor = 0.01\n")
    change.commit()
    mark = change.ours.parent / "executed"
    hooks = change.ours.parent / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (hooks / name).chmod(0o755)
    with (change.theirs / ".git/config").open("a") as file:
        file.write(CONFIG.format(run=f"touch {mark}", ours=change.ours, hooks=hooks))
    (change.theirs / ".git/info").mkdir(exist_ok=True)
    (change.theirs / ".git/info/attributes").write_text("* filter=evil diff=evil\n")
    return mark


def test_the_deciding_repository_is_written_by_nothing_else(change: Project, mark: Path) -> None:
    for words in (
        ["plan", "--profile", "pr", "--write", "results/plan.json"],
        ["judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results"],
        ["fetch", "--plan", "results/plan.json"],
    ):
        done = change.hilgate(*words)
        assert done.returncode in (0, 4), done.stderr
        assert not mark.exists(), words
    plan = json.loads((change.theirs / "results/plan.json").read_text())
    assert plan["merge_base"] == git(change.ours, "rev-parse", "main")
    assert [one["path"] for one in plan["protected_changes"]] == ["src/limits.toml"]


def test_the_guard_does_not_either(change: Project, mark: Path) -> None:
    assert "none of its 1 changed files" in trust.refuse_changed_hosts(str(change.theirs), change.env())
    assert not mark.exists()
