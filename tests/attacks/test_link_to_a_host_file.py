# SPDX-License-Identifier: Apache-2.0
"""Who: a fork. What: a protected file, or one that is read as data, becomes a link to a secret of the planner's host.

What must happen: the host reads nothing through it, so the secret is in no plan and no message; the guard refuses the
fork, and the planner a change that adds a link or a submodule. The same change without a link is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.plans import git, hilgate

from agent_host import trust
from hilgate.declare.protected import protected_changes
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from pathlib import Path

    from support.forks import Project

SECRET = "bkct_SECRET-AGENT-TOKEN-0123456789abcdef"
NAMES = ["src/limits.toml", "ci/areas/a.yaml", "ci/quarantine.yaml"]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "buildkite-agent.cfg"
    path.write_text(f'token="{SECRET}"\n')
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("committed", [True, False])
def test_no_secret_of_the_host_is_in_the_plan_or_a_message(
    change: Project, secret: Path, name: str, committed: bool
) -> None:
    (change.theirs / name).unlink(missing_ok=True)
    (change.theirs / name).symlink_to(secret)
    if committed:
        change.commit()
    for profile in ("pr", "gate"):
        made = hilgate(change.theirs, "plan", "--profile", profile, "--base", "main", "--json")
        assert SECRET not in made.stdout + made.stderr
        assert made.returncode == 3 or profile == "gate" or not committed
    base = git(change.ours, "rev-parse", "main")
    assert SECRET not in repr(protected_changes(change.theirs, base, [name]))


@pytest.mark.parametrize("name", [*NAMES, "src/new.md"])
def test_the_guard_refuses_the_fork(change: Project, secret: Path, name: str) -> None:
    (change.theirs / name).unlink(missing_ok=True)
    (change.theirs / name).symlink_to(secret)
    change.commit()
    with pytest.raises(CannotRunHereError, match="changes what runs on the agents' hosts"):
        trust.refuse_changed_hosts(str(change.theirs), change.env())


def test_a_submodule_is_refused_by_both(change: Project) -> None:
    git(
        change.theirs, "update-index", "--add", "--cacheinfo", f"160000,{git(change.ours, 'rev-parse', 'main')},src/sub"
    )
    git(change.theirs, "commit", "-qm", "submodule")
    (change.theirs / "src/sub").mkdir()  # as a checkout without submodules leaves it
    with pytest.raises(CannotRunHereError, match="src/sub"):
        trust.refuse_changed_hosts(str(change.theirs), change.env())
    refused = hilgate(change.theirs, "plan", "--profile", "pr", "--base", "main")
    assert (refused.returncode, "src/sub" in refused.stderr) == (3, True)


def test_the_same_files_without_a_link_are_planned(change: Project) -> None:
    change.write("src/limits.toml", "floor = 0.01\n")
    change.commit()
    assert "none of its 1 changed files" in trust.refuse_changed_hosts(str(change.theirs), change.env())
    made = hilgate(change.theirs, "plan", "--profile", "pr", "--base", "main", "--json")
    assert (made.returncode, "floor = 0.01" in made.stdout) == (0, True)
