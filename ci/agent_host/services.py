# SPDX-License-Identifier: Apache-2.0
"""Check that what a job needs besides its node answers: Docker's daemon, the registry of images, the git server.

An idle agent takes the next job at once. One whose Docker is dead would end every job of its queue within seconds, so
it is asked before each job.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from agent_host import host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

REGISTRY = "HILGATE_REGISTRY"
"""Of the agent: where images are pulled from, each below it by its name. Without it an image is taken from this host's
own store."""

PATIENCE = "HILGATE_PATIENCE_SECONDS"
PATIENCE_SECONDS = 30
"""For a service that does not answer: a daemon that is being restarted, a lost packet."""

ANSWER_SECONDS = 20.0
"""For one question."""


def own_problems(image: str, *, patience: float = PATIENCE_SECONDS) -> list[str]:
    """What this node itself lacks: a Docker daemon that answers, where its queue runs steps in an `image`."""
    return _asked(_docker, patience) if image else []


def shared_problems(
    env: Mapping[str, str], checkout: Path, image: str, *, patience: float = PATIENCE_SECONDS
) -> list[str]:
    """Servers that do not answer this node: those of images and of git. Other nodes may see the same."""
    found = _asked(lambda: _registry(env.get(REGISTRY, "")), patience) if image and env.get(REGISTRY) else []
    if repository := env.get("BUILDKITE_REPO", ""):
        found += _asked(lambda: _git(repository, checkout), patience)
    return found


def _asked(ask: Callable[[], str], patience: float) -> list[str]:
    """The answer to a question that is asked again until it is empty (all is well) or the time is over."""
    until = time.monotonic() + patience
    while problem := ask():
        left = until - time.monotonic()
        if left <= 0:
            return [problem]
        time.sleep(min(3.0, left))
    return []


def _docker() -> str:
    ran = host.run(("docker", "version", "--format", "{{.Server.Version}}"), ANSWER_SECONDS)
    return f"the Docker daemon does not answer: {ran.failure}" if ran.failure else ""


def _registry(registry: str) -> str:
    """Whatever it answers is an answer, also a refusal or a certificate that only Docker knows: it is there."""
    name = registry.partition("/")[0]
    problem = ""
    for scheme in ("https", "http"):
        try:
            with urllib.request.urlopen(f"{scheme}://{name}/v2/", timeout=ANSWER_SECONDS):  # noqa: S310 - as above
                return ""
        except urllib.error.HTTPError:
            return ""
        except urllib.error.URLError as error:
            if "CERTIFICATE" in str(error.reason):
                return ""
            problem = problem or str(error.reason)
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = problem or f"{type(error).__name__}: {error}"
    return f"the registry {name} does not answer: {host.printable(problem)}"


def _git(repository: str, checkout: Path) -> str:
    words = ("git", "-c", "core.hooksPath=/dev/null", "ls-remote", "--quiet", "--exit-code", "--", repository, "HEAD")
    ran = host.run(words, ANSWER_SECONDS, cwd=checkout, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    return f"the git server does not answer: {ran.failure}" if ran.failure else ""
