"""What Buildkite's REST API says of a build, and where it says it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hilgate.errors import MisuseError

API = "https://api.buildkite.com"
NONCE_KEY = "hilgate-rerun"
"""Meta-data of a rerun: tells one request from the next, so that an answer that was lost starts no second build."""

IMAGES_KEY = "hilgate-images"
"""Meta-data that a verdict leaves: JSON, image -> digest."""

_SLUG = re.compile(r"[a-z0-9][a-z0-9_-]*")


class _Answer(BaseModel):
    """Part of an answer; Buildkite adds fields whenever it likes."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PullRequest(_Answer):
    """The pull request of a build."""

    id: str | None = None
    base: str | None = None
    repository: str | None = None
    """Where the branch is: another repository than the pipeline's for a fork."""


class Build(_Answer):
    """A build, as far as a rerun needs it."""

    number: int
    web_url: str
    commit: str
    branch: str
    state: str
    env: dict[str, Any] = Field(default_factory=dict)
    meta_data: dict[str, Any] = Field(default_factory=dict)
    pull_request: PullRequest | None = None


def builds_url(organization: str, pipeline: str, *, api: str = API) -> str:
    """Where a pipeline's builds are listed and created.

    Raises:
        MisuseError: One of the two names is no slug.
    """
    for option, name in (("--organization", organization), ("--pipeline", pipeline)):
        if not _SLUG.fullmatch(name):
            raise MisuseError(
                f"{option} {name!r} is not a slug",
                remedy="take it from the address of the pipeline: buildkite.com/<organization>/<pipeline>",
            )
    return f"{api}/v2/organizations/{organization}/pipelines/{pipeline}/builds"
