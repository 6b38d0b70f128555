# SPDX-License-Identifier: Apache-2.0
"""Run hilgate as the merge base has it over a checkout that it only reads: no change decides on itself.

    hilgate plan | pipeline | judge | ... ARGUMENTS   on agents, `hilgate` is ci/bin/hilgate of the agent's own clone
    hilgate job KEY ...                               `agent_host.job`: a step of the plan
    hilgate fetch --plan FILE                         `agent_host.fetch`: what the jobs of a plan left
    hilgate approver                                  `agent_host.approver`: who approved the change
    hilgate flow [approve]                            prints the pipeline file that the build runs, or uploads

The code is copied out of git into a folder that is no checkout, and started isolated (`python -I`): no file of the
change, no variable of a pipeline and no package of the user's stands before it. A merge base that holds no hilgate is
served by the agent's clone. A build that nothing can be compared with is refused. All that asks git, here and in what
is started, asks a repository that nothing else writes to (`agent_host.base`).
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from agent_host import base, clone, host
from hilgate.errors import Exit, MisuseError, ending
from hilgate.names import PROJECT_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "hilgate-trusted-"
"""Begin of the names of the copies' folders, followed by the job's id; the last hook of the job removes them."""

FLOWS = ("pipeline", "rerun", "release", "waiting")
"""What a build may ask for by HILGATE_FLOW."""
OF_MAIN = frozenset({"waiting"})
"""Those with a secret that acts on other builds: the default branch's alone."""
UPLOADED = ("approve",)
"""What a verdict uploads."""


def copy_code(place: Path, commit: str, folder: Path) -> Path:
    """Copy a commit's hilgate and this package into `folder`; returns the folder that holds both.

    That is where these modules lie for a commit that lacks one of the two.
    """
    has = host.git(place, "ls-tree", "--name-only", commit, "--", PROJECT_FILE).strip()
    text = host.git(place, "show", f"{commit}:{PROJECT_FILE}") if has else ""
    for path in clone.project(text).python_path:
        inner = PurePosixPath(path)
        packages = [str(inner / "agent_host"), str(inner / "hilgate")]  # in git's order
        entries = [f"{package}/__main__.py" for package in packages]
        if host.git(place, "ls-tree", "--name-only", commit, "--", *entries).split() == entries:
            file = folder / "hilgate.tar"
            host.git(place, "archive", "--format=tar", f"--output={file}", commit, "--", *packages)
            with tarfile.open(file) as archive:
                archive.extractall(folder)  # noqa: S202 - git made it, of a commit that is ours
            return folder / inner
    return Path(__file__).resolve().parents[1]


def flow(place: Path, commit: str, env: Mapping[str, str], name: str = "") -> str:
    """The text of a pipeline file of a commit: the one that is named, or that the build's variables ask for.

    Raises:
        MisuseError: There is no such flow, or this build may not have it.
    """
    asked = "rerun" if env.get("HILGATE_MODELS") or env.get("HILGATE_IMAGE_FROM_BUILD") else env.get("HILGATE_FLOW")
    known = UPLOADED if name else FLOWS
    name = name or asked or FLOWS[0]
    if name not in known:
        raise MisuseError(f"there is no flow {name!r}", where="HILGATE_FLOW", remedy=f"take one of {', '.join(known)}")
    if name in OF_MAIN and (kind := base.compared(env).kind) != "default branch":
        raise MisuseError(
            f"the flow {name!r} is of the default branch alone, and this is a build of a {kind}",
            where="HILGATE_FLOW",
            remedy="start it on the default branch",
        )
    return host.git(place, "show", f"{commit}:.buildkite/{name}.yml")


def command(words: Sequence[str], checkout: Path, env: Mapping[str, str]) -> list[str]:
    """The command that does what `hilgate WORDS` asks for, with the code of the merge base.

    Raises:
        HilgateError: The build cannot be compared.
    """
    folder = _folder(env)
    place = base.own_repository(checkout, folder)
    commit = base.merge_base(place, env)
    code = copy_code(place, commit, folder)
    isolated = [sys.executable, "-I"]
    if words[:1] in (["job"], ["fetch"], ["approver"]):
        asked = ["--repository", str(place), "--base", commit] if words[0] == "approver" else []
        return [*isolated, str(code / "agent_host/__main__.py"), *words, *asked]
    base.fill(place)
    protected_branch = base.compared(env).kind in {"default branch", "release branch"}
    options = ["--base", commit] if words[:1] == ["plan"] and not protected_branch else []
    return [*isolated, str(code / "hilgate/__main__.py"), "--root", str(place), *words, *options]


def _folder(env: Mapping[str, str]) -> Path:
    """A new folder, which the last hook of the job removes."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{env.get('BUILDKITE_JOB_ID', '')}-"))


@ending
def main(words: list[str] | None = None) -> int:
    """Become what is asked for, or print the flow; the exit status is its own, or that of the refusal."""
    words, checkout = sys.argv[1:] if words is None else words, Path.cwd()
    if words[:1] != ["flow"]:
        _become(command(words, checkout, os.environ))
    place = base.own_repository(checkout, _folder(os.environ))
    sys.stdout.write(flow(place, base.merge_base(place, os.environ), os.environ, *words[1:2]))
    return int(Exit.PASS)


def _become(words: list[str]) -> NoReturn:
    """Replace this process, without what says to Python or hilgate where to look."""
    env = {name: value for name, value in os.environ.items() if not re.fullmatch("PYTHON.*|HILGATE_(BASE|ROOT)", name)}
    os.execve(words[0], words, env)  # noqa: S606 - no shell, and a list of our own words


if __name__ == "__main__":
    sys.exit(main())
