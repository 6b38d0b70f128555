# SPDX-License-Identifier: Apache-2.0
"""Who: a member who may start builds, and give them variables. What: a variable that is a setting of the host, of which
some are commands that it runs (HILGATE_SELFCHECK, HILGATE_KERNEL_LOG, LD_PRELOAD, PATH), or open it to forks.

What must happen: an agent takes the job only with variables that a build may set; those that our flows, schedules and
reruns use are among them. What a build may set is no path, no command and no more trust.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from support.executor import offered
from support.nodes import ROOT
from support.rest import build

from hilgate.buildkite.api import RemoteBuild, request

if TYPE_CHECKING:
    from pathlib import Path

CONFIGURATION = (ROOT / "ci/agent/buildkite-agent.cfg").read_text()
ON = "\nenable-environment-variable-allowlist=true\n" in CONFIGURATION
ALLOWED = re.findall(r'^allowed-environment-variables="(.*)"$', CONFIGURATION, re.MULTILINE)
READ = {
    name
    for package in ("hilgate", "agent_host")
    for path in (ROOT / "ci" / package).rglob("*.py")
    for name in re.findall(r"\bHILGATE_[A-Z_]+", path.read_text())
}
ASKED = {
    "HILGATE_FLOW",
    "HILGATE_FORK",
    "HILGATE_IMAGE_FROM_BUILD",
    "HILGATE_MODELS",
    "HILGATE_PROFILE",
}
MORE = (
    "HILGATE_APPROVED_BY",
    "HILGATE_BASE",
    "HILGATE_ROOT",
    "HILGATE_JOB_STARTED",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PATH",
    "BASH_ENV",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "GIT_SSH_COMMAND",
    "DOCKER_HOST",
    "HOME",
    "TMPDIR",
    "XHILGATE_FLOW",
    "HILGATE_FLOWS",
    "http_proxy",
)


def taken(name: str) -> bool:
    return not ON or any(re.search(one, name) for one in ALLOWED[0].split(","))


@pytest.mark.parametrize("name", sorted({*READ, *MORE} - ASKED))
def test_no_setting_of_a_host_comes_from_a_build(name: str) -> None:
    assert {"HILGATE_SELFCHECK", "HILGATE_DISPOSABLE", "HILGATE_HISTORY", "HILGATE_REGISTRY"} <= READ
    assert not taken(name)


@pytest.mark.needs("variable:HILGATE_REAL_AGENT")
def test_the_real_agent_refuses_such_a_job_and_starts_the_others(tmp_path: Path) -> None:
    for name, reason in (
        ("HILGATE_SELFCHECK", "agent_refused"),
        ("LD_PRELOAD", "agent_refused"),
        ("HILGATE_FLOW", None),
    ):
        assert offered(tmp_path, CONFIGURATION, **{name: "x"}).get("signal_reason") == reason, name


def test_what_flows_schedules_and_reruns_set_is_taken() -> None:
    rerun = request(RemoteBuild.model_validate(build(4)), ["all"], profile="pr")["env"]
    schedules = re.findall(r"(HILGATE_\w+) =", (ROOT / "ci/agent/pipeline.tf").read_text())
    assert len(schedules) == 3
    assert [name for name in (*rerun, *schedules, "HILGATE_FORK") if not taken(name)] == []
