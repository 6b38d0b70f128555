# SPDX-License-Identifier: Apache-2.0
"""Run hilgate as the merge base has it over a checkout that it only reads: no change decides on itself.

    hilgate plan | pipeline | judge | ... ARGUMENTS   on agents, `hilgate` is ci/bin/hilgate of the agent's own clone
    hilgate job KEY ...                               `hilgate.agent.job`: a step of the plan
    hilgate fetch --plan FILE                         `hilgate.agent.fetch`: what the jobs of a plan left
    hilgate flow [approve]                            prints the pipeline file that the build runs

The code is copied out of git into a folder that is no checkout, and started isolated (`python -I`): no file of the
change, no variable of a pipeline and no package of the user's stands before it. A merge base that holds no hilgate is
served by the agent's clone. A build that nothing can be compared with is refused.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hilgate.agent import declared, host
from hilgate.errors import CannotRunHereError, Exit, MisuseError, ending

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "hilgate-trusted-"
"""Of the copies' folders, followed by the job's id; the last hook of the job removes them."""

REF = "refs/hilgate/base"
OWN_REF = "refs/hilgate/own"
"""The branch that a build says it is of."""
FLOWS = ("pipeline", "rerun", "release", "watch")
RELEASE_BRANCH = re.compile(r"release/[0-9]+(?:\.[0-9]+)*")
"""Branches of patch releases: a release build of one is planned whole, as one of the default branch is."""
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True)
class Comparison:
    """What a build is: the change between a base and HEAD, or the default branch itself."""

    kind: str
    """pull request, merge queue, branch, release branch or default branch: all but the branches post the required
    status. A release branch is one only in a release build; in others it is a branch."""
    ref: str
    """What is fetched: the default branch, or the commit that a merge queue built on."""


def compared(env: Mapping[str, str]) -> Comparison:
    """What a build is compared with, by Buildkite's variables.

    Raises:
        CannotRunHereError: They do not say.
    """
    default, branch = env.get("BUILDKITE_PIPELINE_DEFAULT_BRANCH", ""), env.get("BUILDKITE_BRANCH", "")
    # Whatever a pull request wants to be merged into: its author can push such a branch, and post on the same commit.
    if env.get("BUILDKITE_PULL_REQUEST", "false") != "false":
        found = Comparison("pull request", default)
    elif env.get("BUILDKITE_MERGE_QUEUE_BASE_BRANCH"):
        found = Comparison("merge queue", env.get("BUILDKITE_MERGE_QUEUE_BASE_COMMIT", ""))
    elif default and branch == default:
        found = Comparison("default branch", default)
    elif RELEASE_BRANCH.fullmatch(branch) and env.get("HILGATE_FLOW") == "release":
        found = Comparison("release branch", default)
    else:
        found = Comparison("branch", default)
    wrong = not _COMMIT.fullmatch(found.ref) if found.kind == "merge queue" else found.ref.startswith("-")
    if not found.ref or wrong:
        raise CannotRunHereError(
            f"this build of a {found.kind} does not say what it is compared with",
            where=f"BUILDKITE_BRANCH={branch!r}, base {found.ref!r}",
            remedy="see the default branch of the pipeline; build a change as a pull request",
        )
    return found


def merge_base(checkout: Path, env: Mapping[str, str]) -> str:
    """Full sha of the merge base of HEAD and what the build is compared with; HEAD's own on the default branch.

    Raises:
        CannotRunHereError: The build says nothing to compare with, git cannot fetch it or knows no common history, or a
            build that says it is of the default branch, or a release of a release branch, is of another commit.
    """
    base = compared(env)
    source = base.ref if base.kind == "merge queue" else f"refs/heads/{base.ref}"
    sources = [f"+{source}:{REF}"]
    # The commit must be on the branch whose rules on the forge say who may push there.
    own, ref = (base.ref, REF) if base.kind == "default branch" else ("", "")
    if base.kind == "release branch":
        own, ref = env["BUILDKITE_BRANCH"], OWN_REF
        sources.append(f"+refs/heads/{own}:{OWN_REF}")
    host.git(checkout, "fetch", "--quiet", "--no-tags", env.get("BUILDKITE_REPO", "origin"), *sources)
    if own and (
        host.git(checkout, "merge-base", ref, "HEAD").strip() != host.git(checkout, "rev-parse", "HEAD").strip()
    ):
        raise CannotRunHereError(
            f"this commit is not on {own}, of which the build says that it is",
            where=str(checkout),
            remedy="build it as a pull request, or under the name of its own branch",
        )
    return host.git(checkout, "merge-base", REF, "HEAD").strip()


def copy_code(checkout: Path, commit: str, folder: Path) -> Path:
    """Copy a commit's hilgate into `folder`; returns where its package lies, or this one's where it holds none."""
    has = host.git(checkout, "ls-tree", "--name-only", commit, "--", declared.PROJECT_FILE).strip()
    text = host.git(checkout, "show", f"{commit}:{declared.PROJECT_FILE}") if has else ""
    for path in declared.words(text, "python_path"):
        name = f"{path.rstrip('/')}/hilgate/agent/trusted.py".removeprefix("./")
        if host.git(checkout, "ls-tree", "--name-only", commit, "--", name).strip():
            package, file = name.removesuffix("/agent/trusted.py"), folder / "hilgate.tar"
            host.git(checkout, "archive", "--format=tar", f"--output={file}", commit, "--", package)
            with tarfile.open(file) as archive:
                archive.extractall(folder)  # noqa: S202 - git made it, of a commit that is ours
            return folder / package
    return Path(__file__).resolve().parents[1]


def flow(checkout: Path, commit: str, env: Mapping[str, str], name: str = "") -> str:
    """The text of a pipeline file of a commit: the one that is named, or that the build's variables ask for.

    Raises:
        MisuseError: There is no such flow.
    """
    asked = "rerun" if env.get("HILGATE_MODELS") or env.get("HILGATE_IMAGE_FROM_BUILD") else env.get("HILGATE_FLOW")
    name = name or asked or FLOWS[0]
    if name not in {*FLOWS, "approve"}:
        raise MisuseError(f"there is no flow {name!r}", where="HILGATE_FLOW", remedy=f"take one of {', '.join(FLOWS)}")
    return host.git(checkout, "show", f"{commit}:.buildkite/{name}.yml")


def command(words: Sequence[str], checkout: Path, env: Mapping[str, str]) -> list[str]:
    """The command that does what `hilgate WORDS` asks for, with the code of the merge base.

    Raises:
        HilgateError: The build cannot be compared.
    """
    base = merge_base(checkout, env)
    package = copy_code(checkout, base, Path(tempfile.mkdtemp(prefix=f"{PREFIX}{env.get('BUILDKITE_JOB_ID', '')}-")))
    isolated = [sys.executable, "-I"]
    if words[:1] in (["job"], ["fetch"]):
        return [*isolated, str(package / "agent/__main__.py"), *words]
    whole = compared(env).kind in {"default branch", "release branch"}
    options = ["--base", base] if words[:1] == ["plan"] and not whole else []
    return [*isolated, str(package / "__main__.py"), *words, *options]


@ending
def main(words: list[str] | None = None) -> int:
    """Become what is asked for, or print the flow; the exit status is its own, or that of the refusal."""
    words, checkout = sys.argv[1:] if words is None else words, Path.cwd()
    if words[:1] != ["flow"]:
        _become(command(words, checkout, os.environ))
    sys.stdout.write(flow(checkout, merge_base(checkout, os.environ), os.environ, *words[1:2]))
    return int(Exit.PASS)


def _become(words: list[str]) -> NoReturn:
    """Replace this process, without what says to Python or hilgate where to look."""
    env = {name: value for name, value in os.environ.items() if not re.fullmatch("PYTHON.*|HILGATE_(BASE|ROOT)", name)}
    os.execve(words[0], words, env)  # noqa: S606 - no shell, and a list of our own words


if __name__ == "__main__":
    sys.exit(main())
