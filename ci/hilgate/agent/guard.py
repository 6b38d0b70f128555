"""Refuses a build of a fork that changes what its agents' hosts execute.

    PYTHONPATH=<a copy outside of the checkout> python3 -m hilgate.agent.guard

Called by the agent's own post-checkout hook, which runs before the checkout's (Buildkite, "Buildkite agent hooks"), so
before anything of the checkout does. A fork that passes has the planner, the hooks and the container's command line of
the branch that it wants to be merged into.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from hilgate.agent import trust
from hilgate.errors import CannotRunHereError, Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Mapping

GIT_SECONDS = 300
SHOWN = 5


def refuse_changed_hosts(checkout: str, env: Mapping[str, str]) -> str:
    """What was decided, in words.

    Raises:
        CannotRunHereError: A fork changes what runs on the host, or what it changes cannot be told.
    """
    decided = trust.of_build(env)
    if not decided.fork:
        return f"trusted: {decided.why}"
    branch = env.get("BUILDKITE_PULL_REQUEST_BASE_BRANCH", "")
    if not branch or branch.startswith("-"):
        raise CannotRunHereError(
            f"a fork's build ({decided.why}) without a base branch: what it changes cannot be told",
            where=f"BUILDKITE_PULL_REQUEST_BASE_BRANCH={branch!r}",
            remedy="build it as a pull request",
        )
    base = "refs/hilgate/base"
    _git(checkout, "fetch", "--quiet", "--no-tags", env["BUILDKITE_REPO"], f"+refs/heads/{branch}:{base}")
    # Without rename detection a file that moves is one that vanishes and one that appears; both names count.
    listing = _git(checkout, "diff", "--name-only", "-z", "--no-renames", "--no-ext-diff", f"{base}...HEAD", "--")
    changed = [name for name in listing.split("\0") if name]
    hosts = [name for name in changed if trust.runs_on_host(name)]
    if hosts:
        names = ", ".join(repr(name) for name in hosts[:SHOWN])
        more = f" and {len(hosts) - SHOWN} more" if len(hosts) > SHOWN else ""
        raise CannotRunHereError(
            f"this fork ({decided.why}) changes what runs on the agents' hosts: {names}{more}",
            where=checkout,
            remedy="a maintainer reads it and pushes it to a branch of this repository",
        )
    return f"fork ({decided.why}); none of its {len(changed)} changed files runs on the host"


def _git(checkout: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ("git", "-c", "core.fsmonitor=false", *arguments),
            cwd=checkout,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRunHereError(
            f"git {arguments[0]}: {error}", where=checkout, remedy="see the agent's git"
        ) from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()[:1]
        raise CannotRunHereError(
            f"git {arguments[0]} failed: {words[0] if words else 'no message'}",
            where=checkout,
            remedy="what a fork changes must be known before its code runs",
        )
    return done.stdout.decode(errors="surrogateescape")


def main() -> int:
    """Say what was decided; the exit status is 0 or that of the refusal."""
    try:
        checkout = os.environ.get("BUILDKITE_BUILD_CHECKOUT_PATH") or "."
        sys.stderr.write(f"guard: {refuse_changed_hosts(checkout, os.environ)}\n")
    except HilgateError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_status)
    return int(Exit.PASS)


if __name__ == "__main__":
    sys.exit(main())
