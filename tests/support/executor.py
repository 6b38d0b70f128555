# SPDX-License-Identifier: Apache-2.0
"""The job executor of buildkite-agent: in which order hooks run, and a job that the real one takes, where there is one.

The order is that of its published source (internal/job/executor.go, checkout.go; versions 3.137 and 4.0).
`HILGATE_REAL_AGENT` names a buildkite-agent 4.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.loopback import Asked, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REAL_AGENT = os.environ.get("HILGATE_REAL_AGENT", "")

AGENT, REPOSITORY = "agent", "repository"
FIRST = {"v3": (AGENT, REPOSITORY), "v4": (REPOSITORY, AGENT)}
"""The hook that runs first of those that come after something: v4 reverses their order, like parentheses."""

PHASES = ("environment", "pre-checkout", "post-checkout", "pre-command", "command", "post-command", "pre-exit")
TURNED = {"post-checkout", "post-command", "pre-exit"}

AFTER = {"command": "post-command"}

Hook = tuple[str, str]
"""Owner of the hook (the agent, or the repository itself) and its name."""


def executed(version: str, hooks: set[Hook], *, failing: frozenset[Hook] = frozenset(), local: bool) -> list[Hook]:
    """The hooks that run, in order, with ("job", "command") for the command itself.

    Args:
        version: `v3` or `v4`.
        hooks: Those that there are.
        failing: Those that end with another status than 0.
        local: Whether the agent runs hooks of a repository (it is started without `no-local-hooks`).
    """
    ran: list[Hook] = []
    failed = ""
    for phase in PHASES:
        # After a failure nothing but pre-exit, and after a failed command its post-command.
        if failed and phase not in ("pre-exit", failed):
            continue
        owners = FIRST[version] if phase in TURNED else (AGENT,) if phase in PHASES[:2] else (AGENT, REPOSITORY)
        if phase == "command":
            owners = next(((one,) for one in (REPOSITORY, AGENT) if (one, phase) in hooks), ("job",))
        for owner in owners:
            hook = (owner, phase)
            if hook not in hooks and owner != "job":
                continue
            if owner == REPOSITORY and not local:  # "refusing to run, local hooks are disabled"
                failed = AFTER.get(phase, "pre-exit")
                break
            ran.append(hook)
            if hook in failing:
                failed = AFTER.get(phase, "pre-exit")
                break
    return ran


@contextmanager
def _api(job: object) -> Iterator[tuple[str, queue.Queue[dict[str, str]]]]:
    """Enough of the agent API for one job, which is offered."""
    ended: queue.Queue[dict[str, str]] = queue.Queue()

    def answer(asked: Asked) -> tuple[int, object, dict[str, str]]:
        said: object = {"id": "a", "uuid": "a", "exists": True, "access_token": "of-the-agent"} | dict.fromkeys(
            ("ping_interval", "heartbeat_interval", "job_status_interval"), 1
        )
        if asked.path.endswith("/finish"):
            ended.put(json.loads(asked.body))
        elif asked.path.endswith(("/ping", "/accept")):
            said = job if asked.path.endswith("/accept") else {"job": job}
        return 200, said, {}

    with served(answer) as address:
        yield f"{address}/", ended


def offered(folder: Path, configuration: str, **variables: str) -> dict[str, str]:
    """What the real agent, started with a configuration, says in the end of a job that brings these variables."""
    facts = dict.fromkeys(("COMMAND", "REPO", "BUILD_ID", "COMMIT", "BRANCH"), "x") | {"JOB_ID": "0193-job"}
    env = {f"BUILDKITE_{name}": value for name, value in facts.items()} | {"CI": "true"} | variables
    job = {"id": "0193-job", "state": "accepted", "env": env, "token": "of-this-job", "chunks_max_size_bytes": 10**5}
    (folder / "agent.cfg").write_text(re.sub(r"/var/lib/buildkite-agent|/opt/hilgate", str(folder), configuration))
    with _api(job) as (address, ended):
        words = [REAL_AGENT, "start", "--config", str(folder / "agent.cfg"), "--token", "x", "--endpoint", address]
        with subprocess.Popen(
            [*words, "--disconnect-after-job"],
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as agent:
            try:
                return ended.get(timeout=60)
            finally:
                agent.terminate()
