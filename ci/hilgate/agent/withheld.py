"""Names of the variables that a fork's job must not see: `python3 -m hilgate.agent.withheld`, for the pre-command hook.

`hilgate.agent.job` gives a step named variables only. This stands before it, for the lines of a job that are not the
step: what an agent happens to have in its environment is not there to be printed. A job that is no fork's keeps all.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from hilgate.agent import trust

if TYPE_CHECKING:
    from collections.abc import Mapping

AGENTS_OWN = frozenset(
    {
        *("OLDPWD", "PWD", "SHELL", "SHLVL", "SPT_NOENV", "_", "GIT_TERMINAL_PROMPT", "GIT_LFS_SKIP_SMUDGE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE"),
        "BUILDKITE_AGENT_ACCESS_TOKEN",
    }
)
"""What the agent, its hooks and its artifact uploads need besides `trust.KEPT`."""

FACTS = re.compile(r"(?:BUILDKITE|HILGATE)(?:_[A-Z0-9_]+)?")
SECRETS = re.compile(r"TOKEN|SECRET|PASSWORD|PASSPHRASE|CREDENTIAL|API_KEY|PRIVATE_KEY")
"""A name of ours or Buildkite's is a fact about the job, unless it says that it is more."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def names(env: Mapping[str, str], *, fork: bool) -> list[str]:
    """The variables to unset, sorted; none outside of forks."""
    if not fork:
        return []
    kept = trust.KEPT | trust.KEPT_ON_A_TRUSTED_HOST | AGENTS_OWN
    facts = {name for name in env if FACTS.fullmatch(name) and not SECRETS.search(name)}
    # The shell cannot unset, nor use, what is no name of a variable (exported functions of bash).
    return sorted(name for name in env if name not in kept | facts and _NAME.fullmatch(name))


def main() -> int:
    """Print the names on one line."""
    decided = trust.of_build(os.environ)
    sys.stdout.write(" ".join(names(os.environ, fork=decided.fork)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
