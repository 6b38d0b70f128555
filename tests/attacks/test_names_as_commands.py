# SPDX-License-Identifier: Apache-2.0
"""Who: an author. What: a branch, a commit message, a title or an approver's name that is a command.

What must happen: no step of `.buildkite` executes any of it, and generated steps hold no `$` that an uploader or a
shell would replace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.pipelines import DECLARED, agent_plan
from support.static_steps import STEPS, run

from hilgate.buildkite.steps import pipeline_yaml

if TYPE_CHECKING:
    from pathlib import Path

NAMES = (
    "BUILDKITE_BRANCH",
    "BUILDKITE_MESSAGE",
    "BUILDKITE_PULL_REQUEST",
    "BUILDKITE_PULL_REQUEST_BASE_BRANCH",
    "BUILDKITE_TAG",
    "BUILDKITE_BUILD_AUTHOR",
    "BUILDKITE_UNBLOCKER",
    "BUILDKITE_UNBLOCKER_EMAIL",
    "HILGATE_PROFILE",
    "BUILDKITE_BUILD_CREATOR_EMAIL",
    "HILGATE_FLOW",
)


@pytest.mark.parametrize("form", ["$(touch {0})", "`touch {0}`", "; touch {0} #", "'; touch {0}; '", '"; touch {0}; "'])
@pytest.mark.parametrize(("name", "key"), STEPS, ids="-".join)
def test_no_name_is_executed(tmp_path: Path, name: str, key: str, form: str) -> None:
    mark = tmp_path / "executed"
    run(tmp_path, STEPS[name, key], env=dict.fromkeys(NAMES, form.format(mark)))
    assert not mark.exists()


def test_a_branch_of_any_name_leaves_the_generated_text_as_it_is() -> None:
    assert "$" not in pipeline_yaml(agent_plan(), DECLARED, branch="$(reboot)")
