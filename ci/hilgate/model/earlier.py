# SPDX-License-Identifier: Apache-2.0
"""`earlier.json`: what Buildkite knows of a build that its results do not show: lost tries of jobs, earlier builds."""

from __future__ import annotations

from pydantic import Field

from hilgate.model import StrictModel


class LostTry(StrictModel):
    """A try of a job that Buildkite repeated. Nothing that it found is among the results."""

    step: str
    job: str
    """Buildkite's id, by which its log is found."""
    exit_status: int | None
    """-1 where the agent was lost."""
    started: bool = True
    """Whether an agent took it."""
    by_hand: bool = True
    """Whether a person asked for the next try; unknown counts as that."""


class Waited(StrictModel):
    """A job that was ended before an agent took it."""

    step: str
    minutes: int = Field(ge=0)
    """How long it waited."""


class EarlierBuild(StrictModel):
    """An earlier build of the same branch."""

    number: int
    commit: str
    state: str
    """Buildkite's word for it: failed, canceled, passed ..."""
    tree: str = ""
    """Fingerprint of the files that its steps ran over; empty where it came to no verdict."""
    failed: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Planned key -> ids of checks that failed, the first ones."""


class Earlier(StrictModel):
    """The whole file."""

    tries: tuple[LostTry, ...] = ()
    waited: tuple[Waited, ...] = ()
    builds: tuple[EarlierBuild, ...] = ()
