# SPDX-License-Identifier: Apache-2.0
"""What a build may do, from who asks for it: a fork gets no secrets and may not change what its agents' hosts execute.

    python3 -m agent_host.trust guard       for the agent's own post-checkout hook: refuses such a fork
    python3 -m agent_host.trust withheld    for the pre-command hook: names of variables that a fork's job loses

A build of a fork runs code that nobody here has read. It gets no secrets, writes no cache, pushes nothing, and its
kernel steps have no network. Whatever cannot be decided counts as a fork. The agent's own post-checkout hook runs
before anything of the checkout does, so a fork that passes the guard has the planner, the hooks and the container's
command line of the default branch. Which code decides this is said in docs/SECURITY.md; on agents that build forks
it is a copy outside of the checkout.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from agent_host import base, clone, host
from hilgate.errors import CannotRunHereError, DeclarationError, Exit, Parser, ending
from hilgate.names import PROJECT_FILE, Trust, of_build, stays_inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEPT = frozenset(
    {
        *("HOME", "LANG", "LC_ALL", "LOGNAME", "NO_COLOR", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "TERM", "TMPDIR"),
        *("TZ", "USER"),
        *("BUILDKITE", "BUILDKITE_AGENT_NAME", "BUILDKITE_BRANCH", "BUILDKITE_BUILD_ID", "BUILDKITE_BUILD_NUMBER"),
        *("BUILDKITE_COMMIT", "BUILDKITE_JOB_ID", "BUILDKITE_PIPELINE_SLUG", "BUILDKITE_PULL_REQUEST"),
        "BUILDKITE_PIPELINE_DEFAULT_BRANCH",
        *("BUILDKITE_PULL_REQUEST_BASE_BRANCH", "BUILDKITE_PULL_REQUEST_REPO", "BUILDKITE_REPO"),
        *("BUILDKITE_RETRY_COUNT", "BUILDKITE_STEP_KEY", "BUILDKITE_TIMEOUT"),
        *("HILGATE_APPROVED_BY", "HILGATE_BASE", "HILGATE_FORK", "HILGATE_JOB_ID", "HILGATE_JOB_STARTED"),
    }
)
"""All that a step sees of its agent's environment. BUILDKITE_AGENT_ACCESS_TOKEN is not here: with it a step could
upload pipeline steps, read secrets and replace the results of other jobs."""

KEPT_ON_A_TRUSTED_HOST = frozenset(
    {
        *("BUILDKIT_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_HOST", "XDG_RUNTIME_DIR", "HILGATE_REGISTRY"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("PIP_CONFIG_FILE", "SSL_CERT_FILE"),
    }
)
"""How a step that builds an image finds its builder, its registry and the network."""

LINKS = frozenset({"120000", "160000"})
"""Modes of a symbolic link and of a submodule in git's trees."""

REPLACEMENT = "\ufffd"
"""What `host.git` puts for bytes that are not UTF-8."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(?:BUILDKITE|HILGATE|DOCKER|BUILDKIT|LD|DYLD|PYTHON|GIT|SSH|HIP|HSA|ROCR|CUDA|GPU)(?:_.*)?|PYTHON.*|BASH.*|"
    r"PATH|HOME|IFS|ENV|SHELL|TERM|USER|LOGNAME|TMPDIR|LANG|LC_.*"
)
AGENTS_OWN = frozenset(
    {
        *("OLDPWD", "PWD", "SHELL", "SHLVL", "SPT_NOENV", "_", "GIT_TERMINAL_PROMPT", "GIT_LFS_SKIP_SMUDGE"),
        "BUILDKITE_AGENT_ACCESS_TOKEN",
    }
)
"""What the agent, its hooks and its artifact uploads need besides `KEPT` and `KEPT_ON_A_TRUSTED_HOST`."""

_FACTS = re.compile(r"(?:BUILDKITE|HILGATE)(?:_[A-Z0-9_]+)?")
_SECRETS = re.compile(r"TOKEN|SECRET|PASSWORD|PASSPHRASE|CREDENTIAL|API_KEY|PRIVATE_KEY")
"""A name of ours or Buildkite's is a fact about the job, unless it says that it is more."""


def environment(env: Mapping[str, str], trust: Trust, secrets: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a step that runs on the host: named variables, and the secrets that it declares.

    Raises:
        DeclarationError: A secret has a name that would change how something runs.
    """
    names = KEPT | frozenset(() if trust.fork else check_secrets(secrets))
    if not trust.fork:
        names |= KEPT_ON_A_TRUSTED_HOST
    kept = {name: env[name] for name in sorted(names) if name in env}
    return {**kept, "HILGATE_FORK": "1"} if trust.fork else kept


def check_secrets(names: Iterable[str]) -> tuple[str, ...]:
    """The names of secrets, each a variable that only carries a value.

    Raises:
        DeclarationError: A name is no variable's, or one that the agent, the shell, the loader or git read themselves.
    """
    chosen = tuple(names)
    for name in chosen:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
            raise DeclarationError(
                f"{name!r} cannot be the name of a secret",
                where="secrets of a step in ci/areas",
                remedy="name the variable of the secret itself, e.g. HF_TOKEN",
            )
    return chosen


def _stays_inside(path: str, may_change: Iterable[str]) -> bool:
    """`stays_inside`, and not where a Python that starts in the checkout would find this package."""
    return stays_inside(path, may_change) and path.partition("/")[0].partition(".")[0] != __package__


def refuse_changed_hosts(checkout: str, env: Mapping[str, str]) -> str:
    """Refuse a build of a fork that changes what its agents' hosts execute; returns what was decided, in words.

    It is compared with the default branch, whatever branch it wants to be merged into: which one its author chooses.

    Raises:
        CannotRunHereError: A fork changes what runs on the host, or what it changes is not known.
    """
    decided = of_build(env)
    if not decided.fork:
        return f"trusted: {decided.why}"
    base.compared(env)
    with tempfile.TemporaryDirectory(prefix="hilgate-guard-") as folder:
        place = base.own_repository(Path(checkout), Path(folder))
        commit = base.merge_base(place, env)
        declares = host.git(place, "ls-tree", "--name-only", commit, "--", PROJECT_FILE).strip()
        text = host.git(place, "show", f"{commit}:{PROJECT_FILE}") if declares else ""
        inside = clone.project(text).forks_may_change
        # Without rename detection a file that moves is one that vanishes and one that appears; both names count.
        listing = host.git(place, "diff", "--raw", "-z", "--no-renames", "--no-ext-diff", commit, "HEAD", "--")
    words = listing.split("\0")
    changed = dict(zip(words[1::2], words[::2], strict=False))
    # What a host reads as data it must not read through a link, nor fetch from where a submodule comes from. A name
    # that is not UTF-8 arrives as another one, which nobody could look at.
    executed = [
        name
        for name, raw in changed.items()
        if raw.split()[1] in LINKS or not _stays_inside(name, inside) or REPLACEMENT in name
    ]
    if executed:
        names = ", ".join(repr(name) for name in executed[:5])
        more = f" and {len(executed) - 5} more" if len(executed) > 5 else ""
        raise CannotRunHereError(
            f"this fork ({decided.why}) changes what runs on the agents' hosts: {names}{more}",
            where=checkout,
            remedy="ask a maintainer to read it and push it to a branch of this repository; what forks may change is "
            f"said by forks_may_change in {PROJECT_FILE} of the default branch",
        )
    return f"fork ({decided.why}); none of its {len(changed)} changed files runs on the host"


def withheld(env: Mapping[str, str]) -> list[str]:
    """The variables that a fork's job must not see, sorted; none outside of forks.

    `agent_host.job` gives a step named variables only. This stands before it, for the lines of a job that are not
    the step: what an agent happens to have in its environment is not there to be printed.
    """
    if not of_build(env).fork:
        return []
    kept = KEPT | KEPT_ON_A_TRUSTED_HOST | AGENTS_OWN
    facts = {name for name in env if _FACTS.fullmatch(name) and not _SECRETS.search(name)}
    # The shell cannot unset, nor use, what is no name of a variable (exported functions of bash).
    return sorted(name for name in env if name not in kept | facts and _NAME.fullmatch(name))


@ending
def main(words: list[str] | None = None) -> int:
    """Guard a checkout, or print the withheld names on one line; 0, or the status of the refusal."""
    parser = Parser(prog="agent_host.trust", description="What a build may do on this host.")
    parser.add_argument("command", choices=["guard", "withheld"])
    if parser.parse_args(words).command == "withheld":
        sys.stdout.write(" ".join(withheld(os.environ)) + "\n")
        return int(Exit.PASS)
    checkout = os.environ.get("BUILDKITE_BUILD_CHECKOUT_PATH") or "."
    sys.stderr.write(f"guard: {refuse_changed_hosts(checkout, os.environ)}\n")
    return int(Exit.PASS)


if __name__ == "__main__":
    sys.exit(main())
