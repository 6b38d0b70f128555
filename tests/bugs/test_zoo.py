# SPDX-License-Identifier: Apache-2.0
"""Every bug of the zoo, the slow ones too, is caught by the step that it names, and by nothing less than that."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilgate.checks.zoo import load_bugs, run_bugs
from hilgate.model import Outcome

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", load_bugs(ROOT), ids=lambda bug: bug.id)
def test_planted_bug_turns_its_step_red(bug, tmp_path):
    control, planted = run_bugs(ROOT, (bug,), tmp_path)
    assert control.outcome is Outcome.PASS, control.message
    assert planted.outcome is Outcome.PASS, planted.message
    assert planted.message.startswith(f"caught by {bug.turns_red}-")
