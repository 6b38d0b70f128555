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
from support import flow
from support.nodes import ROOT
from support.plans import git

from hilgate.agent import trusted
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from support.forks import Project


(NOTICE,) = yaml.safe_load((ROOT / ".buildkite/pipeline.yml").read_text())["steps"][-1]["notify"]
posts = partial(flow.posts, NOTICE["if"])


def test_only_what_somebody_wants_to_merge_into_the_default_branch_posts() -> None:
    assert posts(base="main", number=7)
    assert posts(queue="main", branch="gh-readonly-queue/main/pr-7-0123")
    assert posts(branch="main")
    assert not posts(branch="feature")
    assert not posts(branch="gh-readonly-queue/main/pr-7-0123")
    assert not posts(base="evil-base", number=8)
    assert not posts(base="evil-base", number=8, branch="main"), "a fork's branch that is called main"


BRANCH = {"BUILDKITE_PULL_REQUEST": "false"}
BUILDS = {
    "pull request": {},
    "pull request into a base of its own": {"BUILDKITE_PULL_REQUEST_BASE_BRANCH": "evil"},
    "branch": BRANCH,
    "merge queue": {**BRANCH, "BUILDKITE_MERGE_QUEUE_BASE_BRANCH": "main"},
}


@pytest.mark.parametrize("build", BUILDS)
def test_every_build_of_a_change_is_compared_with_the_default_branch(change: Project, build: str) -> None:
    base = git(change.ours, "rev-parse", "main")
    git(change.ours, "branch", "evil", "main")
    change.write("src/limits.toml", "floor = 0.01\n")
    sha = change.commit()
    git(change.theirs, "push", "-qf", "origin", "HEAD:evil")
    more = {"BUILDKITE_MERGE_QUEUE_BASE_COMMIT": base} if build == "merge queue" else {}
    assert trusted.merge_base(change.theirs, change.env(**BUILDS[build], **more)) == base != sha


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
        trusted.merge_base(change.theirs, change.env(**env))


def test_the_default_branch_itself_is_built(change: Project) -> None:
    env = change.env(**BRANCH, BUILDKITE_BRANCH="main")
    assert trusted.merge_base(change.theirs, env) == git(change.ours, "rev-parse", "main")
