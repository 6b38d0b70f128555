# SPDX-License-Identifier: Apache-2.0
"""Who: anybody who sends a change. What: the author chooses where it begins, and which branch it wants to be merged
into: a commit from before a defence, a commit of a merged branch that no build has seen, a branch of wider rules.

What must happen: a change that begins before the commit which the agents' clone names, or at a commit that never was
the head of the default branch, is refused, in all that decides and in the guard; forks are held against the default
branch, whichever branch they name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.forks import Project, merge_base
from support.nodes import ROOT
from support.plans import git

from agent_host import clone, trust
from hilgate.errors import CannotRunHereError, DeclarationError

if TYPE_CHECKING:
    from pathlib import Path


def name_oldest(change: Project, commit: str) -> None:
    path = change.ours / clone.OLDEST_BASE_FILE
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
def test_a_change_from_before_a_defence_must_be_rebased(change: Project, fork: bool) -> None:
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
    oldest = clone.oldest_base(ROOT)
    assert len(oldest) == 40
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "false":
        git(ROOT, "merge-base", "--is-ancestor", oldest, "HEAD")


def test_a_fork_does_not_choose_the_rules_it_is_held_against(change: Project) -> None:
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


def merged(change: Project, *, rebase: bool = False) -> str:
    """Main gets a series that lowers a floor and raises it again; returns the commit with the low floor.

    The series is merged, so that only its end is a head of main, or rebased: then each commit is a first parent.
    """
    change.write("src/limits.toml", "floor = 0.01\n")
    change.write(".buildkite/pipeline.yml", "steps: [evil]\n")
    low = change.commit()
    git(change.theirs, "revert", "--no-edit", "HEAD")
    git(change.theirs, "push", "-q", "origin", "HEAD:side")
    git(change.ours, "merge", "-q", "--ff-only" if rebase else "--no-ff", "side")
    git(change.ours, "branch", "-qD", "side")
    git(change.theirs, "fetch", "-q")
    git(change.theirs, "reset", "-q", "--hard", low)
    change.write("src/kernel.py", "a = 1\n")
    change.commit()
    return low


@pytest.mark.parametrize("kind", ["fork", "branch", "no pull request"])
def test_a_change_based_on_a_merged_branch_is_refused(change: Project, kind: str) -> None:
    low = merged(change)
    assert git(change.theirs, "merge-base", "origin/main", "HEAD") == low
    env = change.env(fork=kind == "fork", **({"BUILDKITE_PULL_REQUEST": "false"} if kind == "no pull request" else {}))
    with pytest.raises(CannotRunHereError, match="never was the head of main"):
        merge_base(change.theirs, env)
    if kind == "fork":
        with pytest.raises(CannotRunHereError, match="never was the head of main"):
            trust.refuse_changed_hosts(str(change.theirs), env)
    done = change.hilgate("flow", **env)
    assert (done.returncode, "evil" in done.stdout) == (5, False)
    assert "rebase the change onto main, or merge main into it" in " ".join(done.stderr.split())


@pytest.mark.parametrize("remedy", [["rebase", "origin/main"], ["merge", "--no-edit", "origin/main"]], ids=" ".join)
def test_both_remedies_of_the_message_help(change: Project, remedy: list[str]) -> None:
    merged(change)
    git(change.theirs, *remedy)
    assert merge_base(change.theirs, change.env()) == git(change.ours, "rev-parse", "main")


def test_every_earlier_head_of_main_still_counts(change: Project) -> None:
    head = git(change.ours, "rev-parse", "main")
    merged(change)
    git(change.theirs, "reset", "-q", "--hard", head)
    change.write("src/kernel.py", "a = 1\n")
    change.commit()
    for number in range(2):
        git(change.ours, "commit", "-q", "--allow-empty", "-m", f"main goes on {number}")
    assert merge_base(change.theirs, change.env()) == head


def test_a_commit_of_a_merged_branch_is_not_built_as_main(change: Project) -> None:
    low = merged(change)
    git(change.theirs, "reset", "-q", "--hard", low)
    env = change.env(BUILDKITE_PULL_REQUEST="false", BUILDKITE_BRANCH="main")
    with pytest.raises(CannotRunHereError, match="never was the head of main"):
        merge_base(change.theirs, env)


@pytest.mark.parametrize("fits", [False, True])
def test_a_merge_queue_does_not_build_on_a_merged_branch(change: Project, fits: bool) -> None:
    low, branch = merged(change), "gh-readonly-queue/main/pr-7"
    if fits:
        git(change.theirs, "rebase", "-q", "origin/main")
    git(change.theirs, "push", "-q", "origin", f"HEAD:refs/heads/{branch}")
    base = git(change.ours, "rev-parse", "main") if fits else low
    env = change.env(
        BUILDKITE_PULL_REQUEST="false",
        BUILDKITE_BRANCH=branch,
        BUILDKITE_MERGE_QUEUE_BASE_BRANCH="main",
        BUILDKITE_MERGE_QUEUE_BASE_COMMIT=base,
    )
    if fits:
        assert merge_base(change.theirs, env) == base
        return
    with pytest.raises(CannotRunHereError, match="never was the head of main"):
        merge_base(change.theirs, env)


def declare_rebases(change: Project, *, queue: bool) -> None:
    settings = (ROOT / clone.SETTINGS / "github.tf").read_text()
    old, new = ('"SQUASH"', '"REBASE"') if queue else ('["squash"]', '["squash", "rebase"]')
    assert old in settings
    path = change.ours / clone.SETTINGS / "github.tf"
    path.parent.mkdir(parents=True)
    path.write_text(settings.replace(old, new))


@pytest.mark.parametrize("queue", [True, False])
def test_with_rebased_changes_only_the_newest_main_commit_counts(change: Project, queue: bool) -> None:
    low = merged(change, rebase=True)
    assert merge_base(change.theirs, change.env()) == low, "first parents alone cannot tell"
    declare_rebases(change, queue=queue)
    with pytest.raises(CannotRunHereError, match="never was the head of main"):
        merge_base(change.theirs, change.env())
    git(change.theirs, "rebase", "-q", "origin/main")
    assert merge_base(change.theirs, change.env()) == git(change.ours, "rev-parse", "main")


def test_settings_that_allow_rebase_are_refused(tmp_path: Path) -> None:
    assert not clone.may_rebase(ROOT)
    assert not clone.may_rebase(tmp_path), "whoever has no settings here is asked to allow squashes and merges alone"
    path = tmp_path / clone.SETTINGS / "github.tf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff")
    with pytest.raises(DeclarationError, match="cannot be read"):
        clone.may_rebase(tmp_path)
