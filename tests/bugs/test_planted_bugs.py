# SPDX-License-Identifier: Apache-2.0
"""Every planted bug that no step of `ci/areas` plants is caught by the step that it names, and by nothing less."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilgate.cli.planted_bugs import load_bugs, run_bugs
from hilgate.declare.load import load
from hilgate.model.record import Outcome

ROOT = Path(__file__).parents[2]
COMMANDS = (step.command for _, step in load(ROOT).steps())
PLANTED = {word for command in COMMANDS if "hilgate selftest" in command for word in command.split()}
BUGS = tuple(bug for bug in load_bugs(ROOT) if bug.id not in PLANTED)


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """By id; bugs of one step share its control."""
    return {check.id: check for check in run_bugs(ROOT, BUGS, tmp_path_factory.mktemp("planted"))}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_planted_bug_turns_its_step_red(bug, checks):
    planted = checks[bug.id]
    assert planted.outcome is Outcome.PASS, planted.message
    assert planted.message.startswith(f"caught by {bug.turns_red}-")
