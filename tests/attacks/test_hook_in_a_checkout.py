# SPDX-License-Identifier: Apache-2.0
"""Who: a fork, or a branch. What: it brings `.buildkite/hooks/*`, which an agent runs on its host with its token.

What must happen: none of them runs, under version 3 and 4 of the agent, also not `pre-exit` after a refusal; and honest
builds, whose checkout brings none, run all hooks of the agent.
"""

from __future__ import annotations

import pytest
from support.executor import AGENT, FIRST, PHASES, REPOSITORY, executed
from support.nodes import ROOT

OURS = {(AGENT, path.name) for path in (ROOT / "ci/hooks").glob("*") if path.name in PHASES}
CONFIGURATION = ROOT / "ci/agent/buildkite-agent.cfg"
LOCAL = not (CONFIGURATION.exists() and "\nno-local-hooks=true\n" in CONFIGURATION.read_text())


@pytest.mark.parametrize("version", FIRST)
@pytest.mark.parametrize("name", PHASES[2:])
@pytest.mark.parametrize("refused", [True, False])
def test_no_hook_of_a_checkout_runs(version: str, name: str, refused: bool) -> None:
    failing = frozenset({(AGENT, "post-checkout")} if refused else ())
    ran = executed(version, OURS | {(REPOSITORY, name)}, failing=failing, local=LOCAL)
    assert (AGENT, "environment") in ran
    assert (REPOSITORY, name) not in ran


@pytest.mark.parametrize("version", FIRST)
def test_an_honest_checkout_runs_with_all_hooks_of_the_agent(version: str) -> None:
    assert not (ROOT / ".buildkite/hooks").exists()
    ran = executed(version, OURS, local=LOCAL)
    assert {*OURS, ("job", "command")} == set(ran)
