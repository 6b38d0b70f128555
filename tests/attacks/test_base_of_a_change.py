# SPDX-License-Identifier: Apache-2.0
"""Who: anybody who sends a change. What: the author chooses where it begins, and which branch it wants to be merged
into: a commit from before a defence, a branch whose rules are wider.

What must happen: a change that begins before the commit which the agents' clone names is refused, in all that decides
and in the guard; forks are held against the default branch, whichever branch they name.
"""

from __future__ import annotations

import pytest
from support.forks import Project, merge_base
from support.nodes import ROOT
from support.plans import git

from hilgate.agent import declared, trust
from hilgate.errors import CannotRunHereError, DeclarationError


def name_oldest(change: Project, commit: str) -> None:
    path = change.ours / declared.OLDEST_BASE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# why\n{commit}  # a word\n")


def defended(change: Project) -> str:
    """Main goes on by one commit, which the agents' clone names; returns the change, which begins before it."""
    change.write("src/kernel.py", "a = 1\n")
    theirs = change.commit()
    git(change.ours, "commit", "-q", "--allow-empty", "-m", "a defence")
    name_oldest(change, git(change.ours, "rev-parse", "main"))
    return theirs


@pytest.mark.parametrize("fork", [True, False])
def test_a_change_that_begins_before_a_defence_is_refused_until_it_is_rebased(change: Project, fork: bool) -> None:
    defended(change)
    env = change.env(fork=fork)
    with pytest.raises(CannotRunHereError, match="older than"):
        merge_base(change.theirs, env)
    if fork:
        with pytest.raises(CannotRunHereError, match="older than"):
            trust.refuse_changed_hosts(str(change.theirs), env)
    git(change.theirs, "pull", "-q", "--rebase", "origin", "main")
    assert merge_base(change.theirs, env) == git(change.ours, "rev-parse", "main")
    assert "none of its 1 changed files" in trust.refuse_changed_hosts(str(change.theirs), change.env())


def test_a_clone_that_names_what_nobody_has_lets_nothing_pass(change: Project) -> None:
    name_oldest(change, "0" * 40)
    with pytest.raises(CannotRunHereError, match="has no such commit"):
        merge_base(change.theirs, change.env())
    name_oldest(change, "main")
    with pytest.raises(DeclarationError, match="names no commit"):
        merge_base(change.theirs, change.env())


def test_this_repository_names_a_commit_of_its_own() -> None:
    oldest = declared.oldest_base(ROOT)
    assert len(oldest) == 40
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "false":
        git(ROOT, "merge-base", "--is-ancestor", oldest, "HEAD")


def test_a_fork_does_not_choose_the_rules_that_it_is_held_against(change: Project) -> None:
    git(change.ours, "checkout", "-q", "-b", "wide")
    (change.ours / "ci/project.yaml").write_text("forks_may_change: [src/, tests/, docker/]\n")
    git(change.ours, "commit", "-qam", "an experiment")
    git(change.ours, "checkout", "-q", "main")
    git(change.theirs, "fetch", "-q")
    git(change.theirs, "reset", "-q", "--hard", "origin/wide")
    change.write("docker/recipe.sh", "reboot\n")
    change.commit()
    for branch in ("wide", "main"):
        with pytest.raises(CannotRunHereError, match=r"docker/recipe\.sh"):
            trust.refuse_changed_hosts(str(change.theirs), change.env(BUILDKITE_PULL_REQUEST_BASE_BRANCH=branch))
