# SPDX-License-Identifier: Apache-2.0
"""The job executor of buildkite-agent: in which order hooks run, as a table; and the real one, where there is one.

From its published source (internal/job/executor.go, checkout.go; versions 3.137 and 4.0). `HILGATE_REAL_AGENT` names a
buildkite-agent 4 that the table is compared with; it knows both orders.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from support.loopback import Asked, served

if TYPE_CHECKING:
    from collections.abc import Iterator

REAL_AGENT = os.environ.get("HILGATE_REAL_AGENT", "")

AGENT, REPOSITORY = "agent", "repository"
FIRST = {"v3": (AGENT, REPOSITORY), "v4": (REPOSITORY, AGENT)}
"""The hook that runs first of those that come after something: v4 reverses their order, like parentheses."""

PHASES = ("environment", "pre-checkout", "post-checkout", "pre-command", "command", "post-command", "pre-exit")
TURNED = {"post-checkout", "post-command", "pre-exit"}

AFTER = {"command": "post-command"}

Hook = tuple[str, str]
"""Whose it is (the agent's, or the repository's own) and its name."""


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
def _api(refused: str = "", job: object = None) -> Iterator[tuple[str, queue.Queue[dict[str, str]]]]:
    """Enough of the agent API for one job, which is offered; a path with `refused` in it is refused."""
    ended: queue.Queue[dict[str, str]] = queue.Queue()

    def answer(asked: Asked) -> tuple[int, object, dict[str, str]]:
        said: object = {"id": "a", "uuid": "a", "exists": True, "access_token": "of-the-agent"} | dict.fromkeys(
            ("ping_interval", "heartbeat_interval", "job_status_interval"), 1
        )
        if asked.path.endswith("/finish"):
            ended.put(json.loads(asked.body))
        elif asked.path.endswith(("/ping", "/accept")):
            said = job if asked.path.endswith("/accept") else {"job": job}
        return 422 if refused and refused in asked.path else 200, said, {}

    with served(answer) as address:
        yield f"{address}/", ended


def offered(folder: Path, configuration: str, **variables: str) -> dict[str, str]:
    """What the real agent, started with a configuration, says in the end of a job that brings these variables."""
    facts = dict.fromkeys(("COMMAND", "REPO", "BUILD_ID", "COMMIT", "BRANCH"), "x") | {"JOB_ID": "0193-job"}
    env = {f"BUILDKITE_{name}": value for name, value in facts.items()} | {"CI": "true"} | variables
    job = {"id": "0193-job", "state": "accepted", "env": env, "token": "of-this-job", "chunks_max_size_bytes": 10**5}
    (folder / "agent.cfg").write_text(re.sub(r"/var/lib/buildkite-agent|/opt/hilgate", str(folder), configuration))
    with _api(job=job) as (address, ended):
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


def bootstrap(
    folder: Path, repository: Path, hooks: Path, version: str, *, local: bool, refused: str = "", **env: str
) -> tuple[int, str]:
    """Run one job of a repository's HEAD with the real agent; returns its exit status and its log without colours.

    Calls whose path holds `refused` are answered with 422.
    """
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    # A short path: the agent puts a socket below it.
    with _api(refused) as (address, _), tempfile.TemporaryDirectory() as home:
        facts = {
            "PATH": f"{Path(REAL_AGENT).parent}:{os.environ['PATH']}",
            "HOME": home,
            "BUILDKITE": "true",
            "BUILDKITE_AGENT_ACCESS_TOKEN": "of-this-job",
            "BUILDKITE_AGENT_ENDPOINT": address,
            "BUILDKITE_BUILD_PATH": str(folder / "builds"),
            "BUILDKITE_AGENT_NAME": "agent-1",
            "BUILDKITE_AGENT_META_DATA_QUEUE": "amd-cpu",
            "BUILDKITE_ORGANIZATION_SLUG": "org",
            "BUILDKITE_PIPELINE_SLUG": "pipeline",
            "BUILDKITE_JOB_ID": "0193-job",
            "BUILDKITE_BUILD_ID": "0193-build",
            "BUILDKITE_REPO": str(repository),
            "BUILDKITE_PULL_REQUEST": "false",
            "BUILDKITE_BRANCH": "main",
            "BUILDKITE_COMMIT": commit.stdout.strip(),
            "BUILDKITE_PIPELINE_PROVIDER": "github",
            "BUILDKITE_HOOKS_PATH": str(hooks),
            "BUILDKITE_LOCAL_HOOKS_ENABLED": str(local).lower(),
            "BUILDKITE_PLUGINS_ENABLED": "true",
            "BUILDKITE_COMMAND_EVAL": "true",
            "BUILDKITE_STEP_KEY": "step",
            "BUILDKITE_SHELL": "/bin/bash -e -c",
            "BUILDKITE_COMMAND": "echo ran: job command",
            "BUILDKITE_GIT_CLONE_FLAGS": "-v",
            "BUILDKITE_GIT_CLEAN_FLAGS": "-ffxdq",
            "BUILDKITE_GIT_FETCH_FLAGS": "-v",
            "BUILDKITE_GIT_SUBMODULES": "false",
            "BUILDKITE_SSH_KEYSCAN": "false",
            "BUILDKITE_GIT_COMMIT_VERIFICATION": "off",
        }
        words = [REAL_AGENT, "bootstrap", *(["--experiment", "legacy-post-hook-order"] if version == "v3" else [])]
        done = subprocess.run(words, env=facts | env, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, re.sub(r"\x1b[^m]*m|\x1b_[^\x07]*\x07", "", done.stdout + done.stderr)
