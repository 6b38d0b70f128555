# SPDX-License-Identifier: Apache-2.0
"""What a build is compared with, looked up in a repository of the host's own.

A checkout is where jobs work: whatever got into its `.git` would be read as settings, some of which are commands. So
the host takes nothing but objects from it, which are named by their contents, and asks its own repository.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_host import clone, host
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

QUEUE = "gh-readonly-queue"
"""What GitHub's merge queue calls its branches: `gh-readonly-queue/<branch>/pr-<number>-<commit>`."""

REF, DEFAULT_REF, OWN_REF, QUEUE_REFS = (f"refs/hilgate/{name}" for name in ("base", "default", "own", "queue"))
RELEASE_BRANCH = re.compile(r"release/[0-9]+(?:\.[0-9]+)*")
"""Branches of patch releases: a release build of one is planned whole, as one of the default branch is."""


@dataclass(frozen=True)
class BaseComparison:
    """What a build is: the change between a base and HEAD, or the default branch itself."""

    kind: str
    """pull request, merge queue, branch, release branch or default branch: all but the branches post the required
    status. A release branch is one only in a release build; in others it is a branch."""
    ref: str
    """The default branch, or the commit that a merge queue built on."""


def compared(env: Mapping[str, str]) -> BaseComparison:
    """What a build is compared with, by Buildkite's variables.

    Raises:
        CannotRunHereError: They do not say.
    """
    default, branch = env.get("BUILDKITE_PIPELINE_DEFAULT_BRANCH", ""), env.get("BUILDKITE_BRANCH", "")
    # Whatever a pull request wants to be merged into: its author can push such a branch, and post on the same commit.
    if env.get("BUILDKITE_PULL_REQUEST", "false") != "false":
        comparison = BaseComparison("pull request", default)
    elif env.get("BUILDKITE_MERGE_QUEUE_BASE_BRANCH"):
        comparison = BaseComparison("merge queue", env.get("BUILDKITE_MERGE_QUEUE_BASE_COMMIT", ""))
    elif default and branch == default:
        comparison = BaseComparison("default branch", default)
    elif RELEASE_BRANCH.fullmatch(branch) and env.get("HILGATE_FLOW") == "release":
        comparison = BaseComparison("release branch", default)
    else:
        comparison = BaseComparison("branch", default)
    wrong = default.startswith("-") or (
        comparison.kind == "merge queue" and not host.FULL_SHA.fullmatch(comparison.ref)
    )
    if not comparison.ref or not default or wrong:
        raise CannotRunHereError(
            f"this build of a {comparison.kind} does not say what it is compared with",
            where=f"BUILDKITE_BRANCH={branch!r}, base {comparison.ref!r}",
            remedy="see the default branch of the pipeline; build a change as a pull request",
        )
    return comparison


def own_repository(checkout: Path, folder: Path) -> Path:
    """A repository below `folder` at the checkout's HEAD, without files; it reads the checkout's objects, and no more.

    Raises:
        CannotRunHereError: `checkout` is no git checkout.
    """
    head = host.git(checkout, "rev-parse", "--verify", "HEAD^{commit}").strip()
    kind = host.git(checkout, "rev-parse", "--show-object-format").strip()
    objects, shallow = (
        checkout / host.git(checkout, "rev-parse", "--git-path", name).strip() for name in ("objects", "shallow")
    )
    place = folder / "repository"
    host.git(folder, "init", "--quiet", "--template=", f"--object-format={kind}", str(place))
    alternates = place / ".git/objects/info/alternates"
    alternates.parent.mkdir(exist_ok=True)
    alternates.write_text(f"{objects.resolve()}\n", encoding="utf-8")
    if shallow.is_file():
        shutil.copyfile(shallow, place / ".git/shallow")
    host.git(place, "update-ref", "--no-deref", "HEAD", head)
    return place


def fill(place: Path) -> None:
    """Put the files of HEAD into a repository of `own_repository`."""
    host.git(place, "reset", "--quiet", "--hard", "HEAD")


def merge_base(place: Path, env: Mapping[str, str]) -> str:
    """Full sha of the merge base of HEAD and what the build is compared with; HEAD's own on the default branch.

    Args:
        place: A repository of `own_repository`; what is fetched goes there.
        env: Buildkite's variables, and those of the host.

    Raises:
        CannotRunHereError: The build says nothing to compare with, git cannot fetch it or knows no common history, a
            build that says that it is of the default branch, of a release branch or of a merge queue is not, the
            merge base never was the head of the default branch, or it is older than the clone allows.
    """
    base = compared(env)
    default = env["BUILDKITE_PIPELINE_DEFAULT_BRANCH"]
    _fetch(place, env, f"+refs/heads/{default}:{DEFAULT_REF}")
    head = host.git(place, "rev-parse", "HEAD").strip()
    if base.kind == "merge queue":
        _fetch(place, env, f"+{base.ref}:{REF}")
        if why := _no_merge_queue(place, env, base.ref, head):
            raise CannotRunHereError(
                f"this build says that it is of a merge queue, and {why}",
                where=f"BUILDKITE_BRANCH={env.get('BUILDKITE_BRANCH', '')!r}, base {base.ref[:12]}",
                remedy="let the queue start it; build a change as a pull request",
            )
    else:
        host.git(place, "update-ref", REF, DEFAULT_REF)
    commit = host.git(place, "merge-base", REF, head).strip()
    own, on_it = base.ref, base.kind != "default branch" or commit == head
    if base.kind == "release branch":
        own = env["BUILDKITE_BRANCH"]
        _fetch(place, env, f"+refs/heads/{own}:{OWN_REF}")
        on_it = _was_head(place, OWN_REF, head)
    if not on_it:
        raise CannotRunHereError(
            f"this commit is not on {own}, of which the build says that it is",
            where=str(place),
            remedy="build it as a pull request, or under the name of its own branch",
        )
    own_clone = clone.repository(env)
    if base.kind != "merge queue" and not _was_head(place, DEFAULT_REF, commit, rebased=clone.may_rebase(own_clone)):
        raise CannotRunHereError(
            f"the change begins at {commit[:12]}, which never was the head of {default}",
            where=f"git rev-list --first-parent {default}",
            remedy=f"git fetch; rebase the change onto {default}, or merge {default} into it; push",
        )
    oldest = clone.oldest_base(own_clone)
    if oldest and not _has(place, oldest):
        raise CannotRunHereError(
            f"no change may begin before {oldest[:12]}, and this repository has no such commit",
            where=str(own_clone / clone.OLDEST_BASE_FILE),
            remedy=f"see {clone.REPOSITORY} of this agent, which names the clone of the repository that it serves",
        )
    if oldest and not _contains(place, commit, oldest):
        raise CannotRunHereError(
            f"the change begins at {commit[:12]}, which is older than {oldest[:12]}: what decided then is not safe now",
            where=clone.OLDEST_BASE_FILE,
            remedy=f"rebase the change onto {default}",
        )
    return commit


def _fetch(place: Path, env: Mapping[str, str], what: str) -> None:
    host.git(place, "fetch", "--quiet", "--no-tags", env.get("BUILDKITE_REPO", ""), what)


def _has(place: Path, commit: str) -> bool:
    """Whether a repository knows a commit, a full sha."""
    return not host.run(("git", "cat-file", "-e", f"{commit}^{{commit}}"), host.GIT_SECONDS, cwd=place).failure


def _contains(place: Path, commit: str, other: str) -> bool:
    """Whether the history of `commit` has `other`, a full sha; not when this repository does not know it."""
    return _has(place, other) and not host.git(place, "rev-list", "--max-count=1", other, f"^{commit}").strip()


def _was_head(place: Path, ref: str, commit: str, *, rebased: bool = False) -> bool:
    """Whether a branch once pointed at a commit that this repository has, by the first parents of the branch.

    The history of a merge also has the commits of the merged branch, and no build has seen those as they are. Where
    changes are `rebased`, first parents have them too, and only the newest commit of the branch is known to count.
    """
    newer = host.git(place, "rev-list", "--first-parent", "--count", ref, f"^{commit}").strip()
    at_it = host.git(place, "rev-list", "--first-parent", f"--skip={newer}", "--max-count=1", ref).strip()
    return at_it == commit and (newer == "0" or not rebased)


def _no_merge_queue(place: Path, env: Mapping[str, str], base: str, head: str) -> str:
    """Why a build is not one that the merge queue of the default branch has started; empty when it is.

    A build that somebody starts by hand may bring the same variables: the remote's own branches of the queue, to which
    nobody pushes, must say the same.
    """
    default, branch = env["BUILDKITE_PIPELINE_DEFAULT_BRANCH"], env.get("BUILDKITE_BRANCH", "")
    if env["BUILDKITE_MERGE_QUEUE_BASE_BRANCH"] != default:
        return f"that is not the queue of {default}"
    if not branch.startswith(f"{QUEUE}/{default}/"):
        return f"its branch is none of {QUEUE}/{default}/"
    if base == head or not _contains(place, head, base):
        return "its base is not a commit before it"
    _fetch(place, env, f"+refs/heads/{branch}:{OWN_REF}")
    if not _was_head(place, OWN_REF, head):
        return f"its commit is not on {branch}"
    if _was_head(place, DEFAULT_REF, base, rebased=clone.may_rebase(clone.repository(env))):
        return ""
    _fetch(place, env, f"+refs/heads/{QUEUE}/{default}/*:{QUEUE_REFS}/*")
    tips = host.git(place, "for-each-ref", "--format=%(objectname)", f"{QUEUE_REFS}/").split()
    return "" if base in tips else f"its base never was the head of {default}, and is not ahead of it in the queue"
