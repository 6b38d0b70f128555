# SPDX-License-Identifier: Apache-2.0
"""Who: an author who is among the approvers. What: presses the button of their own change: in a build that Buildkite
names nobody for, that a colleague has started again, or under another spelling of the same address.

What must happen: only somebody with no part in the build or the change approves; what is not known is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.plans import git

from agent_host import approver
from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from support.forks import Project

ADA = {"BUILDKITE_UNBLOCKER": "Ada", "BUILDKITE_UNBLOCKER_EMAIL": "ada@example.org"}
HONEST = {**ADA, "BUILDKITE_BUILD_CREATOR_EMAIL": "bob@example.org", "BUILDKITE_BUILD_AUTHOR_EMAIL": "eve@example.org"}


def test_somebody_else_approves() -> None:
    assert approver.approver(HONEST, ["eve@example.org", "bot@example.org"]) == "Ada <ada@example.org>"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"BUILDKITE_UNBLOCKER": "Ada"},
        {"BUILDKITE_UNBLOCKER_EMAIL": "ada@example.org"},
        {"BUILDKITE_UNBLOCKER_EMAIL": "ada", "BUILDKITE_UNBLOCKER": "Ada"},
        {**ADA},
        {**HONEST, "BUILDKITE_BUILD_CREATOR_EMAIL": " "},
        {**HONEST, "BUILDKITE_BUILD_CREATOR_EMAIL": "ada@example.org"},
        {**HONEST, "BUILDKITE_BUILD_CREATOR_EMAIL": " Ada@EXAMPLE.org "},
        {**HONEST, "BUILDKITE_BUILD_CREATOR_EMAIL": "ada+ci@example.org"},
        {**HONEST, "BUILDKITE_BUILD_AUTHOR_EMAIL": "ADA@example.org"},
    ],
)
def test_nobody_approves_their_own_and_nobody_unknown_does(env: dict[str, str]) -> None:
    with pytest.raises(MisuseError):
        approver.approver(env, [])


def test_whoever_wrote_a_commit_of_the_change_is_asked_of_git(change: Project) -> None:
    change.write("src/limits.toml", "floor = 0.9\n")
    git(change.theirs, "-c", "user.email=ADA@example.org", "-c", "user.name=somebody", "commit", "-qam", "hers")
    change.write("src/limits.toml", "floor = 0.8\n")
    change.commit()
    refused = change.hilgate("approver", **HONEST)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "somebody else must approve" in refused.stderr
    cy = {"BUILDKITE_UNBLOCKER": "Cy", "BUILDKITE_UNBLOCKER_EMAIL": "cy@example.org"}
    done = change.hilgate("approver", **HONEST | cy)
    assert (done.returncode, done.stdout) == (0, "Cy <cy@example.org>\n"), done.stderr
