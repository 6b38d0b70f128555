# SPDX-License-Identifier: Apache-2.0
"""The order of hooks in buildkite-agent 3 and 4: no order of them protects an agent that runs hooks of a checkout."""

from __future__ import annotations

import configparser
import itertools
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.executor import AGENT, FIRST, PHASES, REAL_AGENT, REPOSITORY, Hook, bootstrap, executed
from support.nodes import ROOT
from support.plans import git

from agent_host import container, host
from hilgate.buildkite.steps import RETRY

if TYPE_CHECKING:
    from pathlib import Path

# `pre-bootstrap` is run by the agent itself, before there is a job to execute.
OURS = {(AGENT, path.name) for path in (ROOT / "ci/hooks").iterdir() if path.name in PHASES}
GUARD = (AGENT, "post-checkout")
THEIRS = {(REPOSITORY, name) for name in ("post-checkout", "pre-command", "command", "post-command", "pre-exit")}
BUILDS = {
    "honest": (OURS, frozenset[Hook]()),
    "honest, unfit node": (OURS, frozenset({(AGENT, "pre-command")})),
    "fork with hooks": (OURS | THEIRS, frozenset({GUARD})),
    "fork with pre-exit alone": (OURS | {(REPOSITORY, "pre-exit")}, frozenset({GUARD})),
    "branch with a command hook": (OURS | {(REPOSITORY, "command")}, frozenset[Hook]()),
}
CASES = list(itertools.product(FIRST, BUILDS, (False, True)))


@pytest.mark.parametrize("version", FIRST)
def test_without_local_hooks_nothing_of_a_checkout_runs(version: str) -> None:
    for hooks, failing in BUILDS.values():
        assert {owner for owner, _ in executed(version, hooks, failing=failing, local=False)} <= {AGENT, "job"}
    hooks, failing = BUILDS["fork with pre-exit alone"]
    ran = executed(version, hooks, failing=failing, local=False)
    assert ran[:2] == [(AGENT, "environment"), GUARD]
    assert ("job", "command") not in ran


@pytest.mark.parametrize("version", FIRST)
def test_with_local_hooks_a_refused_fork_runs_its_own(version: str) -> None:
    hooks, failing = BUILDS["fork with hooks"]
    ran = executed(version, hooks, failing=failing, local=True)
    assert (REPOSITORY, "pre-exit") in ran
    assert ((REPOSITORY, "post-checkout") in ran) is (version == "v4"), "v4 runs it before the agent's guard"


CONFIGURATION = (ROOT / "ci/agent/buildkite-agent.cfg").read_text()
SETTINGS = dict(re.findall(r'^([a-z-]+)="?([^"\n]*)"?$', CONFIGURATION, re.MULTILINE))
UNIT = configparser.ConfigParser(strict=False, interpolation=None)
UNIT.read(ROOT / "ci/agent/buildkite-agent@.service")


def test_our_agents_run_no_hook_or_plugin_of_a_checkout() -> None:
    assert SETTINGS["hooks-path"] == "/opt/hilgate/ci/hooks"
    assert {SETTINGS[f"no-{name}"] for name in ("local-hooks", "plugins", "git-submodules")} == {"true"}
    assert SETTINGS["checkout-override-mode"] == "strict"


def test_a_cancelled_container_stops_within_the_agents_time() -> None:
    command, cleanup = (int(SETTINGS[f"cancel-{name}-timeout"].removesuffix("s")) for name in ("signal", "cleanup"))
    assert command >= container.STOP_SECONDS + 10
    assert cleanup >= host.CANCELLED_GRACE_SECONDS + host.REAP_SECONDS + 10
    assert command + cleanup < int(UNIT["Service"]["TimeoutStopSec"])
    assert "/opt/hilgate" in UNIT["Service"]["ReadOnlyPaths"]


REAPER = "/usr/bin/python3 -I /opt/hilgate/ci/agent_host/__main__.py reap"


def test_the_service_stops_jobs_reaps_first_and_hides_its_token() -> None:
    service = (ROOT / "ci/agent/buildkite-agent@.service").read_text()
    assert UNIT["Service"]["KillSignal"] == "SIGQUIT", "after it the agent ends its job with hooks and uploads"
    assert f"ExecStartPre=-{REAPER}\n" in service
    assert UNIT["Service"]["LoadCredential"] == "token:/etc/buildkite-agent/token"
    assert "--token file://${CREDENTIALS_DIRECTORY}/token" in UNIT["Service"]["ExecStart"]
    assert "BUILDKITE_AGENT_TOKEN" not in service
    assert "--job-context-dir ${RUNTIME_DIRECTORY}" in UNIT["Service"]["ExecStart"], "hooks run where TMPDIR is full"
    assert UNIT["Service"]["RuntimeDirectory"].endswith("%i")
    assert "%i" in UNIT["Service"]["ExecStart"].partition("--name ")[2].split()[0], "two queues of a host, two names"
    assert "name" not in SETTINGS


def test_the_timer_reaps_as_the_agents_user_in_their_folders() -> None:
    reaper = configparser.ConfigParser(strict=False, interpolation=None)
    reaper.read([ROOT / "ci/agent/hilgate-reap.service", ROOT / "ci/agent/hilgate-reap.timer"])
    assert reaper["Service"]["ExecStart"] == REAPER
    assert reaper["Service"]["User"] == UNIT["Service"]["User"]
    assert reaper["Service"]["EnvironmentFile"] == UNIT["Service"]["EnvironmentFile"]
    assert "Environment=TMPDIR=/var/lib/buildkite-agent/tmp" in (ROOT / "ci/agent/buildkite-agent@.service").read_text()
    assert reaper["Service"]["Environment"] == "TMPDIR=/var/lib/buildkite-agent/tmp"
    assert reaper["Timer"]["OnUnitInactiveSec"] == "10min"


REAL = pytest.mark.needs("variable:HILGATE_REAL_AGENT")


@REAL
def test_the_real_agent_knows_every_setting() -> None:
    known = subprocess.run([REAL_AGENT, "start", "--help"], capture_output=True, text=True, check=True).stdout
    options = re.findall(r"--([a-z-]+) ", UNIT["Service"]["ExecStart"])
    assert len(options) == 5
    assert {name for name in [*SETTINGS, *options] if f"--{name} " not in known} == set()


@REAL
@pytest.mark.timeout(600)
def test_the_table_is_what_the_real_agent_does(tmp_path: Path) -> None:
    for number, (version, build, local) in enumerate(CASES):
        hooks, failing = BUILDS[build]
        status, log = _run(tmp_path / str(number), hooks, failing, version, local=local)
        ran = [tuple(line.split()) for line in re.findall(r"^ran: (.*)$", log, re.MULTILINE)]
        assert ran == executed(version, hooks, failing=failing, local=local), (version, build, local, log)
        assert {name for _, name in ran} <= set(PHASES)
        assert (status == 0) is (not failing and (local or not hooks - OURS)), (version, build, local, log)


@REAL
@pytest.mark.parametrize("command", [0, 1, 75])
def test_without_our_hooks_a_passed_job_fails_by_its_upload(tmp_path: Path, command: int) -> None:
    repository, hooks = tmp_path / "repository", tmp_path / "hooks"
    for place in (repository, hooks):
        place.mkdir()
    (repository / "file").touch()
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "all"]):
        git(repository, *words)
    env = {"BUILDKITE_ARTIFACT_PATHS": "file", "BUILDKITE_COMMAND": f"exit {command}"}
    status, log = bootstrap(tmp_path, repository, hooks, "v4", local=False, refused="artifacts", **env)
    assert "artifact upload file" in log
    assert status == (command or 1), "a passed command is a failed job, a failed one keeps its own"
    assert 1 not in {rule.exit_status for rule in RETRY.automatic or ()}


def _run(folder: Path, hooks: set[Hook], failing: frozenset[Hook], version: str, *, local: bool) -> tuple[int, str]:
    """One job of the real agent, with hooks that say that they ran; its status and log."""
    repository, agents = folder / "repository", folder / "hooks"
    for place in (repository / ".buildkite/hooks", agents):
        place.mkdir(parents=True)
    (repository / "file").touch()
    for owner, name in hooks:
        path = (agents if owner == AGENT else repository / ".buildkite/hooks") / name
        status = 5 if (owner, name) in failing else 0
        path.write_text(f"#!/bin/bash\necho ran: {owner} {name}\nexit {status}\n")
        path.chmod(0o755)
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "all"]):
        git(repository, *words)
    return bootstrap(folder, repository, agents, version, local=local)
