# SPDX-License-Identifier: Apache-2.0
"""Who approves protected changes: `hilgate approver` prints the name and address, or says why nobody else has approved.

Buildkite names who pressed the button after a block step. That must be somebody else than whoever started the build,
wrote the commit or has a part in the change. An address that is missing could be anybody's, so it is refused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agent_host import host
from hilgate.errors import Exit, MisuseError, Parser, ending

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STARTED_BY, WRITTEN_BY = "BUILDKITE_BUILD_CREATOR_EMAIL", "BUILDKITE_BUILD_AUTHOR_EMAIL"
NAME, ADDRESS = "BUILDKITE_UNBLOCKER", "BUILDKITE_UNBLOCKER_EMAIL"


def same(one: str, other: str) -> bool:
    """Whether two addresses are the same person's: capitals, spaces around and a `+word` do not tell people apart."""
    return _plain(one) == _plain(other)


def _plain(address: str) -> str:
    user, _, where = address.strip().casefold().rpartition("@")
    return f"{user.partition('+')[0]}@{where}"


def approver(env: Mapping[str, str], authors: Iterable[str]) -> str:
    """Name and address of whoever approved, as `Ada <ada@example.org>`.

    Args:
        env: Buildkite's variables.
        authors: Addresses of who wrote or committed the commits of the change.

    Raises:
        MisuseError: Buildkite does not say who approved or who started the build, or it is somebody with a part in it.
    """
    name, address = (" ".join(env.get(variable, "").split()) for variable in (NAME, ADDRESS))
    where = f"{NAME}={name!r}, {ADDRESS}={address!r}"
    if not name or "@" not in address:
        raise MisuseError("Buildkite does not say who approved", where=where, remedy="unblock the step in Buildkite")
    started = env.get(STARTED_BY, "")
    if not started.strip():
        raise MisuseError(
            f"Buildkite does not say who started this build, so it could be {name}",
            where=f"{STARTED_BY}={started!r}",
            remedy="start the build again as a member of the organization whose address is verified",
        )
    parts = {"started this build": [started], "wrote its commit": [env.get(WRITTEN_BY, "")]}
    parts["wrote or committed a commit of the change"] = [*authors]
    for what, addresses in parts.items():
        if any(same(address, other) for other in addresses if other.strip()):
            raise MisuseError(
                f"{name} <{address}> {what}: somebody else must approve", where=where, remedy="ask another owner"
            )
    return f"{name} <{address}>"


@ending
def main(words: list[str] | None = None) -> int:
    """Print who approved; 0, or the status of the refusal."""
    parser = Parser(prog="hilgate approver", description="Say who approved a change.")
    parser.add_argument("--repository", metavar="DIR", type=Path, required=True, help="repository that has the change")
    parser.add_argument("--base", metavar="SHA", required=True, help="merge base of the change")
    asked = parser.parse_args(words)
    authors = host.git(asked.repository, "log", "--format=%ae%n%ce", f"{asked.base}..HEAD", "--").splitlines()
    sys.stdout.write(f"{host.printable(approver(os.environ, authors))}\n")
    return int(Exit.PASS)


if __name__ == "__main__":
    sys.exit(main())
