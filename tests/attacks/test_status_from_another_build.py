# SPDX-License-Identifier: Apache-2.0
"""Who: anybody who can push a branch or press "New build". What: the commit of a pull request is built as something
that is compared with nothing or with a base of the attacker's own, and posts the required status on the same commit.

What must happen: only a pull request into the default branch, its merge queue and the default branch itself post; every
build is compared with the default branch; a build that says it is of the default branch has a commit of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import yaml
from support import flow, forks
from support.nodes import ROOT
from support.plans import git

from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from support.forks import Project


(NOTICE,) = yaml.safe_load((ROOT / ".buildkite/pipeline.yml").read_text())["steps"][-1]["notify"]
posts = partial(flow.posts, NOTICE["if"])


def test_only_changes_to_merge_into_the_default_branch_post() -> None:
    assert posts(base="main", number=7)
    assert posts(queue="main", branch="gh-readonly-queue/main/pr-7-0123")
    assert posts(branch="main")
    assert not posts(branch="feature")
    assert not posts(branch="gh-readonly-queue/main/pr-7-0123")
    assert not posts(base="evil-base", number=8)
    assert not posts(base="evil-base", number=8, branch="main"), "a fork's branch that is called main"


QUEUE = "gh-readonly-queue"
BRANCH = {"BUILDKITE_PULL_REQUEST": "false"}
BUILDS = {
    "pull request": {},
    "pull request into a base of its own": {"BUILDKITE_PULL_REQUEST_BASE_BRANCH": "evil"},
    "branch": BRANCH,
    "merge queue": {**BRANCH, "BUILDKITE_MERGE_QUEUE_BASE_BRANCH": "main", "BUILDKITE_BRANCH": f"{QUEUE}/main/pr-7"},
}


@pytest.mark.parametrize("build", BUILDS)
def test_each_build_is_compared_with_the_default_branch(change: Project, build: str) -> None:
    base = git(change.ours, "rev-parse", "main")
    git(change.ours, "branch", "evil", "main")
    change.write("src/limits.toml", "floor = 0.01\n")
    sha = change.commit()
    git(change.theirs, "push", "-qf", "origin", "HEAD:evil", f"HEAD:refs/heads/{QUEUE}/main/pr-7")
    more = {"BUILDKITE_MERGE_QUEUE_BASE_COMMIT": base} if build == "merge queue" else {}
    assert forks.merge_base(change.theirs, change.env(**BUILDS[build], **more)) == base != sha


@pytest.mark.parametrize(
    "env",
    [
        {**BRANCH, "BUILDKITE_BRANCH": "main"},
        {**BRANCH, "BUILDKITE_PIPELINE_DEFAULT_BRANCH": ""},
        {**BRANCH, "BUILDKITE_PIPELINE_DEFAULT_BRANCH": "--upload-pack=x"},
        {**BRANCH, "BUILDKITE_MERGE_QUEUE_BASE_BRANCH": "main", "BUILDKITE_MERGE_QUEUE_BASE_COMMIT": "main"},
        {**BRANCH, "BUILDKITE_MERGE_QUEUE_BASE_BRANCH": "main"},
    ],
    ids=["claims to be main", "nothing to compare with", "an option", "a name for a commit", "no base commit"],
)
def test_a_build_that_says_something_else_is_refused(change: Project, env: dict[str, str]) -> None:
    change.write("src/limits.toml", "floor = 0.01\n")
    change.commit()
    with pytest.raises(CannotRunHereError):
        forks.merge_base(change.theirs, change.env(**env))


def queued(change: Project) -> dict[str, str]:
    """A build of the merge queue, two entries long, whose own is the second: it is honest."""
    change.write("tests/test_b.py", "def test_b():\n    assert True\n")
    ahead = change.commit()
    change.write("tests/test_c.py", "def test_c():\n    assert True\n")
    change.commit()
    git(
        change.theirs,
        "push",
        "-qf",
        "origin",
        f"{ahead}:refs/heads/{QUEUE}/main/pr-7",
        f"HEAD:refs/heads/{QUEUE}/main/pr-8",
    )
    return change.env(
        **BRANCH,
        BUILDKITE_BRANCH=f"{QUEUE}/main/pr-8",
        BUILDKITE_MERGE_QUEUE_BASE_BRANCH="main",
        BUILDKITE_MERGE_QUEUE_BASE_COMMIT=ahead,
    )


def test_a_merge_queue_is_compared_with_what_is_ahead_or_merged(change: Project) -> None:
    env = queued(change)
    ahead = env["BUILDKITE_MERGE_QUEUE_BASE_COMMIT"]
    assert forks.merge_base(change.theirs, env) == ahead
    git(change.ours, "update-ref", "refs/heads/main", ahead)
    git(change.theirs, "push", "-q", "origin", f":refs/heads/{QUEUE}/main/pr-7")
    assert forks.merge_base(change.theirs, env) == ahead


def head(change: Project) -> str:
    return git(change.theirs, "rev-parse", "HEAD")


BY_HAND = {
    "the commit itself": lambda c: {"BUILDKITE_MERGE_QUEUE_BASE_COMMIT": head(c)},
    "a commit that is not before it": lambda c: {"BUILDKITE_MERGE_QUEUE_BASE_COMMIT": after(c)},
    "another branch": lambda _: {"BUILDKITE_BRANCH": "theirs"},
    "a queue of another branch": lambda c: {"BUILDKITE_MERGE_QUEUE_BASE_BRANCH": pushed(c, "evil")},
    "a branch of the queue that is another change's": lambda _: {"BUILDKITE_BRANCH": f"{QUEUE}/main/pr-7"},
    "a branch of the queue that is gone": lambda _: {"BUILDKITE_BRANCH": f"{QUEUE}/main/pr-9"},
    "a base that nobody has queued": lambda c: {"BUILDKITE_MERGE_QUEUE_BASE_COMMIT": between(c)},
}


def after(change: Project) -> str:
    sha = head(change)
    git(change.theirs, "commit", "-q", "--allow-empty", "-m", "after")
    later = head(change)
    git(change.theirs, "reset", "-q", "--hard", sha)
    pushed(change, "later", later)
    return later


def pushed(change: Project, name: str, commit: str = "HEAD") -> str:
    git(change.theirs, "push", "-qf", "origin", f"{commit}:refs/heads/{name}")
    return name


def between(change: Project) -> str:
    """A commit of the author's own, before the one that is built, on a branch of the author's own."""
    sha = head(change)
    pushed(change, "evil")
    git(change.theirs, "commit", "-q", "--allow-empty", "-m", "again")
    pushed(change, f"{QUEUE}/main/pr-8")
    return sha


@pytest.mark.parametrize("hand", BY_HAND)
def test_a_manual_build_with_merge_queue_variables_is_refused(change: Project, hand: str) -> None:
    env = queued(change)
    env |= BY_HAND[hand](change)
    with pytest.raises(CannotRunHereError, match=r"merge queue|git fetch failed"):
        forks.merge_base(change.theirs, env)


def test_the_default_branch_itself_is_built(change: Project) -> None:
    env = change.env(**BRANCH, BUILDKITE_BRANCH="main")
    assert forks.merge_base(change.theirs, env) == git(change.ours, "rev-parse", "main")
