# SPDX-License-Identifier: Apache-2.0
"""The settings and units of an agent on a host: what it runs, how it stops, and who sees its token."""

from __future__ import annotations

import configparser
import re

from support.nodes import ROOT

from agent_host import container, host

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
